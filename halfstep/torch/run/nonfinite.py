"""Finds what stopped being finite first: the tensor, its pass, its micro-batch, and the operation that made it.

The step is run again, eagerly, with hooks on every module. Forward, the cause is the innermost module whose output
is not finite although its inputs are; if code between modules did it, the module that holds the code, with the one
that received the result. Backward, it is the first gradient in autograd's order. Masks, which hold -inf and need
no gradient, are no failure. The operation is the origin of that tensor's numbers (origins.py).

If no pass made it, the sums are looked at: gradients of several micro-batches or ranks can each be finite, and
their sum not. Then it is a reduction.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.core.audit.cause import Cause
from halfstep.torch.parallel.ranks import from_all_ranks, num_ranks
from halfstep.torch.run.origins import Origins
from halfstep.torch.shards import is_shard, local
from halfstep.torch.split.operand import GRAD_OWNER


def find(
    model: nn.Module, loss_fn: Callable[[Any], Any], micro_batches: Iterable[Any], scale: Tensor | float
) -> Cause:
    """Runs the micro-batches again and names the first tensor that is not finite. Has no lasting effect.

    Of several processes each must call it, with its own micro-batches: they need each other in the passes. So none
    stops at what it finds, and all name the same tensor, that of the first rank that has one.
    """
    alone, cause = num_ranks() == 1, None
    with eagerly(), torch.enable_grad(), restored(model):
        for number, batch in enumerate(micro_batches):
            watch = _Watch(model)
            with watch, watch.origins:
                given = loss_fn(batch)
                loss, weight = given if isinstance(given, tuple) else (given, 1.0)
                if watch.cause is None and not _fine(loss):
                    watch.note(Cause("forward", "the loss itself; what the model gave it is finite"), loss)
                if watch.cause is None or not alone:
                    (loss.float() / weight * scale).backward()
            if cause is None and watch.cause is not None:
                cause = replace(watch.cause, micro_batch=number)
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


def eagerly() -> AbstractContextManager[object]:
    """Has compiled functions run as they were written; what nothing was compiled with is not imported."""
    known = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if known else nullcontext()


def _bad_sum(model: nn.Module) -> str | None:
    """Returns the first parameter whose gradients, summed over micro-batches and ranks, are not finite."""
    alone = num_ranks() == 1
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = getattr(parameter, GRAD_OWNER, parameter).grad
        if gradient is None and alone:
            continue
        total = torch.zeros_like(local(parameter), dtype=torch.float32) if gradient is None else local(gradient)
        bad = torch.zeros((), device=total.device)
        if not alone and not is_shard(parameter):  # of a shard, the gradient is a sum already
            total = total.to_dense() if total.is_sparse else total
            total = total.to(torch.float32, copy=True)
            dist.all_reduce(total)
        bad += not _fine(total, masks=False)
        if not alone:
            dist.all_reduce(bad)
        if bool(bad):
            return name
    return None


class _Watch:
    def __init__(self, model: nn.Module):
        self.cause: Cause | None = None
        self._running = [""]  # the modules whose forward passes run, innermost last
        self.origins = Origins(lambda: self._running[-1])
        self._entered = ""  # the first module whose input is not finite
        self._handles: list[Any] = []
        self._watched: set[int] = set()
        for name, module in model.named_modules():
            before, after = self._before(name), self._after(name, module)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        for name, parameter in model.named_parameters():
            self._watch_parameter(name, parameter)

    def _watch_parameter(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad and id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            hook = self._gradient(f"`{name}`", name.rpartition(".")[0])
            owner = getattr(parameter, GRAD_OWNER, parameter)  # whose gradient autograd takes
            self._handles.append(owner.register_hook(hook))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def note(self, cause: Cause, tensor: Tensor) -> None:
        """Keeps a cause, with the operation that made the tensor bad if that was seen."""
        origin = self.origins.of(tensor)
        if origin is not None:
            where: Any = "backward" if origin.backward else "forward"
            module = origin.module or cause.module
            cause = replace(cause, where=where, operation=origin.operation, module=module)
        self.cause = cause

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for own, parameter in module._parameters.items():
                if parameter is not None:  # FSDP shows modules another one while they run
                    self._watch_parameter(f"{name}.{own}" if name else own, parameter)
            self._running.append(name)
            if not self._entered and self.cause is None and not _fine((args, kwargs)):
                self._entered = name or "the model"

        return hook

    def _after(self, name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._running.pop()
            if self.cause is None and not _fine(output):
                if _fine((args, kwargs)):
                    bad = next(tensor for tensor in _tensors(output) if not _fine(tensor))
                    self.note(Cause("forward", self._describe(name, module, (args, kwargs)), name), bad)
                elif not name:
                    self.cause = Cause("forward", "the input of the model")
            for tensor in _tensors(output):
                if tensor.requires_grad and torch.is_grad_enabled():
                    what = f"the output of `{name}`" if name else "the output of the model"
                    self._handles.append(tensor.register_hook(self._gradient(what, name)))

        return hook

    def _describe(self, name: str, module: nn.Module, inputs: Any) -> str:
        largest = max((float(t.detach().abs().max()) for t in _tensors(inputs) if t.numel()), default=None)
        where = name or "the model"
        bad = [key for key, p in module.named_parameters(recurse=False) if not bool(p.isfinite().all())]
        if bad:
            return f"{where}, whose own `{bad[0]}` is not finite"
        if self._entered:
            where += f", in its own code before `{self._entered}`"
        return where if largest is None else f"{where}, largest input {largest:.3g}"

    def _gradient(self, what: str, module: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self.cause is None and not _fine(gradient, masks=False):
                self.note(Cause("backward", f"gradient of {what}", module), gradient)

        return hook


def _fine(tree: Any, *, masks: bool = True) -> bool:
    """Whether no tensor holds NaN or infinity, except the -inf of masks."""
    for tensor in _tensors(tree):
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        bad = ~values.isfinite()
        if masks and not tensor.requires_grad:
            bad &= values != -torch.inf
        if bool(bad.any()):
            return False
    return True


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and the random state afterwards."""
    gradients = [(p, p.grad) for p in model.parameters()]
    held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices):
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
