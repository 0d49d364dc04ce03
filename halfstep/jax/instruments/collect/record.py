"""The record of a training: what the rules of an audit read of its loss, parameters, batch and optimizer.

Nothing of the training needs halfstep. The loss function and its gradient are traced to a jaxpr, in which the
formats of norms, softmaxes, routers, losses and sums are read (operations.py). Then a few updates are made, on
copies, and what overflows, underflows or is lost is counted (evaluate.py, updates.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from halfstep.core.audit.record import Operation, Record, Weight, WeightKind
from halfstep.core.errors import ArgumentError, LossError
from halfstep.jax.instruments.collect.evaluate import evaluate, incidents
from halfstep.jax.instruments.collect.graph import Graph, Names, Value, graph_of
from halfstep.jax.instruments.collect.operations import format_name, fp32_matmul, operations_of
from halfstep.jax.instruments.collect.updates import Parameters, Stepper
from halfstep.jax.jaxpr import COMPILER_OPTIONS
from halfstep.jax.pytree import check_transform

STEPS = 10


@dataclass(frozen=True)
class Prepared:
    """A training that halfstep runs: its policy, formats by parameter, and the way to call the loss function."""

    policy: str
    compute: Mapping[str, str]
    masters: Mapping[str, str]
    call: Callable[[Callable[..., Any], Mapping[str, Array], Sequence[Any]], Any]


def record_of(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: Any,
    *,
    rng: Any = None,
    loss_scale: float = 1.0,
    steps: int = STEPS,
    prepared: Prepared | None = None,
) -> Record:
    """Returns what rules read: facts about the formats and numbers of a training.

    The function is called as it is, or as `prepared` says, with the parameters in fp32.
    """
    check_transform(optimizer)
    if steps < 1:
        raise ArgumentError(f"steps={steps}: an audit watches at least one update", hint=f"the default is {STEPS}")
    held, rest = Parameters(params), (batch,) if rng is None else (batch, rng)
    if prepared is not None:
        held.trained = {name: leaf.astype(jnp.float32) for name, leaf in held.trained.items()}

    def loss(trained: Mapping[str, Array]) -> Any:
        if prepared is not None:
            return prepared.call(loss_fn, trained, rest)
        return loss_fn(held.rebuild(trained), *rest)

    graph = _trace(loss, held.trained, loss_scale)
    names, stepper = Names(held.trained), Stepper(optimizer, held, loss_scale)
    record = Record("jax", "jax", updates=steps, policy=None if prepared is None else prepared.policy)
    seen = {_key(each): each for each in operations_of(graph, names)}
    run = jax.jit(partial(evaluate, graph), compiler_options=COMPILER_OPTIONS)
    for _ in range(steps):
        # In the order of their names, not of the pytree.
        (_, value, *grads), numbers = run([stepper.values[name] for name in held.trained])
        for each in incidents(graph, names, jax.device_get(numbers)):
            seen.setdefault(_key(each), each)
        stepper.step(dict(zip(held.trained, grads, strict=True)), value)
        record.losses.append(float(value) if np.isfinite(float(value)) else None)
    record.operations = list(seen.values())
    for fmt in stepper.sums():
        record.operations.append(Operation("", "accumulation", inside=fmt, count=1, function="optax.MultiSteps"))
    if stepper.formats[0] != jnp.float64:
        record.unseen.append("updates in fp64: the optimizer refuses them, so they are counted in less")
    record.weights = [
        _weight(name, value, stepper, prepared) for name, value in zip(held.trained, graph.inputs, strict=True)
    ]
    record.switches["fp32_matmul"] = fp32_matmul()
    record.unseen.append("the training loop: only its loss and its optimizer were passed")
    return record


def _trace(loss: Callable[..., Any], trained: Mapping[str, Array], scale: float) -> Graph:
    """Returns the graph of the loss and its gradients, which takes the parameters in the order of their names."""

    def scaled(*leaves: Array) -> tuple[Array, Array]:
        value = _mean(loss(dict(zip(trained, leaves, strict=True))))
        return (value * jnp.asarray(scale, value.dtype) if scale != 1 else value), value

    gradient = jax.value_and_grad(scaled, argnums=tuple(range(len(trained))), has_aux=True)
    return graph_of(jax.make_jaxpr(gradient)(*trained.values()), [*trained])


def _mean(returned: Any) -> Array:
    """Returns the loss alone, of a function that may return more beside it, or a sum and its weight."""
    loss = returned[0] if isinstance(returned, tuple) else returned
    loss = loss.total / loss.weight if hasattr(loss, "weight") else loss
    if jnp.shape(loss) != ():
        raise LossError(
            f"the loss has shape {jnp.shape(loss)}; a loss is one number",
            hint="return its mean, or a tuple that begins with it",
        )
    return jnp.asarray(loss)


def _weight(name: str, value: Value, stepper: Stepper, prepared: Prepared | None) -> Weight:
    leaf, counts = stepper.params.trained[name], stepper.counts[name]
    frozen = counts.gradient > 0 and counts.steps > 0 and counts.intended == 0
    fmt, master = format_name(leaf.dtype), stepper.master and "fp32"
    if prepared is not None:
        fmt, master = prepared.compute[name], prepared.masters[name]
    return Weight(
        name,
        fmt,
        trainable=not frozen,
        kind=_kind(name, leaf, {node.name for node in value.taken_by}),
        optimizer=None if frozen else stepper.name,
        master=master,
        moments=stepper.moments(name),
        grad_format=format_name(leaf.dtype),
        updates=counts,
    )


def _kind(name: str, leaf: Array, uses: set[str]) -> WeightKind:
    """Returns what a parameter is for, by the primitives that take it and by its name."""
    words = name.lower()
    if "lora" in words or "adapter" in words:
        return "adapter"
    if "router" in words:
        return "router"
    if leaf.ndim >= 2:
        return "embedding" if "gather" in uses and "dot_general" not in uses else "matrix"
    if words.endswith("bias"):
        return "bias"
    return "norm" if any(part in words for part in ("norm", "ln", "scale", "gain")) else "other"


def _key(each: Operation) -> tuple[Any, ...]:
    kind = (each.module, each.kind, each.place, each.inside, each.backward, each.promoted)
    return (*kind, each.overflow > 0, each.underflow > 0)
