"""`halfstep.jax.audit`: what is wrong with a training in JAX, from its loss, parameters, batch and optimizer.

    for finding in halfstep.jax.audit(loss_fn, params, batch, optax.adamw(1e-5)):
        print(finding)

Nothing of it needs halfstep. The loss function and its gradient are traced to a jaxpr, in which the formats of
norms, softmaxes, routers, losses and sums are read (operations.py). Then a few updates are made, on copies, and
what overflows, underflows or is lost is counted (evaluate.py, updates.py).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from halfstep.core.audit import engine
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import Operation, Record, Weight, WeightKind
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy, as_policy
from halfstep.jax.apply import Applied, Leaves, apply
from halfstep.jax.collect.evaluate import evaluated, incidents
from halfstep.jax.collect.graph import Graph, graph_of
from halfstep.jax.collect.names import Names
from halfstep.jax.collect.operations import format_name, fp32_matmul, operations_of
from halfstep.jax.collect.parameters import Parameters
from halfstep.jax.collect.updates import Stepper
from halfstep.jax.functions.interpret import cast_inside, checked
from halfstep.jax.layers import COMPILER_OPTIONS

STEPS = 10
Objective = Callable[[Mapping[str, Any]], Array]


def audit(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: Any,
    *,
    rng: Any = None,
    policy: Policy | str | None = None,
    cast: bool = True,
    loss_scale: float = 1.0,
    steps: int = STEPS,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Finding]:
    """Returns what is wrong with a training, worst first; an empty list if nothing is.

    `loss_fn(params, batch[, rng])` returns a loss, or a tuple that begins with one; `params` is any pytree, and
    `optimizer` any optax transform. `steps` updates are made with this batch, on copies: the arrays that were
    passed stay as they are. `loss_scale` is what your step multiplies the loss by before it differentiates.
    `policy` and `cast` are those that `init` and `make_step` get; without a policy the function is taken as it is.

    `select` and `ignore` are ids of rules, or their beginnings: `ignore=["HS4"]`.
    """
    record = record_of(
        loss_fn, params, batch, optimizer, rng=rng, policy=policy, cast=cast, loss_scale=loss_scale, steps=steps
    )
    return engine.check(record, select, ignore)


def record_of(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: Any,
    *,
    rng: Any = None,
    policy: Policy | str | None = None,
    cast: bool = True,
    loss_scale: float = 1.0,
    steps: int = STEPS,
) -> Record:
    """Returns what rules read: facts about the formats and numbers of a training."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise HalfstepError(
            f"the optimizer is a {type(optimizer).__name__}, not an optax transform",
            hint="for example optax.adamw(1e-3)",
        )
    if steps < 1:
        raise HalfstepError(f"steps={steps}: an audit watches at least one update", hint=f"the default is {STEPS}")
    rest = (batch,) if rng is None else (batch, rng)
    held, applied = Parameters(params), None
    loss: Objective = partial(_plain_loss, loss_fn, held, rest)
    if policy is not None:
        applied = apply(params, as_policy(policy), ())
        loss = partial(_loss_under, loss_fn, Leaves(params), applied, rest, cast)
        held = Parameters(held.rebuilt({name: leaf.astype(jnp.float32) for name, leaf in held.trained.items()}))
    return _Audit(held, loss, optimizer, loss_scale, applied).record(steps)


def _plain_loss(loss_fn: Callable[..., Any], held: Parameters, rest: tuple[Any, ...], trained: Any) -> Array:
    return _mean(loss_fn(held.rebuilt(trained), *rest))


def _loss_under(
    loss_fn: Callable[..., Any], leaves: Leaves, applied: Applied, rest: Any, cast: bool, trained: Any
) -> Array:
    call = partial(cast_inside, cast_batch=True) if cast else checked
    # As a step does it: fp32 is fp32.
    with jax.default_matmul_precision("highest"):
        return _mean(call(loss_fn, leaves, applied, trained, rest)[0])


def _mean(returned: Any) -> Array:
    """Returns the loss alone, of a function that may return more beside it, or a sum and its weight."""
    loss = returned[0] if isinstance(returned, tuple) else returned
    loss = loss.total / loss.weight if hasattr(loss, "weight") else loss
    if jnp.shape(loss) != ():
        raise HalfstepError(
            f"the loss has shape {jnp.shape(loss)}; a loss is one number",
            hint="return its mean, or a tuple that begins with it",
        )
    return jnp.asarray(loss)


class _Audit:
    """One training under the eyes of an audit."""

    def __init__(self, params: Parameters, loss: Objective, optimizer: Any, scale: float, applied: Applied | None):
        self.params, self.applied, self.scale = params, applied, scale
        self.names = Names(params.trained)
        self.stepper = Stepper(optimizer, params, scale)
        flat = [*params.trained]

        def scaled(*leaves: Array) -> tuple[Array, Array]:
            value = loss(dict(zip(flat, leaves, strict=True)))
            return (value * jnp.asarray(scale, value.dtype) if scale != 1 else value), value

        closed = jax.make_jaxpr(jax.value_and_grad(scaled, argnums=tuple(range(len(flat))), has_aux=True))(
            *params.trained.values()
        )
        self.graph: Graph = graph_of(closed, flat)
        self._run = jax.jit(evaluated(self.graph), compiler_options=COMPILER_OPTIONS)

    def record(self, steps: int) -> Record:
        record = Record("jax", "jax", updates=steps)
        record.policy = None if self.applied is None else str(self.applied.policy)
        seen = {_key(each): each for each in operations_of(self.graph, self.names)}
        for _ in range(steps):
            values = self.stepper.values  # in the order of their names, not of the pytree
            (_, loss, *grads), numbers = self._run(*(values[name] for name in self.params.trained))
            for each in incidents(self.graph, self.names, jax.device_get(numbers)):
                seen.setdefault(_key(each), each)
            self.stepper.step(dict(zip(self.params.trained, grads, strict=True)), loss)
            record.losses.append(float(loss) if np.isfinite(float(loss)) else None)
        record.operations = list(seen.values())
        for fmt in self.stepper.sums():
            record.operations.append(
                Operation("", "accumulation", inside=fmt, count=1, function="optax.MultiSteps")
            )
        if self.stepper.formats != [jnp.float64, jnp.float32]:
            record.unseen.append("updates in fp64: the optimizer refuses them, so they are counted in less")
        record.weights = [self._weight(name) for name in self.params.trained]
        record.switches["fp32_matmul"] = fp32_matmul()
        record.unseen.append("the training loop: only its loss and its optimizer were passed")
        return record

    def _weight(self, name: str) -> Weight:
        leaf, counts = self.params.trained[name], self.stepper.counts[name]
        frozen = counts.gradient > 0 and counts.steps > 0 and counts.intended == 0
        fmt, master = format_name(leaf.dtype), self.stepper.master and "fp32"
        if self.applied is not None:
            fmt, master = str(self.applied.precisions[name].compute), str(self.applied.masters[name].format)
        return Weight(
            name,
            fmt,
            list(leaf.shape),
            trainable=not frozen,
            kind=_kind(name, leaf, self.graph),
            optimizer=None if frozen else self.stepper.name,
            master=master,
            moments=self.stepper.moments(name),
            grad_format=format_name(leaf.dtype),
            updates=counts,
        )


def _key(operation: Operation) -> tuple[Any, ...]:
    return (
        operation.module,
        operation.kind,
        operation.place,
        operation.inside,
        operation.backward,
        operation.promoted,
        operation.overflow > 0,
        operation.underflow > 0,
    )


def _kind(name: str, leaf: Array, graph: Graph) -> WeightKind:
    """Returns what a parameter is for, by what takes it and by its name."""
    words = name.lower()
    if "lora" in words or "adapter" in words:
        return "adapter"
    if "router" in words:
        return "router"
    if leaf.ndim >= 2:
        taken = {node.name for node in graph.inputs[list(graph_names(graph)).index(name)].taken_by}
        return "embedding" if taken & {"gather"} and "dot_general" not in taken else "matrix"
    if words.endswith("bias"):
        return "bias"
    return "norm" if any(part in words for part in ("norm", "ln", "scale", "gain")) else "other"


def graph_names(graph: Graph) -> list[str | None]:
    """Returns the parameters that a graph takes, in order."""
    return [value.weight for value in graph.inputs]
