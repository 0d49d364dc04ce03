"""A step run again in other formats, without a trace: the same weights, batches and random numbers.

    with switch_formats(run):                                    every module in fp32, masters whole
    with switch_formats(run, {"lm_head": precision}):            one module in this precision, the rest in fp32
    with switch_formats(run, precisions_of(run.model)):          as the run computes

    loss, gradients = replay(run, loss_fn, batches)        inside: what the step would give, in fp32

It is a switch, not a copy: modules temporarily get other casts, and the fp32 numbers of a split master are joined
when layers need them. A precision names the formats of roles: `replace(precision, norm=E4M3)` changes one of them.
One with `emulate=True` carries fp32 numbers and rounds by the reference casts, on any device; single modules may
be emulated among native ones.

A pass runs eagerly, also if the model is compiled. Afterwards gradients, buffers, random state, amaxes of delayed
operands and the counts of the monitor are unchanged. The memory needed is a second gradient, in fp32, and
activations as wide as the formats say.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.core.errors import ArgumentError
from halfstep.core.formats import Format
from halfstep.core.precision import Precision
from halfstep.torch.convert.modules import Code, Island, Leaf, Root
from halfstep.torch.convert.plan import set_module_precision
from halfstep.torch.instruments.nonfinite import force_eager, preserve_state
from halfstep.torch.instruments.observe.slots import pause_counting
from halfstep.torch.layers import Layer
from halfstep.torch.numerics.lowering import CASTED_TO
from halfstep.torch.numerics.shards import is_shard
from halfstep.torch.parallel.ranks import average, mean, num_ranks
from halfstep.torch.update.accumulation import Accumulation, checked_pair, divisor, mark_last, mean_loss

# What `set_module_precision` sets on a module.
_PRECISION_ATTRIBUTES = ("casts", "halfstep")


class Replay(NamedTuple):
    """The loss and the gradients of a step."""

    loss: Tensor  # mean over the tokens of all micro-batches, a device scalar
    gradients: dict[str, Tensor]  # of the mean loss, in fp32, by parameter; of shards, this rank's


def precisions_of(model: nn.Module) -> dict[str, Precision]:
    """Returns what each module currently computes in, by name; the name of the model itself is empty."""
    found = {name: _casts_of(module) for name, module in model.named_modules()}
    return {name: casts.precision for name, casts in found.items() if casts is not None}


def _casts_of(module: nn.Module) -> Any:
    if isinstance(module, Layer):
        return module.casts
    if isinstance(module, Island | Leaf | Code):
        return module.halfstep.casts
    return module.halfstep.model_casts if isinstance(module, Root) else None


@contextmanager
def switch_formats(
    run: Any, precisions: Mapping[str, Precision] | None = None, *, otherwise: Precision | None = None
) -> Iterator[None]:
    """Inside, modules compute in the given precisions, by name, others in `otherwise`, fp32 by default.

    The model's own code (functions between its modules) follows the empty name. Modules are those of
    `precisions_of`; `core.precision.precisions(policy, names)` gives those of a whole policy. Everything that a
    pass inside changes is restored at the end.
    """
    model, given = run.model, dict(precisions or {})
    known = precisions_of(model)
    for name in given:
        if name not in known:
            raise ArgumentError(
                f"`{name}` is no module with a precision",
                hint=f"such as `{next(iter(known), '')}`: precisions_of(model)",
            )
    rest = otherwise or Precision()
    with ExitStack() as stack:
        stack.enter_context(force_eager())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(pause_counting())
        stack.enter_context(preserve_cast_marks(run))
        stack.enter_context(preserve_state(model))
        stack.enter_context(_python_random())
        stack.enter_context(_pause_ddp_sync(run))
        stack.callback(_reshard, run)
        stack.enter_context(_set_precisions(model, {name: given.get(name, rest) for name in known}))
        _reshard(run)
        yield


@contextmanager
def _set_precisions(model: nn.Module, precisions: Mapping[str, Precision]) -> Iterator[None]:
    modules = [(name, module) for name, module in model.named_modules() if name in precisions]
    before = [
        (module, {key: module.__dict__[key] for key in _PRECISION_ATTRIBUTES if key in module.__dict__})
        for _, module in modules
    ]
    try:
        for name, module in modules:
            set_module_precision(module, precisions[name], precisions.get("", precisions[name]))
        yield
    finally:
        for module, attributes in before:
            for key in _PRECISION_ATTRIBUTES:
                module.__dict__.pop(key, None)
            module.__dict__.update(attributes)


def _reshard(run: Any) -> None:
    if run.sharded is not None:
        run.sharded.set_grad_sync(True)
        run.sharded.reshard()


@contextmanager
def _pause_ddp_sync(run: Any) -> Iterator[None]:
    """Keeps DDP from communicating inside: `replay` averages by itself, and DDP's buckets stay as they are."""
    keys = ("require_backward_grad_sync", "require_forward_param_sync")
    wrappers = run.wrappers() if num_ranks() > 1 and run.sharded is None else []
    before = [(wrapper, {key: getattr(wrapper, key) for key in keys}) for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = False
        yield
    finally:
        for wrapper, values in before:
            wrapper.__dict__.update(values)


def replay(
    run: Any, loss_fn: Callable[[Any], Any], batches: Iterable[Any], accumulate: Format | None = None
) -> Replay:
    """Returns the loss and the gradients of an update from micro-batches; call it inside `switch_formats`.

    Gradients are summed in `accumulate`, by default the policy's format. The loss is multiplied by the run's scale
    for the backward pass, and gradients are divided by it. Every process of a job calls it with its own
    micro-batches, and gets the gradients over all of them.
    """
    policy = run.policy if accumulate is None else replace(run.policy, accumulate=accumulate)
    total, scale = Accumulation(policy, run.contents), run.scale_state.scale
    for batch, last in mark_last(batches):
        if run.sharded is not None:
            run.sharded.set_grad_sync(last)
        given, weight = loss_fn(batch), None
        if isinstance(given, tuple):
            given, weight = checked_pair(given)
            given = given / divisor(weight)
        total.add(given, weight, scale, run.parameters, last=last)
    losses, weights = total.losses, total.weights
    grads = total.gradients(run.parameters)
    if num_ranks() > 1:
        losses, weights = mean(losses, run.device), mean(weights, run.device)
        summed = {id(p) for p in total.summed}
        ours = [grads[id(p)] for p in run.parameters if id(p) in grads and id(p) not in summed and not is_shard(p)]
        average(ours, torch.float32)
    factor = 1.0 / (scale * weights)
    named = {run.masters.names[p]: grads[id(p)] for p in run.parameters if id(p) in grads}
    return Replay(mean_loss(losses, weights).detach(), {name: _dense(g) * factor for name, g in named.items()})


def _dense(grad: Tensor) -> Tensor:
    return (grad.to_dense() if grad.is_sparse else grad).detach().float()


@contextmanager
def preserve_cast_marks(run: Any) -> Iterator[None]:
    """Restores what the next update depends on: marks for casts of weights, amaxes of delayed operands."""
    marks = [(p, p.__dict__.get(CASTED_TO)) for p in run.model.parameters()]
    pending = None if run.amaxes is None else run.amaxes.pending.clone()
    try:
        yield
    finally:
        for p, mark in marks:
            p.__dict__.pop(CASTED_TO, None)
            if mark is not None:
                p.__dict__[CASTED_TO] = mark
        if run.amaxes is not None and pending is not None:
            run.amaxes.pending.copy_(pending)


@contextmanager
def _python_random() -> Iterator[None]:
    """Restores the random states of Python and numpy, which some models draw from."""
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
