"""Initial weights from elsewhere: transformers' own models give the same logits here, and nothing else gets in.

In fp32 both sides compute the same function, and their sums differ in order. Each of `SERIES` results that follow
one another carries the error of a sum of at most `LONGEST` terms, and errors of random sign add up as the root of
their number:

    |ours - theirs| <= sqrt(SERIES * LONGEST) * 2^-24 * |theirs|, in norm

Angles of rotary positions are rounded from fp64 here and computed in fp32 there: one rounding of position * rate
more, for 16 positions below the rest.
"""

import hashlib
import shutil
import warnings
from dataclasses import asdict, replace
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.numpy import save_file

import halfstep
from halfstep.cli.main import run
from halfstep.config.load import load, to_toml
from halfstep.config.weights import initial_weights
from halfstep.core.errors import ResumeError, SettingConflictError
from halfstep.core.policy import Policy
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import DamagedCheckpointError
from halfstep.training.loop import Loop
from halfstep.training.run.resume import open_run
from halfstep.training.session import open_session
from halfstep.training.telemetry.events import read_events
from halfstep.training.weights.artifact import DamagedArtifactError, decode, encode
from halfstep.training.weights.pretrained import open_pretrained
from halfstep.training.weights.safetensors import WeightsFileError, WeightsFitError
from tests.training.runs import spread

LAYERS, LONGEST = 2, 128
SERIES = 16 * LAYERS + 4  # some 16 a block, as in the conformance suite
BOUND = np.sqrt(SERIES * LONGEST) * 2**-24
VOCABULARY = 128
SIZES = {
    "gpt2": ["width=32", "heads=4"],
    "qwen3": ["width=32", "heads=4", "kv_heads=2", "head_width=16", "mlp_width=64"],
}
SHORT = ["training.batch=2", "training.micro_batches=2", "training.steps=2", "training.validation_tokens=64",
         "training.compile=false"]  # fmt: skip
BACKENDS = ["torch", "jax", "mlx"]


def recipe(name, *extra):
    return load(name, [*sizes(name), *SHORT, *extra])


def sizes(name):
    shared = (f"vocabulary={VOCABULARY}", "context=16", f"layers={LAYERS}")
    return [f"model.{size}" for size in (*shared, *SIZES[name])]


def distance(found, expected):
    return np.linalg.norm(np.float64(found) - np.float64(expected)) / np.linalg.norm(np.float64(expected))


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("torch") is None,
    reason="transformers is not installed: pip install transformers torch",
)


def theirs(name, **changes):
    """A model of transformers at the size of `recipe`, every parameter of it alive."""
    import torch
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        given = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**given, **ids, **changes))
    else:
        given = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
        given |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
        rope = {"rope_type": "default", "rope_theta": changes.pop("rope_theta", 1e6)}
        given |= {"tie_word_embeddings": True, "rope_parameters": rope} | changes
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**given))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model.eval()


def logits_of(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.float().numpy()


def loss_of(model, batch):
    """Their mean loss over the tokens of (micro-batches, batch, context + 1)."""
    rows = batch.reshape(-1, batch.shape[-1])
    logits = np.float64(logits_of(model, rows[:, :-1]))
    top = logits.max(-1, keepdims=True)
    spread = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return float((spread - np.take_along_axis(logits, rows[:, 1:, None].astype(int), -1)[..., 0]).mean())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function (name, form) -> (their model, the folder it was saved to); forms are whole, shards and bf16."""
    kept = {}

    def save(name, form="whole"):
        if (name, form) not in kept:
            model, path = theirs(name), tmp_path_factory.mktemp(f"{name}-{form}") / "model"
            if form == "bf16":
                model = model.bfloat16()
            model.save_pretrained(path, max_shard_size="20KB" if form == "shards" else "1GB")
            kept[name, form] = model.float(), path  # widened again: the same numbers
        return kept[name, form]

    return save


def opened(config, path, backend="torch"):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    config = replace(config, backend=backend)
    weights = open_pretrained(str(path), config.model).weights()
    return open_session(config, Policy.parse("fp32"), "cpu", weights=weights)


TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 16).tolist()
PLACES = [0, 4, 15]


def our_logits(session):
    return np.stack([session.logits(TOKENS[: place + 1]) for place in PLACES])


@needs_transformers
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_transformers(saved, backend, name):
    model, path = saved(name)
    found = our_logits(opened(recipe(name), path, backend))
    assert distance(found, logits_of(model, [TOKENS])[0, PLACES]) <= BOUND


OTHERS = {
    "gelu by erf": ("gpt2", {"activation_function": "gelu"}, "mlp=gelu_exact"),
    "epsilon of layer norms": ("gpt2", {"layer_norm_epsilon": 1e-3}, "norm_epsilon=0.001"),
    "width inside the MLP": ("gpt2", {"n_inner": 48}, "mlp_width=48"),
    "an own head": ("gpt2", {"tie_word_embeddings": False}, "tied=false"),
    "epsilon of every RMS norm": ("qwen3", {"rms_norm_eps": 1e-3}, "norm_epsilon=0.001"),
    "base of rotary positions": ("qwen3", {"rope_theta": 500.0}, "rope_base=500.0"),
    "a head of its own": ("qwen3", {"tie_word_embeddings": False}, "tied=false"),
}


@needs_transformers
@pytest.mark.parametrize(("name", "changes", "setting"), OTHERS.values(), ids=OTHERS)
def test_what_numbers_depend_on_is_refused_with_the_setting_that_fits(name, changes, setting, tmp_path):
    """And it does fit: the logits are theirs with it; where no shape depends on it, they are not without."""
    model = theirs(name, **changes)
    model.save_pretrained(tmp_path)
    with pytest.raises(WeightsFitError) as caught:
        open_pretrained(str(tmp_path), recipe(name).model)
    assert caught.value.hint == f"use --set model.{setting}"
    expected = logits_of(model, [TOKENS])[0, PLACES]
    backends = BACKENDS if setting.startswith(("mlp=", "norm")) else ["torch"]  # what was written for this
    for backend in backends:
        session = opened(recipe(name, f"model.{setting}"), tmp_path, backend)
        assert distance(our_logits(session), expected) <= BOUND
    if setting.startswith(("mlp=", "norm", "rope")):
        (tmp_path / "config.json").unlink()  # now the recipe is believed
        assert distance(our_logits(opened(recipe(name), tmp_path)), expected) > 4 * BOUND


@needs_transformers
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("form", ["shards", "bf16"])
def test_shards_and_bf16_hold_the_same_numbers(saved, name, form):
    model, path = saved(name, form)
    assert (len(list(path.glob("*.safetensors"))) > 2) == (form == "shards")
    found = open_pretrained(str(path), recipe(name).model)
    weights = dict(found.weights())
    assert all(value.dtype == np.float32 and value.flags.writeable for value in weights.values())
    assert ("held in bf16 and widened to fp32, exactly" in "; ".join(found.notes)) == (form == "bf16")
    own = {name: p.detach().numpy() for name, p in model.named_parameters()}
    if name == "gpt2":
        assert (weights["embed.weight"] == own["transformer.wte.weight"]).all()
        assert (weights["blocks.1.mlp.down.weight"] == own["transformer.h.1.mlp.c_proj.weight"].T).all()
        for third, part in enumerate("qkv"):  # logits would not show the bias of keys: softmax does not see it
            bias = own["transformer.h.1.attn.c_attn.bias"][32 * third : 32 * (third + 1)]
            assert (weights[f"blocks.1.attn.{part}.bias"] == bias).all()
    else:
        assert (weights["blocks.1.attn.k_norm.weight"] == own["model.layers.1.self_attn.k_norm.weight"]).all()
        assert (weights["blocks.1.mlp.gate.weight"] == own["model.layers.1.mlp.gate_proj.weight"]).all()


@needs_transformers
@pytest.mark.parametrize("name", SIZES)
def test_train_starts_from_it_and_its_first_loss_is_theirs(saved, name, text, tmp_path, out, capsys):
    model, path = saved(name)
    words = [word for setting in [*sizes(name), *SHORT, f"data.source={text}"] for word in ("--set", setting)]
    arguments = ["train", name, "--init", str(path), "--policy", "fp32", "--device", "cpu", "--out", str(out),
                 *words]  # fmt: skip
    assert run(arguments) == 0
    err = capsys.readouterr().err.replace("\n", " ")
    assert f"weights of {name}" in err
    assert "warning: the data is bytes" in err
    events = read_events(out / "events.jsonl")
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert (events[0]["init"]["path"], events[0]["init"]["sha256"]) == (str(path), digest)
    assert events[0]["init"]["layout"] == name
    kept = load(str(out / "run.toml"))
    assert (kept.init, kept.init_digest) == (str(path), digest)
    expected = loss_of(model, Loop(kept, Policy.parse("fp32"), tmp_path / "other", device="cpu").batches.at(0))
    first = next(event for event in events if event["event"] == "step")
    assert abs(first["loss"] - expected) <= BOUND * expected
    assert abs(expected - np.log(VOCABULARY)) > 0.1  # a drawn model's first loss is another


@needs_transformers
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.prove), "mlx"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_your_own_loop_gets_the_same_weights(saved, name, backend):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    theirs, path = saved(name)
    with warnings.catch_warnings(record=True, action="always") as caught:
        made = halfstep.load_model(name, path, backend=backend, settings=sizes(name))
    assert any("has dropout" in str(one.message) for one in caught) == (name == "gpt2")
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 16)).astype(np.int32)
    if backend == "torch":
        import torch

        found = made(torch.from_numpy(tokens).long()).detach().numpy()
    elif backend == "jax":
        found = np.asarray(made[0](made[1], tokens))
    else:
        import mlx.core as mx

        found = np.array(made(mx.array(tokens)))
    assert distance(found, logits_of(theirs, tokens)) <= BOUND


@needs_transformers
def test_prepare_trains_what_was_loaded(saved):
    import torch

    from halfstep.torch import AdamW, prepare

    theirs, path = saved("gpt2")
    with pytest.warns(UserWarning, match="has dropout"):
        model = halfstep.load_model("gpt2", str(path), settings=sizes("gpt2"))
    run = prepare(model, AdamW(model.parameters(), lr=1e-3), "bf16-mixed,emulate=true")
    batch = np.random.default_rng(1).integers(0, VOCABULARY, (1, 2, 17)).astype(np.int32)
    tokens = torch.from_numpy(batch[0]).long()

    def loss(tokens):
        return model.loss(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()

    losses = [float(run.step(loss, [tokens]).loss) for _ in range(20)]
    expected = loss_of(theirs, batch)
    assert abs(losses[0] - expected) <= 2 * 2**-8 * np.sqrt(SERIES) * expected
    assert losses[-1] < losses[0]


@needs_transformers
def test_padding_rows_raise_the_loss_by_their_share_at_most(saved):
    model, path = saved("gpt2")
    config = recipe("gpt2", "model.vocabulary=136")
    batch = np.random.default_rng(1).integers(0, VOCABULARY, (2, 2, 17)).astype(np.int32)
    session = opened(config, path)
    expected = loss_of(model, batch)
    found = session.read(session.step(batch))["loss"]
    assert expected * (1 - BOUND) < found <= (expected + np.log(1 + 8 / VOCABULARY)) * (1 + BOUND)
    notes = open_pretrained(str(path), config.model).notes
    assert any("8 of 136 rows of the vocabulary are padding" in note for note in notes)


def start(config, out, policy="fp32", resume=False, **options):
    opened = open_run(out, config) if resume else None
    config = config if opened is None else opened.config
    return Loop(config, Policy.parse(policy), out, device="cpu", opened=opened, **options)


@pytest.fixture
def ours(text):
    return load(
        "tiny",
        ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", *SHORT, f"data.source={text}"],
    )


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed,emulate=true,param=fp32:split"])
def test_a_run_can_be_the_initial_weights(ours, tmp_path, policy):
    start(ours, tmp_path / "first", policy).run()
    newest = checkpoint.latest(tmp_path / "first" / "checkpoints")
    session = open_session(ours, Policy.parse("fp32"), "cpu", train=False)
    session.load_weights(
        {name: (a.dtype, a.shape, bytes(a.data)) for name, a in checkpoint.load(newest)[0].items()}
    )
    expected = {name: bytes(record[2]) for name, record in session.state().items() if name.startswith("model.")}
    copy = shutil.copytree(newest, tmp_path / "best")
    parts = spread(newest, tmp_path / "of two ranks")
    for place in (
        tmp_path / "first",
        newest,
        newest / "state.safetensors",
        copy,
        parts,
        next(parts.glob("state-*")),
    ):
        found = open_pretrained(str(place), ours.model)
        assert {f"model.{name}": value.tobytes() for name, value in found.weights()} == expected
        assert found.layout.name == "halfstep"
        assert any("moments, which a new run starts anew" in note for note in found.notes)
        assert any("split masters are joined" in note for note in found.notes) == ("split" in policy)
    with pytest.raises(WeightsFitError, match=r"model\.qk_norm is plain there and none here"):
        open_pretrained(str(newest), replace(ours.model, qk_norm="none"))


def test_weights_alone_are_read_by_our_names_and_those_of_an_artifact_as_they_were_rounded(ours, tmp_path):
    weights = dict(initial_weights(ours.model, 5))
    save_file(weights, tmp_path / "export.safetensors")
    found = dict(open_pretrained(str(tmp_path / "export.safetensors"), ours.model).weights())
    assert {name: value.tobytes() for name, value in found.items()} == {n: w.tobytes() for n, w in weights.items()}
    place = tmp_path / "model.int8z"
    origin = {"step": 1, "policy": "fp32", "config": asdict(ours), "weights": "model"}
    origin["data"] = {"digest": "", "description": "", "bytes_per_token": 1.0}
    place.write_bytes(encode(initial_weights(ours.model, 5), origin))
    opened = open_pretrained(str(place), ours.model)
    rounded = decode(place.read_bytes()).weights
    assert {n: w.tobytes() for n, w in opened.weights()} == {n: w.tobytes() for n, w in rounded.items()}
    assert opened.digest == hashlib.sha256(place.read_bytes()).hexdigest()
    assert "it is an artifact: its matrices were rounded to int8 and the rest to fp16" in opened.notes
    with pytest.raises(WeightsFitError, match=r"model\.layers is 1 there and 2 here"):
        open_pretrained(str(place), replace(ours.model, layers=2))
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(DamagedArtifactError):
        open_pretrained(str(place), ours.model)


def test_a_damaged_checkpoint_is_refused_as_initial_weights(ours, tmp_path):
    start(ours, tmp_path / "run").run()
    state = checkpoint.latest(tmp_path / "run" / "checkpoints") / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: the SHA-256 of state\.safetensors"):
        open_pretrained(str(tmp_path / "run"), ours.model)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(WeightsFileError):
        open_pretrained(str(tmp_path / "run"), ours.model)


@pytest.mark.parametrize("policy", ["fp32", "bf16-true", "bf16-mixed,emulate=true,param=fp32:split"])
def test_the_state_of_a_run_that_starts_from_weights_is_that_of_one_that_drew_them(ours, tmp_path, policy):
    """Masters are made of given weights as of drawn ones, whatever they are held in."""
    save_file(dict(initial_weights(ours.model, ours.seed)), tmp_path / "drawn.safetensors")
    given = replace(ours, init=str(tmp_path / "drawn.safetensors"))
    states = [
        start(config, tmp_path / name, policy).session.state() for config, name in ((ours, "a"), (given, "b"))
    ]
    assert states[0] == states[1]


def test_init_and_resume_together_are_refused_with_what_to_leave_out(ours, tmp_path, capsys):
    assert run(["train", "--init", "weights.safetensors", "--resume", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "--init and --resume exclude each other: a resumed run takes the weights" in err
    assert "omit --init to resume" in err


def test_a_resumed_run_remembers_where_its_weights_came_from(ours, tmp_path):
    weights = tmp_path / "weights.safetensors"
    save_file(dict(initial_weights(ours.model, 5)), weights)
    given = replace(ours, init=str(weights), training=replace(ours.training, steps=3, save_every=2))
    loop = start(given, tmp_path / "run")
    record = loop.context.origin
    loop.run()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    weights.unlink()
    again = start(replace(given, init=""), tmp_path / "run", resume=True)  # as `train RECIPE --resume` says it
    assert (again.start, again.context.origin) == (2, record)
    again.run()
    begun = [
        event["init"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "start"
    ]
    assert begun == [record, record]
    assert load(str(tmp_path / "run" / "run.toml")).init == str(weights)
    with pytest.raises(ResumeError):
        start(replace(given, init="elsewhere"), tmp_path / "run", resume=True)


def test_your_own_recipe_may_name_the_weights_and_pin_them(ours, text, tmp_path, capsys):
    weights = tmp_path / "weights.safetensors"
    save_file(dict(initial_weights(ours.model, 5)), weights)
    pinned = replace(ours, policy="fp32", init=str(weights), init_digest="0" * 64)
    (tmp_path / "mine.toml").write_text(to_toml(pinned))
    arguments = ["train", str(tmp_path / "mine.toml"), "--device", "cpu", "--out", str(tmp_path / "run")]
    assert run(arguments) == 2
    assert f"init_digest is {'0' * 64}" in capsys.readouterr().err.replace("\n", "")
    assert not (tmp_path / "run").exists()
    assert run([*arguments, "--init", str(weights)]) == 0  # what is named here is not what was pinned
    assert run([*arguments, "--init", ""]) == 2
    with pytest.raises(SettingConflictError, match="but there is no `init`"):
        load("tiny", ["init_digest=abc"])
