"""What goes wrong during a run is reported, survived, and changes no bit of the result."""

import errno
import math
import os
import threading
import time

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.audit.cause import Cause
from halfstep.core.errors import ConfigError, HalfstepError, ResumeError, ScaleFloorError, SettingConflictError
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.writer import best_step, survey
from halfstep.training.data import batches
from halfstep.training.data.types import DataMismatchError
from halfstep.training.files import LockedError
from halfstep.training.loop import Loop
from halfstep.training.run.health import DivergedError
from halfstep.training.run.opening import check_determinism, prepare_determinism
from tests.training.runs import (
    at_step,
    before_step,
    evaluations_find,
    events_of,
    final_state,
    interrupt_at,
    interrupt_when,
    poison,
    ruin,
    ruin_by_update,
    starter,
    stop,
)

start = starter("training.steps=20", "training.save_every=4", "optimizer.name=adamw")


def test_a_batch_that_is_not_finite_is_skipped_and_located(text, out, capsys):
    loop = poison(start(text, out, "training.steps=6"), [2], math.nan)
    assert loop.run().finished
    (skip,) = events_of(out, "skip")
    assert (skip["step"], skip["in_a_row"]) == (3, 1)
    assert math.isnan(skip["loss"])
    ((place),) = skip["where"]
    assert place["file"] == f"`{text}`"
    (rows,) = loop.batches.at(2)
    for offset, row in zip(place["offsets"], rows, strict=True):
        assert np.array_equal(loop.corpus.train[offset : offset + 17], row)
    assert f"skipped; its data begins in `{text}` at token {place['offsets'][0]}" in capsys.readouterr().err
    assert loop.session.applied() == 5


def test_a_loss_that_is_not_finite_counts_though_its_gradients_are(text, out, capsys):
    loop = start(text, out, "training.steps=80")
    real = loop.session._loss
    loop.session._loss = lambda x, y: real(x, y) + (math.inf if loop.tally.step >= 5 else 0.0)
    with pytest.raises(
        ScaleFloorError,
        match=r"50 steps in a row .* step 55; forward: the loss.*; the loss was .* gradients were ",
    ):
        loop.run()
    events = events_of(out, "not_finite")
    assert [event["step"] for event in events] == list(range(6, 56))
    assert events[0]["where"] == loop.batches.locate(5)
    assert events_of(out, "skip") == []
    assert "step 6 had a loss that is not finite and was skipped; its data begins in" in capsys.readouterr().err
    assert loop.session.applied() == 5


def test_a_run_that_diverged_names_the_tensor_and_keeps_the_checkpoint_from_before(text, out):
    loop = start(text, out, "training.steps=100", "training.save_every=5", "training.keep_last=1")
    at_step(loop, 13, lambda: ruin(loop))
    with pytest.raises(
        HalfstepError, match=r"50 steps in a row.*up to step 62; forward: blocks\.0\.mlp\.up"
    ) as caught:
        loop.run()
    assert f"--init {out / 'checkpoints' / 'step-000010'}" in caught.value.hint
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000010", "step-000060"]
    assert len(events_of(out, "skip")) == 50
    (stop,) = events_of(out, "stop")
    assert (stop["step"], stop["saved"]) == (62, 60)
    assert "not finite" in stop["reason"]


@pytest.mark.parametrize(("keep", "kept"), [([], [10, 50, 60]), (["training.keep_last=1"], [10, 60])])
def test_an_update_that_ruins_the_weights_it_saves_does_not_push_out_the_ones_before(text, out, keep, kept):
    loop = ruin_by_update(start(text, out, "training.steps=100", "training.save_every=10", *keep), 20)
    with pytest.raises(ScaleFloorError, match="50 steps in a row") as caught:
        loop.run()
    left = {p.name: checkpoint.load(p)[0] for p in checkpoint.step_folders(out / "checkpoints")}
    assert [*left] == [f"step-{step:06d}" for step in kept]
    weight = np.frombuffer(left["step-000010"]["model.blocks.0.mlp.up.weight"].data, np.float32)
    assert np.isfinite(weight).all()
    assert f"--init {out / 'checkpoints' / 'step-000010'}" in caught.value.hint


def test_a_checkpoint_left_behind_says_the_step_that_its_weights_are_after(text, tmp_path, monkeypatch):
    """Where steps are read late, one more was launched, and it may have been a good one."""
    loop = start(text, tmp_path / "run", "training.steps=100", "training.save_every=99")
    poison(loop, range(50), math.nan)
    monkeypatch.setattr(type(loop.session), "asynchronous", True)
    with pytest.raises(ScaleFloorError, match="up to step 50"):
        loop.run()
    manifest = final_state(tmp_path / "run")[1]
    assert loop.session.applied() == 1
    assert (manifest["step"], manifest["data"]["position"]) == (51, loop.batches.position(51))


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.prove), "mlx"])
def test_if_no_scale_helps_the_tensor_is_named_and_a_checkpoint_left(text, tmp_path, backend):
    pytest.importorskip("mlx.core" if backend == "mlx" else backend)
    policy, extra = "fp16-mixed,emulate=true,scale=dynamic:init=2:floor=1", [f"backend={backend}"]
    loop = start(text, tmp_path / "run", *extra, policy=policy)
    state = loop.session.state()
    dtype, shape, data = state["model.embed.weight"]
    state["model.embed.weight"] = (dtype, shape, np.full(len(data) // 4, np.nan, np.float32).tobytes())
    loop.session.load(state)
    with pytest.raises(ScaleFloorError, match=r"at its floor, 1; .*embed"):
        loop.run()
    launched = 3 if loop.session.asynchronous else 2
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == f"step-{launched:06d}"
    (stop,) = events_of(tmp_path / "run", "stop")
    assert stop["saved"] == launched


def test_a_loss_scale_that_is_low_and_falling_is_an_alarm_once_long_before_its_floor(text, tmp_path, capsys):
    loop = start(text, tmp_path / "run", policy="fp16-mixed,emulate=true,scale=dynamic:init=2048")
    assert poison(loop, range(4, 8), math.nan).run().finished
    assert [event["scale"] for event in events_of(tmp_path / "run", "skip")] == [2048, 1024, 512, 256]
    (alarm,) = events_of(tmp_path / "run", "low_scale")
    assert (alarm["step"], alarm["scale"]) == (6, 1024)
    assert "the loss scale is 1024 and falling" in alarm["message"]
    assert f"warning: step 6: {alarm['message']}" in capsys.readouterr().err


def test_if_no_scale_helps_the_data_of_that_step_is_examined(text, tmp_path, monkeypatch):
    """And not those of the step that was launched after it, where steps are read late."""
    policy = "fp16-mixed,emulate=true,scale=dynamic:init=2:floor=1"
    loop = poison(start(text, tmp_path / "run", policy=policy), range(2), math.nan)
    monkeypatch.setattr(type(loop.session), "asynchronous", True)
    seen, check = [], loop.session.check
    loop.session.check = lambda result, batch: seen.append(batch) or check(result, batch)
    with pytest.raises(ScaleFloorError, match="at its floor, 1; forward: the loss itself"):
        loop.run()
    assert len(seen) == 1
    assert np.array_equal(seen[0], loop.batches.at(1))


ROLLBACK = "training.rollback=2.0"


def test_a_spike_rolls_back_past_its_data_and_is_the_same_when_it_is_resumed(text, tmp_path):
    spiking = range(10, 13)  # steps 11, 12 and 13; step 12 is saved while it spikes
    whole = tmp_path / "whole"
    assert poison(start(text, whole, ROLLBACK), spiking, 10.0).run().finished
    assert [event["step"] for event in events_of(whole, "spike")] == [11, 12, 13]
    (rollback,) = events_of(whole, "rollback")
    assert (rollback["step"], rollback["to"], rollback["skipped_data"]) == (13, 8, 5)
    state, manifest = final_state(whole)
    assert (manifest["data"]["left_out"], manifest["data"]["position"]["tokens"]) == (5, 25 * 2 * 16)
    assert [e["step"] for e in events_of(whole, "checkpoint")] == [4, 8, 12, 12, 16, 20]

    def after_rollback(steps):
        return lambda loop: bool(events_of(loop.out, "rollback")) and loop.tally.step == steps

    for name, condition, resumed_at in (
        ("in the spike", lambda loop: loop.tally.step == 12, 12),
        ("after going back", after_rollback(10), 8),
        ("later", after_rollback(14), 12),
    ):
        out = tmp_path / name
        interrupt_when(poison(start(text, out, ROLLBACK), spiking, 10.0), condition)
        again = poison(start(text, out, ROLLBACK, resume=True), spiking, 10.0)
        assert again.start == resumed_at
        again.run()
        assert final_state(out)[0] == state, name
        assert final_state(out)[1]["data"] == manifest["data"]


def test_a_rollback_leaves_the_run_that_never_saw_the_data(text, tmp_path):
    assert poison(start(text, tmp_path / "spiked", ROLLBACK), range(10, 13), 10.0).run().finished
    spared = start(text, tmp_path / "spared", ROLLBACK)
    at = spared.batches.at
    spared.batches.at = lambda step: at(step if step < 8 else step + 5)
    assert spared.run().finished
    assert final_state(tmp_path / "spiked")[0] == final_state(tmp_path / "spared")[0]
    tokens = [events_of(tmp_path / name, "step")[-1]["tokens"] for name in ("spiked", "spared")]
    assert tokens == [20 * 2 * 16] * 2


def test_a_rollback_waits_for_the_checkpoint_that_is_being_written(text, tmp_path, monkeypatch):
    out, saves, real = tmp_path / "run", [], checkpoint.write

    def slow(folder, step, *rest):
        saves.append(step)
        if saves.count(12) == 1:  # of the spike, which comes to its end at step 13
            time.sleep(0.3)
        return real(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "write", slow)
    assert poison(start(text, out, ROLLBACK), range(10, 13), 10.0).run().finished
    assert saves == [4, 8, 12, 12, 16, 20]
    assert events_of(out, "save_failed") == []


@pytest.mark.prove
def test_after_a_rollback_bad_data_is_located_past_what_was_skipped(text, tmp_path):
    out, bad, seen = tmp_path / "run", range(5, 55), []
    loop = poison(start(text, out, "training.steps=100", "monitor.on=true"), bad, math.nan)
    loop.health.shift = 5  # as a rollback leaves it
    loop.session.blame = lambda batch, scale: seen.append(batch) or Cause("forward", "there", micro_batch=0)
    with pytest.raises(HalfstepError, match="up to step 50; forward: there"):
        loop.run()
    assert [event["where"] for event in events_of(out, "skip")] == [loop.batches.locate(index) for index in bad]
    assert [np.array_equal(seen[i], loop.batches.at(bad[-i])) for i in (0, 1)] == [True, True]
    assert [event["where"] for event in events_of(out, "cause")] == [loop.batches.locate(bad[-i]) for i in (0, 1)]


def test_skipped_data_stays_skipped(text, out):
    assert poison(start(text, out, ROLLBACK), range(10, 16), 10.0).run().finished
    rollbacks = [(e["step"], e["to"], e["skipped_data"]) for e in events_of(out, "rollback")]
    assert rollbacks == [(13, 8, 5), (11, 8, 3)]
    assert final_state(out)[1]["data"]["left_out"] == 8


def test_a_rollback_is_the_same_if_steps_are_read_late(text, tmp_path, monkeypatch):
    spiking, found = range(10, 13), []
    for name, late in (("at once", False), ("late", True)):
        loop = poison(start(text, tmp_path / name, ROLLBACK), spiking, 10.0)
        monkeypatch.setattr(type(loop.session), "asynchronous", late)
        assert loop.run().finished
        state, manifest = final_state(tmp_path / name)
        found.append((state, manifest["data"], manifest["guard"]))
    assert found[0] == found[1]


def test_a_spike_changes_nothing_without_rollback_and_is_a_warning_without_a_checkpoint(text, tmp_path, out):
    assert poison(start(text, tmp_path / "plain"), range(10, 14), 10.0).run().finished
    assert events_of(tmp_path / "plain", "spike", "rollback") == []
    assert poison(start(text, out, ROLLBACK, "training.save_every=50"), range(10, 13), 10.0).run().finished
    (warning,) = events_of(out, "warning")
    assert "no checkpoint from before" in warning["message"]


def test_endless_spikes_stop_the_run(text, out):
    loop = poison(start(text, out, ROLLBACK, "training.steps=40"), range(10, 60), 10.0)
    with pytest.raises(DivergedError, match="spiked again after 3 rollbacks to step 8"):
        loop.run()
    assert checkpoint.latest(out / "checkpoints").name == "step-000008"
    (stop,) = events_of(out, "stop")
    assert stop["saved"] == 8  # and not the one of step 12, which a rollback removed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_for_a_while_changes_nothing_but_the_record(text, tmp_path, monkeypatch, capsys, code):
    plain, out = tmp_path / "plain", tmp_path / "run"
    start(text, plain).run()
    loop = start(text, out)
    real_mkdir = os.mkdir

    def mkdir(path, *args, **kwargs):
        if str(path).endswith(("step-000004.partial", "step-000008.partial")):  # whenever the writer gets there
            raise OSError(code, os.strerror(code), str(path))
        return real_mkdir(path, *args, **kwargs)

    class Refusing:
        def __init__(self, file):
            self.file, self.close = file, file.close

        def write(self, data):
            if 3 <= loop.tally.step < 11:
                raise OSError(code, os.strerror(code))
            return self.file.write(data)

    def refuse():
        loop.events._file = Refusing(loop.events._file)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert at_step(loop, 1, refuse).run().finished
    err = capsys.readouterr().err
    assert err.count("NOT WRITTEN: ") == err.count("events are written again") == 1
    assert err.count("NOT SAVED: ") == 2
    assert [event["step"] for event in events_of(out, "save_failed")] == [4, 8]
    assert os.strerror(code) in events_of(out, "save_failed")[0]["message"]
    assert [event["step"] for event in events_of(out, "checkpoint")] == [12, 16, 20]
    assert [event["step"] for event in events_of(out, "step")] == list(range(1, 21))
    assert final_state(out)[0] == final_state(plain)[0]


def test_a_folder_in_use_is_refused_until_its_run_is_over_and_a_refused_resume_frees_it(text, tmp_path):
    loop = start(text, tmp_path / "run", "training.steps=2")
    for again in (True, False):
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            start(text, tmp_path / "run", "training.steps=2", resume=again)
    loop.run()
    start(text, tmp_path / "run", "training.steps=2", resume=True).run()
    with pytest.raises(ConfigError) as kept:  # the error holds the frames, and they hold the loop
        start(text, tmp_path / "run", "training.steps=3", resume=True)
    start(text, tmp_path / "run", "training.steps=2", resume=True)
    assert kept is not None


def test_a_folder_stays_in_use_while_what_a_deadline_left_behind_is_still_written(text, tmp_path, monkeypatch):
    gate, real = threading.Event(), checkpoint.write

    def slow(*args):
        assert gate.wait(20)
        return real(*args)

    monkeypatch.setattr(checkpoint, "write", slow)
    loop = start(text, tmp_path / "run", "training.save_every=1", deadline=0.2)
    outcome = before_step(loop, stop).run()
    assert (outcome.step, outcome.saved) == (1, None)
    with pytest.raises(LockedError):
        start(text, tmp_path / "run", resume=True)
    gate.set()
    loop.saver.wait()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_the_best_is_kept_and_recorded(text, out, monkeypatch):
    evaluations_find({4: 3.0, 8: 1.0, 12: 2.0, 16: 2.5, 20: 2.0}, monkeypatch)
    start(text, out, "training.validate_every=4", "training.keep_best=true", "training.keep_last=1").run()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000008", "step-000020"]
    assert best_step(survey(out / "checkpoints")) == 8
    assert [event["held_out"] for event in events_of(out, "checkpoint")] == [3.0, 1.0, 2.0, 2.5, 2.0]


def test_keeping_a_best_that_is_never_evaluated_is_a_warning(text, tmp_path):
    start(text, tmp_path / "run", "training.keep_best=true", "training.validate_every=5").run()
    (warning,) = events_of(tmp_path / "run", "warning")
    assert "first meet at step 20" in warning["message"]
    start(text, tmp_path / "fine", "training.keep_best=true", "training.validate_every=8").run()
    assert events_of(tmp_path / "fine", "warning") == []


def test_resuming_in_another_order_is_refused_and_with_other_software_a_warning(text, out, monkeypatch):
    interrupt_at(start(text, out), 5)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "SORTED_AT_MOST", 10)
        with pytest.raises(DataMismatchError, match=r"in the order `sorted`.* would continue in `keyed`"):
            start(text, out, resume=True)
    monkeypatch.setattr("halfstep.torch.session.version", "99.0")
    start(text, out, resume=True).run()
    (warning,) = events_of(out, "warning")
    assert "since step 4 torch was" in warning["message"]
    assert "and is 99.0: the bits may differ" in warning["message"]


def test_the_manifest_holds_what_a_resume_needs(text, tmp_path, out):
    start(text, out, "training.steps=4").run()
    manifest = final_state(out)[1]
    assert manifest["aliases"] == {"model.lm_head.weight": "model.embed.weight"}
    assert manifest["random"]["seed"] == 0
    assert {"halfstep", "python", "numpy", "safetensors", "torch"} <= manifest["versions"].keys()
    assert "rng.cpu" in manifest["tensors"]
    assert {"scale.scale", "applied"} <= manifest["tensors"].keys()
    assert manifest["tensors"]["model.embed.weight"]["dtype"] == "F32"
    start(text, tmp_path / "untied", "training.steps=4", "model.tied=false").run()
    assert final_state(tmp_path / "untied")[1]["aliases"] == {}


def test_a_run_that_died_between_its_last_step_and_its_end_gets_its_end(text, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(text, out, "training.steps=4").run()
    assert events_of(out, "end") == []
    outcome = start(text, out, "training.steps=4", resume=True).run()
    assert outcome.finished
    assert (outcome.saved, outcome.held_out.tokens) == (4, 64)
    assert [event["step"] for event in events_of(out, "end")] == [4]


def test_an_evaluation_does_not_keep_a_signal_waiting(text, out):
    loop = start(text, out, "training.validate_every=3", "training.validation_tokens=640", deadline=20.0)
    seen, real = [], loop.session._loss

    def loss(x, y):
        if loop.tally.step == 3:
            seen.append(x)
            if len(seen) == 2:
                stop()
        return real(x, y)

    loop.session._loss = loss
    outcome = loop.run()
    assert len(seen) == 2  # of 20 batches
    assert (outcome.finished, outcome.step, outcome.saved) == (False, 3, 3)
    assert events_of(out, "validation") == []
    (event,) = events_of(out, "stop")
    assert (event["reason"], event["saved"]) == ("SIGTERM", 3)


def test_a_signal_without_time_to_save_reports_what_is_lost(text, tmp_path, capsys):
    loop = start(text, tmp_path / "run", deadline=1e-6)
    outcome = at_step(loop, 6, lambda: (loop.checkpointer.wait(), stop())).run()
    assert (outcome.step, outcome.saved) == (6, 4)
    assert "NOT SAVED in time: --resume continues after step 4" in capsys.readouterr().err
    assert start(text, tmp_path / "run", resume=True).start == 4


def test_determinism_sets_early_variables_and_refuses_what_cannot(tmp_path, monkeypatch):
    names = ["CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC", "TORCHINDUCTOR_CACHE_DIR",
             "TRITON_CACHE_DIR"]  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    prepare_determinism(load("tiny"), tmp_path)
    assert not any(name in os.environ for name in names)
    asked = load("tiny", ["training.deterministic=true"])
    prepare_determinism(asked, tmp_path / "run")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "run" / "cache" / "triton")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(SettingConflictError, match="CUBLAS_WORKSPACE_CONFIG is `:0:0`"):
        prepare_determinism(asked, tmp_path)
    for kind in ("cpu", "nvidia"):
        check_determinism(asked, kind)
    with pytest.raises(SettingConflictError):
        check_determinism(asked, "amd")
    with pytest.raises(SettingConflictError):
        check_determinism(load("tiny", ["training.deterministic=true", "backend=jax"]), "nvidia")


def test_a_deterministic_run_switches_torch(text, tmp_path, monkeypatch):
    import torch

    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, ":16:8" if "CUBLAS" in name else "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    try:
        start(text, tmp_path / "run", "training.deterministic=true", "training.steps=2").run()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    with pytest.raises(ResumeError, match=r"training\.deterministic was True"):
        start(text, tmp_path / "run", "training.steps=2", resume=True)


def blamed(loop, operation="exp"):
    """Has the session name an operation for any step, and returns the steps it was asked about."""
    asked = []

    def blame(batch, scale):
        asked.append((loop.tally.step, scale))
        return Cause("forward", "blocks.0.mlp", "blocks.0.mlp", operation, micro_batch=1)

    loop.session.blame = blame
    return asked


def test_the_cause_of_an_episode_is_sought_once_with_the_data_of_its_micro_batch(text, out, capsys):
    loop = poison(
        start(text, out, "training.steps=12", "training.micro_batches=2", "monitor.on=true"), range(4, 9), math.nan
    )
    asked = blamed(loop)
    assert loop.run().finished
    assert asked == [(5, 1.0)]
    (cause,) = events_of(out, "cause")
    assert cause["where"] == loop.batches.locate(4, micro_batch=1)
    assert [sum(len(place["offsets"]) for place in cause["where"])] == [2]
    known = {key: cause[key] for key in ("step", "pass", "operation", "module", "micro_batch", "rank")}
    assert known == {
        "step": 5, "pass": "forward", "operation": "exp", "module": "blocks.0.mlp", "micro_batch": 1, "rank": None
    }  # fmt: skip
    assert "step 5: forward: blocks.0.mlp; made by `exp`" in capsys.readouterr().err


def test_the_search_of_a_loss_scale_is_no_episode_and_without_the_monitor_nothing_is_sought(text, tmp_path):
    policy = "fp16-mixed,scale=dynamic:init=16777216:floor=1024"
    loop = start(text, tmp_path / "scale", "training.steps=6", "monitor.on=true", policy=policy)
    asked = blamed(loop)
    loop.run()
    assert len(events_of(loop.out, "skip")) > 2
    assert asked == []
    loop = poison(start(text, tmp_path / "off", "training.steps=6", "monitor.on=false"), [2], math.nan)
    asked = blamed(loop)
    loop.run()
    assert asked == []


def test_the_time_of_a_search_is_not_training(text, out):
    loop = poison(start(text, out, "training.steps=6", "monitor.on=true"), [2], math.nan)
    real = loop.session.blame
    loop.session.blame = lambda *args: time.sleep(0.3) or real(*args)
    spent = loop.run().totals["spent"]
    assert spent["monitor"] > 0.3
    assert spent["wall"] >= spent["training"] + spent["monitor"]
