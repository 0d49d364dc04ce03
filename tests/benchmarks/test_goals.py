"""Goals are judged as they are stated, rows share runs where they can, and the page shows what was measured."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.measure import goals
from halfstep.core.errors import HalfstepError

ROOT = Path(__file__).parents[2]
REAL = Namespace(dry=False, set=[])


def arm(*seconds, memory=100, held_out=2.5, failed=""):
    return {"seconds": list(seconds), "memory": memory, "held_out": held_out, "failed": failed}


def test_speed_counts_median_turns_and_memory_is_ours_over_theirs():
    ours, theirs = arm(1.0, 2.0, 9.0, memory=60), arm(3.0, 2.2, 1.5)
    speed = goals.Goal("ours", "theirs", "speed", 1.1, 1.2)
    assert speed.ratios(ours, theirs) == (1.1, 1.5)
    assert [speed.reached(ratio) for ratio in (1.1, 1.0999)] == [True, False]
    memory = goals.Goal("ours", "theirs", "memory", 0.6)
    assert memory.ratios(ours, theirs) == (0.6, None)
    assert [memory.reached(ratio) for ratio in (0.6, 0.6001)] == [True, False]
    first = goals.Goal("ours", "theirs", "first step", 1.0)
    assert first.ratios(arm(30.0), arm(60.0)) == (0.5, None)
    assert first.reached(0.5)


def test_losses_are_the_same_if_compare_says_so():
    goal, theirs = goals.Goal("ours", "theirs", "loss", 0.005), arm(held_out={"0": 2.0, "1": 3.0, "2": 2.5})
    close, far, wild = (
        arm(
            held_out={seed: loss + gap for (seed, loss), gap in zip(theirs["held_out"].items(), gaps, strict=True)}
        )
        for gaps in ((0.001, 0.0011, 0.0009), (0.1, 0.1001, 0.0999), (0.1, -0.1, 0.02))
    )
    assert [goal.said(ours, theirs).kind for ours in (close, far, wild)] == ["same", "different", "cannot tell"]
    assert goal.said(close, theirs).delta == pytest.approx(0.0125)
    cells = [goals._measured(goal, {"ours": ours, "theirs": theirs}) for ours in (close, far, wild)]
    assert [cell[2] for cell in cells] == ["yes", "**no**", "unknown"]
    assert "CANNOT TELL, about" in cells[2][0]


def test_what_failed_is_named_and_nothing_is_invented():
    arms = {"halfstep": arm(1.0), "autocast": arm(1.5), "casted": arm(failed="OutOfMemoryError: too | much")}
    lines = goals.table({"bf16": {"arms": arms}}, ["bf16", "golf"])[2:]
    assert lines[0].endswith("| 1.17 | 1.500 | 1.500 | yes | 0 / 0 | 2.5000 / 2.5000 |")
    assert lines[1].endswith("| casted: OutOfMemoryError: too / much |  |  |  |  |")
    assert all("| not measured yet |" in line for line in lines[2:])
    runs = {"fp8": goals._of_seeds([0, 1], {"0": 2.5}), "bf16": goals._of_seeds([0, 1], {"0": 2.25, "1": 2.0})}
    lines += goals.table({"fp8-loss": {"arms": runs}}, ["fp8-loss"])[2:]
    assert lines[-1].endswith("| fp8: not done: seeds [1] |  |  |  | 2.5000 / 2.2500 2.0000 |")
    assert all(line.count(" |") == lines[0].count(" |") for line in lines)


def test_rows_of_one_setting_share_a_run():
    assert goals.group_rows(["bf16", "golf", "lean", "fp8-1.3b", "fp8"], REAL) == [
        ["bf16", "lean", "fp8"],
        ["golf"],
        ["fp8-1.3b"],
    ]
    assert [len(group) for group in goals.group_rows(list(goals.ROWS), REAL)] == [3, 1, 1, 1, 1, 1, 2, 1, 1, 1]


def test_rows_that_share_a_run_keep_their_own_arms(monkeypatch, capsys):
    asked = []

    def run(arms, **setting):
        asked.append((arms, setting))
        return Namespace(
            arms=[Namespace(**arm(1.0), name=name, missing="", ready_seconds=3.0, profile={}) for name in arms]
        )

    monkeypatch.setattr(goals.bench, "run", run)
    kept = {}
    goals.measure(["bf16", "fp8"], REAL, 500.0, kept)
    ((arms, setting),) = asked
    assert arms == ["halfstep-fp8", "halfstep", "autocast", "casted"]  # the slowest to compile first
    assert (setting["seconds"], setting["batch"], setting["width"]) == (500.0, 32, 768)
    assert [*kept["fp8"]["arms"]] == ["halfstep-fp8", "autocast"]
    assert "| fp8-mixed, 124M | halfstep-fp8 / autocast |" in capsys.readouterr().out

    def refuse(arms, **setting):
        raise HalfstepError("there is no GPU")

    monkeypatch.setattr(goals.bench, "run", refuse)
    goals.measure(["lean"], REAL, 500.0, kept)  # other rows must not be lost with it
    assert "halfstep-lean: there is no GPU" in capsys.readouterr().out
    goals.measure(["fp8-1.3b"], REAL, 20.0, kept)  # too little time to begin
    assert len(asked) == 1
    assert "fp8-1.3b: not measured, for 20 s are left" in capsys.readouterr().err


def test_seeds_that_are_known_are_not_run_again(monkeypatch):
    calls = []

    def run(name, given, seconds):
        calls.append(given[given.index("--seeds") + 1 : -1])
        lines = [{"seed": 1, "loss": 4.0}, {"seed": 1, "held_out": 3.0}]  # seed 2 was not done in time
        Path(given[-1].partition("=")[2]).write_text("\n".join(map(json.dumps, lines)))
        return "not done within 9 s"

    monkeypatch.setattr(goals, "_run", run)
    known = {"bf16": {"held_out": {"0": 2.0}}, "fp8": {"held_out": {"0": 2.0, "1": 2.1, "2": 2.2}}}
    found = goals.seeds(["bf16", "fp8"], {"seeds": [0, 1, 2], "steps": 5}, 9.0, known)
    assert calls == [["1", "2"]]
    assert found["bf16"] == {"held_out": {"0": 2.0, "1": 3.0}, "failed": "not done: seeds [2]"}
    assert found["fp8"] == {**known["fp8"], "failed": ""}


def test_seeds_of_a_recipe_count_if_all_their_updates_were_done(monkeypatch):
    calls = []

    def run(arms, setting, seconds, known):
        calls.append(setting)
        late = setting["set"] == ["seed=2"]
        return {name: {**arm(held_out=3.0), "updates": 4 if late and name == "source" else 5} for name in arms}

    monkeypatch.setattr(goals, "recipe", run)
    known = {"halfstep": {"held_out": {"0": 2.0}}, "source": {"held_out": {"0": 2.1}}}
    found = goals.recipe_seeds(["halfstep", "source"], {"seeds": [0, 1, 2], "steps": 5, "set": []}, 9.0, known)
    assert calls == [{"steps": 5, "set": [f"seed={seed}"]} for seed in (1, 2)]
    assert found["halfstep"] == {"held_out": {"0": 2.0, "1": 3.0, "2": 3.0}, "failed": ""}
    assert found["source"] == {"held_out": {"0": 2.1, "1": 3.0}, "failed": "not done: seeds [2]"}


def test_the_page_shows_what_was_measured():
    stored = ROOT / "docs" / "measurements" / "goals.json"
    kept = json.loads(stored.read_text()) if stored.exists() else {}
    page = (ROOT / "docs" / "measurements" / "goals.md").read_text(encoding="utf-8")
    assert "\n".join(goals.table(kept, list(goals.ROWS))) in page, "paste what `goals.py --print` prints"
    assert all(f"`{name}`" in page for name in goals.ROWS)
