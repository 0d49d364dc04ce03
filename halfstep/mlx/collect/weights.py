"""Weights, moments and buffers of a model, and what happens to each update of a weight."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from halfstep.core.audit.kinds import buffer_kind, weight_kind
from halfstep.core.audit.record import Buffer, UpdateCounts, Weight
from halfstep.core.audit.updates import Intended, count, count_unknown
from halfstep.mlx.apply import arrays
from halfstep.mlx.collect.operations import format_name
from halfstep.mlx.observe.updates import Update, moments_of, owner_of
from halfstep.mlx.optim.optimizers import Optimizer

PART = 65_536  # elements of a tensor that stand for all


def cut(array: mx.array) -> mx.array:
    """Returns the part of an array that stands for it."""
    return array.reshape(-1)[:PART]


def weights_of(model: Module, optimizers: Sequence[Optimizer]) -> tuple[list[Weight], list[Buffer]]:
    """Returns what a model holds, as its optimizers see it after their first step."""
    trained: dict[str, mx.array] = dict(tree_flatten(model.filter_and_map(Module.trainable_parameter_filter)))
    known: dict[str, mx.array] = dict(tree_flatten(model.filter_and_map(Module.valid_parameter_filter)))
    weights, buffers = [], []
    for name, place in arrays(model).items():
        array = place.array
        if not mx.issubdtype(array.dtype, mx.floating):
            continue
        kind = buffer_kind(name)
        if name not in known or (name not in trained and kind == "running"):
            buffers.append(Buffer(name, format_name(array.dtype), kind))
            continue
        owner = owner_of(optimizers, name) if name in trained else None
        moments = {} if owner is None else moments_of(owner, name, array.shape)
        weights.append(
            Weight(
                name,
                format_name(array.dtype),
                list(array.shape),
                trainable=name in trained,
                kind=weight_kind(name, array.shape, type(place.module).__name__),
                optimizer=None if owner is None else type(owner).__name__,
                moments={key: format_name(each.dtype) for key, each in moments.items()},
            )
        )
    return weights, buffers


def counts_of(update: Update, format: str) -> UpdateCounts:
    """Returns the counts of one step of one weight, stored in `format`."""
    before, after, gradient = (np.array(each.astype(mx.float32)).astype(np.float64) for each in update[:3])
    if update.intended is None:
        return count_unknown(before, after, gradient)
    meant, decay = np.array(update.intended), None
    if update.decay is not None:
        decay = -float(update.decay) * before
        meant = meant - decay
        meant[np.abs(meant) < 2.0**-50 * np.abs(before)] = 0  # what fp64 leaves of w (1 - rate decay) - w
    return count(before, after, Intended(meant, decay), format, gradient)


def finite_or_none(value: Any) -> float | None:
    """Returns a loss as records hold it: None if it is not finite."""
    number = float(value)
    return number if np.isfinite(number) else None
