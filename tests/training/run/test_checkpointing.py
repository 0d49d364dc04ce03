"""Nothing is lost by what looks harmless: a stop, an evaluation, pruning, a disk that is not mounted."""

import math
import threading
import time

import pytest

from halfstep.core.errors import ConfigError
from halfstep.training import paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import CheckpointError, DamagedCheckpointError
from halfstep.training.data.types import DataError
from halfstep.training.run.resume import open_run
from tests.training.runs import (
    at_step,
    evaluations_find,
    events_of,
    final_state,
    full,
    poison,
    raising,
    starter,
    stop,
)

ROLLBACK = "training.rollback=2.0"
start = starter("training.steps=20", "training.save_every=4", "optimizer.name=adamw")


def left(out):
    return [checkpoint.parse_step(path) for path in checkpoint.step_folders(out / paths.CHECKPOINTS)]


def stop_in_evaluation(loop, number):
    evaluate = loop.session.evaluate

    def stopped(batches, **given):
        if loop.tally.step == number:
            stop()
        return evaluate(batches, **given)

    loop.session.evaluate = stopped
    return loop


def test_an_evaluation_proves_the_newest_good_so_that_one_is_enough(text, out):
    seen, loop = [], start(text, out, "training.keep_last=1", "training.validate_every=8")
    save = loop.saver.save

    def saved(step, *rest):
        loop.saver.wait()
        seen.append((step, left(out)))
        return save(step, *rest)

    loop.saver.save = saved
    assert loop.run().finished
    # The evaluation at 8 lets 4 go; 12 is not known to be good when it is saved, so 8 stays too.
    assert seen == [(4, []), (8, [4]), (12, [8]), (16, [8, 12]), (20, [16])]
    assert left(out) == [20]


def test_keeping_one_leaves_something_to_roll_back_to(text, out):
    loop = poison(start(text, out, ROLLBACK, "training.keep_last=1"), range(8, 11), 10.0)  # steps 9, 10, 11
    assert loop.run().finished
    (rollback,) = events_of(out, "rollback")
    assert (rollback["step"], rollback["to"]) == (11, 4)  # the update of 8 may be what ruined 9


@pytest.mark.parametrize("stopped_at", [10, *(pytest.param(step, marks=pytest.mark.prove) for step in (9, 11))])
def test_a_run_that_was_stopped_rolls_back_to_where_the_other_does(text, tmp_path, stopped_at):
    spiking, whole, out = range(12, 15), tmp_path / "whole", tmp_path / "run"
    settings = (ROLLBACK, "training.save_every=8", "training.steps=24")
    assert poison(start(text, whole, *settings), spiking, 10.0).run().finished
    assert not at_step(poison(start(text, out, *settings), spiking, 10.0), stopped_at, stop).run().finished
    assert left(out) == [8, stopped_at]
    assert poison(start(text, out, *settings, resume=True), spiking, 10.0).run().finished
    assert [e["to"] for e in events_of(out, "rollback")] == [e["to"] for e in events_of(whole, "rollback")] == [8]
    (state, manifest), (expected, plain) = final_state(out), final_state(whole)
    assert (state, manifest["data"]) == (expected, plain["data"])


def test_a_stop_before_the_first_checkpoint_is_nothing_to_roll_back_to(text, tmp_path):
    spiking, whole, out = range(12, 15), tmp_path / "whole", tmp_path / "run"
    settings = (ROLLBACK, "training.save_every=16", "training.steps=24")
    assert poison(start(text, whole, *settings), spiking, 10.0).run().finished
    assert not at_step(poison(start(text, out, *settings), spiking, 10.0), 9, stop).run().finished
    assert poison(start(text, out, *settings, resume=True), spiking, 10.0).run().finished
    assert events_of(whole, "rollback") == events_of(out, "rollback") == []
    assert final_state(out)[0] == final_state(whole)[0]


def test_a_stop_in_bad_steps_pushes_out_no_checkpoint_that_was_due(text, tmp_path):
    """Step 9 is skipped, so at the stop after it the checkpoint of 8 is not known to be good yet."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    settings = (ROLLBACK, "training.keep_last=1", "training.steps=24")

    def bad(loop):
        return poison(poison(loop, [8], math.nan), range(10, 13), 10.0)

    assert bad(start(text, whole, *settings)).run().finished
    assert not at_step(bad(start(text, out, *settings)), 9, stop).run().finished
    assert left(out) == [4, 8, 9]
    assert bad(start(text, out, *settings, resume=True)).run().finished
    assert [e["to"] for e in events_of(out, "rollback")] == [e["to"] for e in events_of(whole, "rollback")] == [8]
    assert final_state(out)[0] == final_state(whole)[0]


def flip(path):
    content = bytearray((path / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "state.safetensors").write_bytes(content)


def test_a_rollback_goes_past_a_damaged_one(text, out):
    loop = poison(start(text, out, ROLLBACK, "training.keep_last=5"), range(13, 16), 10.0)  # steps 14, 15, 16
    at_step(loop, 15, lambda: (loop.saver.wait(), flip(out / "checkpoints" / "step-000012")))
    assert loop.run().finished
    (rollback,) = events_of(out, "rollback")
    assert rollback["to"] == 8
    assert (out / "checkpoints" / "step-000012.damaged").is_dir()
    assert "step-000012" in events_of(out, "warning")[0]["message"]


def test_if_none_is_whole_the_first_damage_is_named(text, out):
    settings = (ROLLBACK, "training.keep_last=5", "training.steps=24")
    loop = poison(start(text, out, *settings), range(13, 16), 10.0)

    def damage():
        loop.saver.wait()
        for step in (4, 8, 12):
            flip(out / "checkpoints" / f"step-{step:06d}")

    with pytest.raises(DamagedCheckpointError, match="step-000012"):
        at_step(loop, 15, damage).run()
    assert [path.name[-8:] for path in (out / "checkpoints").glob("*.damaged")] == [".damaged"] * 3
    loop.lock.release()


def test_an_interrupted_evaluation_still_makes_its_checkpoint_the_best(text, out, monkeypatch):
    evaluations_find({4: 3.0, 8: 1.0, 12: 2.0, 16: 2.5, 20: 2.0}, monkeypatch)
    settings = ("training.validate_every=4", "training.keep_best=true", "training.keep_last=1")
    assert not stop_in_evaluation(start(text, out, *settings), 8).run().finished
    path = out / "checkpoints" / "step-000008"
    before, manifest = checkpoint.load(path)
    assert manifest["held_out"] is None
    assert start(text, out, *settings, resume=True).run().finished
    assert left(out) == [8, 20]
    after, manifest = checkpoint.load(path)  # verified, with the digest of what it says now
    assert manifest["held_out"] == 1.0
    assert {n: bytes(a.data) for n, a in after.items()} == {n: bytes(a.data) for n, a in before.items()}


def test_the_last_evaluation_reaches_the_last_checkpoint(text, out):
    assert not stop_in_evaluation(start(text, out), 20).run().finished
    assert final_state(out)[1]["held_out"] is None
    outcome = start(text, out, resume=True).run()
    assert outcome.finished
    assert final_state(out)[1]["held_out"] == outcome.held_out.loss


def test_an_evaluation_that_is_interrupted_twice_is_still_owed(text, tmp_path):
    out, every = tmp_path / "run", "training.validate_every=8"
    assert not stop_in_evaluation(start(text, out, every), 8).run().finished
    outcome = stop_in_evaluation(start(text, out, every, resume=True), 8).run()
    assert (outcome.finished, outcome.step) == (False, 8)
    assert start(text, out, every, resume=True).run().finished
    assert [event["step"] for event in events_of(out, "validation")] == [8, 16, 20]


def test_a_disk_that_refuses_the_note_of_an_evaluation_stops_nothing(text, tmp_path, monkeypatch):
    out, every = tmp_path / "run", "training.validate_every=8"
    assert not stop_in_evaluation(start(text, out, every), 8).run().finished

    loop = start(text, out, every, resume=True)
    monkeypatch.setattr(checkpoint, "write_whole", full)
    assert loop.run().finished
    assert "manifest.json` cannot be written: No space left" in events_of(out, "warning")[0]["message"]


def test_a_rollback_forgets_the_evaluations_of_the_weights_it_gives_up(text, tmp_path, monkeypatch):
    loop, save, refused = start(text, tmp_path / "run", ROLLBACK), checkpoint.write, []

    def once(folder, step, *rest):
        if step == 12 and not refused:
            refused.append(step)
            raise CheckpointError("a full disk")
        return save(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "write", once)
    at_step(loop, 11, lambda: loop.checkpointer._held_out.update({12: 1.0}))
    poison(loop, range(10, 13), 10.0)
    assert loop.run().finished
    assert [event["step"] for event in events_of(tmp_path / "run", "save_failed")] == [12]
    found = {event["step"]: event["held_out"] for event in events_of(tmp_path / "run", "checkpoint")}
    assert (found[12], found[16]) == (None, None)


def test_a_signal_does_not_wait_for_data(text, out):
    loop = start(text, out, deadline=30.0)
    at, release, began = loop.batches.at, threading.Event(), time.monotonic()

    def slow(step):
        if step == 6:
            while loop.tally.step < 6:
                time.sleep(0.001)
            stop()  # lands in the main thread, which waits for this batch
            release.wait(60)
        return at(step)

    loop.batches.at = slow
    outcome = loop.run()
    release.set()
    assert time.monotonic() - began < 50
    assert (outcome.finished, outcome.step, outcome.saved) == (False, 6, 6)
    assert start(text, out, resume=True).start == 6


@pytest.mark.parametrize("way", ["removed", "empty", "dangling"])
def test_lost_checkpoints_are_noticed(text, tmp_path, out, way):
    start(text, out).run()
    where, away = out / "checkpoints", tmp_path / "other disk"
    where.rename(away)
    if way == "empty":
        where.mkdir()
    if way == "dangling":
        where.symlink_to(tmp_path / "not mounted")
    said = "is a link to .*not mounted" if way == "dangling" else "says that step 20 was saved there"
    with pytest.raises(ConfigError, match=said) as caught:
        start(text, out, resume=True)
    if way == "dangling":
        with pytest.raises(ConfigError, match=said):
            start(text, out, resume=True, allow_older=True)  # nothing could be saved there
        where.unlink()
    else:
        assert "--allow-older" in caught.value.hint
    again = start(text, out, resume=True, allow_older=True)
    assert again.start == 0
    at_step(again, 3, lambda: 1 / 0)  # it dies before its first checkpoint
    with pytest.raises(ZeroDivisionError):
        again.run()
    assert start(text, out, resume=True).run().finished


def test_a_lost_run_toml_is_restored_from_an_older_checkpoint_if_allowed(text, out):
    start(text, out).run()
    before = (out / paths.CONFIG).read_bytes()
    (out / paths.CONFIG).unlink()
    manifest = out / "checkpoints" / "step-000020" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(DamagedCheckpointError, match="step-000020"):
        open_run(out)
    opened = open_run(out, allow_older=True)
    assert f"had no run.toml: it was restored from `{out / 'checkpoints' / 'step-000016'}`" in opened.warnings[0]
    assert (out / paths.CONFIG).read_bytes() == before
    opened.lock.release()
    assert open_run(out).warnings == []


def test_data_that_cannot_be_read_at_the_first_step_leaves_no_checkpoint(text, tmp_path):
    loop = start(text, tmp_path / "run")
    loop.batches.at = raising(DataError("a shard is damaged"))
    with pytest.raises(DataError):
        loop.run()
    assert left(tmp_path / "run") == []
