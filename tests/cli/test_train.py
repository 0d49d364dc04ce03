"""`halfstep train`, `eval` and `sample` as people type them."""

import errno
import json
import re

import pytest

from halfstep.cli import train as command
from halfstep.cli.main import run
from halfstep.config.load import load
from halfstep.config.run import RunConfig
from halfstep.config.schema import rows
from halfstep.core.choice import Choice
from halfstep.core.policy import Policy
from halfstep.report import page
from halfstep.tools import probe
from halfstep.training.files import RunLock
from halfstep.training.telemetry import loggers
from halfstep.training.telemetry.events import EventsError, read_events
from halfstep.training.telemetry.meters import Ceiling
from tests.training.runs import raising


@pytest.fixture
def trained(small, tmp_path):
    out = tmp_path / "run"
    assert run(["train", "tiny", "--policy", "fp32", "--out", str(out), *small]) == 0
    return out


def test_a_run_prints_a_summary_its_utilization_and_leaves_a_page(small, out, capsys):
    assert run(["train", *small, "--policy", "fp32", "--out", str(out), "--set", "training.steps=4"]) == 0
    printed, words = capsys.readouterr()
    assert "held-out bits per byte" in printed
    assert "bigram entropy of the same text" in printed
    assert re.search(r"ratio of the two +[\d.]+; below 1 it uses more than the byte before", printed)
    assert f"halfstep sample {out}" in printed.replace("\n", "")
    assert "precision fp32" in words
    assert "<html" in (out / "report.html").read_text()
    assert re.search(
        r"model FLOPs utilization [\d.e-]+ % of [\d.e+]+ .FLOP/s; lost to input [\d.]+ %, to saving",
        " ".join(printed.split()),
    )
    ceiling = read_events(out / "events.jsonl")[0]["ceiling"]
    assert ceiling["flops"] > 0
    assert ceiling["told"].startswith("fp32 matmuls")


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "no space is left"), EventsError("no space is left")])
def test_a_page_that_cannot_be_written_is_a_warning(small, tmp_path, out, capsys, monkeypatch, fault, data_of):
    monkeypatch.setattr(page, "write", raising(fault))
    assert run(["train", *small, "--policy", "fp32", "--out", str(out)]) == 0
    printed, words = capsys.readouterr()
    assert f"warning: cannot write `{out / 'report.html'}`: no space is left" in words
    assert "held-out bits per byte" in printed
    assert "report.html" not in printed
    assert not re.search(r"^ *page\b", printed, re.MULTILINE)
    assert data_of("train", *small, "--policy", "fp32", "--out", str(tmp_path / "other"))["report"] is None


def test_json_output_and_a_resumed_run_keeps_its_ceiling(small, out, monkeypatch, data_of):
    first = data_of("train", *small, "--policy", "fp32", "--out", str(out))
    assert first["finished"] is True
    assert (first["report"], first["step"]) == (str(out / "report.html"), 3)
    assert first["ratio"] == pytest.approx(first["bits_per_byte"] / first["bigram_bits"])
    assert first["mfu"] > 0
    assert first["spent"]["wall"] > 0
    monkeypatch.setattr("halfstep.torch.measure.measure", lambda *_, **__: pytest.fail("measured again"))
    assert (
        data_of("train", *small, "--policy", "fp32", "--out", str(out), "--resume")["ceiling"] == first["ceiling"]
    )


def test_the_reason_of_auto_reaches_messages_events_and_page_unchanged(small, tmp_path, capsys, monkeypatch):
    reason = "bf16 matmuls are 287x slower than fp32 (1.09 s against 3.8 ms at 512x512x512)"
    monkeypatch.setattr(probe, "choose_policy", lambda *_: Choice("fp32", reason))
    assert run(["train", *small, "--out", str(tmp_path / "run"), "--set", "policy.norm=bf16"]) == 0
    assert reason in capsys.readouterr().err
    start = read_events(tmp_path / "run" / "events.jsonl")[0]
    assert (start["choice"], start["policy"]) == ({"preset": "fp32", "reason": reason}, "fp32,norm=bf16")
    assert reason in (tmp_path / "run" / "report.html").read_text()


def test_a_slow_policy_is_obeyed_with_a_warning(small, tmp_path, capsys, monkeypatch):
    slow = "bf16 matmuls are 287x slower than fp32; it runs as asked"
    monkeypatch.setattr(probe, "measure_ceiling", lambda *_, **__: Ceiling(1e9, ""))
    monkeypatch.setattr(probe, "slow_formats", lambda *_, **__: [slow])
    monkeypatch.setattr(probe, "choose_policy", lambda *_: pytest.fail("a policy that was named is not measured"))
    policy = "bf16,scale=static:value=64"
    assert run(["train", *small, "--policy", policy, "--out", str(tmp_path / "run")]) == 0
    err = capsys.readouterr().err
    assert "precision bf16-mixed,scale=static:value=64: `bf16` is read as `bf16-mixed`" in err
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert events[0]["policy"] == "bf16-mixed,scale=static:value=64"
    warned = [*Policy.parse(policy).warnings, slow]
    assert [e["message"] for e in events if e["event"] == "warning"] == warned
    assert all(f"warning: {message}" in err for message in warned)


@pytest.mark.parametrize("emulate", ["", ",emulate=true"], ids=["native", "emulated"])
def test_the_measurement_is_printed_and_recorded(small, tmp_path, capsys, emulate):
    """On a CPU fp8 is never faster: a run in fp8-mixed is then one in bf16, and must not look like fp8."""
    if not emulate:
        pytest.importorskip("torch")
        from halfstep.core.formats import E4M3
        from halfstep.torch.numerics.dtypes import supported

        if not (found := supported(E4M3, "cpu")):
            pytest.skip(found.reason)
    assert run(["train", *small, "--policy", f"fp8-mixed{emulate}", "--out", str(tmp_path / "run")]) == 0
    messages = [e["message"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "warning"]
    (printed,) = [message for message in messages if message.startswith("measured: ")]
    assert printed in capsys.readouterr().err
    assert ("since it is emulated" if emulate else "stay bf16") in printed


def test_a_policy_whose_fp8_runs_nowhere_is_nowhere_named_alone(small, tmp_path, capsys, monkeypatch):
    """In the terminal, the record, the page and `halfstep runs`; where all of it runs, the name says it all."""
    pytest.importorskip("torch")
    from halfstep.core.formats import E4M3
    from halfstep.torch.convert import fp8_choice
    from halfstep.torch.numerics.dtypes import supported

    if not (found := supported(E4M3, "cpu")):
        pytest.skip(found.reason)
    out, measure = tmp_path / "run", fp8_choice.measure_layers
    monkeypatch.setattr(
        fp8_choice,
        "measure_layers",
        lambda works, _, *rest, **more: measure(works, lambda *_: [1.0, 2.0], *rest, **more),
    )
    assert run(["train", *small, "--policy", "fp8-mixed", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    outcome = re.search(r"precision fp8-mixed \((0 of (\d+) matmuls in fp8: bf16 is faster here)\)", said)[1]
    start = next(e for e in read_events(out / "events.jsonl") if e["event"] == "start")
    assert (start["policy"], start["outcome"]) == ("fp8-mixed", outcome)
    page = (out / "report.html").read_text()
    assert f"trained in <code>fp8-mixed</code> ({outcome})" in page
    assert f"The run used <code>fp8-mixed ({outcome})</code>" in page
    assert run(["runs", str(out), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["policy"], row["outcome"]) == ("fp8-mixed", outcome)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["runs", str(out)]) == 0
    assert f"fp8-mixed ({outcome})" in capsys.readouterr().out


def test_resume_keeps_the_policy_that_ran(small, tmp_path, capsys, monkeypatch):
    out = ["--out", str(tmp_path / "run")]
    monkeypatch.setattr(probe, "choose_policy", lambda *_: Choice("fp32", "because"))
    assert run(["train", *small, *out]) == 0
    monkeypatch.setattr(probe, "choose_policy", lambda *_: pytest.fail("measured again"))
    assert run(["train", "--resume", "--device", "cpu", *out]) == 0
    assert read_events(tmp_path / "run" / "events.jsonl")[-1]["event"] == "end"


def test_resume_changes_the_precision_and_trains_further_if_asked(trained, capsys, refused, data_of):
    again = ["train", "--resume", "--device", "cpu", "--out", str(trained)]
    assert run([*again, "--policy", "fp16-mixed,emulate=true", "--set", "training.steps=6"]) == 0
    words = " ".join(capsys.readouterr().err.split())
    assert "from step 3 on the policy is `fp16-mixed,emulate=true` (it was `fp32`)" in words
    assert "training.steps is 6 (it was 3); the learning rate follows the schedule of 6 steps" in words
    assert data_of(*again)["step"] == 6  # both hold from now on
    assert 'policy = "fp16-mixed,emulate=true"' in (trained / "run.toml").read_text()
    starts = [event for event in read_events(trained / "events.jsonl") if event["event"] == "start"]
    assert starts[1]["ceiling"]["told"].startswith("fp16 is emulated")  # of the format that it computes in
    assert "this policy would round what the run has learned" in refused(
        *again, "--policy", "bf16-true", "--set", "training.steps=9"
    )
    assert run([*again, "--policy", "auto"]) == 0  # the precision that it has


def test_a_damaged_checkpoint_is_named_with_the_flag_to_skip_it(small, tmp_path, capsys, refused):
    out = ["--out", str(tmp_path / "run")]
    assert run(["train", *small, *out, "--policy", "fp32", "--set", "training.save_every=1"]) == 0
    (tmp_path / "run" / "checkpoints" / "step-000003" / "state.safetensors").write_bytes(b"")
    capsys.readouterr()
    resume = ["train", "--resume", "--device", "cpu", *out]
    err = refused(*resume)
    assert "step-000003/state.safetensors` is damaged" in err
    assert "--resume --allow-older" in err
    assert run([*resume, "--allow-older"]) == 0
    assert "it was set aside, and the run resumes after step 2" in capsys.readouterr().err


def test_the_deadline_may_come_from_the_environment(small, tmp_path, refused, monkeypatch):
    monkeypatch.setenv("HALFSTEP_DEADLINE", "soon")
    assert "HALFSTEP_DEADLINE=soon: it must be a number" in refused(
        "train", *small, "--policy", "fp32", "--out", str(tmp_path / "run")
    )
    monkeypatch.setenv("HALFSTEP_DEADLINE", "30")
    assert run(["train", *small, "--policy", "fp32", "--out", str(tmp_path / "run")]) == 0


def test_sample_begins_as_the_held_out_text_does(trained, small, tmp_path, capfdbinary):
    valid = tmp_path / "valid.txt"
    valid.write_text("\n\n = Heading = \n \n" + "\n".join(f"held out {i}" for i in range(99)))
    own = ["--set", f"data.validation={valid}"]
    assert run(["train", "tiny", "--policy", "fp32", "--out", str(tmp_path / "own"), *small, *own]) == 0
    capfdbinary.readouterr()

    def sampled(*words):
        code = run(["sample", *map(str, words), "--device", "cpu", "--length", "3"])
        return code, capfdbinary.readouterr()

    code, printed = sampled(tmp_path / "own")
    assert (code, printed.out[:14]) == (0, b" = Heading = \n")
    code, printed = sampled(trained)  # of the share that is held out
    assert code == 0
    assert printed.out.splitlines()[0] in (tmp_path / "text.txt").read_bytes()
    code, printed = sampled(trained, "--validation", valid)
    assert (code, printed.out[:14]) == (0, b" = Heading = \n")
    assert b"the data changed" not in printed.err
    assert run(["eval", str(trained), "--device", "cpu", "--validation", str(valid), "--json"]) == 0
    capfdbinary.readouterr()
    valid.unlink()
    code, printed = sampled(tmp_path / "own")
    assert code == 2
    assert b"give a beginning with --prompt" in printed.err
    assert sampled(tmp_path / "own", "--prompt", "x")[0] == 0


BAD = {
    "option": (["train", "--steps", "20"], "unknown option: --steps", "`--set training.steps=20`"),
    "two recipes": (["train", "tiny", "gpt2"], "`gpt2` is one argument too many", "halfstep train --help"),
    "backend": (["train", "--backend", "tensorflow"], "tensorflow", ""),
    "gpus of JAX": (["train", "--backend", "jax", "--gpus", "4"], "--gpus starts processes of torch", "--device cuda:0-3"),
    "no run to resume": (["train", "--resume"], "there is no run to resume in runs/", "--out"),
    "older": (["train", "--allow-older"], "--allow-older only makes sense with --resume", "--resume"),
    "deadline": (["train", "--deadline", "-1"], "--deadline -1: it must be a number of seconds above 0", ""),
}  # fmt: skip


# What people type who know another library, and what the hint must offer.
ELSEWHERE = {
    "--max_steps 100": "--set training.steps=100",
    "--learning-rate 1e-3": "optimizer.muon_rate",
    "--weight_decay=0.1": "--set optimizer.weight_decay=0.1",
    "--batch-size 4": "--set training.batch=4",
    "--report_to wandb": '--set training.loggers=["wandb"]',
    "--gradient_checkpointing": "--set training.recompute_blocks=true",
    "--gradient_checkpointing True": "--set training.recompute_blocks=true",
    "--deterministic --compile": "--set training.deterministic=true",
    "--precision bf16-mixed": "--policy bf16-mixed",
    "--precision 16": "--policy 16",
    "--dtype bfloat16": "bf16-mixed",
    "--dtype float16": "fp16-mixed",
    "--mixed_precision=fp16": "--policy fp16",
    "--n_embd 256": "--set model.width=256",
    "--vocab-size 512": "--set model.vocabulary=512",
    "--seed 7": "--set seed=7",
    "--bf16": "--policy bf16-mixed",
    "--fp16 true": "--policy fp16-mixed",
    "--output_dir x": "--out",
    "--out-dir x": "--out",
    "--run_name x": "--out",
    "--model gpt2": "halfstep train gpt2",
    "--config my.toml": "halfstep train gpt2",
    "--resume_from_checkpoint x": "--resume",
    "--epochs 3": "training.steps",
    "--warmup_steps 100": "training.warmup",
    "--warmup_ratio 0.1": "--set training.warmup=0.1",
}


@pytest.mark.parametrize(("typed", "offered"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_an_option_of_another_library_has_a_hint_that_works(typed, offered, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    err = refused("train", *typed.split())
    assert f"error: unknown option: {typed.split()[0].partition('=')[0]}" in err
    assert f"`{offered}`" in err.partition("hint: ")[2]
    for words in re.findall("`(--(?:set|policy) [^`]+)`", err.partition("hint: ")[2]):
        option, _, value = words.partition(" ")
        assert load("tiny", [value if option == "--set" else f"policy={value}"])


@pytest.mark.parametrize(("arguments", "said", "hint"), BAD.values(), ids=BAD)
def test_a_mistake_exits_with_2_and_leaves_nothing(arguments, said, hint, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    err = refused(*arguments)
    assert "error: " in err
    assert said in err
    assert hint in err
    assert list(tmp_path.iterdir()) == []


def test_one_command_starts_and_resumes_a_run(small, out, capsys, refused):
    assert run(["train", "--resume", "--out", str(out)]) == 2  # which recipe?
    assert "holds no run" in capsys.readouterr().err
    command = ["train", "tiny", *small, "--policy", "fp32", "--resume", "--out", str(out)]
    out.mkdir()
    (out / "lock").write_text("")  # of a process that was killed while it started
    assert run(command) == 0
    assert f"`{out}` holds no run yet: starting tiny" in capsys.readouterr().err
    assert run(command) == 0
    assert "holds no run yet" not in capsys.readouterr().err
    before = (out / "run.toml").read_bytes()
    for again in (command, ["train", "--resume", "--out", str(out)]):
        (out / "run.toml").unlink()
        assert run(again) == 0  # its checkpoints have the settings: it does not start again next to them
        assert (out / "run.toml").read_bytes() == before
        assert "had no run.toml: it was restored from" in " ".join(capsys.readouterr().err.split())
    (out / "run.toml").unlink()
    manifest = out / "checkpoints" / "step-000003" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    assert "manifest.json` is damaged" in refused(*command)
    assert not (out / "run.toml").exists()


def test_a_recipe_that_finds_a_run_keeps_its_settings(small, tmp_path, capsys, monkeypatch, refused):
    monkeypatch.setattr(command, "RUNS", tmp_path)
    assert run(["train", "tiny", *small, "--policy", "fp32"]) == 0
    assert run(["train", "tiny", "--resume"]) == 0
    assert "nothing: all 3 steps were already trained" in capsys.readouterr().out
    assert "model.width was 16 and is now 32" in refused("train", "tiny", "--resume", "--set", "model.width=32")
    (out,) = tmp_path.glob("tiny-*")
    assert f"`halfstep train --resume --out {out}` continues" in refused(
        "train", "tiny", "--resume", "--out", str(out)
    )


def hinted(capsys):
    """The commands that the hint of an error names."""
    return [
        words.split()[1:] for words in re.findall("`(halfstep [^`]*)`", " ".join(capsys.readouterr().err.split()))
    ]


def test_a_finished_run_is_refused_before_its_data_is_read_with_the_command_that_trains_it_further(
    arguments, out, capsys, monkeypatch
):
    assert run(arguments) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("halfstep.training.data.load.load_corpus", raising(AssertionError("the data was read")))
        assert run(["train", "--resume", "--out", str(out), "--policy", "bf16-mixed", "--device", "cpu"]) == 2
    (command,) = hinted(capsys)
    assert command == ["train", "--resume", "--out", str(out), "--set", "training.steps=6"]
    assert run([*command, "--device", "cpu"]) == 0
    assert "6 steps in total" in capsys.readouterr().out


def test_what_a_refused_resume_hints_at_runs(arguments, out, tmp_path, capsys):
    assert run(arguments) == 0
    resumed, other = ["train", "--resume", "--out", str(out)], str(tmp_path / "other")
    for wrong, number in (
        (arguments, 1),
        ([*resumed, "--set", "seed=1"], 2),
        ([*resumed, "--set", "model.width=32"], 1),  # weights of another shape are no beginning
        ([*resumed, "--set", "training.steps=2"], 1),
    ):
        capsys.readouterr()
        assert run(wrong) == 2
        commands = hinted(capsys)
        assert len(commands) == number
        for words in commands:
            assert run([*(other if word == "OTHER" else word for word in words), "--device", "cpu"]) == 0


CHEAP = {
    "data": (["--set", "data.source=nowhere"], "nowhere"),
    "a logger": (["--set", 'training.loggers=["trackio"]'], "run: pip install '.[trackio]'"),
    "a file": (["--out", "file"], "`file` cannot be written: `file` is not a folder"),
    "in a file": (["--out", "file/a/b"], "is not a folder"),
    "settings": (["--resume", "--out", "run", "--set", "seed=9"], "seed was 0 and is now 9; it cannot change"),
}


@pytest.mark.parametrize(("wrong", "said"), CHEAP.values(), ids=CHEAP)
def test_a_mistake_is_reported_before_anything_is_measured(wrong, said, small, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    if "--resume" in wrong:
        assert run(["train", "tiny", *small, "--policy", "fp32", "--out", "run"]) == 0
    monkeypatch.setattr(probe, "resolve", lambda *_, **__: pytest.fail("it was measured"))
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert said in refused("train", *([] if "--resume" in wrong else ["tiny"]), *small, *wrong)


@pytest.mark.parametrize("source", ["", "/*", "/[!x]*.toml"])
def test_a_run_does_not_write_among_its_own_data(text, small, refused, tmp_path, source):
    data = tmp_path / "data"
    data.mkdir()
    for name, line in (("a", "one"), ("b", "two")):
        (data / f"{name}.toml").write_text(line + text.read_text())
    named = ["--set", f"data.source={data}{source}"]
    assert "holds the data of the run" in refused(
        "train", *small, *named, "--policy", "fp32", "--out", f"{data}/../data"
    )
    assert {path.name for path in data.iterdir()} == {"a.toml", "b.toml"}
    assert run(["train", *small, *named, "--policy", "fp32", "--out", str(data / "run")]) == 0
    assert run(["train", "--resume", "--out", str(data / "run")]) == 0


@pytest.mark.parametrize("resume", [True, False])
def test_nothing_is_measured_if_the_folder_is_taken(trained, small, refused, monkeypatch, resume):
    """A second run would take the device's memory from the first before it is refused."""

    for name in ("resolve", "measure_ceiling"):
        monkeypatch.setattr(probe, name, raising(AssertionError("the device was used")))
    held = RunLock(trained)
    assert ("is in use" if resume else "already holds a run") in refused(
        "train", *small, "--out", str(trained), *["--resume"] * resume
    )
    held.release()


def test_help_is_short_and_names_the_list_of_every_setting(capsys):
    assert run(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--help-settings" in shown
    assert shown.count("\n") < 60
    assert run(["train", "--help-settings"]) == 0
    shown = capsys.readouterr().out
    assert all(row.key in shown for row in rows(RunConfig))
    assert "training.compile = false" in shown  # as they are typed
    assert "training.loggers = []" in shown
