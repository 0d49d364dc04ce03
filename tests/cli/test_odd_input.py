"""Inputs that once ended in a traceback: each exits with 2 and a sentence, or simply works."""

import os
import subprocess
import sys

import pytest

from halfstep.cli.main import run

REFUSED = {
    "data.source=~nobody-of-this-name/x": "~nobody-of-this-name/x",
    "seed=99999999999999999999999": "`seed` is 99999999999999999999999",
    "training.clip_norm=inf": "`training.clip_norm` is inf",
    "optimizer.rate=nan": "`optimizer.rate` is nan",
    "optimizer.betas=[0.9, 1.0]": "`optimizer.betas[1]` is 1.0",
    "policy=fp16-mixed,scale=dynamic:hysteresis=1e12": "from 1 to 2^31 - 1",
    "policy=fp16-mixed,scale=dynamic:interval=1e300": "from 1 to 2^31 - 1",
    "model.context=100000": "is shorter than one sequence",
}


@pytest.mark.parametrize(("setting", "said"), REFUSED.items(), ids=REFUSED)
def test_a_value_that_cannot_work_is_refused(setting, said, small, tmp_path, capsys):
    policy = [] if setting.startswith("policy") else ["--policy", "fp32"]
    assert run(["train", "--out", str(tmp_path / "run"), *policy, *small, "--set", setting]) == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert said in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_a_recipe_whose_section_is_a_number_and_a_name_too_long_for_the_disk(tmp_path, capsys, quick):
    recipe = tmp_path / "odd.toml"
    recipe.write_text("training = 3\n")
    assert run(["train", str(recipe), "--policy", "fp32", "--set", "training.steps=1"]) == 2
    assert "must be a table" in capsys.readouterr().err
    assert run(["train", "--out", str(tmp_path / ("x" * 300)), *quick]) == 2
    assert "error: " in capsys.readouterr().err
    assert run(["eval", str(tmp_path / ("x" * 300))]) == 2


def test_text_without_any_entropy_trains_and_has_no_ratio(arguments, tmp_path, capsys):
    plain = tmp_path / "plain.txt"
    plain.write_text("a" * 100000)
    assert run([*arguments, "--set", f"data.source={plain}"]) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_a_model_too_small_to_measure_is_measured(small, tmp_path):
    tiny = [*small, "--set", "model.context=4", "--set", "training.batch=1"]
    for extra in ([], ["--policy", "bf16-mixed"]):  # the real measurement, both ways
        assert run(["train", "--out", str(tmp_path / f"run{len(extra)}"), *extra, *tiny]) == 0


def test_a_vocabulary_larger_than_bytes_still_samples_bytes(arguments, tmp_path, capfdbinary):
    assert run([*arguments, "--set", "model.vocabulary=512"]) == 0
    assert run(["sample", str(tmp_path / "run"), "--device", "cpu", "--length", "20"]) == 0


WRONG = {
    "--length -3": ["--length -3: it must be 1 or more"],
    "--temperature nan": ["--temperature nan: it must be 0, or from 0.01 to 100"],
    "--temperature 1e-320": ["--temperature 1e-320: it must be 0, or from 0.01 to 100"],
    "--seed -1": ["--seed -1: it must be from 0 to 2^63 - 1"],
    "--length 0 --top-k -1": ["--length 0: it must be 1 or more", "--top-k -1: it must be 0 or more"],
}


@pytest.mark.parametrize(("extra", "said"), WRONG.items(), ids=WRONG)
def test_wrong_sampling_options_are_named_together(extra, said, capsys):
    assert run(["sample", "/no/such", *extra.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {'; '.join(said)}\n")


def test_a_reader_that_has_seen_enough_and_a_prompt_of_any_bytes(arguments, tmp_path):
    assert run(arguments) == 0
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


def test_eval_warns_if_the_data_changed(arguments, text, tmp_path, capsys):
    assert run(arguments) == 0
    text.write_text(text.read_text() + "one more line\n")
    assert run(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert "warning: the data changed" in capsys.readouterr().err
