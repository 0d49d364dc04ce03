"""The study runs what was registered, in order and within its time, and compare judges it."""

import json
import re
from collections import Counter
from dataclasses import replace
from typing import ClassVar
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.race.seeds import LIBRARIES
from benchmarks.study import page
from benchmarks.study import run as study_run
from benchmarks.study.plan import read_plan
from benchmarks.study.results import last_line, log_of, pairs_done, results
from benchmarks.study.run import Study
from benchmarks.study.texts import load_text
from halfstep.cli.main import run as halfstep
from halfstep.core.compare.gaps import verdict
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy

PLAN = read_plan()
LOSSES = {"fp32": 2.0, "bf16-mixed": 2.001, "bf16-split": 2.0, "fewer-8": 2.1, "no-masters": 2.4}


def test_every_row_says_all_that_a_row_must_before_it_runs():
    names = [row.name for row in PLAN.rows]
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(row.tier for row in PLAN.rows)) == ["A", "P", "N", "C", "D", "B", "E"]
    for row in PLAN.rows:
        assert row.arm != row.against
        assert row.metric in ("held_out", "held_out_last")
        assert row.margin == ("10% of gain" if row.tier == "C" else "0.5%")
        assert list(row.pairs) == sorted(row.pairs)
        assert PLAN.cost(row) > 0
        for arm in (row.arm, row.against):
            setting = PLAN.setting(row.size, arm)
            assert (setting.end, bool(setting.ema)) == (0.0, True)
            policy = PLAN.arms[arm].policy
            assert policy in LIBRARIES or Policy.parse(policy)
    assert Counter(row.tier for row in PLAN.rows)["N"] == 20
    for tier in "APNCDBE":  # Holm and Bonferroni are the same for all rows of a tier
        assert len({len(row.pairs) for row in PLAN.rows if row.tier == tier}) == 1


def test_a_dose_is_as_many_steps_fewer():
    steps = [PLAN.setting("124m", arm).steps for arm in ("bf16-split", "fewer-1", "fewer-2", "fewer-4", "fewer-8")]
    assert steps == [500, 495, 490, 480, 460]


class FakeArm:
    """Arms whose losses are known, and which take ten seconds for a run."""

    made: ClassVar = Counter()
    ran: ClassVar = []

    def __init__(self, policy, setting):
        self.name = next(name for name, arm in PLAN.arms.items() if PLAN.policy(name, "cpu") == policy
                         and arm.fewer == pytest.approx(1 - setting.steps / 30, abs=0.02)
                         and (arm.rounded, arm.nudge) == (setting.rounded, setting.nudge))  # fmt: skip
        self.made[self.name] += 1

    def train(self, seed, corpus):
        """Yields what a run would."""
        self.ran.append((self.name, seed))
        loss = LOSSES.get(self.name, 2.0) + seed / 100 + (seed % 3) / 10_000 * (self.name != "fp32")
        yield from ({"step": step, "loss": 9 - step / 10} for step in range(1, 31))
        facts = {"lost": 0.9} if self.name == "no-masters" else {}
        yield {"step": 30, "before": 3.0, "held_out": loss, "held_out_last": loss, "seconds": 10.0, **facts}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Returns a function that begins a study in a folder, with a clock that each run moves."""
    FakeArm.made.clear()
    FakeArm.ran.clear()
    monkeypatch.setattr(study_run.seeds, "make_arm", FakeArm)
    monkeypatch.setattr(study_run.time, "monotonic", lambda: 10.0 * len(FakeArm.ran))
    tiny = read_plan(is_try=True)
    rows = tuple(
        replace(row, pairs=real.pairs, seeds=real.seeds) for row, real in zip(tiny.rows, PLAN.rows, strict=True)
    )
    plan = replace(tiny, rows=rows, times=dict.fromkeys(tiny.times, 0.1))
    monkeypatch.setattr(Study, "make_base", lambda self: "digest")
    return lambda seconds=1e9: Study(plan, tmp_path / "study", "cpu", seconds, tmp_path / "base")


def test_a_row_runs_every_seed_of_an_arm_after_one_compilation(study):
    first = study()
    assert study_run.run(first.plan, first.plan.choose(["A1"]), first) == 0
    assert FakeArm.ran == [("fp32", seed) for seed in range(10)] + [("bf16-mixed", seed) for seed in range(10)]
    assert FakeArm.made == {"fp32": 1, "bf16-mixed": 1}
    (a1, *others) = results(first.plan, first.out)
    assert (a1.pairs, a1.kind, a1.comparison.verdict.delta) == (10, "same", pytest.approx(0.005 * 2.045))
    assert (a1.seconds, a1.comparison.correlation) == (200.0, pytest.approx(1.0, abs=0.01))
    assert {each.kind for each in others} == {"cannot tell"}


def test_it_stops_before_its_limit_and_continues_without_training_anything_twice(study, capsys):
    codes, limit = [], 65.0
    for _ in range(9):
        FakeArm.ran_before = len(FakeArm.ran)
        each = study(limit)
        codes.append(study_run.run(each.plan, each.plan.choose(["A1"]), each))
        assert 10.0 * (len(FakeArm.ran) - FakeArm.ran_before) <= limit
        if not codes[-1]:
            break
    assert codes == [study_run.LEFT] * (len(codes) - 1) + [0]
    assert len(FakeArm.ran) == len(set(FakeArm.ran)) == 20
    assert "the same command continues" in capsys.readouterr().err


def test_a_dose_of_eight_per_cent_is_different_and_an_arm_is_not_different_from_itself(study):
    each = study()
    assert study_run.run(each.plan, each.plan.choose(["P8", "N"]), each) == 0
    kinds = {found.row.name: found.kind for found in results(each.plan, each.out) if found.pairs}
    assert kinds.pop("P8") == "different"
    assert len(kinds) == 20
    assert "different" not in kinds.values()


def test_looks_stop_at_the_first_that_decides(study):
    each = study()
    b1, d1 = (each.plan.choose([name])[0] for name in ("B1", "D1"))
    study_run.run(each.plan, [b1, d1], each)
    assert (pairs_done(b1, each.out), b1.pairs) == (10, (10, 23))
    assert (pairs_done(d1, each.out), d1.pairs) == (12, (4, 8, 12))  # two groups with the luck of all seeds


def test_the_margin_of_fine_tuning_is_a_share_of_what_fp32_gains(study):
    each = study()
    study_run.run(each.plan, each.plan.choose(["C1"]), each)
    (found,) = [found for found in results(each.plan, each.out) if found.pairs]
    assert found.comparison.verdict.delta == pytest.approx(0.1 * (3.0 - 2.025))
    assert (found.kind, found.last["lost"]) == ("different", 0.9)


def test_runs_that_are_no_pairs_are_not_judged(study):
    each = study()
    (row,) = each.plan.choose(["C1"])
    study_run.run(each.plan, [row], each)
    path = log_of(each.out, row.size, row.arm, 3)
    whole = path.read_text()
    for name, message in (("base", "different bases"), ("text", "differ in text"), ("torch", "differ in torch")):
        *lines, end = whole.splitlines()
        path.write_text("\n".join([*lines, json.dumps(json.loads(end) | {name: "another"})]))
        found = next(found for found in results(each.plan, each.out) if found.row == row)
        assert (found.pairs, found.comparison) == (0, None)
        assert message in found.reason


def test_an_arm_that_cannot_run_is_named_and_others_run(study, monkeypatch):
    def make(policy, setting):
        if policy == "autocast":
            raise HalfstepError("autocast is not here")
        return FakeArm(policy, setting)

    monkeypatch.setattr(study_run.seeds, "make_arm", make)
    each = study()
    assert study_run.run(each.plan, each.plan.choose(["A4", "A1"]), each) == study_run.CANNOT
    found = {found.row.name: found for found in results(each.plan, each.out)}
    assert (found["A1"].pairs, found["A4"].pairs, found["A4"].reason) == (10, 0, "autocast: autocast is not here")


def test_whole_packages_are_held_out_and_copies_left_out(tmp_path):
    for number in range(60):
        package = tmp_path / f"package{number}"
        (package / "_vendor").mkdir(parents=True)
        (package / "code.py").write_text(f"number = {number}\n" * 20)
        (package / "more.py").write_text(f"more = {number}\n")
        (package / "_vendor" / "copy.py").write_text("vendored = 1\n")
        (package / "shared.py").write_text("the same in all of them\n")
    corpus = load_text("**/*.py", "package", 256, root=tmp_path)
    train, held_out = (bytes(side) for side in (corpus.train, corpus.validation))
    sides = [{line for line in side.decode().splitlines() if " = " in line} for side in (train, held_out)]
    assert sides[1]
    assert not {line.split()[-1] for line in sides[0]} & {line.split()[-1] for line in sides[1]}
    assert b"the same in all of them" in train
    assert b"the same in all of them" not in held_out
    assert b"vendored" not in train + held_out
    (tmp_path / "package3" / "large.py").write_text("large = 3\n" * 10_000)
    larger = load_text("**/*.py", "package", 256, root=tmp_path)
    assert b"large" in bytes(larger.train)  # most of the text is never held out
    assert 0 < len(larger.validation) <= 0.1 * (len(larger.train) + len(larger.validation))
    for path in tmp_path.glob("package[1-9]*/**/*.py"):
        path.unlink()
    with pytest.raises(HalfstepError, match="too few units"):
        load_text("**/*.py", "package", 256, root=tmp_path)


def test_one_row_runs_from_the_command_line_with_nothing_else(tmp_path, monkeypatch, capsys):
    """As `--try`, which is tiny; the same but for its size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "--try", "--row", "A1"])
    assert study_run.main() == 0
    output = capsys.readouterr()
    assert output.out.startswith("A1: ")
    assert "1 left, about" in output.err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["study"]
    monkeypatch.setattr("sys.argv", ["run.py", "--list"])
    assert study_run.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PLAN.rows)


def test_the_page_shows_every_row_its_verdict_and_what_has_not_run(study):
    each = study()
    study_run.run(each.plan, each.plan.choose(["A1", "P", "N", "C1"]), each)
    found = results(each.plan, each.out)
    text = page.tables(each.plan, found)
    assert "| A1 | bf16-mixed, whole masters, against fp32 | +0.00109" in text
    assert "**SAME**" in text
    assert "; 90.0% of updates lost |" in text
    assert "20 of 20 comparisons of an arm with itself, of 4 pairs each" in text
    assert "0 DIFFERENT" in text
    not_run = text.partition("## NOT RUN")[2]  # nothing is left of A2: other rows have its arms
    names = [row.name for row in PLAN.rows]
    assert all(f"\n| {name} |" in text or name.startswith("N") for name in names)
    assert [name for name in names if f"\n| {name} |" in not_run] == [
        name for name in names if name not in ("A1", "A2", "C1") and name[0] not in "PN"
    ]
    compared = re.search(r"`(halfstep compare [^`]*fewer-8[^`]*)`", text)[1]
    assert compared.endswith("bf16-split --delta 0.5% --column held_out")
    for drawing in page.figures(found).values():
        ElementTree.fromstring(drawing)
    assert sorted(page.figures(found)) == ["study_power.svg", "study_rows.svg"]


def test_the_command_of_a_row_says_what_the_page_says(study, capsys):
    each = study()
    study_run.run(each.plan, each.plan.choose(["P8", "C1"]), each)
    for found in results(each.plan, each.out):
        if found.pairs:
            words = page.verdict_command(found).replace("docs/measurements/study", str(each.out)).split()[1:]
            capsys.readouterr()
            assert halfstep(words) == 1
            assert capsys.readouterr().out.splitlines()[0].endswith(": DIFFERENT")


def test_power_is_the_share_of_verdicts():
    chance = np.random.default_rng(5)
    kinds = Counter(verdict(list(chance.normal(0.015, 0.004, 4)), delta=0.01).kind for _ in range(300))
    different, same = page.powers(0.015, 0.004, 4, 0.01)
    assert kinds["different"] / 300 == pytest.approx(different, abs=0.09)
    assert kinds["same"] / 300 == pytest.approx(same, abs=0.03)
    assert page.powers(0.0, 0.004, 23, 0.01)[1] > 0.99


def test_the_figures_are_current():
    drawn = page.figures(results(PLAN, page.LOGS))
    there = {path.name for path in page.IMAGES.glob("study_*.svg")}
    assert there == {*drawn}, "run `python benchmarks/study/page.py`"
    assert all((page.IMAGES / name).read_text(encoding="utf-8") == drawing for name, drawing in drawn.items())


def test_a_plan_with_results_was_registered_before_them():
    """Logs say what was trained: the settings in the plan are those of the logs."""
    for path in page.LOGS.glob("*/*/seed-*.jsonl"):
        if path.parts[-3] == "base":
            continue
        assert last_line(path)["step"] == PLAN.setting(*path.parts[-3:-1]).steps
