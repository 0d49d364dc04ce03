"""What an optimizer meant to do to a weight, in fp64, and what arrived.

The formulas read the state *after* the step, so that nothing has to be stepped twice (w is the weight before it):

    SGD     b after the step, g with the decay   update = -rate b; Nesterov: -rate (g + momentum b)
    Adam    m, v after the step, t steps         update = -rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    AdamW   the same, and apart from it          decay = -rate weight_decay w
    Lion    m *before* the step                  update = -rate sign(b1 m + (1 - b1) g)

An update is **lost** if it is not zero, the step was not skipped, and the stored value is the one from before.
A row of an embedding that no token used has an update of zero, and loses nothing. A decay is lost if it alone
would not change the stored value: below half of its last bit. Beside the counts stands the share that arrived,

    arrived = sum(actual * intended) / sum(intended^2)

which is 1 for exact arithmetic, and near 1 too where many updates are lost but the large ones are not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.core.audit.record import UpdateCounts
from halfstep.core.formats import parse
from halfstep.core.rounding import cast

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """One tensor around one step, in fp64; a part of a large one."""

    weight: Array  # as stored, before the step
    gradient: Array  # unscaled
    state: Mapping[str, Any]  # of the optimizer, after the step; numbers or arrays
    earlier: Mapping[str, Any]  # of the optimizer, before the step
    settings: Mapping[str, Any]  # of its parameter group: lr, betas, ...


@dataclass(frozen=True)
class Intended:
    """What a step should have added: the update, and the decoupled decay, if there is one."""

    update: Array
    decay: Array | None = None


def sgd(seen: Seen) -> Intended:
    """SGD with momentum, dampening, Nesterov's form and coupled decay."""
    given = seen.settings
    gradient = seen.gradient * (-1 if given.get("maximize") else 1) + given.get("weight_decay", 0) * seen.weight
    momentum, buffer = given.get("momentum", 0), seen.state.get("momentum_buffer")
    if momentum and buffer is not None:
        gradient = gradient + momentum * buffer if given.get("nesterov") else buffer
    return Intended(-float(given["lr"]) * gradient)


def adam(seen: Seen, *, decoupled: bool = False) -> Intended:
    """Adam; decay is part of the gradient, and so of the moments, unless it is decoupled."""
    given, state = seen.settings, seen.state
    (b1, b2), steps, rate = given["betas"], float(state["step"]), float(given["lr"])
    second = state["max_exp_avg_sq"] if given.get("amsgrad") else state["exp_avg_sq"]
    root = np.sqrt(second / (1 - float(b2) ** steps)) + given["eps"]
    update = -rate * (state["exp_avg"] / (1 - float(b1) ** steps)) / root
    if not (decoupled or given.get("decoupled_weight_decay")):
        return Intended(update)
    return Intended(update, decoupled_decay(seen))


def adamw(seen: Seen) -> Intended:
    """Adam with decoupled decay."""
    return adam(seen, decoupled=True)


def lion(seen: Seen) -> Intended:
    """Lion, from its moment before the step."""
    given, (b1, _) = seen.settings, seen.settings["betas"]
    mixed = b1 * seen.earlier.get("exp_avg", 0.0) + (1 - b1) * seen.gradient
    return Intended(-float(given["lr"]) * np.sign(mixed), decoupled_decay(seen))


def decoupled_decay(seen: Seen) -> Array:
    """Returns what decoupled decay adds."""
    return -float(seen.settings["lr"]) * float(seen.settings.get("weight_decay", 0)) * seen.weight


FORMULAS: dict[str, Callable[[Seen], Intended]] = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "Lion": lion}


def count(before: Array, after: Array, intended: Intended, format: str, gradient: Array) -> UpdateCounts:
    """Returns the counts of one step of one tensor, stored in `format`."""
    return count_each(before, after, intended, format, gradient, [before.size])[0]


def count_each(
    before: Array, after: Array, intended: Intended, format: str, gradient: Array, sizes: Sequence[int]
) -> list[UpdateCounts]:
    """Returns the counts of one step of several tensors that were joined to one; none is empty."""
    meant, same = intended.update != 0, after == before
    decay = np.zeros_like(before) if intended.decay is None else intended.decay
    with np.errstate(invalid="ignore", over="ignore"):
        whole, actual = intended.update + decay, after - before
        finite = np.isfinite(whole) & np.isfinite(actual)
        whole, actual = np.where(finite, whole, 0.0), np.where(finite, actual, 0.0)
        decays = (decay != 0) & np.isfinite(before)
        kept = _round_as_stored(before + np.where(decays, decay, 0.0), format) == before
    columns = {
        "intended": meant,
        "lost": meant & same,
        "decay_intended": decays,
        "decay_lost": decays & kept,
        "arrived_sum": actual * whole,
        "intended_sum": whole * whole,
        "gradient": gradient != 0,
        "moved": ~same,
    }
    return _each(columns, sizes)


def count_unknown(before: Array, after: Array, gradient: Array) -> UpdateCounts:
    """Returns the counts of one step of an optimizer whose formula is not known: only the gradient is."""
    return count_each_unknown(before, after, gradient, [before.size])[0]


def count_each_unknown(before: Array, after: Array, gradient: Array, sizes: Sequence[int]) -> list[UpdateCounts]:
    """Returns the same of several tensors that were joined to one."""
    meant, same = gradient != 0, after == before
    columns = {"intended": meant, "lost": meant & same, "gradient": meant, "moved": ~same}
    return [replace(counts, exact=False) for counts in _each(columns, sizes)]


def _each(columns: Mapping[str, NDArray[Any]], sizes: Sequence[int]) -> list[UpdateCounts]:
    """Returns the sum of each column over each of the joined tensors."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    sums = {
        name: np.add.reduceat(column.astype(np.int64) if column.dtype == bool else column, starts).tolist()
        for name, column in columns.items()
    }
    return [
        UpdateCounts(steps=1, elements=size, **{k: bool(v[i]) if k == "moved" else v[i] for k, v in sums.items()})
        for i, size in enumerate(sizes)
    ]


def _round_as_stored(values: Array, format: str) -> Array:
    """Returns values as a format stores them, to nearest-even. Of the common ones without `cast`, which is exact
    for every format and takes ten times as long."""
    wide = values.astype(np.float32)
    if format == "fp16":
        return wide.astype(np.float16).astype(np.float64)
    if format == "bf16":
        bits = wide.view(np.uint32)
        bits = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isfinite(wide), bits.view(np.float32), wide).astype(np.float64)
    fmt = parse(format)
    return np.where(np.isfinite(wide), cast(np.where(np.isfinite(wide), wide, 0), fmt, overflow="saturate"), wide)
