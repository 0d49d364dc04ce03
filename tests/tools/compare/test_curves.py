"""Losses that other tools have logged."""

import math
import os

import pytest

from halfstep.core.compare.gaps import CompareError
from halfstep.tools.compare.curves import read_log
from halfstep.tools.compare.judge import judge


def written(folder, text, name="log.csv"):
    (folder / name).write_text(text)
    return folder / name


def test_a_csv_has_steps_a_training_loss_and_a_held_out_one(tmp_path):
    (curve,) = read_log(written(tmp_path, "step,loss,lr,val_loss\n10,3.5,1e-3,\n20,3.25,1e-3,3.3\n"))
    assert [list(part) for part in curve.series["loss"]] == [[10, 20], [3.5, 3.25]]
    assert [list(part) for part in curve.series["held-out loss"]] == [[20], [3.3]]
    assert (curve.held_out, curve.step) == (3.3, 20)


@pytest.mark.parametrize("name", ["train/loss", "Train Loss", "training_loss", "loss", "anything"])
def test_losses_have_many_names(tmp_path, name):
    (curve,) = read_log(written(tmp_path, f"{name}\n4\n3\n"))
    assert [list(part) for part in curve.series["loss"]] == [[1, 2], [4.0, 3.0]]


def test_an_export_of_wandb_holds_several_runs(tmp_path):
    head = ['"Step"']
    for run in ("brave-fox-1", "calm - sea-2"):
        head += [f'"{run} - _step"', f'"{run} - loss"', f'"{run} - loss__MIN"', f'"{run} - loss__MAX"']
    text = ",".join(head) + '\n"1","1","4.0","4.0","4.0","1","5.0","5.0","5.0"\n"2","2","3.0","","","","","",""\n'
    first, second = read_log(written(tmp_path, text))
    assert (first.name.rpartition(": ")[2], second.name.rpartition(": ")[2]) == ("brave-fox-1", "calm - sea-2")
    assert list(first.series["loss"][1]) == [4.0, 3.0]
    assert list(second.series["loss"][1]) == [5.0]


def test_a_tensorboard_log_is_read_by_its_own_package(tmp_path):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tb"))
    for step in (1, 2, 3):
        values = [summary_pb2.Summary.Value(tag="train/loss", simple_value=4.0 - step)]
        writer.add_event(event_pb2.Event(step=step, wall_time=step, summary=summary_pb2.Summary(value=values)))
    writer.close()
    for place in (tmp_path / "tb", next((tmp_path / "tb").iterdir())):
        (curve,) = read_log(place)
        assert [list(part) for part in curve.series["loss"]] == [[1, 2, 3], [3.0, 2.0, 1.0]]


def test_logs_without_a_held_out_loss_are_compared_by_the_last_tenth_of_training(tmp_path):
    lines = [",".join(str(3 + 0.01 * seed + 1 / step) for seed in range(4)) for step in range(1, 41)]
    text = "\n".join([",".join(f"run{seed} - loss" for seed in range(4)), *lines])
    a, b = (read_log(written(tmp_path, text, name)) for name in ("a.csv", "b.csv"))
    result = judge(("a", "b"), a, b)
    assert (result.verdict.kind, result.measure) == ("same", "mean training loss of steps 37 to 40")
    assert any("taken to be the same" in note for note in result.notes)
    assert any("in the order given" in note for note in result.notes)


def test_a_loss_that_is_not_a_number_has_diverged(tmp_path):
    (curve,) = read_log(written(tmp_path, "step,val_loss\n1,3.0\n2,nan\n"))
    assert curve.held_out == math.inf


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "it is empty", "step,loss"),
        ("step,a,b\n1,2,3\n", "no column that is called a loss", "`a`, `b`"),
        ("step,loss\nx,2\n", "the step is `x`", "line"),
        ("step,loss\n1e19,2\n", "the step is `1e19`", "line"),
        ("step,loss\nnan,2\n", "the step is `nan`", "line"),
        ("step,loss\n", "holds no numbers", "step,loss"),
        ("no numbers at all", "holds no numbers", "step,loss"),
    ],
)
def test_a_file_that_is_no_log_is_refused_with_what_to_do(tmp_path, text, message, hint):
    with pytest.raises(CompareError, match=message) as caught:
        read_log(written(tmp_path, text))
    assert hint in str(caught.value.hint)


def test_a_tensorboard_log_that_is_a_pipe_or_damaged_is_refused(tmp_path):
    (tmp_path / "tb").mkdir()
    os.mkfifo(tmp_path / "tb" / "events.out.tfevents.1")
    for place in (tmp_path / "tb", tmp_path / "tb" / "events.out.tfevents.1"):
        with pytest.raises(CompareError, match="it is a pipe"):
            read_log(place)


def test_a_column_can_be_named(tmp_path):
    log = written(tmp_path, "step,a,b\n1,2,3\n2,1,2\n")
    (curve,) = read_log(log, "b")
    assert curve.held_out == 2.0
    with pytest.raises(CompareError, match="no column `c`"):
        read_log(log, "c")
