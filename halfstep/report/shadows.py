"""Steps beside the same steps in fp32: the loss against what noise does to it, and layers that left their band."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.report.charts import Chart, Line
from halfstep.report.history import Event, History
from halfstep.report.number_format import number, plain, plural
from halfstep.report.series import Series

SHOWN = 20  # layers


@dataclass(frozen=True)
class Shadows:
    """The section: a chart, a sentence, and the layers outside, those of the last shadow first."""

    chart: Chart
    summary: str
    caption: str
    rows: list[dict[str, Any]]  # when a layer left the band last, how far, and how often


def shadows(history: History) -> Shadows | None:
    """Returns the section; None without shadows."""
    if not (events := {step: history.shadows[step] for step in sorted(history.shadows)}):
        return None
    rows = _rows(events)
    caption = "Layers whose gradients noise does not explain, where they did so last"
    caption += ". SQNR: how far, in dB, the difference is below the gradient; 6 dB less double it"
    if len(rows) > SHOWN:
        caption += f": {SHOWN} of {len(rows)}"
    return Shadows(_chart(events), _summary(events, rows), caption, rows[:SHOWN])


def _chart(events: Mapping[int, Event]) -> Chart:
    steps = list(events)
    difference = [number(event.get("difference")) for event in events.values()]
    low, high = zip(*(_band_of(event, "band") for event in events.values()), strict=True)
    lines = (
        Line("loss above that in fp32", "held-out", Series(steps, difference)),
        Line("lowest of noise", "reference", Series(steps, low)),
        Line("highest of noise", "reference", Series(steps, high)),
    )
    outside = sum(not a <= d <= b for d, a, b in zip(difference, low, high, strict=True) if d == d)
    caption = (
        f"{plural(len(steps), 'step')} compared, the last at step {steps[-1]:,}: {plain(difference[-1])}, where "
    )
    caption += f"noise makes {plain(low[-1])} to {plain(high[-1])}. "
    caption += f"{outside or 'None'} of them {'was' if outside == 1 else 'were'} outside. In nats per token."
    return Chart("shadow", "Loss beside fp32", "plain", lines, caption, wide=True)


def _band_of(table: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Returns the ends of a band; NaN where there is none."""
    band = table.get(key)
    low, high = band if isinstance(band, list | tuple) and len(band) == 2 else (None, None)
    return number(low), number(high)


def _summary(events: Mapping[int, Event], rows: list[dict[str, Any]]) -> str:
    last = [*events.values()][-1]
    noise = str(last.get("noise") or "the compute format")
    text = (
        "The same weights and batch ran in fp32 before these steps, and eight times with every operand of a "
        f"matmul moved by half an ulp of {noise}: what that noise does is no concern. "
    )
    if not rows:
        return text + "The gradients of all layers stayed inside."
    causes = dict.fromkeys(str(c) for e in events.values() for c in e.get("causes") or ())
    named = ", ".join(f"`{name.replace('`', '')}`" if name else "the model's own code" for name in causes)
    text += f"{plural(len(rows), 'layer')} left the band."
    return f"{text} Alone, with the rest in fp32, these lead outside: {named}." if named else text


def _rows(events: Mapping[int, Event]) -> list[dict[str, Any]]:
    times: Counter[str] = Counter()
    last: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for step, event in events.items():
        for name, layer in (event.get("layers") or {}).items():
            if layer.get("outside"):
                times[name] += 1
                last[name] = step, layer
    rows = [
        {"name": name, "times": times[name], "step": step, **_row(layer)} for name, (step, layer) in last.items()
    ]
    return sorted(rows, key=lambda row: (-row["step"], -row["times"]))


def _row(layer: Mapping[str, Any]) -> dict[str, str]:
    given = layer.get("band")
    band = given if isinstance(given, Mapping) else {}
    low, high = _band_of(band, "norm_ratio")
    return {
        "cosine": f"{number(layer.get('cosine')):.6f} (lowest {number(band.get('cosine')):.6f})",
        "norm_ratio": f"{number(layer.get('norm_ratio')):.4f} ({low:.4f} to {high:.4f})",
        "sqnr": f"{number(layer.get('sqnr')):.1f} dB (lowest {number(band.get('sqnr')):.1f})",
    }
