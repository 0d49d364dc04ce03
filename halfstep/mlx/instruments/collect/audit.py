"""`halfstep.mlx.audit`: what is wrong with a training on MLX, from model, optimizer, loss function and a batch.

    for finding in halfstep.mlx.audit(model, optimizer, loss_fn, batch):
        print(finding.message)

Nothing of it needs halfstep. A few updates are made as a plain loop makes them, and everything is restored:
weights, the optimizer's state, random state and running statistics.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.utils import value_and_grad
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map

from halfstep.core.audit import engine
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import Call, Record, UpdateCounts, finite_or_none
from halfstep.core.errors import AlreadyPreparedError, ArgumentError
from halfstep.mlx.convert.places import arrays, trainable
from halfstep.mlx.instruments.collect.operations import format_name, watching
from halfstep.mlx.instruments.collect.updates import after_step, before_step, count_update, cut, describe_weights
from halfstep.mlx.optim.optimizers import leaf_optimizers
from halfstep.mlx.state import set_random_key

STEPS = 10


def audit(
    model: Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Module, Any], Any],
    batch: Any,
    *,
    steps: int = STEPS,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Finding]:
    """Returns what is wrong with a training, worst first; an empty list if nothing is.

    `loss_fn(model, batch)` returns a loss, or (sum of losses, number of tokens). `steps` updates are made with
    this batch, and model and optimizer are restored after them. For a prepared model, `run.audit()` knows the
    policy.

    `select` and `ignore` are ids of rules, or their beginnings: `ignore=["HS4"]`.
    """
    return engine.check(record_of(model, optimizer, loss_fn, batch, steps=steps), select, ignore)


def record_of(
    model: Module, optimizer: Optimizer, loss_fn: Callable[[Module, Any], Any], batch: Any, *, steps: int = STEPS
) -> Record:
    """Returns what rules read: facts about the formats and updates of a training."""
    _check(model, optimizer, steps)
    record = Record("mlx", framework="mlx", updates=steps)
    record.unseen = [
        "places in the code: MLX has no hooks that know them",
        "clipping and loss scaling in your loop",
    ]
    optimizers, places = leaf_optimizers(optimizer), trainable(model)
    updates: dict[str, UpdateCounts] = {}
    grad_formats: dict[str, str] = {}
    with _restored(model, optimizer):
        optimizer.init(model.trainable_parameters())
        for step in range(steps):
            before = before_step({name: cut(place.array) for name, place in places.items()}, cut, optimizers)
            with watching(model, loss_fn) if step == 0 else nullcontext() as watcher:
                loss, grads = _differentiated(model, loss_fn, batch)
                mx.eval(loss, grads)
            if watcher is not None:
                record.operations = watcher.operations()
            optimizer.update(model, grads)
            mx.eval(model.parameters(), [each.state for each in optimizers])
            gradients: dict[str, mx.array] = dict(tree_flatten(grads))
            record.losses.append(finite_or_none(loss))
            record.calls += [Call("backward", step), Call("step", step + 1)]
            for name, place in places.items():
                update = after_step(before[name], cut(place.array), cut(gradients[name]))
                counts = count_update(update, format_name(place.array.dtype))
                updates[name] = counts if step == 0 else updates[name].merge(counts)
                grad_formats[name] = format_name(gradients[name].dtype)
        record.weights, record.buffers = describe_weights(model, optimizers)
    for weight in record.weights:
        weight.updates, weight.grad_format = updates.get(weight.name), grad_formats.get(weight.name)
    return record


def _check(model: Any, optimizer: Any, steps: int) -> None:
    if not isinstance(model, Module) or not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"an audit takes a model and an optimizer of MLX, not `{type(model).__name__}` and "
            f"`{type(optimizer).__name__}`",
            hint="audit(model, optimizer, loss_fn, batch)",
        )
    if "update" in vars(optimizer):
        raise AlreadyPreparedError("a run has this optimizer and its model", hint="run.audit() knows their policy")
    if steps < 1:
        raise ArgumentError(f"steps={steps}: an audit watches at least one update", hint=f"the default is {STEPS}")


def _differentiated(model: Module, loss_fn: Callable[[Module, Any], Any], batch: Any) -> tuple[mx.array, Any]:
    def loss(batch: Any) -> mx.array:
        returned = loss_fn(model, batch)
        if isinstance(returned, tuple):
            return returned[0] / returned[1] if len(returned) == 2 else returned[0]
        return returned  # type: ignore[no-any-return]

    return value_and_grad(model, loss)(batch)  # type: ignore[no-any-return]


@contextmanager
def _restored(model: Module, optimizer: Optimizer) -> Iterator[None]:
    """Restores everything that training changes."""
    held = [(place, place.array) for place in arrays(model).values()]
    leaves = [(each, tree_map(lambda x: x, each.state), each._initialized) for each in leaf_optimizers(optimizer)]
    key = mx.random.state[0]  # type: ignore[index]
    try:
        yield
    finally:
        for place, array in held:
            place.put(array)
        for each, state, initialized in leaves:
            # In place: compiled steps keep the containers.
            each.state.clear()
            each.state.update(state)
            each._initialized = initialized
        set_random_key(key)
