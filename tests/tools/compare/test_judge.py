"""What is compared of two sets of runs, and what is not."""

import json
import math
from pathlib import Path

import pytest

from halfstep.core.compare.gaps import CompareError
from halfstep.tools.compare.judge import Comparison, judge
from halfstep.tools.compare.runs import read_side
from tests.tools.compare.made_up import make_run, make_runs


def compared(a: Path, b: Path, **more) -> Comparison:
    return judge(("A", "B"), read_side(str(a)), read_side(str(b)), **more)


def stop(reason: str) -> str:
    event = {"event": "stop", "time": 1.7e9, "step": 40, "reason": reason, "saved": 40, "spent": None, "mfu": None}
    return json.dumps(event) + "\n"


def test_runs_of_the_same_losses_are_the_same_and_never_part(tmp_path):
    result = compared(make_runs(tmp_path / "a"), make_runs(tmp_path / "b"))
    assert result.verdict.kind == "same"
    assert (result.seeds, result.parting, result.first_difference) == ((0, 1, 2, 3), None, None)
    assert result.verdict.delta == pytest.approx(result.spread / 2)
    assert (result.a.tokens_per_second, result.b.memory) == (1000.0, 2**30)
    json.dumps(result.to_dict())


def test_a_worse_way_is_different_and_parts_where_it_gets_worse(tmp_path):
    a = make_runs(tmp_path / "a", worse=0.5, policy="bf16-true", tokens_per_second=2000.0)
    result = compared(a, make_runs(tmp_path / "b"))
    assert result.verdict.kind == "different"
    assert result.verdict.mean == pytest.approx(0.5)
    assert (result.parting.step, result.parting.name, result.first_difference) == (21, "loss", 21)
    assert result.settings == (("policy", "bf16-true", "fp32"),)
    assert result.a.tokens_per_second == 2000.0


def test_a_layer_that_parts_is_named(tmp_path):
    a, b = make_runs(tmp_path / "a"), make_runs(tmp_path / "b")
    for events in a.glob("*/events.jsonl"):
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        for event in lines:
            if event["event"] == "layers" and event["step"] >= 12:
                event["weight"]["gradient_norm"][1] *= 9
        events.write_text("".join(json.dumps(event) + "\n" for event in lines))
    result = compared(a, b)
    assert (result.parting.step, result.parting.name) == (12, "gradient norm of blocks.0.down")


def test_one_run_of_each_cannot_tell_and_says_why_there_is_no_band(tmp_path):
    result = compared(make_run(tmp_path / "a", worse=1.0), make_run(tmp_path / "b"))
    assert result.verdict.kind == "cannot tell"
    assert "4 runs" in result.parting_unknown
    assert result.first_difference == 21


def test_runs_are_paired_by_seed_and_others_left_out(tmp_path):
    for seed in (3, 1, 7):
        make_run(tmp_path / "a" / f"x{seed}", seed=seed)
    result = compared(tmp_path / "a", make_runs(tmp_path / "b"))
    assert result.seeds == (1, 3)
    assert "3 runs without a partner" in result.notes[0]


def test_other_data_leaves_speed_and_memory(tmp_path):
    result = compared(make_runs(tmp_path / "a", digest="d2"), make_runs(tmp_path / "b"))
    assert (result.verdict, result.curves, result.a.losses) == (None, None, ())
    assert result.a.tokens_per_second == 1000.0
    assert any("other data" in note for note in result.notes)


def test_other_models_leave_the_held_out_losses(tmp_path):
    result = compared(make_runs(tmp_path / "a", overrides=["model.layers=2"]), make_runs(tmp_path / "b"))
    assert result.verdict.kind == "same"
    assert (result.curves, result.a.tokens_per_second, result.a.memory) == (None, None, None)
    assert any("other models" in note for note in result.notes)


def test_other_data_and_models_leave_nothing(tmp_path):
    a = make_runs(tmp_path / "a", digest="d2", overrides=["model.layers=2"])
    with pytest.raises(CompareError, match="both data and model") as caught:
        compared(a, make_runs(tmp_path / "b"))
    assert "speed and memory" in caught.value.hint


def test_a_diverged_run_is_different_and_says_why(tmp_path):
    a, b = make_runs(tmp_path / "a"), make_runs(tmp_path / "b")
    events = a / "seed-1" / "events.jsonl"
    events.write_text(events.read_text().rpartition('{"event": "validation"')[0] + stop("never finite"))
    result = compared(a, b)
    assert (result.verdict.kind, result.verdict.diverged) == ("different", 1)
    assert result.a.problems == ("never finite",)
    with pytest.raises(CompareError, match="the reference, B, diverged"):
        compared(b, a)


def test_a_run_that_was_stopped_by_a_person_has_not_diverged(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    events = a / "events.jsonl"
    events.write_text(events.read_text().rpartition('{"event": "end"')[0] + stop("SIGINT"))
    assert math.isfinite(compared(a, b).a.losses[0])


def test_a_given_delta_counts(tmp_path):
    a, b = make_runs(tmp_path / "a", worse=0.5), make_runs(tmp_path / "b")
    assert compared(a, b, delta=1.0).verdict.kind == "same"


def test_a_folder_without_runs_is_refused_with_what_may_be_named(tmp_path):
    with pytest.raises(CompareError, match="holds no run and no log") as caught:
        read_side(str(tmp_path))
    assert "a folder of runs" in caught.value.hint
    with pytest.raises(CompareError, match="there is no file or folder"):
        read_side(str(tmp_path / "absent.csv"))
