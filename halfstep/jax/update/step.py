"""The update itself: accumulate, finite?, unscale, clip, step, rescale; pure functions of the state.

A loss function runs on `masters`, the fp32 numbers that the policy lets it see, and on what scales delayed
operands (fp8.py). Its gradients are scaled, and summed over micro-batches in the accumulate format, each weighted
against the first micro-batch that has any tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array, lax

from halfstep.core.averages import move_averages
from halfstep.jax.convert.apply import Applied
from halfstep.jax.fp8 import PREFIX, update_histories
from halfstep.jax.numerics.cast import carried
from halfstep.jax.numerics.dtypes import dtype_of
from halfstep.jax.optim.masters import hold, narrow_moments, widen_masters, widen_moments
from halfstep.jax.state import State
from halfstep.jax.update.checks import check_leading, check_loss

LossFn = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResult:
    """What one update did, as device scalars: reading one waits for the device."""

    loss: Array  # mean over the tokens of all micro-batches
    skipped: Array  # bool: a gradient or a loss was not finite
    scale: Array  # the scale that was used
    grad_norm: Array  # after unscaling, before clipping
    stuck: Array  # bool: not finite, and the scale is at its floor
    aux: Any = None  # what else the loss function returned; stacked by device of a mesh, and by micro-batch
    layers: Any = None  # with a monitor: the numbers of its layers
    updates: Any = None  # with a monitor: sums over a slice of each parameter, by name


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A sum of losses and how many there are (tokens), where micro-batches differ in size."""

    total: Any
    weight: Any


class Sums(NamedTuple):
    """The sums over micro-batches, each weighted against the first."""

    grads: dict[str, Array]  # scaled, in the accumulate format
    loss: Array
    weight: Array
    amaxes: dict[str, Array]  # of delayed operands: the largest, not a sum


Gradient = Callable[[dict[str, Array], Any, Any], tuple[Any, tuple[Any, Any, Any], Any]]
"""(masters, batch, rng) -> gradients; loss, weight, and what else the function returned; a monitor's numbers"""


UpdateReport = Callable[..., dict[str, Array]]
"""(old masters, new, intended updates, scaled gradients, what unscales them, finite) -> a monitor's numbers"""


def scalar_loss(
    call: LossFn, applied: Applied, masters: Mapping[str, Array], batch: Any, rng: Any
) -> tuple[Array, Array, Any]:
    """Returns the mean loss of a micro-batch in fp32, its weight, and what else the function returned."""
    returned, shape = call(applied, masters, (batch,) if rng is None else (batch, rng))
    check_loss(shape, applied.policy)
    loss, aux = returned if isinstance(returned, tuple) else (returned, None)
    if isinstance(loss, Weighted):
        weight = lax.stop_gradient(jnp.asarray(loss.weight, jnp.float32))
        return jnp.asarray(loss.total, jnp.float32) / _divisor(weight), weight, aux
    return jnp.asarray(loss, jnp.float32), jnp.float32(1), aux


def _divisor(weight: Array) -> Array:
    """Returns a weight to divide by: a micro-batch without tokens has no mean, and its sum is zero."""
    return jnp.where(weight == 0, 1.0, weight)


def accumulate(
    gradient: Gradient, masters: dict[str, Array], applied: Applied, batch: Any, rng: Any, count: int | None
) -> tuple[Sums, Array, Any]:
    """Returns the sums, the weight of the first micro-batch that has any, and what is each micro-batch's own."""
    fmt = applied.policy.accumulate

    def micro_batch(first: Array, part: Any, key: Any) -> tuple[Sums, Array, Any]:
        """Returns the gradient of one; `first` is the weight of the first, 0 if this is it."""
        grads, (loss, weight, aux), numbers = gradient(masters, part, key)
        reference = jnp.where(first == 0, weight, first)
        share = weight / _divisor(reference)  # not inside the loss: times fp16's scale it could overflow
        # `carried` first: XLA may drop a conversion to bf16 and back, and the sum would be another.
        amaxes = {name: grads.pop(name) for name in [*grads] if name.startswith(PREFIX)}
        narrow = {name: carried(share * g, fmt).astype(dtype_of(fmt)) for name, g in grads.items()}
        counted = jnp.where(weight == 0, 0.0, share * loss)
        return Sums(narrow, counted, share, amaxes), reference, (aux, numbers)

    if count is None:
        return micro_batch(jnp.float32(0), batch, rng)
    check_leading(batch, count)

    def body(carry: tuple[Sums, Array], inputs: tuple[Array, Any]) -> tuple[tuple[Sums, Array], Any]:
        sums, first = carry
        index, part = inputs
        key = None if rng is None else jax.random.fold_in(rng, index)
        more, first, own = micro_batch(first, part, key)
        added = jax.tree.map(jnp.add, sums, more)
        return (added._replace(amaxes=jax.tree.map(jnp.maximum, sums.amaxes, more.amaxes)), first), own

    zero = jnp.float32(0)
    amaxes = {name: jnp.zeros(x.shape) for name, x in masters.items() if name.startswith(PREFIX)}
    grads = {name: jnp.zeros(x.shape, dtype_of(fmt)) for name, x in masters.items() if name not in amaxes}
    nothing = Sums(grads, zero, zero, amaxes)
    (sums, first), own = lax.scan(body, (nothing, zero), (jnp.arange(count), batch))
    return sums, first, own


def apply_sums(
    state: State,
    applied: Applied,
    optimizer: optax.GradientTransformationExtraArgs,
    sums: Sums,
    clip_norm: float,
    report: UpdateReport | None,
) -> tuple[State, StepResult]:
    """Makes one update of sums of gradients: finite?, unscale, clip, step, rescale."""
    wide = {name: g.astype(jnp.float32) for name, g in sums.grads.items()}
    scaled_norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in wide.values()))
    finite = jnp.isfinite(scaled_norm) & (sums.weight > 0)  # without any token there is no mean either
    used = state.scale
    verdict = state.policy.scale.judge(used, finite, jnp)
    finite &= jnp.isfinite(sums.loss)  # which no scale is to blame for
    factor = verdict.inv_scale / sums.weight
    norm, unscaled = scaled_norm * factor, factor
    if clip_norm:
        factor = factor * jnp.minimum(clip_norm / norm, 1.0)
    grads = {name: g * factor for name, g in wide.items()}
    loss = sums.loss / sums.weight
    leaves = applied.leaves
    masters = widen_masters(leaves.trained, state.remainders)
    # The optimizer sees fp32 alone; optax passes `extra` only to transforms that take it.
    extra = {"value": loss, "policy": state.policy}
    moments = widen_moments(state.opt_state, applied)
    steps, moments = optimizer.update(leaves.bare(grads), moments, leaves.bare(masters), **extra)
    intended, opt_state = leaves.read(steps), narrow_moments(moments, applied)
    stepped = {name: masters[name] + u.astype(jnp.float32) for name, u in intended.items()}
    held, remainders = hold(stepped, applied, seed=state.seed, step=state.num_applied + 1)
    updates = None
    if report is not None:
        updates = report(masters, widen_masters(held, remainders), intended, wide, unscaled, finite)

    def kept(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    held, remainders = kept(held, leaves.trained), kept(remainders, state.remainders)
    share = jnp.where(finite, 1.0 - state.decay, 0.0)
    following = replace(
        state,
        params=leaves.rebuild(held),
        remainders=remainders,
        ema=move_averages(state.ema, widen_masters(held, remainders), share),
        amaxes=update_histories(state.amaxes, sums.amaxes, finite),
        opt_state=kept(opt_state, state.opt_state),
        scale=verdict.state,
        num_applied=state.num_applied + finite.astype(jnp.int32),
    )
    return following, StepResult(loss, ~finite, used.scale, norm, verdict.state.stuck, updates=updates)
