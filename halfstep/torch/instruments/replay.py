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
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.core.formats import Format
from halfstep.core.precision import Precision
from halfstep.torch.convert.modules import Code, Island, Leaf, Root
from halfstep.torch.convert.plan import set_module_precision
from halfstep.torch.instruments.observe.slots import pause_counting
from halfstep.torch.layers import Layer
from halfstep.torch.numerics.lowering import CAST, CachedCast
from halfstep.torch.numerics.shards import is_shard
from halfstep.torch.parallel.ranks import average, mean, num_ranks
from halfstep.torch.update.accumulation import Accumulation, check_pair, divisor, mark_last, mean_loss

# What `set_module_precision` sets on a module.
_PRECISION_ATTRIBUTES = ("casts", "halfstep")


class Replay(NamedTuple):
    """The loss and the gradients of a step."""

    loss: Tensor  # mean over the tokens of all micro-batches, a device scalar
    gradients: dict[str, Tensor]  # of the mean loss, in fp32, by parameter; of shards, this rank's


def precisions_of(model: nn.Module) -> dict[str, Precision]:
    """Returns what each module currently computes in, by name; the name of the model itself is empty."""
    found = {name: casts_of(module) for name, module in model.named_modules()}
    return {name: casts.precision for name, casts in found.items() if casts is not None}


def casts_of(module: nn.Module) -> Any:
    """Returns the casts of a module that a policy has prepared; None of any other."""
    if isinstance(module, Layer):
        return module.casts
    if isinstance(module, Island | Leaf | Code):
        return module.halfstep.casts
    return module.halfstep.model_casts if isinstance(module, Root) else None


@contextmanager
def switch_formats(run: Any, precisions: Mapping[str, Precision] | None = None) -> Iterator[None]:
    """Inside, modules compute in the given precisions, by name, and the others in fp32.

    The model's own code (functions between its modules) follows the empty name. Modules are those of
    `precisions_of`; `core.precision.precisions(policy, names)` gives those of a whole policy. Everything that a
    pass inside changes is restored at the end.
    """
    given = precisions or {}
    wanted = {name: given.get(name, Precision()) for name in precisions_of(run.model)}
    with ExitStack() as stack:
        stack.enter_context(extra_pass_of_run(run))
        # `replay` averages by itself: DDP does not communicate, and its buckets stay as they are.
        for wrapper in run.wrappers() if num_ranks() > 1 and run.sharded is None else []:
            sync = ("require_backward_grad_sync", "require_forward_param_sync")
            stack.callback(vars(wrapper).update, {key: getattr(wrapper, key) for key in sync})
            wrapper.require_backward_grad_sync = False
        stack.callback(_reshard, run)
        stack.enter_context(_set_precisions(run.model, wanted))
        _reshard(run)
        yield


@contextmanager
def _set_precisions(model: nn.Module, precisions: Mapping[str, Precision]) -> Iterator[None]:
    modules = [(name, module) for name, module in model.named_modules() if name in precisions]
    held = [vars(module) for _, module in modules]
    before = [{key: its[key] for key in _PRECISION_ATTRIBUTES if key in its} for its in held]
    try:
        for name, module in modules:
            set_module_precision(module, precisions[name], precisions.get("", precisions[name]))
        yield
    finally:
        for its, attributes in zip(held, before, strict=True):
            for key in _PRECISION_ATTRIBUTES:
                its.pop(key, None)
            its.update(attributes)


def _reshard(run: Any) -> None:
    if run.sharded is not None:
        run.sharded.set_grad_sync(True)
        run.sharded.reshard()


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
            given, weight = check_pair(given)
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
    named = {run.masters.names[p]: grads[id(p)].detach() for p in run.parameters if id(p) in grads}
    wide = {name: (g.to_dense() if g.is_sparse else g).float() * factor for name, g in named.items()}
    return Replay(mean_loss(losses, weights).detach(), wide)


# --- passes that leave no trace


@contextmanager
def extra_pass(model: nn.Module) -> Iterator[None]:
    """Inside, passes run eagerly; afterwards gradients, buffers and random states are as they were before."""
    gradients = [(p, p.grad) for p in model.parameters()]
    held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    of_python, of_numpy = random.getstate(), np.random.get_state()  # some models draw from them
    # Not to import dynamo, which is slow, if nothing was compiled.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eager, torch.enable_grad(), torch.random.fork_rng(devices):
        try:
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            for place, before in held:
                place.update(before)  # a module may have put another tensor there
            with torch.no_grad():
                for b, old in buffers:
                    b.copy_(old)
            for p, old_grad in gradients:
                p.grad = old_grad
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def extra_pass_of_run(run: Any) -> Iterator[None]:
    """Inside, nothing is counted; restores also marks for casts of weights, and amaxes of delayed operands."""
    held = {p: p.__dict__.get(CAST) for p in run.model.parameters()}
    marks = [(p, mark, mark.dtype) for p, mark in held.items() if isinstance(mark, CachedCast)]
    pending = None if run.amaxes is None else run.amaxes.pending.clone()
    with pause_counting(), extra_pass(run.model):
        try:
            yield
        finally:
            for p in held:
                p.__dict__.pop(CAST, None)
            for p, mark, dtype in marks:
                mark.dtype, p.__dict__[CAST] = dtype, mark
            if pending is not None:
                run.amaxes.pending.copy_(pending)


class RunningModules:
    """Which module's forward pass runs; in a backward pass, the module whose operation is differentiated."""

    def __init__(self) -> None:
        self.names = [""]  # innermost last
        self._by_node: dict[int, str] = {}  # the number of the autograd node that differentiates an operation

    def follow(self, model: nn.Module, names: Container[str] | None = None) -> ExitStack:
        """Follows all modules, or those of these names, until the stack is closed."""

        def leave(*_: Any) -> None:
            self.names.pop()

        stack = ExitStack()
        for name, module in model.named_modules():
            if names is None or name in names:
                enter = module.register_forward_pre_hook(lambda *_, name=name: self.names.append(name))
                stack.callback(enter.remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        return stack

    def here(self) -> str:
        """Returns the module that the next operation belongs to; to be called for each."""
        node = torch._C._current_autograd_node()
        if node is not None and len(self.names) == 1:  # else a forward pass that checkpointing runs again
            return self._by_node.get(node._sequence_nr(), "")
        newest = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        # The first operation counts: others without a node of their own may follow.
        self._by_node.setdefault(newest, self.names[-1])
        return self.names[-1]
