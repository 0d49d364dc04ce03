"""The pictures of the layers: headroom and updates as maps over time, and the distribution of exponents.

All of a picture's numbers are in the page, so they are packed: maps as fp32 numbers, histograms as 16-bit
logarithms of shares, both in base64. What is too much for a page is merged before (layer_history.py).
"""

import base64
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import FormatError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, Format, parse
from halfstep.report.layer_history import VIEWS, Column, Distribution, LayerHistory, coarse
from halfstep.report.number_format import percent, plain, plural

COLUMNS = 256  # more than most screens tell apart
CELLS = 300_000  # of all maps together: 1.6 MB
SHARES = 900_000  # of all histograms together: 2.4 MB
OCTAVE = 2048  # how many codes of a share lie between it and its half
COMPARED = (FP16, BF16, E5M2, E4M3)
ROLES = {"activation": "activations", "gradient": "gradients", "weight": "weights"}


@dataclass(frozen=True)
class LayerFigures:
    """What the page shows of the layers: data for the script, and captions that say the same in words."""

    data: dict[str, Any]
    headroom: str
    updates: str
    exponents: str

    @property
    def names(self) -> list[str]:
        """The layers, in their order."""
        names: list[str] = self.data["names"]
        return names


def figures(history: LayerHistory, sampling: str = "") -> LayerFigures | None:
    """Returns the pictures; None if nothing was watched. `sampling` says how often samples are taken."""
    if not history.layers or not (history.columns or history.samples):
        return None
    columns = coarse(history.columns, max(16, min(COLUMNS, CELLS // (len(VIEWS) * len(history.layers)))))
    formats = {role: [layer.formats.get(role, "") for layer in history.layers] for role in ROLES}
    named = {*COMPARED, *(f for written in formats.values() for f in map(own_format, written) if f is not None)}
    values = _stack_columns(columns, len(history.layers))
    ends = [_ends(history.samples, key) for key in {key for one in history.samples for key in one.histograms}]
    samples = coarse(history.samples, max(2, SHARES // max(1, sum(high - low + 1 for low, high in ends))))
    data = {
        "names": [layer.name for layer in history.layers],
        "kinds": [layer.kind for layer in history.layers],
        "formats": formats,
        "first": _tightest(history, values),
        "ranges": {str(each): _range(each) for each in sorted(named, key=str)},
        "after": [column.after for column in columns],
        "last": [column.last for column in columns],
        # A map of zeros alone is left out.
        "views": {view: pack(shown) for view, shown in zip(VIEWS, values, strict=True) if (shown > 0).any()},
        "watched": [view for view, shown in zip(VIEWS, values, strict=True) if np.isfinite(shown).any()],
        "samples": {"steps": [one.last for one in samples], "why": [one.why for one in samples]},
        "histograms": {role: _histograms(samples, role, len(history.layers)) for role in ROLES},
    }
    exponents = _exponents(history)
    exponents += sampling if exponents else ""
    return LayerFigures(data, _headroom(history, columns, values), _updates(history, columns, values), exponents)


def own_format(written: str) -> Format | None:
    """Returns the format that an event names, such as `bf16` or `e4m3:row`; None if this version lacks it."""
    try:
        return parse(written.partition(":")[0])
    except FormatError:
        return None


def headroom_in(written: str) -> float:
    """Returns log2 of the largest number of a format that is used without a scale; NaN for others."""
    known = own_format(written)
    return math.log2(known.max) if known is not None and known.bits > 8 else math.nan


def pack(values: NDArray[Any]) -> str:
    """Returns numbers as base64 of their bytes, the lowest first."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _range(fmt: Format) -> dict[str, float]:
    """Returns log2 of the numbers at which a format ends; what is scaled into it has no fixed ends."""
    return {
        "largest": math.log2(fmt.max),
        "normal": fmt.min_exponent,
        "smallest": fmt.min_exponent - fmt.mantissa_bits,
        "scaled": fmt.bits <= 8,
    }


def _stack_columns(columns: list[Column], layers: int) -> NDArray[np.float32]:
    """Returns (views, layers, columns)."""
    stack = np.full((len(VIEWS), layers, len(columns)), np.nan, np.float32)
    for place, column in enumerate(columns):
        stack[:, : column.values.shape[1], place] = column.values
    return stack


# ---- histograms


def _ends(samples: Iterable[Distribution], key: tuple[int, str]) -> tuple[int, int]:
    exponents = [e for one in samples for e in one.histograms.get(key, ())]
    return min(exponents, default=0), max(exponents, default=-1)


def _histograms(samples: list[Distribution], role: str, layers: int) -> list[dict[str, Any] | None]:
    """Returns for each layer its lowest exponent, and codes by sample and exponent: 0 for none."""
    packed_layers: list[dict[str, Any] | None] = []
    for row in range(layers):
        low, high = _ends(samples, (row, role))
        if high < low:
            packed_layers.append(None)
            continue
        counts = np.zeros((len(samples), high - low + 1))
        for place, one in enumerate(samples):
            for exponent, amount in one.histograms.get((row, role), {}).items():
                counts[place, exponent - low] = amount
        packed_layers.append({"low": low, "width": high - low + 1, "codes": pack(codes(counts))})
    return packed_layers


def codes(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Returns 65535 for all of a sample, OCTAVE less for each halving, 0 for none of it."""
    totals = counts.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.log2(counts / totals)
    return np.where(counts > 0, np.clip(np.rint(65535 + OCTAVE * logarithms), 1, 65535), 0).astype(np.uint16)


def _tightest(history: LayerHistory, values: NDArray[np.float32]) -> int:
    """Returns the layer whose activations come nearest to the end of their format, or the first."""
    amax = values[VIEWS.index("activation.amax")]
    tops = np.array([headroom_in(layer.formats.get("activation", "")) for layer in history.layers])
    with np.errstate(divide="ignore", invalid="ignore"):
        room = tops - np.log2(np.nan_to_num(amax).max(axis=1, initial=0))
    return int(np.where(np.isfinite(room), room, np.inf).argmin())


# ---- captions


def _exponents(history: LayerHistory) -> str:
    if not history.samples:
        return ""
    steps = [one.last for one in history.samples]
    alarms = sum(one.why.startswith("alarm") for one in history.samples)
    when = f"from step {steps[0]:,} to step {steps[-1]:,}" if len(steps) > 1 else f"at step {steps[0]:,}"
    caption = f"Each column is a sample of a layer's numbers, {plural(len(steps), 'sample')} {when}; the stronger "
    caption += "its color, the more numbers have that exponent. Lines mark where a format ends."
    return caption + (f" {plural(alarms, 'sample')} followed an alarm." if alarms else "")


def _headroom(history: LayerHistory, columns: list[Column], values: NDArray[np.float32]) -> str:
    sentences = []
    for role in ("activation", "gradient"):
        amax, overflow = (values[VIEWS.index(f"{role}.{what}")] for what in ("amax", "overflow"))
        tops = np.array([headroom_in(layer.formats.get(role, "")) for layer in history.layers])
        with np.errstate(divide="ignore", invalid="ignore"):
            room = tops[:, None] - np.log2(amax)
        known = np.isfinite(room)
        if known.any():
            row, place = np.unravel_index(np.where(known, room, np.inf).argmin(), room.shape)
            layer, least = history.layers[row], round(float(room[row, place]), 1)
            where = f"at `{layer.name}`, {_describe_steps(columns[place])}."
            if least >= 0:
                said = f"The least headroom of {ROLES[role]}: {plain(least)} bits in {layer.formats[role]}"
            else:
                said = f"The largest of the {ROLES[role]} was {plain(-least)} bits beyond {layer.formats[role]}"
            sentences.append(f"{said}, {where}")
        if (overflow > 0).any():
            worst = np.unravel_index(np.nanargmax(overflow), overflow.shape)
            sentences.append(
                f"Up to {percent(float(overflow[worst]))} of the {ROLES[role]} of "
                f"`{history.layers[worst[0]].name}` overflowed, {_describe_steps(columns[worst[1]])}."
            )
    return " ".join(sentences)


def _updates(history: LayerHistory, columns: list[Column], values: NDArray[np.float32]) -> str:
    lost = values[VIEWS.index("weight.lost")]
    if not np.isfinite(lost).any():
        return ""
    row, place = np.unravel_index(np.nanargmax(lost), lost.shape)
    worst = float(lost[row, place])
    if worst == 0:
        return "No update of a weight was lost: every one that was not zero changed the stored weight."
    ever = int((np.nan_to_num(lost).max(axis=1) > 0.01).sum())
    name = history.layers[row].name
    return (
        f"The most updates were lost at `{name}`: {percent(worst)}, {_describe_steps(columns[place])}. "
        f"{ever or 'None'} of {plural(len(history.layers), 'layer')} lost more than 1 % at some time."
    )


def _describe_steps(column: Column) -> str:
    if column.last - column.after <= 1:
        return f"at step {column.last:,}"
    return f"in steps {column.after + 1:,} to {column.last:,}"
