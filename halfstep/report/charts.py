"""The charts of a run, each with a caption that says the same in numbers to readers without the script."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from halfstep.config.groups import rates_by_kind
from halfstep.config.model import ModelConfig
from halfstep.config.run import OptimizerConfig
from halfstep.config.schema import build
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.core.precision import operand_formats
from halfstep.core.roles import is_narrow
from halfstep.core.scaling import NoScale
from halfstep.report.history import History, nested
from halfstep.report.number_format import count, number, plain, plural, power_of_two, size
from halfstep.report.series import LIMIT, SMOOTH_LIMIT, Series, as_data, smooth

Look = Literal["main", "raw", "smooth", "held-out", "reference", "mark", "event"]
# From this many steps on, the smooth line is shown at first; below, it adds nothing to the steps.
SMOOTH_FROM = 100
MARKS = 500  # incidents that are marked, the last ones


@dataclass(frozen=True)
class Line:
    """One line of a chart, and how it looks: the names are classes of the style sheet."""

    label: str
    look: Look
    series: Series
    names: tuple[str, ...] = ()  # of marks, each at its step


@dataclass(frozen=True)
class Chart:
    """One chart: `unit` says how its numbers are written, `log` whether its axis is logarithmic."""

    id: str
    title: str
    unit: Literal["plain", "count", "size", "power"]
    lines: tuple[Line, ...]
    caption: str
    log: Literal["never", "choice", "always"] = "never"
    wide: bool = False

    def data(self) -> dict[str, Any]:
        """Returns what the page's script draws."""
        lines = [
            {"label": line.label, "look": line.look, **({"names": line.names} if line.names else {})}
            | as_data(line.series, SMOOTH_LIMIT if line.look == "smooth" else LIMIT)
            for line in self.lines
        ]
        return {"unit": self.unit, "log": self.log == "always", "lines": lines}

    @property
    def has_smooth(self) -> bool:
        """Whether it has a smooth line, which can be switched off."""
        return any(line.look == "smooth" for line in self.lines)

    @property
    def smooth_first(self) -> bool:
        """Whether the smooth line is shown at first."""
        return len(self.lines[0].series.steps) >= SMOOTH_FROM

    def last(self, line: Line) -> str:
        """Returns the last value of a line, or how many marks it has."""
        values = line.series.values
        return f"{len(values):,}" if line.look in ("mark", "event") else _WRITTEN[self.unit](values[-1])


_WRITTEN: dict[str, Callable[[float], str]] = {"plain": plain, "count": count, "size": size, "power": power_of_two}


def charts(history: History, policy: Policy | None, marks: Mapping[int, str] | None = None) -> list[Chart]:
    """Returns the charts for which there are numbers, in the order of the page; `marks` name incidents by step."""
    drawn = [
        _loss(history, marks or {}),
        _scale(history) if has_scale(history, policy) else None,
        _single(history, "tokens_per_second", "throughput", "Throughput", "tokens per second", "count"),
        _single(history, "grad_norm", "gradient", "Gradient norm", "norm", "plain", log="always"),
        _rates(history),
        _single(history, "memory", "memory", "Memory", "in use", "size"),
    ]
    return [chart for chart in drawn if chart is not None]


def has_scale(history: History, policy: Policy | None) -> bool:
    """Whether a loss scale is in use: by the policy, or by what was recorded before the policy was changed."""
    if policy is not None and not isinstance(policy.scale, NoScale):
        return True
    return bool((history.steps.column("scale").numbers != 1).any())


def why_unscaled(policy: Policy) -> str:
    """Says why a run without a loss scale needs none."""
    formats = operand_formats(policy)
    wide = sorted({str(fmt) for fmt in formats if not is_narrow(fmt)} - {"fp32"})
    narrow = sorted(str(fmt) for fmt in formats if is_narrow(fmt))
    parts = [f"{_list_words(wide)} {'has' if len(wide) == 1 else 'have'} fp32's range" if wide else ""]
    if narrow:
        parts.append(f"{_list_words(narrow)} operands have their own scales")
    reasons = " and ".join(part for part in parts if part)
    return f"No loss scale: {reasons or 'everything is computed in fp32, where no gradient is lost to range'}."


def _loss(history: History, marks: Mapping[int, str]) -> Chart | None:
    train, held_out = history.steps.column("loss"), history.held_out("loss")
    if not len(train.numbers) and not len(held_out.numbers):
        return None
    lines = list(_noisy("training", train))
    caption = _describe("The training loss", train, plain)
    if len(held_out.numbers):
        lines.append(Line("held-out", "held-out", held_out))
        caption += " " + _describe("The held-out loss", held_out, plain)
    bigram = bigram_loss(history)
    if math.isfinite(bigram):
        steps = [*train.steps, *held_out.steps]
        lines.append(Line("bigram entropy", "reference", Series([min(steps), max(steps)], [bigram, bigram])))
        caption += f" The bigram entropy of the text is {plain(bigram)}."
    caption += " All in nats per token."
    if marks:
        marks = dict(list(marks.items())[-MARKS:])
        gaps = Series(list(marks), [math.nan] * len(marks))
        lines.append(Line("incidents", "event", gaps, tuple(marks.values())))
        caption += " Vertical lines mark incidents, which the next section lists."
    return Chart("loss", "Loss", "plain", tuple(lines), caption, log="choice", wide=True)


def bigram_loss(history: History) -> float:
    """Returns the bigram entropy in nats per token, by an evaluation with bits per byte; NaN without one."""
    bits = number(nested(history.start, "data", "bigram_bits"))
    pairs = zip(history.held_out("loss").values, history.held_out("bits_per_byte").values, strict=True)
    nats = [loss / score for loss, score in pairs if math.isfinite(loss) and score > 0]
    return bits * nats[-1] if nats else math.nan


def _single(
    history: History,
    column: str,
    identifier: str,
    title: str,
    label: str,
    unit: Literal["plain", "count", "size"],
    log: Literal["never", "always"] = "never",
) -> Chart | None:
    series = history.steps.column(column)
    if not len(series.numbers):
        return None
    written = _WRITTEN[unit]
    caption = _describe(title, series, written)
    if column == "tokens_per_second":
        caption += f" Half of the steps ran above {written(float(np.median(series.numbers)))}."
    noisy = column in ("tokens_per_second", "grad_norm")
    lines = _noisy(label, series) if noisy else (Line(label, "main", series),)
    return Chart(identifier, title, unit, lines, caption, log)


def _rates(history: History) -> Chart | None:
    """Returns the learning rate of every optimizer and kind of parameter; those that are the same share a line."""
    recorded = history.steps.column("learning_rate")
    sessions = [_session_rates(each.start) for each in history.sessions]
    if not len(recorded.numbers) or not all(sessions):  # a configuration of another version
        return _single(history, "learning_rate", "rate", "Learning rate", "rate", "plain")
    lines: dict[tuple[bytes, str], tuple[list[str], Series]] = {}
    for kind, (optimizer, _) in sessions[-1].items():
        shares = np.ones(len(recorded.steps))  # of the rate that is recorded: that of the matrices in blocks
        for session, rates in zip(history.sessions, sessions, strict=True):
            if session.first_step is not None:
                own = rates[kind][1] / rates["matrices in blocks"][1]
                shares[np.asarray(recorded.steps) >= session.first_step] = own
        series = Series(recorded.steps, np.asarray(recorded.values) * shares)
        lines.setdefault((shares.tobytes(), optimizer), ([], series))[0].append(kind)
    named = [(f"{optimizer}, {' and '.join(kinds)}", series) for (_, optimizer), (kinds, series) in lines.items()]
    drawn = tuple(Line(label, look, series) for (label, series), look in zip(named, _LOOKS, strict=False))
    (label, series), *others = named
    caption = _describe(f"The rate of {label}", series, plain)
    caption += "".join(f" {name}: {plain(s.numbers[0])} to {plain(s.numbers[-1])}." for name, s in others)
    return Chart("rate", "Learning rate", "plain", drawn, caption, log="choice" if len(drawn) > 1 else "never")


_LOOKS: tuple[Look, ...] = ("main", "held-out", "reference", "raw")


def _session_rates(start: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Returns the rates of a session, the matrices in blocks first; none if they cannot be read."""
    model, optimizer = (nested(start, "config", name) for name in ("model", "optimizer"))
    if not isinstance(model, Mapping) or not isinstance(optimizer, Mapping):
        return {}
    try:
        rates = rates_by_kind(build(ModelConfig, model), build(OptimizerConfig, optimizer))
    except HalfstepError:
        return {}
    return {kind: rates[kind] for kind in sorted(rates, key=lambda kind: kind != "matrices in blocks")}


def _noisy(label: str, series: Series) -> tuple[Line, Line]:
    return Line(label, "raw", series), Line("smooth", "smooth", smooth(series))


def _scale(history: History) -> Chart | None:
    series = history.steps.column("scale")
    if not len(series.numbers):
        return None
    skips = history.skips()
    marks = Series(list(skips), np.asarray(series.values)[np.searchsorted(series.steps, list(skips))])
    total = sum(skips.values())
    caption = f"{_describe('The loss scale', series, power_of_two)} "
    if total:
        caption += (
            f"{plural(total, 'step')} {_was(total)} skipped because gradients were not "
            f"finite, the first by step {min(skips):,} and the last by step {max(skips):,}."
        )
    else:
        caption += "No step was skipped."
    lines = [Line("scale", "main", series)] + ([Line("skipped steps", "mark", marks)] if total else [])
    return Chart("scale", "Loss scale", "power", tuple(lines), caption, log="always")


def _describe(subject: str, series: Series, written: Callable[[float], str]) -> str:
    """Says the first, last, smallest and largest value, and how many could not be drawn."""
    points, numbers = np.flatnonzero(np.isfinite(series.values)), series.numbers
    chosen = points[0], points[-1], points[numbers.argmin()], points[numbers.argmax()]
    (first_at, first), (last_at, last), low, high = (
        (int(series.steps[place]), float(series.values[place])) for place in chosen
    )
    if first_at == last_at:
        text = f"{subject} was {written(first)} at step {first_at:,}."
    elif low[1] == high[1]:
        text = f"{subject} stayed at {written(first)} from step {first_at:,} to step {last_at:,}."
    else:
        text = (
            f"{subject} went from {written(first)} at step {first_at:,} to {written(last)} at step "
            f"{last_at:,}; lowest {written(low[1])} at step {low[0]:,}, highest {written(high[1])} at step "
            f"{high[0]:,}."
        )
    gaps = series.num_gaps
    return f"{text} {plural(gaps, 'value')} {_was(gaps)} not finite and left a gap." if gaps else text


def _was(amount: int) -> str:
    return "was" if amount == 1 else "were"


def _list_words(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
