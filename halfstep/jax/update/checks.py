"""Checks of what users hand to `init` and `make_step`, when the step is built or traced."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from halfstep.config.model import model_like
from halfstep.core.arrays.measure import decide_once
from halfstep.core.choice import Choice
from halfstep.core.errors import (
    AlreadyPreparedError,
    ArgumentError,
    AutoPolicyError,
    BatchError,
    HalfstepError,
    LossError,
    LossFormatError,
    ParallelError,
    StateError,
    UnsupportedTransformError,
    type_name,
)
from halfstep.core.policy import Policy
from halfstep.core.refusal import call_error
from halfstep.jax import measure
from halfstep.jax.convert.apply import Leaves
from halfstep.jax.numerics.dtypes import dtype_of, format_of
from halfstep.jax.state import State

_STACK = "batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *micro_batches)"


def trace_error(error: Exception, loss_fn: Any, batch: Any, rng: Any) -> HalfstepError | None:
    """Returns the error behind one of a step's trace, if the step was not made or called as it must be."""
    if isinstance(error, HalfstepError):
        return None
    if not callable(loss_fn):
        hint = "pass the function: make_step(loss_fn, optimizer)"
        return ArgumentError(f"loss_fn is {type_name(loss_fn)}", hint=hint)
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        return LossError(
            f"the loss function asks for a number while it is traced: {str(error).partition(chr(10))[0]}",
            hint="return the loss without float(), .item() or numpy; jnp.where chooses, jax.debug.print shows",
        )
    for name, leaf in _named_leaves(batch):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            hint = "give arrays of JAX or numpy, such as tensor.numpy(), and leave out what is none"
            return BatchError(f"{name} is {type_name(leaf)}, not an array", hint=hint)
    if isinstance(rng, int | float):
        return ArgumentError(f"rng={rng} is no key of a generator", hint="step(state, batch, jax.random.key(0))")
    if isinstance(batch, list) and not {tuple, list, dict}.isdisjoint(map(type, batch)):
        return BatchError(
            f"the batch is a list of {len(batch)} {type(batch[0]).__name__}s, and a step takes one batch",
            hint=f"step(state, batch); or stack them, for make_step(..., micro_batches=n): {_STACK}",
        )
    given = ("parameters", "a batch") if rng is None else ("parameters", "a batch", "a key (rng)")
    call = "make_step(lambda params, batch: loss_fn(params, *batch), optimizer); a key: step(state, batch, key)"
    return call_error(error, loss_fn, (), jax.Array, given, call)


def check_loss(returned: Any, policy: Policy) -> None:
    """Refuses what is not a loss: `returned` is what the loss function returns, as shapes and dtypes."""
    loss = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
    if hasattr(loss, "weight"):  # a Weighted (step.py)
        if jnp.shape(loss.weight) != ():
            raise LossError(
                f"the weight of a loss is one number, but it has shape {jnp.shape(loss.weight)}",
                hint="sum it: Weighted(losses.sum(), mask.sum())",
            )
        loss = loss.total
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.floating):
        given = type(loss).__name__ if dtype is None else f"{dtype} of shape {shape}"
        raise LossError(
            f"the loss function returned {given}; a loss is one floating scalar",
            hint="return its mean, or Weighted(sum, count), or either in a tuple with a second value: (loss, aux)",
        )
    if dtype not in (jnp.float32, dtype_of(policy.loss)):
        raise LossFormatError(
            f"the loss is {dtype}, but the policy says loss={policy.loss}",
            hint="return it in fp32: convert predictions with `.astype(jnp.float32)` before the loss; or accept "
            f"it with `loss={format_of(dtype)}`",
        )


def measured_choice(params: Any, tokens: int) -> Choice:
    """Returns what `auto` means for parameters: what is fastest on their device, by a block of their width."""
    if jax.process_count() > 1:
        raise AutoPolicyError(
            "`auto` is measured in each process, and two of them could choose differently",
            hint="`halfstep probe` measures; name what it chooses",
        )
    leaves = jax.tree.leaves(params)
    first = jnp.asarray(leaves[0] if leaves else 0.0)
    if isinstance(first, jax.core.Tracer):
        raise UnsupportedTransformError(
            "`auto` measures the device, which a traced function cannot",
            hint="call init outside of jit and eval_shape, or name a policy; `halfstep probe` measures too",
        )
    device = min(first.devices(), key=lambda device: device.id)
    return decide_once(measure, device, model_like(jnp.shape(leaf) for leaf in leaves), tokens)


def check_not_in_shard_map() -> None:
    """Refuses a step inside shard_map, where each device would have the gradient of its own rows."""
    axes = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if axes:
        over = ", ".join(f"`{axis}`" for axis in axes)
        raise ParallelError(
            f"the step is inside shard_map, over {over}: each device would step with the gradient of its own rows",
            hint="pass the mesh to init and make_step instead: they share the rows, and sum gradients in fp32",
        )


class Progress(NamedTuple):
    """The optimizer's state and the count of steps of a training that continues here."""

    opt_state: Any
    steps: Any


def unpack_train_state(params: Any, optimizer: optax.GradientTransformation) -> tuple[Any, Progress | None]:
    """Returns the parameters and, if they came in a TrainState of Flax, how far it was trained."""
    if isinstance(params, State):
        raise AlreadyPreparedError(
            "the parameters are a state that `init` returned",
            hint="step(state, batch) continues with it; init(state.masters(), optimizer, policy) begins anew",
        )
    if not all(hasattr(params, field) for field in ("apply_fn", "params", "tx", "opt_state", "step")):
        return params, None
    check_optimizer(optimizer, Leaves(params.params), params.opt_state)
    return params.params, Progress(params.opt_state, params.step)


def check_micro_batches(count: Any) -> None:
    """Refuses what is not a number of micro-batches."""
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ArgumentError(
            f"micro_batches={count!r}: an update needs at least one",
            hint="None takes the batch as it is; n takes every leaf along a leading axis of n",
        )


def check_optimizer(optimizer: optax.GradientTransformation, leaves: Leaves, opt_state: Any) -> None:
    """Refuses the state of another optimizer: optax transforms read their state without checking it."""
    wide = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for name, leaf in leaves.trained.items()}
    expected: Any = jax.tree.structure(jax.eval_shape(optimizer.init, leaves.bare(wide)))
    if expected != jax.tree.structure(opt_state):
        raise StateError(
            "the state was initialized with another optimizer than the step uses",
            hint="pass the same transform to init and make_step",
        )


def check_leading(batch: Any, count: int) -> None:
    """Refuses a batch whose leaves lack a leading axis of `count` micro-batches."""
    for name, leaf in _named_leaves(batch):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != count:
            raise BatchError(
                f"{name} has shape {jnp.shape(leaf)}, but there are {count} micro-batches",
                hint=f"every leaf of the batch needs a leading axis of {count}: {_STACK}",
            )


def _named_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields what messages call each leaf of a batch, and the leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        yield f"leaf `{name}` of the batch" if name else "the batch", leaf
