"""Writes what the page of the study shows: a table, and two figures in docs/images.

python benchmarks/study/page.py    # the figures; docs/generate.py puts the table into docs/study.md
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks and docs
from benchmarks.study.plan import Plan, read_plan
from benchmarks.study.results import Result, results
from docs.figures import WIDTH, box, curve, line, svg, words
from halfstep.core.compare.gaps import CLOSE, SURE, t_quantile
from halfstep.report.compare import signed
from halfstep.report.number_format import plain

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "docs" / "measurements" / "study"
IMAGES = ROOT / "docs" / "images"
ITSELF, DOSES = "N", "P"  # the tiers of an arm against itself, and of known doses
COLUMNS = ("row", "question", "gap", "steps", "90 % interval", "margin", "pairs", "correlation")
COLUMNS += ("verdict", "seconds")
KINDS = {"same": "d", "different": "b", "cannot tell": "c"}  # with the color of each
RUN = "python benchmarks/study/run.py"
DRAWS = 4000


def tables(plan: Plan, found: Sequence[Result]) -> str:
    """Returns the tables of the page."""
    judged = [each for each in found if each.pairs and each.row.tier != ITSELF]
    parts = ["## Results\n", *([_table(COLUMNS, [_cells(each) for each in judged])] if judged else [])]
    parts += [_itself([each for each in found if each.row.tier == ITSELF])]
    if doses := [each for each in found if each.row.tier == DOSES and each.pairs]:
        parts += ["## What the test can see\n", _powers(doses)]
    if figures(found):
        parts += ["![Each row's gap and its 90 % interval in units of its margin](images/study_rows.svg)\n"]
        parts += ["![The chance to be called different by true gap](images/study_power.svg)\n"] if doses else []
    parts += ["## Commands\n", _commands(found)]
    missing = [(each.row.name, each.row.title, f"{plan.cost(each.row):,.0f}", each.reason or "no GPU time yet")
               for each in found if not each.pairs]  # fmt: skip
    if missing:
        parts += ["## NOT RUN\n", _table(("row", "question", "GPU seconds", "why"), missing)]
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([head, f"|{'---|' * len(columns)}", *lines]) + "\n"


def _cells(result: Result) -> list[str]:
    row, found = result.row, result.comparison
    assert found is not None
    verdict = found.verdict
    assert verdict is not None
    behind = "" if found.behind is None else f"{found.behind:,}"
    lost = f"; {result.last['lost']:.1%} of updates lost" if "lost" in result.last else ""
    return [
        row.name,
        row.title + lost,
        signed(verdict.mean),
        behind,
        f"{signed(verdict.interval90[0])} to {signed(verdict.interval90[1])}",
        f"±{plain(verdict.delta)}",
        f"{result.pairs}" if row.paired else f"{result.pairs} and {result.pairs}",
        "" if found.correlation is None else f"{found.correlation:.2f}",
        said(result),
        f"{result.seconds:,.0f}",
    ]


def said(result: Result) -> str:
    """Returns the verdict after Holm; and what it would be alone, or how many pairs are missing."""
    assert result.comparison is not None
    alone = result.comparison.verdict
    assert alone is not None
    if result.kind != "cannot tell":
        return f"**{result.kind.upper()}**"
    if alone.kind != "cannot tell":
        return f"CANNOT TELL ({alone.kind} if it were the only row)"
    more = f"about {alone.more_seeds:,}" if alone.more_seeds else "more than 1,000"
    return f"CANNOT TELL ({more} more pairs)"


def _itself(found: Sequence[Result]) -> str:
    done = [each for each in found if each.pairs and each.comparison and each.comparison.verdict]
    if not done:
        return f"{len(found)} comparisons of an arm with itself have not run yet.\n"
    gaps = [abs(each.comparison.verdict.mean) for each in done if each.comparison and each.comparison.verdict]
    kinds = [each.kind for each in done]
    pairs = " or ".join(str(number) for number in sorted({each.pairs for each in done}))
    counts = ", ".join(f"{kinds.count(kind)} {kind.upper()}" for kind in KINDS)
    return (
        f"{len(done)} of {len(found)} comparisons of an arm with itself, of {pairs} pairs each, whose first "
        f"weights differ by one unit in the last place: {counts}. The mean distance is {plain(fmean(gaps))}, "
        f"the largest {plain(max(gaps))}.\n"
    )


def spread_of_gaps(result: Result) -> float:
    """Returns the standard deviation of the gaps of a row's pairs."""
    assert result.comparison is not None
    a, b = result.comparison.a.losses, result.comparison.b.losses
    return float(np.std(np.subtract(a, b), ddof=1))


def powers(gap: float, spread: float, pairs: int, delta: float) -> tuple[float, float]:
    """Returns the chance to be called different and the same, of one row alone, by simulation."""
    draws = np.random.default_rng(0).normal(gap, spread, (DRAWS, pairs))
    mean, error = draws.mean(1), draws.std(1, ddof=1) / math.sqrt(pairs)
    different = (abs(mean) > delta) & (abs(mean) > t_quantile(0.5 + SURE / 2, pairs - 1) * error)
    same = abs(mean) + t_quantile(0.5 + CLOSE / 2, pairs - 1) * error <= delta
    return float(different.mean()), float(same.mean())


def _pooled(doses: Sequence[Result]) -> tuple[float, float]:
    """Returns the spread of gaps and the margin of the doses."""
    margins = [each.comparison.verdict.delta for each in doses if each.comparison and each.comparison.verdict]
    return math.sqrt(fmean(spread_of_gaps(each) ** 2 for each in doses)), fmean(margins)


def _powers(doses: Sequence[Result]) -> str:
    spread, delta = _pooled(doses)
    rows = []
    for pairs in (4, 10, 23):
        found = [powers(gap * delta, spread, pairs, delta) for gap in (0.0, 0.5, 1.5, 2.0)]
        cells = [f"{found[0][1]:.0%}", f"{found[1][1]:.0%}", f"{found[2][0]:.0%}", f"{found[3][0]:.0%}"]
        rows.append([str(pairs), *cells])
    columns = ("pairs", "same, no gap", "same, half the margin", "different, 1.5 margins", "different, 2 margins")
    return (
        f"The gaps of the doses have a spread of {plain(spread)}, beside a margin of {plain(delta)}. By them, so "
        "many rows are decided, each alone:\n\n" + _table(columns, rows)
    )


def _commands(found: Sequence[Result]) -> str:
    rows = [
        [
            name,
            f"`{RUN} --row {name}`",
            f"`{verdict_command(each)}`" if each.pairs else "",
        ]
        for each in found
        if not (name := each.row.name).startswith(ITSELF)
    ]
    rows.append([ITSELF, f"`{RUN} --row {ITSELF}`", ""])
    return _table(("row", "trains it", "judges the logs here"), rows)


def verdict_command(result: Result) -> str:
    """Returns the `halfstep compare` that judges the logs of a row, alone."""
    row, logs = result.row, "docs/measurements/study"
    assert result.comparison is not None
    assert result.comparison.verdict is not None
    words = [f"halfstep compare {logs}/{row.size}/{row.arm} {logs}/{row.size}/{row.against}"]
    gain = f"{result.comparison.verdict.delta:.6g}"
    words += ["--delta", gain if row.margin.endswith("gain") else row.margin]
    words += [f"--column {row.metric}"]
    words += [] if row.paired else ["--unpaired"]
    return " ".join(words)


def rows_figure(found: Sequence[Result]) -> str:
    """The gap of each row with its 90 % interval, in units of its margin."""
    done = [each for each in found if each.pairs and each.row.tier != ITSELF]
    left, right, top, most = 372, WIDTH - 24, 84, 3.0
    bottom = top + 26 * len(done)

    def at(gap: float) -> float:
        return left + (max(-most, min(most, gap)) + most) / (2 * most) * (right - left)

    def parts() -> Iterator[str]:
        yield words(24, 30, "Gap to the reference, in units of the margin, with its 90 % interval", "title")
        for place, (kind, look) in enumerate(KINDS.items()):
            yield box(24 + 124 * place, 46, 12, 12, look)
            yield words(42 + 124 * place, 57, kind.upper(), "note")
        yield box(at(-1), top - 8, at(1) - at(-1), bottom - top + 8, "c faint")
        for unit in range(-3, 4):
            yield line(at(unit), top - 8, at(unit), bottom)
            yield words(at(unit), bottom + 18, f"{unit:+d}" if unit else "0", "note middle")
        for place, each in enumerate(done):
            verdict = each.comparison.verdict if each.comparison else None
            assert verdict is not None
            y, unit, look = top + 26 * place + 8, verdict.delta, KINDS[each.kind]
            yield words(24, y + 5, f"{each.row.name}  {each.row.title}", "note")
            low, high = (at(end / unit) for end in verdict.interval90)
            yield box(low, y - 1, max(1.0, high - low), 3, look)
            yield box(at(verdict.mean / unit) - 4, y - 4, 8, 8, look)

    return svg(bottom + 32, "Gap of each row with its interval", parts())


def power_figure(found: Sequence[Result]) -> str:
    """The chance to be called different, by the true gap, and where the known doses are."""
    doses = [each for each in found if each.row.tier == DOSES and each.pairs]
    spread, delta = _pooled(doses)
    left, right, top, bottom, most = 64, WIDTH - 24, 92, 320, 3.0
    gaps = np.linspace(0, most, 31)

    def spot(gap: float, share: float) -> tuple[float, float]:
        return left + min(gap, most) / most * (right - left), bottom - share * (bottom - top)

    def parts() -> Iterator[str]:
        yield words(24, 30, "Chance of the verdict DIFFERENT, by the true gap in units of the margin", "title")
        for share in (0, 0.25, 0.5, 0.75, 1):
            y = spot(0, share)[1]
            yield line(left, y, right, y)
            yield words(left - 8, y + 4, f"{share:.0%}", "note right")
        for gap in range(4):
            yield words(spot(gap, 0)[0], bottom + 20, str(gap), "note middle")
        for place, (pairs, look) in enumerate({4: "c", 10: "a", 23: "d"}.items()):
            yield box(24 + 124 * place, 46, 12, 12, look)
            yield words(42 + 124 * place, 57, f"{pairs} pairs", "note")
            yield curve([spot(gap, powers(gap * delta, spread, pairs, delta)[0]) for gap in gaps], look)
        for place, each in enumerate(doses):
            assert each.comparison is not None
            assert each.comparison.verdict is not None
            x = spot(abs(each.comparison.verdict.mean) / delta, 0)[0]
            yield line(x, top, x, bottom, "b")
            side, end = (6, "note") if x < (left + right) / 2 else (-6, "note right")
            yield words(x + side, top + 12 + 16 * place, f"{each.row.name[1:]} % fewer steps: {each.kind}", end)

    return svg(352, "Power of the test", parts())


def figures(found: Sequence[Result]) -> dict[str, str]:
    """Returns the figures that there are results for."""
    drawn = {}
    if any(each.pairs and each.row.tier != ITSELF for each in found):
        drawn["study_rows.svg"] = rows_figure(found)
    if any(each.pairs and each.row.tier == DOSES for each in found):
        drawn["study_power.svg"] = power_figure(found)
    return drawn


def page() -> str:
    """Returns the generated part of docs/study.md."""
    plan = read_plan()
    return tables(plan, results(plan, LOGS))


if __name__ == "__main__":
    for name, drawing in figures(results(read_plan(), LOGS)).items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")
