import dataclasses
import inspect
import re

import pytest

from halfstep.cli.train import train
from halfstep.config.load import load, recipe_names, to_toml
from halfstep.config.run import NAMES_ELSEWHERE, OTHER_MEANINGS, RunConfig
from halfstep.config.schema import rows
from halfstep.core.errors import ConfigError, ConfigFileError, UnknownRecipeError
from halfstep.core.policy import Policy, read


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_is_measures_its_precision_and_reads_back(name, tmp_path):
    config = load(name)
    assert config.title
    assert config.policy == "auto"
    config = load(name, ["policy=bf16-mixed; lm_head: compute=fp32", "seed=7", "optimizer.betas=[0.5, 0.25]"])
    assert load(write(tmp_path, to_toml(config))) == config


def test_the_default_recipe_is_first_and_sections_are_frozen():
    assert recipe_names()[0] == "tiny"
    assert load() == load("tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().seed = 3


def test_overrides_apply_from_left_to_right_and_every_default_can_be_one():
    config = load("tiny", ["training.steps=50", "training.steps=60", "model.mlp=swiglu", "data.source=/a b.txt"])
    assert (config.training.steps, config.model.mlp, config.data.source) == (60, "swiglu", "/a b.txt")
    overrides = []
    for row in rows(RunConfig):
        value = list(row.default) if isinstance(row.default, tuple) else row.default
        text = str(value).lower() if isinstance(value, bool) else str(value)
        overrides.append(f"{row.key}={text}")
    assert load("tiny", overrides) == RunConfig()


def test_the_policy_may_be_text_or_a_table(tmp_path):
    text = load(write(tmp_path, 'policy = "bf16-mixed,norm=bf16; lm_head: compute=fp32"'))
    table = load(
        write(
            tmp_path, '[policy]\npreset = "bf16-mixed"\nnorm = "bf16"\n[policy.rules]\nlm_head = "compute=fp32"\n'
        )
    )
    assert Policy.parse(text.policy) == Policy.parse(table.policy)
    assert text.policy == table.policy


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        (["policy=bf16-mixed", "policy.norm=bf16"], "bf16-mixed,norm=bf16"),
        (["policy.norm=bf16"], "auto,norm=bf16"),
        (["policy.preset=fp16-mixed"], "fp16-mixed"),
        (["policy.emulate=true"], "auto,emulate=true"),
        (['policy.rules."blocks.3.mlp.up"="compute=bf16"'], "auto; blocks.3.mlp.up: compute=bf16"),
        (["policy.rules.blocks.3.mlp.up=compute=bf16"], "auto; blocks.3.mlp.up: compute=bf16"),
    ],
)
def test_the_policy_can_be_overridden_piece_by_piece(overrides, policy):
    assert load("tiny", overrides).policy == policy


@pytest.mark.parametrize(
    ("override", "said", "hint"),
    [
        ("trainng.steps=1", "unknown setting `trainng.steps`", "did you mean `training.steps`?"),
        ("steps=1", "unknown setting `steps`", "did you mean `training.steps`?"),
        ("training.lr=1", "unknown setting `training.lr`", "`optimizer.rate` is AdamW's learning rate"),
        ("optimizer=muon", "`optimizer` is a section", "did you mean `optimizer.name`?"),
        ("data=notes.txt", "`data` is a section", "did you mean `data.source`?"),
        ("model=gpt2", "`model` is a section", "`halfstep train gpt2`"),
        ("name=first", "unknown setting `name`", "`--out`"),
        ("bf16=true", "unknown setting `bf16`", "`--policy bf16-mixed`"),
        ("warmup_steps=100", "unknown setting `warmup_steps`", "a share of the steps"),
        ("model.hidden_size=1", "unknown setting `model.hidden_size`", "did you mean `model.width`?"),
        ("seed.x=1", "unknown setting `seed.x`", None),
        ("training.steps=abc", '`training.steps` is "abc"; it must be a whole number', None),
        ("training=3", "`training` is a section", None),
        ("training.steps", "not of the form key=value", "--set training.steps=100"),
        ("=3", "not of the form key=value", None),
        ("policy=bf16-mxied", "unknown preset `bf16-mxied`", "bf16-mixed"),
        ("policy.nrom=bf16", "unknown role `nrom`", "norm"),
        ("policy.rules.lm_head=compte=bf16", "unknown role `compte`", "compute"),
        ("model.width=130", "which 4 heads do not divide", None),
        ("model.kv_heads=3", "does not divide", None),
        ("model.head_width=3", "rotary positions rotate pairs", None),
        ("training.warmup=0.9", "add up to more than 1", None),
    ],
)
def test_a_wrong_override_is_named(override, said, hint):
    with pytest.raises(ConfigError) as caught:
        load("tiny", [override])
    assert said in caught.value.message
    assert hint is None or hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nsteps = = 3\n", "run.toml:2:9: this is not TOML"),
        ("[training\n", "run.toml:1:10: this is not TOML"),
        ('title = "x', "run.toml:1:"),
        ("steps = 1\nsteps = 2\n", "run.toml:2:"),
        ("[trainng]\nsteps = 3\n", "unknown setting `trainng.steps`"),
        ("[training]\nlr = 3\n", "unknown setting `training.lr`"),
        ('policy = "bf17"\n', "unknown preset `bf17`"),
        ('[policy]\ncompute = "fp17"\n', "unknown number format `fp17`"),
        ("policy = 3\n", "`policy` is 3; it must be text"),
        ("[model]\nlayers = 1\n[model]\n", "run.toml:3:7: this is not TOML: cannot declare [model] twice"),
        ("[a.b]\n[a.b]\n", "cannot declare [a.b] twice"),
        ("a = {}\n[a.b]\n", "cannot declare [a.b] twice"),
        ("[a.b.c]\n[a]\nb.c.d = 1\n", "cannot redefine namespace [a.b.c]"),
        ("a = {}\na.b = 1\n", "cannot mutate immutable namespace [a]"),
        ('["don\'t"]\n["don\'t"]\n', "cannot declare [don't] twice"),
    ],
)
def test_a_wrong_file_is_named_with_its_place(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert said in caught.value.message
    assert "cannot" not in said or "such as [model] once" in caught.value.hint


def test_what_is_no_recipe(tmp_path):
    with pytest.raises(UnknownRecipeError) as caught:
        load("tinny")
    assert "did you mean `tiny`?" in caught.value.hint
    with pytest.raises(ConfigFileError):
        load(str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b'title = "x"\ndata = "\xff"')
    with pytest.raises(ConfigFileError, match=r"bytes\.toml:2: this is not UTF-8: byte 0xff") as caught:
        load(str(tmp_path / "bytes.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigFileError, match=r"folder\.toml` is a folder") as caught:
        load(str(tmp_path / "folder.toml"))
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(ConfigFileError, match=r"loop\.toml` cannot be read: Too many levels") as caught:
        load(str(tmp_path / "loop.toml"))


def test_a_name_of_another_library_means_a_setting_that_exists_and_hides_none():
    keys = [row.key for row in rows(RunConfig)]
    assert {*NAMES_ELSEWHERE.values()} <= {*keys}
    assert not {*NAMES_ELSEWHERE} & {key.rpartition(".")[2] for key in keys}
    assert not {*NAMES_ELSEWHERE} & {*OTHER_MEANINGS}
    for hint in OTHER_MEANINGS.values():
        for named in re.findall(r"`([^`]+)`", hint):
            command, _, value = named.partition(" ")
            if named.startswith("--policy "):
                assert read(value)
            elif named.startswith("--"):
                assert command.removeprefix("--") in inspect.signature(train).parameters
            elif command == "halfstep":
                assert named.split()[2] in recipe_names()
            else:
                assert named in keys
