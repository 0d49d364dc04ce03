"""Whole runs on the CPU: they end, resume bit for bit, stop when asked, and refuse what is not theirs."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from halfstep.config.load import load
from halfstep.core.choice import Choice
from halfstep.core.errors import ConfigError, HalfstepError, ResumeError, RunFolderError, how_to_install
from halfstep.core.policy import Policy
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import DamagedCheckpointError
from halfstep.training.run.trained import open_trained
from halfstep.training.session import open_session
from halfstep.training.telemetry.events import read_events
from tests.refusals import refuses
from tests.training.runs import SMALL, final_state, full, interrupt_at, starter

BASE = ("training.micro_batches=2", "training.steps=6", "training.validate_every=4", "training.save_every=2")
start = starter(*BASE)


def config(text, *extra):
    return load("tiny", [f"data.source={text}", *SMALL, *BASE, *extra])


def test_data_may_move_and_may_not_change(text, tmp_path):
    out, moved, other = tmp_path / "run", tmp_path / "moved.txt", tmp_path / "other.txt"
    interrupt_at(start(text, out, "training.save_every=2"), 3)
    other.write_text(Path(text).read_text() + "\n\nmore")
    Path(text).rename(moved)
    with pytest.raises(ResumeError):
        start(str(other), out, "training.save_every=2", resume=True)
    assert start(str(moved), out, "training.save_every=2", resume=True).start == 2


def test_a_run_leaves_its_folder_with_everything_in_it(text, out):
    outcome = start(text, out).run()
    assert outcome.finished
    assert outcome.step == 6
    held_out = outcome.held_out
    assert held_out.ratio == held_out.bits_per_byte / held_out.bigram_bits
    assert load(str(out / "run.toml")) == config(
        text, "policy=fp32", "monitor.on=false"
    )  # what ran, instead of `auto`
    events = read_events(out / "events.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds.count("step") == 6
    assert [e["step"] for e in events if e["event"] == "validation"] == [4, 6]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [2, 4, 6]
    assert events[-1]["until_first_step"] > events[-1]["spent"]["first_step"]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    manifest = json.loads((out / "checkpoints" / "step-000006" / "manifest.json").read_text())
    assert (manifest["policy"], manifest["data"]["position"]["tokens"]) == ("fp32", 6 * 2 * 2 * 16)


def test_a_run_compiles_one_of_its_equal_blocks_once_also_if_it_is_watched_and_says_so(text, out, monkeypatch):
    pytest.importorskip("torch")
    import torch
    from torch._dynamo.utils import counters

    monkeypatch.setattr("halfstep.torch.model.LEAST_WORK", 0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    loop = start(text, out, "training.compile=true", "model.layers=12", "monitor.every=1", "training.steps=2")
    notes = []
    monkeypatch.setattr(loop.bar, "note", notes.append)
    assert loop.run().finished
    # A block, and the head with its loss; and both again where nothing is learned, for held-out text.
    assert counters["stats"]["unique_graphs"] == 4
    assert "the first step is compiled block by block: its 12 blocks are alike" in notes
    expected = {"how": "block", "why": "its 12 blocks are alike"}
    assert read_events(out / "events.jsonl")[0]["compiled"] == final_state(out)[1]["compiled"] == expected
    assert load(str(out / "run.toml")).training.compile is True


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("fp32", "muon"),
        ("fp16-mixed,emulate=true", "adamw"),
        ("bf16-true,param=bf16:stochastic", "muon"),
        pytest.param("fp32", "adamw", marks=pytest.mark.prove),
        pytest.param("fp16-mixed,emulate=true", "muon", marks=pytest.mark.prove),
        pytest.param("bf16-true,param=bf16:stochastic", "adamw", marks=pytest.mark.prove),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(text, tmp_path, policy, optimizer):
    extra = [f"optimizer.name={optimizer}"]
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    start(text, whole, *extra, policy=policy).run()

    interrupt_at(start(text, halved, *extra, policy=policy), 5)  # after the checkpoint of step 4
    again = start(text, halved, *extra, policy=policy, resume=True)
    assert again.start == 4
    assert again.run().step == 6
    left, right = final_state(whole), final_state(halved)
    assert left[0] == right[0]
    losses = [
        {e["step"]: e["loss"] for e in read_events(out / "events.jsonl") if e["event"] == "step"}
        for out in (whole, halved)
    ]
    assert losses[0] == losses[1]


def run_in_background(text, out, *extra):
    settings = [word for each in (*SMALL, *BASE, *extra) for word in ("--set", each)]
    words = ["train", "--device", "cpu", "--policy", "fp32", "--out", str(out), "--json", *settings]
    code = (
        # The tests may run with SIGINT ignored, as a shell does in the background, and a run keeps ignoring what
        # was ignored when it started.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup has it ignored
        f"from halfstep.cli.main import main\nmain({[*words, '--set', f'data.source={text}']!r})\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for_steps(process, out, count):
    """Waits for steps as long as the process lives: on a busy machine its imports alone may take a minute."""
    deadline = time.monotonic() + 300
    path = out / "events.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_text().count('"event": "step"') >= count:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the run did not get going: {process.communicate()[1]}")


def stopped_by(text, out, kind, later):
    """Sends a run a signal and then others until it has ended; returns its exit code and its output."""
    process = run_in_background(text, out, *STOPPED)
    try:
        wait_for_steps(process, out, 5)
        process.send_signal(kind)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:  # into the shutdown of the interpreter
            time.sleep(0.002)
            process.send_signal(later)
        stdout, stderr = process.communicate(timeout=300)
        return process.returncode, stdout, stderr
    finally:
        process.kill()  # where it did not leave, it must not train on for an hour


STOPPED = ("training.steps=100000", "training.save_every=100000", "training.validate_every=100000",
           "training.measure_ceiling=false")  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize(
    ("kind", "later"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM)],
)
def test_a_signal_saves_and_exits_cleanly_whatever_follows_and_the_run_resumes(text, out, kind, later):
    code, stdout, stderr = stopped_by(text, out, kind, later)
    assert code == 0, stderr
    outcome = json.loads(stdout)
    assert (outcome["finished"], outcome["report"]) == (False, str(out / "report.html"))
    assert checkpoint.latest(out / "checkpoints").name == f"step-{outcome['step']:06d}"
    assert read_events(out / "events.jsonl")[-1]["event"] == "stop"
    assert f"stopped by {kind.name}" in stderr or f"stopped by {later.name}" in stderr  # one overtakes the other
    assert "Traceback" not in stderr
    assert start(text, out, *STOPPED, resume=True).start == outcome["step"]


@pytest.mark.prove
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_second_sigint_ends_the_run_at_once_without_a_traceback(text, out, kind):
    code, _, stderr = stopped_by(text, out, kind, signal.SIGINT)
    assert code in (130, -signal.SIGINT), stderr  # both are 130 in a shell
    assert "Traceback" not in stderr


def test_a_folder_that_holds_a_run_or_its_checkpoints_is_not_written_over(text, out):
    start(text, out).run()
    before = (out / "events.jsonl").read_bytes()
    with pytest.raises(RunFolderError) as caught:
        start(text, out)
    assert "--resume" in caught.value.hint
    assert (out / "events.jsonl").read_bytes() == before
    for name in ("run.toml", "events.jsonl"):
        (out / name).unlink()
    with pytest.raises(RunFolderError):
        start(text, out)


def test_a_checkpoint_that_lacks_a_key_is_refused_with_a_remedy(text, out):
    start(text, out).run()
    path = out / "checkpoints" / "step-000006" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["guard"]
    manifest["digest"] = checkpoint.table_digest(manifest)
    path.write_text(json.dumps(manifest))
    with refuses(ConfigError, "`guard` is missing", f"--init {path.parent}"):
        start(text, out, resume=True)
    (out / "run.toml").unlink()  # it would be restored from the checkpoint
    with refuses(ConfigError, "`guard` is missing", f"--init {path.parent}"):
        start(text, out, resume=True)


def test_a_checkpoint_with_a_setting_of_another_halfstep_is_refused_alike_by_all_who_read_it(text, out):
    start(text, out).run()
    path = out / "checkpoints" / "step-000006" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["model"]["mixture"] = 8  # what it computes is unknown here
    manifest["note"] = "nothing that is read"
    manifest["digest"] = checkpoint.table_digest(manifest)
    path.write_text(json.dumps(manifest))
    for read in (lambda: start(text, out, resume=True), lambda: open_trained(out, "cpu")):
        with refuses(
            ConfigError, f"`{path.parent}` .* in its manifest, unknown setting `config.model.mixture`", "update"
        ):
            read()
    (out / "run.toml").unlink()
    with refuses(ConfigError, "in its manifest, unknown setting `config.model.mixture`"):
        start(text, out, resume=True)
    assert not (out / "run.toml").exists()


def test_a_full_disk_stops_a_resume_only_if_a_setting_changed(text, out, monkeypatch):
    interrupt_at(start(text, out), 4)

    before = (out / "run.toml").read_bytes()
    monkeypatch.setattr("halfstep.training.run.folder.write_whole", full)
    assert start(text, out, resume=True).start == 4
    with pytest.raises(RunFolderError, match=r"run\.toml` cannot be written: No space left"):
        start(text, out, "training.save_every=1", resume=True)
    assert (out / "run.toml").read_bytes() == before


def test_a_folder_that_cannot_be_written_or_holds_no_run_is_named(text, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError):
        start(text, tmp_path / "file" / "run")
    with pytest.raises(RunFolderError):
        start(text, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["training.batch=100000"], "text.txt"),
        (["model.context=100000"], "text.txt"),
        (["model.vocabulary=50"], "vocabulary"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_a_folder_is_made(text, tmp_path, extra, said):
    with pytest.raises(HalfstepError, match=said):
        start(text, tmp_path / "run", *extra)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("backend", "missing"), [("jax", "jax"), ("jax", "optax"), ("mlx", "mlx.core")])
def test_a_missing_framework_says_how_to_install_it(text, backend, missing, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(f"halfstep.{backend}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # importing it fails, as if it were not there
    with pytest.raises(HalfstepError, match=missing) as caught:
        open_session(config(text, f"backend={backend}"), Policy())
    assert how_to_install(backend) in caught.value.hint


def test_skipped_steps_are_counted_across_a_resume(text, tmp_path):
    policy = "fp16-mixed,emulate=true"
    loop = start(text, tmp_path / "run", policy=policy)
    loop.session.run.num_applied -= 2  # as if two steps had been skipped
    interrupt_at(loop, 4)
    again = start(text, tmp_path / "run", policy=policy, resume=True)
    assert again.session.applied() == 2
    again.run()
    assert again.tally.skipped == 2


def test_resuming_a_finished_run_adds_nothing_to_its_record_and_may_evaluate_at_other_times(text, tmp_path):
    start(text, tmp_path / "run").run()
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    outcome = start(text, tmp_path / "run", resume=True).run()
    assert outcome.finished
    assert outcome.held_out is not None
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before
    loop = start(text, tmp_path / "run", "training.validate_every=1", resume=True)
    assert loop.start == 6
    assert loop.run().finished


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_reached_again(text, out):
    start(text, out).run()
    newest = out / "checkpoints" / "step-000006" / "state.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-100])
    with pytest.raises(DamagedCheckpointError, match="step-000006") as caught:
        start(text, out, resume=True)
    assert "--allow-older" in caught.value.hint
    again = start(text, out, resume=True, allow_older=True)
    assert again.start == 4
    again.run()
    assert newest.read_bytes() == whole
    (message,) = [e["message"] for e in read_events(out / "events.jsonl") if e["event"] == "warning"]
    assert "step-000006" in message
    assert "after step 4" in message
    assert (out / "checkpoints" / "step-000006.damaged").is_dir()


def test_the_reason_of_a_choice_is_in_the_checkpoint_and_survives_a_resume(text, out):
    interrupt_at(start(text, out, choice=Choice("fp32", "bf16 is 287x slower here")), 4)
    start(text, out, resume=True).run()
    assert final_state(out)[1]["choice"] == {"preset": "fp32", "reason": "bf16 is 287x slower here"}
    assert read_events(out / "events.jsonl")[-1]["event"] == "end"
