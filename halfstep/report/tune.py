"""The page of `halfstep tune`: loss against cost of each policy that was compared, and what each module tolerates.

One file that needs nothing: no script, no font, no other file.
"""

import math
from dataclasses import dataclass
from typing import Any

from halfstep.report.template import fill
from halfstep.tools.tune.reasons import describe_saving, describe_verdict, format_cost, percent, summary
from halfstep.tools.tune.rules import describe_formats
from halfstep.tools.tune.search import Option
from halfstep.tools.tune.tune import TuneResult

# The picture's inside: pixels.
LEFT, TOP, WIDTH, HEIGHT = 80, 24, 640, 300


@dataclass(frozen=True)
class Axes:
    """What the picture spans."""

    cheapest: float
    dearest: float
    lowest: float
    highest: float

    def x(self, cost: float) -> float:
        """Returns where a cost is."""
        return LEFT + WIDTH * (cost - self.cheapest) / (self.dearest - self.cheapest)

    def y(self, gap: float) -> float:
        """Returns where a gap is; one beyond the picture is at its edge."""
        inside = min(max(gap, self.lowest), self.highest)
        return TOP + HEIGHT * (self.highest - inside) / (self.highest - self.lowest)


def html(tuned: TuneResult) -> str:
    """Returns the page."""
    base, axes = tuned.policy, _axes(tuned)
    options = next(iter(tuned.rows.values()))[1:]
    return fill(
        "tune.html",
        tuned=tuned,
        title=f"What {tuned.settings.target.split(' ')[0]} bears",
        summary=summary(tuned),
        points=_points(tuned, axes),
        zero=axes.y(0),
        band=(axes.y(tuned.delta), axes.y(-tuned.delta)),
        ticks_y=[(axes.y(gap), f"{gap:+.3g}") for gap in (axes.lowest, 0.0, axes.highest)],
        ticks_x=[(axes.x(cost), format_cost(cost, tuned.unit)) for cost in (axes.cheapest, axes.dearest)],
        picture=(LEFT, TOP, WIDTH, HEIGHT),
        policies=[(each, describe_saving(tuned, each), describe_verdict(each)) for each in tuned.evaluations],
        columns=[describe_formats(base, option.compute, option.grad) for option in options],
        modules=_modules(tuned),
    )


def _axes(tuned: TuneResult) -> Axes:
    costs = [tuned.base_cost, *(each.cost for each in tuned.evaluations)]
    ends = [end for each in tuned.evaluations for end in each.verdict.interval90 if math.isfinite(end)]
    most = max([tuned.delta, *map(abs, ends)]) or 1.0
    cheapest = min(costs)
    return Axes(cheapest, max(costs) if max(costs) > cheapest else cheapest + 1, -most * 1.05, most * 1.05)


def _points(tuned: TuneResult, axes: Axes) -> list[dict[str, Any]]:
    """Returns the policies in the picture: pixels, and what to say of each."""
    cost, y = axes.x(tuned.base_cost), axes.y(0)
    sentence = f"The base, {tuned.settings.base}."
    points: list[dict[str, Any]] = [
        {"x": cost, "y": y, "low": y, "high": y, "look": "base", "label": "base", "sentence": sentence}
    ]
    for each in tuned.evaluations:
        low, high = map(axes.y, each.verdict.interval90)
        look = "chosen" if each is tuned.chosen else "met" if each.met else "missed"
        count = f"{len(each.modules)} of {len(tuned.rows)}"
        sentence = f"{count} matmuls narrow: {describe_verdict(each)}; {describe_saving(tuned, each)}."
        pixels = {"x": axes.x(each.cost), "y": axes.y(each.verdict.mean), "low": low, "high": high}
        points.append({**pixels, "look": look, "label": count, "sentence": sentence})
    return points


def _modules(tuned: TuneResult) -> list[tuple[str, str, list[tuple[str, float]]]]:
    """Returns each module, what it was given, and what each option loses with the length of its bar."""
    rows = []
    chosen, base = tuned.found.assignment, tuned.policy
    for name, options in sorted(tuned.rows.items(), key=lambda row: -max(o.damage for o in row[1])):
        given = chosen.get(name, Option())
        losses = [(percent(o.damage), 100 * math.sqrt(min(o.damage, 1.0))) for o in options[1:]]
        rows.append((name, describe_formats(base, given.compute, given.grad), losses))
    return rows
