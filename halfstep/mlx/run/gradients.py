"""Gradients on their way to an update: what they carry, and their sum over processes."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from halfstep.mlx.parallel.ranks import Ranks


@dataclass(frozen=True)
class Gradients:
    """The gradients of a micro-batch, times the scale, by the name of the parameter; or a sum of such."""

    arrays: dict[str, mx.array]
    scale: mx.array  # the one they carry
    weight: mx.array  # tokens of the first micro-batch, against which the others are weighted
    weights: mx.array  # sum of the weights, over the first
    loss: mx.array  # sum of the mean losses, with the same weights
    finite: mx.array | None = None  # whether they were before `unscale`; None if that was not called
    bad_rank: mx.array | None = None  # of several processes, the first whose own loss is not finite; -1 if all are


def summed(total: Gradients, ranks: Ranks, update: int) -> Gradients:
    """Returns the sum over ranks, whose weights are against the first micro-batch of rank 0."""
    mx.eval(vars(total))  # our own part is no waiting
    weight = mx.where(total.weight == 0, 1.0, total.weight)
    what = f"the sums of update {update}"
    given = [float(number) for number in (weight, total.scale, total.weights, total.loss)]
    weight, scale, weights, loss = np.array(ranks.exchange(what, given), np.float32).T
    shares, bad = weight / weight[0], next((r for r, own in enumerate(loss) if not np.isfinite(own)), -1)
    share = mx.array((shares * (scale[0] / scale))[ranks.rank])
    sums = ranks.sum(what, {name: g.astype(mx.float32) * share for name, g in total.arrays.items()})
    first, both = (weight[0], scale[0]), ((shares * weights).sum(), (shares * loss).sum())
    weight, scale, weights, loss = map(mx.array, (*first, *both))
    return Gradients(sums, scale, weight, weights, loss, bad_rank=mx.array(bad))


def norm(arrays: Mapping[str, mx.array]) -> mx.array:
    """Returns the norm of all gradients together."""
    return mx.sqrt(mx.stack([mx.square(g.astype(mx.float32)).sum() for g in arrays.values()]).sum())
