"""What the logs of the study say: `halfstep compare` judges each row, and Holm corrects for the rows of a tier."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.study.plan import Plan, Row
from halfstep.core.compare.gaps import holm
from halfstep.tools.compare.judge import Comparison, judge
from halfstep.tools.compare.logs import read_log

SAME_IN_A_ROW = ("text", "device", "torch")  # what all runs of a row must share
REASON = "NOT_RUN"  # the file that says why an arm cannot run


@dataclass(frozen=True)
class Result:
    """What is known of a row."""

    row: Row
    pairs: int  # 0: it has not run
    comparison: Comparison | None
    kind: str  # after Holm
    seconds: float  # of all of its runs
    last: dict[str, Any]  # the last line of a log of the arm
    reason: str = ""  # why it cannot run


def log_of(out: Path, size: str, arm: str, seed: int) -> Path:
    """Returns the file of a run."""
    return out / size / arm / f"seed-{seed}.jsonl"


def last_line(path: Path) -> dict[str, Any]:
    """Returns the end of a run: its held-out losses and what it took."""
    return json.loads(path.read_text(encoding="utf-8").splitlines()[-1])


def pairs_done(row: Row, out: Path) -> int:
    """Returns the last look for which all runs are there; 0 if there is none."""
    looks = [0]
    for pairs in row.pairs:
        paths = [log_of(out, row.size, arm, s) for arm in (row.arm, row.against) for s in row.seeds_of(pairs)]
        looks += [pairs] if all(path.exists() for path in paths) else []
    return looks[-1]


def results(plan: Plan, out: Path) -> list[Result]:
    """Judges every row that has run."""
    found = [_result(row, out) for row in plan.rows]
    kinds: dict[str, str] = {}
    for tier in dict.fromkeys(row.tier for row in plan.rows):
        family = [each for each in found if each.row.tier == tier]
        (looks,) = {len(each.row.pairs) for each in family}  # the same for all rows of a tier
        verdicts = [each.comparison.verdict if each.comparison else None for each in family]
        kinds |= dict(zip((each.row.name for each in family), holm(verdicts, looks), strict=True))
    return [
        Result(each.row, each.pairs, each.comparison, kinds[each.row.name], each.seconds, each.last, each.reason)
        for each in found
    ]


def _result(row: Row, out: Path) -> Result:
    pairs = pairs_done(row, out)
    if not pairs:
        paths = [out / row.size / arm / REASON for arm in (row.arm, row.against)]
        reasons = [path.read_text(encoding="utf-8").strip() for path in paths if path.exists()]
        return Result(row, 0, None, "", 0.0, {}, "; ".join(reasons))
    sides = [[log_of(out, row.size, arm, seed) for seed in row.seeds_of(pairs)] for arm in (row.arm, row.against)]
    ends = [[last_line(path) for path in paths] for paths in sides]
    if reason := _unlike(ends):
        return Result(row, 0, None, "", 0.0, {}, reason)
    curves = [[read_log(path, row.metric) for path in paths] for paths in sides]
    a, b = ([curve for (curve,) in side] for side in curves)
    margin = {"share": row.share}
    if row.margin.endswith("gain"):
        margin = {"delta": row.share * fmean(end["before"] - end[row.metric] for end in ends[1])}
    comparison = judge((row.arm, row.against), a, b, paired=row.paired, **margin)
    seconds = sum(end["seconds"] for side in ends for end in side)
    return Result(row, pairs, comparison, "", seconds, ends[0][-1])


def _unlike(ends: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Says why runs are no pairs: they are of another text, machine or base."""
    for name in SAME_IN_A_ROW:
        if len(values := sorted({str(end.get(name)) for side in ends for end in side})) > 1:
            return f"its runs differ in {name}: {', '.join(values)}; begin again in another --out"
    if any(one.get("base") != other.get("base") for one, other in zip(*ends, strict=True)):
        return "the arms of a pair began with different bases; remove the logs of that seed"
    return ""
