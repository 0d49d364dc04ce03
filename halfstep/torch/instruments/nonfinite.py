"""Finds what stopped being finite first: the tensor, its pass, its micro-batch, and the operation that made it.

The step is run again, eagerly, with hooks on every module. Forward, the cause is the innermost module whose output
is not finite although its inputs are; if code between modules did it, the module that holds the code, with the one
that received the result. Backward, it is the first gradient in autograd's order. Masks, which hold -inf and need
no gradient, are no failure.

If no pass made it, the sums are examined: the gradients of several micro-batches or ranks can each be finite and
their sum not. Then the cause is the reduction.

**Origins.** A dispatch mode sees each operation of the forward and the backward pass. An operation with a bad
output and no bad input is an origin; one that has both passes on the origin of its input. Origins are kept by
storage, so that views and writes in place carry them, and only the origin of a tensor that matters is looked up:
code may divide by zero and replace the result, which is no failure.

    -inf    is how masks are written: an operation that was given -inf, as a number or in a tensor, may return it.
            What makes NaN of it is an origin, such as a softmax over nothing but -inf.
    empty   memory that nobody has written to may hold anything, and is not examined.

Around compiled code a dispatch mode would silently turn compilation off, so the pass is eager.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.core.audit.cause import Cause
from halfstep.torch.instruments.replay import RunningModules, extra_pass
from halfstep.torch.numerics.shards import is_shard, local
from halfstep.torch.numerics.split.operand import grad_owner_of
from halfstep.torch.parallel.ranks import from_all_ranks, num_ranks


def find(
    model: nn.Module, loss_fn: Callable[[Any], Any], micro_batches: Iterable[Any], scale: Tensor | float
) -> Cause:
    """Runs the micro-batches again and names the first tensor that is not finite. Has no lasting effect.

    Every process of a job must call it, with its own micro-batches, because the passes communicate. So none stops
    at what it finds, and all name the same tensor: that of the first rank that has one.
    """
    alone, cause = num_ranks() == 1, None
    with extra_pass(model):
        for number, batch in enumerate(micro_batches):
            watch = _FirstFailure(model)
            with watch.hooks, watch.origins:
                given = loss_fn(batch)
                loss, weight = given if isinstance(given, tuple) else (given, 1.0)
                if watch.cause is None and not _is_finite(loss):
                    watch.keep_cause(Cause("forward", "the loss itself; what the model gave it is finite"), loss)
                (loss.float() / weight * scale).backward()
            if cause is None and watch.cause is not None:
                loss_alone = watch.finite_gradients and not _is_finite(loss)
                cause = replace(watch.cause, micro_batch=number, loss_alone=loss_alone)
            if alone and cause is not None:
                return cause
        for rank, found in enumerate([] if alone else from_all_ranks(cause)):
            if found is not None:
                return replace(found, rank=rank)
        if (name := _bad_sum(model)) is not None:
            each = "of each micro-batch" if alone else "on each rank"
            what = f"the sum of gradients of `{name}`; {each} they are finite"
            return Cause("reduction", what, name.rpartition(".")[0])
    return Cause("nowhere", "run again, the step is finite: dropout, another batch or a later update decides it")


def _bad_sum(model: nn.Module) -> str | None:
    """Returns the first parameter whose gradients, summed over micro-batches and ranks, are not finite."""
    alone = num_ranks() == 1
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = grad_owner_of(parameter).grad
        if gradient is None and alone:
            continue
        total = torch.zeros_like(local(parameter), dtype=torch.float32) if gradient is None else local(gradient)
        bad = torch.zeros((), device=total.device)
        if not alone and not is_shard(parameter):  # the gradient of a shard is a sum already
            total = total.to_dense() if total.is_sparse else total
            total = total.to(torch.float32, copy=True)
            dist.all_reduce(total)
        bad += not _is_finite(total, masks=False)
        if not alone:
            dist.all_reduce(bad)
        if bool(bad):
            return name
    return None


class _FirstFailure:
    """Hooks on every module and parameter, which find the cause of the first bad tensor of a pass."""

    def __init__(self, model: nn.Module):
        self.cause: Cause | None = None
        self.finite_gradients = True
        running = RunningModules()
        self.origins = Origins(running)
        self.hooks = running.follow(model)  # until the stack is closed
        self._entered = ""  # the first module whose input is not finite
        self._watched: set[int] = set()
        for name, module in model.named_modules():
            before, after = partial(self._before_forward, name), partial(self._after_forward, name)
            self.hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self.hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        for name, parameter in model.named_parameters():
            self._watch_parameter(name, parameter)

    def _watch_parameter(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad and id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            hook = partial(self._see_gradient, f"`{name}`", name.rpartition(".")[0])
            self.hooks.callback(grad_owner_of(parameter).register_hook(hook).remove)

    def keep_cause(self, cause: Cause, tensor: Tensor) -> None:
        """Keeps a cause, with the operation that made the tensor bad if it is known."""
        origin = self.origins.origin_of(tensor)
        if origin is not None:
            where: Any = "backward" if origin.backward else "forward"
            module = origin.module or cause.module
            cause = replace(cause, where=where, operation=origin.operation, module=module)
        self.cause = cause

    def _before_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for own, parameter in module._parameters.items():
            if parameter is not None:  # FSDP gives a module another parameter while it runs
                self._watch_parameter(f"{name}.{own}" if name else own, parameter)
        if not self._entered and self.cause is None and not _is_finite((args, kwargs)):
            self._entered = name or "the model"

    def _after_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.cause is None and not _is_finite(output):
            if _is_finite((args, kwargs)):
                bad = next(tensor for tensor in _float_tensors(output) if not _is_finite(tensor))
                self.keep_cause(Cause("forward", self._describe(name, module, (args, kwargs)), name), bad)
            elif not name:
                self.cause = Cause("forward", "the input of the model")
        hook = partial(self._see_gradient, f"the output of `{name}`" if name else "the output of the model", name)
        for tensor in _float_tensors(output):
            if tensor.requires_grad and torch.is_grad_enabled():
                self.hooks.callback(tensor.register_hook(hook).remove)

    def _see_gradient(self, what: str, module: str, gradient: Tensor) -> None:
        if self.finite_gradients and not _is_finite(gradient, masks=False):
            self.finite_gradients = False
            if self.cause is None:
                self.keep_cause(Cause("backward", f"gradient of {what}", module), gradient)

    def _describe(self, name: str, module: nn.Module, inputs: Any) -> str:
        largest = max((float(t.detach().abs().max()) for t in _float_tensors(inputs) if t.numel()), default=None)
        where = name or "the model"
        bad = [key for key, p in module.named_parameters(recurse=False) if not bool(p.isfinite().all())]
        if bad:
            return f"{where}, whose own `{bad[0]}` is not finite"
        if self._entered:
            where += f", in its own code before `{self._entered}`"
        return where if largest is None else f"{where}, largest input {largest:.3g}"


def _is_finite(tree: Any, *, masks: bool = True) -> bool:
    """Whether no tensor holds NaN or infinity, except the -inf of masks, which need no gradient."""
    return all(badness(t) <= (MASKED if masks and not t.requires_grad else FINE) for t in _float_tensors(tree))


def _float_tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


# Origins

FINE, MASKED, BAD = range(3)  # of a tensor; -inf alone may be a mask


@dataclass(frozen=True)
class Origin:
    """An operation that made something not finite of finite numbers."""

    operation: str
    module: str  # whose forward pass it belongs to, or whose operation it differentiates
    backward: bool


class Origins(TorchDispatchMode):
    """Records where bad numbers come from, while it is active."""

    def __init__(self, running: RunningModules):
        super().__init__()
        self._running = running
        self._origins: dict[int, Origin | None] = {}  # by storage; None: the numbers came from outside

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Returns the origin of the bad numbers in a tensor, if it is known."""
        return self._origins.get(_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and examines its inputs and what it returns or writes to."""
        given = tree_leaves((args, kwargs))
        worst, origin = FINE, None
        for each in given:
            if (how := badness(each)) > worst:
                worst, origin = how, self.origin_of(each) if isinstance(each, Tensor) else None
        node, module = torch._C._current_autograd_node(), self._running.here()
        returned = func(*args, **(kwargs or {}))
        before = {_key(each) for each in given if isinstance(each, Tensor) and each.is_floating_point()}
        written = "empty" not in func.overloadpacket.__name__
        for each in tree_leaves(returned):
            if (how := badness(each) if written else FINE) != FINE:
                mine = worst == FINE or (worst < how and origin is None)
                name = func.overloadpacket.__name__ + ("" if node is None else f" of {node.name()}")
                self._origins[_key(each)] = Origin(name, module, node is not None) if mine else origin
            elif isinstance(each, Tensor) and each.is_floating_point() and (key := _key(each)) not in before:
                self._origins.pop(key, None)  # the memory of a tensor that is gone
        return returned


def badness(value: Any) -> int:
    """Returns FINE, MASKED if a number or a tensor has nothing bad but -inf, or BAD."""
    if isinstance(value, float):
        return MASKED if value == -math.inf else FINE
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or value.is_nested:
        return FINE
    values = _values_of(value)
    values = values.float() if values.element_size() == 1 else values  # fp8 has no isfinite
    if bool(values.isfinite().all()):
        return FINE
    return MASKED if bool((values.isfinite() | (values == -torch.inf)).all()) else BAD


def _key(tensor: Tensor) -> int:
    return int(_values_of(tensor).untyped_storage()._cdata)


def _values_of(tensor: Tensor) -> Tensor:
    values = tensor._local_tensor if is_shard(tensor) else tensor.detach()  # type: ignore[attr-defined]
    return values.coalesce().values() if values.is_sparse else values
