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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.core.audit.record import UpdateCounts
from halfstep.core.formats import parse
from halfstep.core.stats.tensors import UpdateStats

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
    return Intended(update, decayed(seen))


def adamw(seen: Seen) -> Intended:
    """Adam with decoupled decay."""
    return adam(seen, decoupled=True)


def lion(seen: Seen) -> Intended:
    """Lion, from its moment before the step."""
    given, (b1, _) = seen.settings, seen.settings["betas"]
    mixed = b1 * seen.earlier.get("exp_avg", 0.0) + (1 - b1) * seen.gradient
    return Intended(-float(given["lr"]) * np.sign(mixed), decayed(seen))


def decayed(seen: Seen) -> Array:
    """Returns what decoupled decay adds."""
    return -float(seen.settings["lr"]) * float(seen.settings.get("weight_decay", 0)) * seen.weight


FORMULAS: dict[str, Callable[[Seen], Intended]] = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "Lion": lion}


def count(before: Array, after: Array, intended: Intended, format: str, gradient: Array) -> UpdateCounts:
    """Returns the counts of one step of one tensor, stored in `format`."""
    update = intended.update
    meant = update != 0
    with np.errstate(invalid="ignore", over="ignore"):
        whole = update if intended.decay is None else update + intended.decay
        actual = after - before
        counts = UpdateCounts(
            steps=1,
            elements=before.size,
            intended=int(meant.sum()),
            lost=int((meant & (after == before)).sum()),
            arrived_sum=_finite(np.sum(actual * whole)),
            intended_sum=_finite(np.sum(whole * whole)),
            gradient=int((gradient != 0).sum()),
            moved=bool((after != before).any()),
        )
    if intended.decay is not None and np.isfinite(before).all():
        stats = UpdateStats.of(before.astype(np.float32), intended.decay.astype(np.float32), parse(format))
        counts.decay_intended, counts.decay_lost = stats.count, stats.lost
    return counts


def count_unknown(before: Array, after: Array, gradient: Array) -> UpdateCounts:
    """Returns the counts of a step by an optimizer whose formula is not known: only the gradient is."""
    meant = gradient != 0
    return UpdateCounts(
        steps=1,
        elements=before.size,
        intended=int(meant.sum()),
        lost=int((meant & (after == before)).sum()),
        gradient=int(meant.sum()),
        moved=bool((after != before).any()),
        exact=False,
    )


def _finite(number: Any) -> float:
    return float(number) if np.isfinite(number) else 0.0
