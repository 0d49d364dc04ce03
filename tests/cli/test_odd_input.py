"""Inputs that once ended in a traceback: each is exit code 2 with a sentence, or simply works."""

import json
import os
import subprocess
import sys

import pytest

from halfstep.cli.main import run

SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2"]
SMALL += ["training.batch=2", "training.steps=2", "training.validation_tokens=64"]


def train(out, *extra, text=None):
    settings = [*SMALL, *extra, *([f"data.source={text}"] if text else [])]
    flags = [word for setting in settings for word in ("--set", setting)]
    return run(["train", "--device", "cpu", "--policy", "fp32", "--out", str(out), *flags])


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("data.source=~nobody-of-this-name/x", "~nobody-of-this-name/x"),
        ("seed=99999999999999999999999", "`seed` is 99999999999999999999999"),
        ("training.clip_norm=inf", "`training.clip_norm` is inf"),
        ("optimizer.rate=nan", "`optimizer.rate` is nan"),
        ("optimizer.betas=[0.9, 1.0]", "`optimizer.betas[1]` is 1.0"),
        ("policy=fp16-mixed,scale=dynamic:hysteresis=1e12", "from 1 to 2^31 - 1"),
        ("policy=fp16-mixed,scale=dynamic:interval=1e300", "from 1 to 2^31 - 1"),
        ("model.context=100000", "held-out text"),
    ],
)
def test_a_value_that_cannot_work_is_refused(extra, said, text, tmp_path, capsys):
    flags = [word for setting in [*SMALL, f"data.source={text}", extra] for word in ("--set", setting)]
    policy = [] if extra.startswith("policy") else ["--policy", "fp32"]
    assert run(["train", "--device", "cpu", "--out", str(tmp_path / "run"), *policy, *flags]) == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert said in err or extra.startswith("model.context")
    assert not (tmp_path / "run").exists()


def test_a_recipe_whose_section_is_a_number(tmp_path, capsys):
    recipe = tmp_path / "odd.toml"
    recipe.write_text("training = 3\n")
    assert run(["train", str(recipe), "--policy", "fp32", "--set", "training.steps=1"]) == 2
    assert "must be a table" in capsys.readouterr().err


def test_a_name_that_is_too_long_for_the_disk(text, tmp_path, capsys):
    assert train(tmp_path / ("x" * 300), text=text) == 2
    assert "error: " in capsys.readouterr().err
    assert run(["eval", str(tmp_path / ("x" * 300))]) == 2


def test_text_without_any_entropy_trains_and_has_no_ratio(tmp_path, capsys):
    plain = tmp_path / "plain.txt"
    plain.write_text("a" * 100000)
    assert train(tmp_path / "run", text=plain) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_a_model_too_small_to_measure_is_measured(text, tmp_path):
    settings = [*SMALL, f"data.source={text}", "model.context=4", "training.batch=1"]
    flags = [word for setting in settings for word in ("--set", setting)]
    for extra in ([], ["--policy", "bf16-mixed"]):  # the real measurement, both ways
        out = tmp_path / f"run{len(extra)}"
        assert run(["train", "--device", "cpu", "--out", str(out), *extra, *flags]) == 0


def test_a_vocabulary_larger_than_bytes_still_samples_bytes(text, tmp_path, capfdbinary):
    assert train(tmp_path / "run", "model.vocabulary=512", text=text) == 0
    assert run(["sample", str(tmp_path / "run"), "--device", "cpu", "--length", "20"]) == 0


WRONG = {
    "--length -3": ["--length -3: it must be 1 or more"],
    "--temperature nan": ["--temperature nan: it must be 0, or from 0.01 to 100"],
    "--temperature 1e-320": ["--temperature 1e-320: it must be 0, or from 0.01 to 100"],
    "--seed -1": ["--seed -1: it must be from 0 to 2^63 - 1"],
    "--length 0 --top-k -1": ["--length 0: it must be 1 or more", "--top-k -1: it must be 0 or more"],
}


@pytest.mark.parametrize(("extra", "said"), WRONG.items(), ids=WRONG)
def test_sampling_that_cannot_be_names_what_is_wrong_alone(extra, said, capsys):
    assert run(["sample", "/no/such", *extra.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {'; '.join(said)}\n")


def test_a_reader_that_has_seen_enough_and_a_prompt_of_any_bytes(text, tmp_path):
    assert train(tmp_path / "run", text=text) == 0
    command = [sys.executable, "-m", "halfstep", "sample", str(tmp_path / "run"), "--device", "cpu"]
    prompt = os.fsdecode(b"\xff")
    process = subprocess.Popen(
        [*command, "--length", "400", "--prompt", prompt], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(1) == b"\xff"
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait() == 0
    process.stderr.close()


def test_json_has_null_where_there_is_no_number(capsys):
    from halfstep.cli.output import print_json

    print_json({"a": float("nan"), "b": [float("inf"), 1.0]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.0]}


def test_eval_says_when_the_data_changed(text, tmp_path, capsys):
    assert train(tmp_path / "run", text=text) == 0
    text.write_text(text.read_text() + "one more line\n")
    assert run(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert "warning: the data changed" in capsys.readouterr().err
