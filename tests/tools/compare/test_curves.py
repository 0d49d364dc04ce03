"""Losses that other tools have logged."""

import json
import math
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from halfstep.core.compare.gaps import CompareError
from halfstep.report.compare import conclusion, html
from halfstep.report.number_format import plain
from halfstep.tools.compare.curves import Curve
from halfstep.tools.compare.judge import judge
from halfstep.tools.compare.logs import read_log, read_trackio
from halfstep.tools.compare.runs import read_side


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
    assert (result.verdict.kind, result.measure) == ("cannot tell", "mean training loss of steps 37 to 40")
    assert any("taken to be the same" in note for note in result.notes)
    assert any("their means are compared" in note for note in result.notes)


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
        ('{"step": 1, "loss": 2}\n{"step": 2, "lo', "it looks like JSON", "step,loss"),
        ("step,loss,loss\n1,2,3\n", "two columns called `loss`", "rename"),
        ("step,loss\n1,2\n2,2,9\n", "log.csv:3: 3 cells, and 2 columns", "line"),
        ("step,loss\n1,2\n2", "log.csv:3: 1 cells, and 2 columns", "cut off"),
        ('step,loss\n1,2\n2,"3', "not CSV", "step,loss"),
        ("step,loss\n1,2\n2,two\n", "log.csv:3: `two` in the column `loss` is not a number", "nan"),
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


@pytest.mark.parametrize("empty", ["", "None", "null", "n/a"])
def test_a_loss_that_ends_before_its_log_is_no_loss_of_the_end(tmp_path, empty):
    """As pandas writes NaN: a run that diverged."""
    lines = [f"{step},{4 - step / 100 if step <= 60 else empty},0.1" for step in range(1, 101)]
    with pytest.raises(CompareError, match=r"`loss` is empty from step 60 on, and the log ends at 100") as caught:
        read_log(written(tmp_path, "\n".join(["step,loss,lr", *lines])))
    assert "nan" in caught.value.hint


def test_a_log_that_begins_late_ends_no_earlier(tmp_path):
    lines = [f"{step},{'' if step > 100060 else 3}" for step in range(100001, 100101)]
    with pytest.raises(CompareError, match=r"`loss` is empty from step 100,060 on"):
        read_log(written(tmp_path, "\n".join(["step,loss", *lines])))


def test_an_end_that_may_be_due_is_said_beside_a_gap(tmp_path):
    lines = [f"{step},{3 if step <= 30 or 60 < step <= 80 else ''}" for step in range(1, 101)]
    (curve,) = read_log(written(tmp_path, "\n".join(["step,loss", *lines])))
    assert [note.partition(" has ")[2] for note in curve.notes] == [
        "no `loss` between the steps 30 and 61, nor between the steps 80 and 100"
    ]


def test_a_table_of_very_many_columns_is_read_at_once(tmp_path):
    names = [f"c{i}" for i in range(200_000)]
    begun = time.monotonic()
    with pytest.raises(CompareError, match="two columns called `c7`"):
        read_log(written(tmp_path, ",".join([*names, "c7"]) + "\n1\n"))
    assert time.monotonic() - begun < 10  # comparing each with each takes minutes


def test_a_held_out_loss_that_is_due_after_the_end_is_not_missed(tmp_path):
    lines = [f"{step},{4 - step / 100},{3 if step % 20 == 0 else ''}" for step in range(1, 110)]
    (curve,) = read_log(written(tmp_path, "\n".join(["step,loss,val_loss", *lines])))
    assert (curve.held_out, curve.notes) == (3.0, ())
    with pytest.raises(CompareError, match=r"`val_loss` is empty from step 100"):
        read_log(written(tmp_path, "\n".join(["step,loss,val_loss", *lines, "120,2,"])))


def test_a_gap_within_a_loss_is_said(tmp_path):
    lines = [f"{step},{4 - step / 100 if not 30 < step < 40 else ''}" for step in range(1, 101)]
    (curve,) = read_log(written(tmp_path, "\n".join(["step,loss", *lines])))
    assert "no `loss` between the steps 30 and 40" in curve.notes[0]
    assert curve.notes[0] in judge(("a", "b"), [curve], [curve]).notes


def test_a_run_of_wandb_that_ended_earlier_has_no_gap(tmp_path):
    lines = [f"{step},{3 / step},{3 / step if step < 5 else ''}" for step in range(1, 11)]
    _, short = read_log(written(tmp_path, "\n".join(["Step,long - loss,short - loss", *lines])))
    assert short.step == 4


def test_tabs_separate_columns_too(tmp_path):
    (curve,) = read_log(written(tmp_path, "step\tloss\n1\t3\n2\t2\n", "log.tsv"))
    assert list(curve.series["loss"][1]) == [3.0, 2.0]


def test_runs_without_common_seeds_are_compared_unpaired(tmp_path):
    """The order of the files says nothing, so it changes nothing."""
    random = np.random.default_rng(0)
    runs = [3.1 + 0.02 * random.standard_normal(6), 3.0 + 0.02 * random.standard_normal(8)]
    a, b = ([Curve("", None, {"held-out loss": (np.array([9]), np.array([x]))}, x, 9) for x in of] for of in runs)
    first = judge(("a", "b"), a, b, delta=0.01)
    assert first.verdict.kind == "different"
    for _ in range(5):
        random.shuffle(a)
        random.shuffle(b)
        again = judge(("a", "b"), a, b, delta=0.01).verdict
        assert again.interval99 == pytest.approx(first.verdict.interval99)
    assert "between the means of 6 and 8 runs" in conclusion(first)[1]
    page = html(first)
    assert all(f'<td class="number">{plain(curve.held_out, 6)}</td>' in page for curve in (*a, *b))


def test_jsonl_has_an_object_for_each_record(tmp_path):
    lines = [
        {"step": 10, "train": {"loss": 3.5}, "lr": None},
        {"step": 20, "train": {"loss": 3.25}},
        {"step": 20, "val_loss": 3.3},
    ]
    (curve,) = read_log(written(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n", "log.jsonl"))
    assert [list(part) for part in curve.series["loss"]] == [[10, 20], [3.5, 3.25]]
    assert (curve.held_out, curve.step, curve.seed) == (3.3, 20, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "it is not an object"),
        ('{"step": 3, "loss"', ":2: not a line of JSON"),
        ('{"step": 3, "step": 4, "loss": 2}', "stands twice"),
        ('{"step": "three", "loss": 2}', "not a number of updates"),
        ('{"step": 3, "loss": [2]}', "`[...]` in the column `loss`"),
        ('{"step": 3, "loss": true}', "`True` in the column `loss`"),
        ('{"step": 3, "other": 2}', "empty from step 1 on"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 900 + "1" + "}" * 900, "empty from step 1 on"),
    ],
)
def test_a_line_of_jsonl_that_is_no_record_is_refused(tmp_path, line, message):
    with pytest.raises(CompareError) as error:
        read_log(written(tmp_path, '{"step": 1, "loss": 3}\n' + line, "log.jsonl"))
    assert message in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_folder_of_logs_has_a_run_in_each_with_the_seed_of_its_name(tmp_path):
    for side, offset in (("a", 0.25), ("b", 0.0)):
        (tmp_path / side).mkdir()
        for seed, luck in enumerate([0.5, -0.25, 0.125]):
            lines = [{"step": step, "loss": 4 - step / 100 + luck + offset} for step in range(1, 41)]
            written(tmp_path / side, "\n".join(map(json.dumps, lines)), f"seed_{seed}.jsonl")
        written(tmp_path / side, "step,loss\n" + "\n".join(f"{n},{3 + offset}" for n in range(1, 41)), "Seed3.csv")
        written(tmp_path / side, "not a log", "notes.md")
    result = judge(("a", "b"), *(read_side(str(tmp_path / side)) for side in "ab"), share=0.01)
    assert result.seeds == (0, 1, 2, 3)
    assert result.verdict.delta == pytest.approx(0.01 * np.mean(result.b.losses))
    assert (result.verdict.mean, result.verdict.kind) == (pytest.approx(0.25), "different")
    assert result.correlation == pytest.approx(1.0)
    assert "its order in a pair: they are taken to be the same" in "".join(result.notes)
    apart = judge(("a", "b"), *(read_side(str(tmp_path / side)) for side in "ab"), delta=0.01, paired=False)
    assert (apart.seeds, apart.correlation, apart.verdict.kind) == ((), None, "cannot tell")
    (tmp_path / "a" / "seed-3.csv").write_text("loss\n3\n")
    with pytest.raises(CompareError, match="two runs of the seed 3"):
        read_side(str(tmp_path / "a"))


def test_how_many_more_steps_the_worse_side_needs_stands_beside_the_gap(tmp_path):
    sides = []
    for offset in (0.05, 0.0):  # the loss falls by 0.01 a step
        text = "step,loss\n" + "\n".join(f"{n},{9 - n / 100 + offset + n % 2 / 1000}" for n in range(1, 201))
        sides.append([replace(read_log(written(tmp_path, text))[0], seed=seed) for seed in range(2)])
    result = judge(("a", "b"), *sides, delta=0.0)
    assert result.behind == pytest.approx(5, abs=1)
    assert f"({result.behind} steps)" in conclusion(result)[1]
    assert judge(("a", "b"), *reversed(sides), delta=0.0).behind == result.behind


def test_runs_of_other_lengths_are_compared_by_their_ends(tmp_path):
    def ends(steps, loss):
        return [
            replace(read_log(written(tmp_path, f"step,loss,val_loss\n{steps},3,{loss}\n"))[0], seed=s)
            for s in (0, 1)
        ]

    result = judge(("a", "b"), ends(460, 2.5), ends(500, 2.25), delta=0.1)
    assert (result.measure, result.verdict.mean) == ("held-out loss at the end of each run", 0.25)
    assert "A at 460, B at 500" in "".join(result.notes)


@pytest.fixture
def project(tmp_path):
    """A database as trackio leaves it."""
    with closing(sqlite3.connect(tmp_path / "mine.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp TEXT, run_name TEXT, step INTEGER, metrics)"
        )
        for arm, offset in (("bf16", 0.25), ("fp32", 0.0)):
            for seed in range(2):
                for step in range(1, 11):
                    row = json.dumps({"loss": 3 + offset + seed / step, "note": {"text": "ok"}})
                    given = row.encode() if step % 2 else row  # as orjson writes it
                    values = ("now", f"{arm}-seed-{seed}", step, given)
                    database.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?)", values)
        database.commit()
    return tmp_path / "mine.db"


def test_runs_of_trackio_are_named_by_their_project(project, tmp_path):
    sides = [read_side(f"{project}:{arm}-*") for arm in ("bf16", "fp32")]
    result = judge(("bf16", "fp32"), *sides, delta=0.1)
    assert (result.seeds, result.verdict.mean) == ((0, 1), pytest.approx(0.25))
    assert len(read_side(f"{project}:*")) == len(read_trackio(project)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["mine.db"]  # nothing is left beside it


def test_what_is_still_in_the_log_of_a_database_is_read(project):
    with closing(sqlite3.connect(project)) as open_database:
        values = ("now", "late-seed-0", 1, json.dumps({"loss": 2.0}))
        open_database.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?)", values)
        open_database.commit()
        (curve,) = read_side(f"{project}:late*")
    assert list(curve.series["loss"][1]) == [2.0]


def test_a_database_that_is_not_of_trackio_is_refused(project, tmp_path):
    for runs, message in (("none-*", "has no run called `none-*`"), ("", "is not a database")):
        if not runs:
            with closing(sqlite3.connect(project)) as database:
                database.execute("ALTER TABLE metrics RENAME TO others")
                endless = (
                    "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, 'a' AS run_name"
                )
                database.execute(f"CREATE VIEW metrics AS {endless}, 1 AS step, '' AS metrics FROM n")
        with pytest.raises(CompareError) as error:
            read_side(f"{project}:{runs}")
        assert message in str(error.value)
    (tmp_path / "text.db").write_text("step,loss\n1,2\n" * 100)
    with pytest.raises(CompareError, match="is not a database of trackio"):
        read_side(str(tmp_path / "text.db"))
    os.mkfifo(tmp_path / "pipe.db")
    with pytest.raises(CompareError, match="cannot be read"):
        read_side(str(tmp_path / "pipe.db"))
