"""A comparison in words, in a table, and as a page."""

import math
from typing import Any

import numpy as np

from halfstep import __version__
from halfstep.core.compare.divergence import Series as Curves
from halfstep.core.compare.gaps import Verdict
from halfstep.report.charts import Chart, Line, Look
from halfstep.report.number_format import count, plain, plural, size
from halfstep.report.page import assets
from halfstep.report.series import Series
from halfstep.report.template import fill
from halfstep.tools.compare.curves import LOSS
from halfstep.tools.compare.judge import Comparison

Row = tuple[str, str, str]


def conclusion(result: Comparison) -> list[str]:
    """Returns the verdict in one line, and what it rests on in another."""
    verdict = result.verdict
    names = f"{result.a.name} against {result.b.name}"
    if verdict is None:
        return [f"{names}: no verdict, because the losses cannot be compared"]
    return [f"{names}: {verdict.kind.upper()}", _reason(result, verdict)]


def _reason(result: Comparison, verdict: Verdict) -> str:
    a, b, delta = len(result.a.losses), len(result.b.losses), plain(verdict.delta)
    if verdict.diverged:
        return f"{verdict.diverged} of {plural(a, 'run')} ended without a finite loss."
    of = f"mean gap of {plural(a, 'pair')}" if result.seeds else f"gap between the means of {a} and {b} runs"
    gap = f"The {of} is {signed(verdict.mean)}"
    if result.behind is not None:
        gap += f" ({plural(result.behind, 'step')})"
    if min(a, b) == 1:
        one = "pair" if result.seeds else "run"
        return f"{gap}, and one {one} says nothing about luck: train about 4 seeds of each."
    if verdict.kind == "different":
        return f"{gap}, more than {delta}, and the 99 % interval {_interval(verdict.interval99)} excludes 0."
    within = f"the 90 % interval {_interval(verdict.interval90)}"
    if verdict.kind == "same":
        return f"{gap}, and {within} lies within ±{delta}."
    more = f"about {verdict.more_seeds:,} more" if verdict.more_seeds else "more than 1,000"
    return f"{gap}, {within} does not lie within ±{delta}, and {more} seeds would be needed to decide."


def evidence(result: Comparison) -> list[Row]:
    """Returns the rows of a table: what is compared, of A and of B."""
    a, b = result.a, result.b
    rows = [("runs", str(len(a.runs)), str(len(b.runs)))]
    if a.losses:
        rows.append((result.measure, plain(float(np.mean(a.losses)), 6), plain(float(np.mean(b.losses)), 6)))
    if result.spread is not None:
        finite = all(map(math.isfinite, a.losses))
        spread = plain(float(np.std(a.losses, ddof=1))) if finite else "not a number"
        rows.append(("spread over seeds", spread, plain(result.spread)))
    if result.correlation is not None:
        rows.append(("correlation of the pairs", f"{result.correlation:.2f}", ""))
    if result.verdict is not None and result.behind is not None:
        more = f"about {result.behind:,} more"
        both = (more, "") if result.verdict.mean > 0 else ("", more)
        rows.append(("steps to the loss of the other", *both))
    if a.tokens_per_second and b.tokens_per_second:
        # No ratio: the runs were made one after the other, beside whatever else the machine did.
        rows.append(("tokens per second, when it ran", count(a.tokens_per_second), count(b.tokens_per_second)))
    if a.memory and b.memory:
        rows.append(("peak memory", f"{size(a.memory)} ({a.memory / b.memory:.2f} times)", size(b.memory)))
    if result.curves is not None:
        if result.seeds:
            differ = "none" if result.first_difference is None else f"{result.first_difference:,}"
            rows.append(("first step where losses differ at all", differ, ""))
        rows.append(("first step that seeds do not explain", describe_divergence(result), ""))
    rows += [(key, _format_value(one), _format_value(other)) for key, one, other in result.settings]
    return rows


def describe_divergence(result: Comparison) -> str:
    """Says where the curves part."""
    parting = result.parting
    if result.parting_unknown:
        return f"unknown: {result.parting_unknown}"
    return "none" if parting is None else f"{parting.step:,}, in the {parting.name}"


def html(result: Comparison) -> str:
    """Returns the page."""
    drawn = charts(result)
    pairs = list(zip(result.seeds, result.a.losses, result.b.losses, strict=False))  # without a verdict, no losses
    sides = (result.a, result.b)
    runs = [(side.name, *row) for side in sides for row in zip(side.runs, side.losses, strict=False)]
    return fill(
        "compare.html",
        title=f"{result.a.name} against {result.b.name}",
        headline=". ".join(conclusion(result)),
        kind=None if result.verdict is None else result.verdict.kind,
        tiles=_tiles(result),
        result=result,
        rows=evidence(result),
        pairs=[(str(seed), plain(a, 6), plain(b, 6), signed(a - b)) for seed, a, b in pairs],
        runs=[] if pairs else [(name, run, plain(loss, 6)) for name, run, loss in runs],
        charts=drawn,
        data={"charts": {chart.id: chart.data() for chart in drawn}, "layers": None, "what_if": []},
        halfstep=__version__,
        **assets(maps=False, live=False),
    )


def charts(result: Comparison) -> list[Chart]:
    """Returns the mean curves, the gap of the loss in its band, and that of what parts first if it is another."""
    if result.curves is None:
        return []
    a, b = result.curves
    drawn = [_means(result, a[LOSS], b[LOSS])] if LOSS in a else []
    parting = result.parting
    names = [LOSS, *([parting.name] if parting is not None and parting.name != LOSS else [])]
    return drawn + [_gap(result, name, a[name], b[name]) for name in names if name in a]


def _means(result: Comparison, a: Curves, b: Curves) -> Chart:
    both = ((result.a, a), (result.b, b))
    means = {side.name: Series(curves.steps, np.mean(curves.values, axis=0)) for side, curves in both}
    looks: tuple[Look, ...] = ("main", "held-out")
    lines = [Line(name, look, series) for (name, series), look in zip(means.items(), looks, strict=False)]
    ends = "; ".join(f"{name} ends at {plain(float(series.values[-1]))}" for name, series in means.items())
    caption = f"The training loss in nats per token, mean of {plural(len(a.values), 'run')}: {ends}."
    return Chart("loss", "Loss", "plain", (*lines, *_mark(result)), caption, log="choice", wide=True)


def _gap(result: Comparison, name: str, a: Curves, b: Curves) -> Chart:
    gap = Series(b.steps, np.mean(a.values - b.values, axis=0))
    lines = [Line("mean gap", "main", gap)]
    caption = f"{result.a.name} minus {result.b.name}, mean of {plural(len(a.values), 'pair')}."
    limits = None if result.limits is None else result.limits.get(name)
    if limits is not None:
        lines += [Line("seeds explain up to", "reference", Series(b.steps, limits))]
        lines += [Line("and down to", "reference", Series(b.steps, -limits))]
        caption += " The dashed band is simultaneous: seeds alone seldom leave it at any step of any curve."
    title = f"Gap of the {name}" + ("" if name == LOSS else ", as a logarithm")
    identifier = "gap" if name == LOSS else "gap-of-first"
    return Chart(identifier, title, "plain", (*lines, *_mark(result)), caption, wide=True)


def _mark(result: Comparison) -> tuple[Line, ...]:
    if (parting := result.parting) is None:
        return ()
    return (Line("parting", "event", Series([parting.step], [math.nan]), (f"parts in the {parting.name}",)),)


def _tiles(result: Comparison) -> list[tuple[str, str, str]]:
    """Returns the key figures: the name of each, its value, and a note."""
    verdict, a, b = result.verdict, result.a, result.b
    tiles = []
    if verdict is not None:
        tiles.append(("mean gap", signed(verdict.mean), f"99 %: {_interval(verdict.interval99)}"))
        tiles.append(("does not matter", f"±{plain(verdict.delta)}", result.measure))
    if result.curves is not None:
        step = "none" if result.parting is None else f"step {result.parting.step:,}"
        step = "unknown" if result.parting_unknown else step
        tiles.append(("curves part", step, describe_divergence(result)))
    if a.tokens_per_second and b.tokens_per_second:
        note = f"{result.b.name}: {count(b.tokens_per_second)}; not timed side by side"
        tiles.append((f"tokens per second, {result.a.name}", count(a.tokens_per_second), note))
    if a.memory and b.memory:
        note = f"{size(a.memory)} against {size(b.memory)}"
        tiles.append(("peak memory", f"{a.memory / b.memory:.2f} times", note))
    return tiles


def signed(value: float) -> str:
    """`+0.0012`."""
    return f"+{plain(value)}" if value > 0 else plain(value)


def _interval(ends: tuple[float, float]) -> str:
    return f"[{signed(ends[0])}, {signed(ends[1])}]"


def _format_value(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
