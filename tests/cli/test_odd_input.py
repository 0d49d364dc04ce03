"""Inputs that once ended in a traceback: each exits with 2 and a sentence, or simply works."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from halfstep.cli.main import run
from halfstep.report.page import write as write_page

REFUSED = {
    "data.source=~nobody-of-this-name/x": "~nobody-of-this-name/x",
    "seed=99999999999999999999999": "`seed` is 99999999999999999999999",
    "training.clip_norm=inf": "`training.clip_norm` is inf",
    "optimizer.rate=nan": "`optimizer.rate` is nan",
    "optimizer.betas=[0.9, 1.0]": "`optimizer.betas[1]` is 1.0",
    "policy=fp16-mixed,scale=dynamic:hysteresis=1e12": "from 1 to 2^31 - 1",
    "policy=fp16-mixed,scale=dynamic:interval=1e300": "from 1 to 2^31 - 1",
    "model.context=100000": "is shorter than one sequence",
    "model.layers=10000000": "`model.layers` is 10000000; it must be a whole number, at least 1 and at most 10000",
    "model.width=100000000": "parameters, whose weights, gradients and moments take",
    "model.vocabulary=1000000000000": "parameters, whose",
    "training.batch=1000000000000": "an update reads",
    "training.micro_batches=1000000000000": "an update reads",
    "training.steps=" + "9" * 5000: "`training.steps` is",
    "training.steps=" + "[" * 2000: "`training.steps` is",
    "training.steps=0x" + "f" * 6000: "`training.steps` is a int too long to print",
    "data.source=\x1b[31m": r"no file matches `\x1b[31m`",
    "data.source=" + "A" * 100_000: "more characters",
}


@pytest.mark.parametrize(("setting", "said"), REFUSED.items(), ids=[setting[:40] for setting in REFUSED])
def test_a_value_that_cannot_work_is_refused(setting, said, small, tmp_path, refused):
    policy = [] if setting.startswith("policy") else ["--policy", "fp32"]
    err = refused("train", "--out", str(tmp_path / "run"), *policy, *small, "--set", setting)
    assert "error: " in err
    assert said in " ".join(err.split())
    assert len(err) < 10_000
    assert "\x1b" not in err
    assert not (tmp_path / "run").exists()


def test_a_recipe_whose_section_is_a_number_and_a_name_too_long_for_the_disk(tmp_path, refused, quick):
    recipe = tmp_path / "odd.toml"
    recipe.write_text("training = 3\n")
    assert "must be a table" in refused("train", str(recipe), "--policy", "fp32", "--set", "training.steps=1")
    assert "error: " in refused("train", "--out", str(tmp_path / ("x" * 300)), *quick)
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


COMMANDS = {
    "formats e0m0ieee": "a format has 2 to 8 exponent bits",
    "formats e999999999999m7fn": "a format has 2 to 8 exponent bits",
    "formats e4m3b999999999999fn": "every format must fit inside fp32",
    f"formats e{'9' * 5000}m1f": "unknown number format",
    f"policy {'A' * 100_000}": "more characters",
    f"policy fp32,norm={'[' * 3000}": "more characters",
    f"sample run --length {'9' * 5000}": "--length",
    f"probe --backend torch --budget {'9' * 5000}": "budget",
    "data pack text.txt --tokenizer bytes --out out --workers 1000000": "--workers is 1000000; it must be from 1 to",
    "data train-tokenizer text.txt --out out --vocabulary 1000000000": "--vocabulary is 1000000000; it must be at most",
    "train pipe.toml": "`pipe.toml` cannot be read: it is a pipe, not a file",
    "train zero.toml": "`zero.toml` cannot be read: it is a device, not a file",
    "train huge.toml": "which is too large",
    "train deep.toml": "deep.toml: this cannot be read: it is nested too deeply",
    "train tiny --set data.source=pipe.toml": "cannot read `pipe.toml`: it is a pipe, not a file",
    "train tiny --set data.source=huge.toml": "which a run reads into memory three times over",
    "data pack pipe.toml --tokenizer bytes --out out": "holds no file (skipped: 1 special file)",
    "eval pipe.toml": "`pipe.toml`",
}


@pytest.fixture
def odd_files(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.toml")
    os.symlink("/dev/zero", "zero.toml")
    (tmp_path / "huge.toml").touch()
    os.truncate("huge.toml", 1 << 40)
    (tmp_path / "deep.toml").write_text("x = " + "[" * 2000)


@pytest.mark.parametrize(("command", "said"), COMMANDS.items(), ids=[command[:40] for command in COMMANDS])
def test_a_command_that_cannot_work_is_refused_in_a_sentence(odd_files, command, said, refused, tmp_path):
    before = sorted(os.listdir())
    err = refused(*command.split(" "))
    assert said in " ".join(err.split())
    assert len(err) < 10_000
    assert sorted(os.listdir()) == before


def test_what_an_event_holds_cannot_block_a_resume_nor_reach_the_terminal_or_the_page(arguments, out, capsys):
    title = "\x1b[31mred\x07\u202e"
    assert run([*arguments, "--set", f"title={title}", "--set", "training.save_every=1"]) == 0
    events = out / "events.jsonl"
    kept = events.read_text().splitlines()
    bad = ['{"event": "checkpoint", "step": "x"}', '{"event": "start", "device": 3}', "[" * 5000, "\x1b[2J"]
    events.write_text("\n".join([*kept[:-1], *bad]) + "\n")
    for path in sorted((out / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    assert run(["train", "--resume", "--out", str(out), "--device", "cpu"]) == 0
    err = capsys.readouterr().err
    assert r"\x1b[31mred\x07\u202e" in err
    assert "\x1b" not in err
    assert (out / "report.html").is_file()  # without the damaged lines
    events.write_text("\n".join(kept) + "\n")
    write_page(events, out / "report.html")
    page = (out / "report.html").read_text()
    assert r"\x1b[31mred" in page
    assert not {"\x1b", "\x07", "\u202e"} & set(page)


@pytest.mark.prove
def test_closed_streams_and_too_little_memory(arguments, out):
    assert run(arguments) == 0
    python, sample = shlex.quote(sys.executable), shlex.quote(str(out))
    for closed, code in ((">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0)):
        words = f"{python} -m halfstep sample {sample} --device cpu --length 1 {closed}"
        assert subprocess.run(["sh", "-c", words], check=False).returncode == code, closed
    words = f"ulimit -v 200000; {python} -m halfstep sample {sample} --device cpu"
    done = subprocess.run(["sh", "-c", words], check=False, capture_output=True, text=True)
    assert (done.returncode, "error: " in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


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


@pytest.mark.prove
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
