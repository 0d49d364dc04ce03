"""The formats that a model computes in, and whether its activations and gradients fit them.

For a few updates hooks on modules say whose code runs, and a torch function mode is on inside the outermost of
them (operations.py says what is seen of each function). Gradients of what a layer returns are seen by
tensor hooks. Loss functions are replaced for that time too, because loops call them outside of any module.

If anything is compiled, none of this happens: hooks and modes would become a part of compiled code. Formats are
read from dynamo's graphs (graphs.py), and the values inside them are not seen.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from halfstep.core.audit.record import Operation, Record
from halfstep.core.formats import parse
from halfstep.core.precision import Precision
from halfstep.core.torch_functions import LOSSES
from halfstep.torch.instruments.collect import graphs
from halfstep.torch.instruments.collect.guard import Guard, describe
from halfstep.torch.instruments.collect.models import full_name
from halfstep.torch.instruments.collect.operations import Operations, Where, where_of
from halfstep.torch.instruments.collect.patches import Patches
from halfstep.torch.instruments.collect.tensors import format_name, is_narrow, local, place, tensors_of

# Whether the gradients of activations are large enough for their format.
#
# A gradient that is too small for fp16 is zero, and zeros say nothing of where they come from: a rectifier makes
# them, and so does a weight that begins at zero. So two facts count:
#
#     few bits      of the numbers that are not zero, how many are among the sixteen smallest of the format
#     all zero      a layer's gradient is zero throughout, that of the block around it is not, and no matrix of the
#                   block began at zero

FEW = 16
_SEEN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Tally:
    dtype: torch.dtype
    amax: Tensor
    nonzero: Tensor | int = 0
    few_bits: Tensor | int = 0
    calls: int = 0
    elements: int = 0


class Gradients:
    """Gathers gradients; `operations` returns what was gathered."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self.places: dict[str, str | None] = {}  # where a module is called
        self._zero: dict[str, Tensor] = {}  # whether a matrix was zero when watching began

    def find_zeros(self, model: str, root: nn.Module) -> None:
        """Remembers which matrices are zero, without waiting for the device."""
        for name, p in root.named_parameters():
            if p.dim() > 1:
                self._zero.setdefault(full_name(model, name), ~local(p.detach()).any())

    def see(self, name: str, grad: Tensor) -> None:
        """Adds the gradient of a module's output."""
        grad = local(grad.detach())
        if grad.dtype not in _SEEN or not grad.numel():
            return
        size = grad.abs()
        tally = self._tallies.get(name)
        if tally is None or tally.dtype != grad.dtype:
            tally = self._tallies[name] = _Tally(grad.dtype, torch.zeros((), device=grad.device))
        tally.calls += 1
        tally.elements += grad.numel()
        tally.amax = torch.maximum(tally.amax, size.amax().float())
        tally.nonzero += (size != 0).sum()
        smallest = parse(format_name(grad.dtype)).smallest_subnormal
        tally.few_bits += ((size != 0) & (size < FEW * smallest)).sum()

    def operations(self) -> Iterator[Operation]:
        """Yields one operation per module whose gradients were seen in a narrow format."""
        for name, tally in self._tallies.items():
            if tally.dtype != torch.float32:
                nonzero, lost = int(tally.nonzero), int(tally.few_bits)
                if not nonzero and tally.dtype == torch.float16 and self._should_have_some(name):
                    nonzero = lost = tally.elements
                yield Operation(
                    name,
                    "other",
                    outputs=[format_name(tally.dtype)],
                    count=tally.calls,
                    amax=float(tally.amax),
                    underflow=lost,
                    place=self.places.get(name),
                    backward=True,
                    elements=nonzero,
                )

    def _should_have_some(self, name: str) -> bool:
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            around = ".".join(parts[:depth])
            outer = self._tallies.get(around)
            if outer is not None and float(outer.amax) > 0:
                return not any(bool(zero) for name, zero in self._zero.items() if name.startswith(f"{around}."))
        return False


UPDATES = 3  # at a time, the one that is running included: formats do not change
PASSES = 64  # at most, of an optimizer whose steps torch does not see
ROUNDS = 3  # of watching, a new one after a skipped update


class _Known(NamedTuple):
    where: Where
    layer: bool
    block: bool


class Formats:
    """Fills the operations of a record, and what the process does to fp32 matmuls."""

    def __init__(self) -> None:
        self.operations, self.gradients = Operations(), Gradients()
        self.models: dict[str, nn.Module] = {}
        self.unseen: dict[str, None] = {}
        self._hooks = Patches(Guard(self.note))  # of the few updates that are watched
        self._known: dict[int, _Known] = {}  # by id of a module; `models` keeps them alive
        self._local = threading.local()
        self._mode = ResultMode(self._noting(self.called))
        self.watching = self._finished = self._compiles = False
        self._rounds = self._passes = self._compiled = 0
        self._steps: dict[int, int] = {}

    def install(self, patches: Patches) -> None:
        """Begins to read the graphs that dynamo compiles, and the format of losses."""
        self._compiled = graphs.graphs_compiled()
        see = partial(self.safely, graphs.read, self.operations)
        graphs.install(patches, see, partial(setattr, self, "_compiles", True))
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.on_undo(self.unwatch)

    def start(self, models: Mapping[str, nn.Module]) -> None:
        """Watches the models for a few updates."""
        self.models = dict(models)
        if not self.watching and not self._rounds:
            self.safely(self.watch)

    def after_step(self, skipped: bool) -> None:
        """Watches again after a skipped update, in which an activation may have overflowed."""
        if skipped and not self.watching and self._rounds < ROUNDS:
            self.safely(self.watch)

    def watch(self) -> None:
        """Adds every hook."""
        modules = [module for root in self.models.values() for module in root.modules()]
        compiled = any(m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in modules)
        if compiled or self._compiles or graphs.graphs_compiled() > self._compiled:
            self.unseen["the values of activations and gradients, and what runs outside compiled code"] = None
            return
        self.watching, self._finished, self._passes, self._steps = True, False, 0, {}
        self._rounds += 1
        hooks = self._hooks
        for model, root in self.models.items():
            self.gradients.find_zeros(model, root)
            for name, module in root.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    self.unseen[f"what TorchScript computes in `{full_name(model, name)}`"] = None
                else:
                    where = where_of(full_name(model, name), type(module).__name__)
                    parent = root.get_submodule(name.rpartition(".")[0])
                    has_inner = any(True for _ in module.children())
                    is_layer = not has_inner or any(True for _ in module.parameters(recurse=False))
                    is_block = has_inner and isinstance(parent, nn.ModuleList | nn.Sequential)
                    self._known[id(module)] = _Known(where, is_layer, is_block)
        # Of all modules at once: a copy of a model, or its file, has none of ours.
        hooks.hook(register_module_forward_pre_hook, self._noting(self._enter_module))
        hooks.hook(register_module_forward_hook, self._noting(self._leave_module), always_call=True)
        for name in LOSSES.split():
            hooks.wrap(F, name, partial(self._loss, getattr(F, name)))
        hooks.hook(register_optimizer_step_post_hook, hooks.guard.hook(self._count_step))

    def unwatch(self) -> None:
        """Removes the hooks on modules."""
        if stack := self._stack():  # a hook has failed to leave its module
            stack.clear()
            self._mode.__exit__(None, None, None)
        self._hooks.undo()
        self.watching = False

    def fill(self, record: Record) -> None:
        """Adds the operations and switches to a record."""
        record.operations += [*self.operations.operations(), *self.gradients.operations()]
        record.switches |= switches(self.models, self.operations.fp8)
        record.unseen += [text for text in self.unseen if text not in record.unseen]

    # --- called by the hooks

    def safely(self, see: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Calls `see` without gradients; an error in it is noted, and does not end the script."""
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                see(*args, **kwargs)
        except Exception as error:  # no error of an audit may reach the script
            self.note(describe(error))

    def _noting(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Returns a hook whose errors are noted; the hooks after it still leave what it has entered."""

        def noting(*args: Any, **kwargs: Any) -> None:
            try:
                hook(*args, **kwargs)
            except Exception as error:
                self.note(describe(error))

        return noting

    def note(self, failure: str) -> None:
        """Notes that the audit itself has failed to see something."""
        self.unseen[f"some operations: {failure}"] = None

    def _stack(self) -> list[tuple[Where, int]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        known = self._known.get(id(module))
        if known is None or torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not stack:
            self._passes += 1
            self._mode.__enter__()
        stack.append((known.where, self.operations.calls))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        known, stack = self._known.get(id(module)), self._stack()
        if known is None or torch.compiler.is_compiling() or known.where not in [where for where, _ in stack]:
            return
        while stack[-1][0] != known.where:  # an exception has skipped its hook
            stack.pop()
        where, calls = stack.pop()
        if not stack:
            self._mode.__exit__(None, None, None)
            if self._finished:
                self.unwatch()
        if self._passes > PASSES or not torch.is_grad_enabled():
            return
        if known.layer and calls == self.operations.calls:
            self.safely(self._see_opaque_module, where, module, args, output)
        if known.layer or known.block:
            self.safely(self._hook_gradient, where, known.block, output)

    def called(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Sees a function that a module's code has called."""
        stack = self._stack()
        if stack and self._passes <= PASSES and not torch.compiler.is_compiling():
            self._see(function, args, kwargs, result, stack[-1][0])

    def _see(self, function: Any, args: Any, kwargs: Any, result: Any, where: Where) -> None:
        out = result if isinstance(result, Tensor) else next(tensors_of(result), None)
        if out is None or torch._C._functorch.is_functorch_wrapped_tensor(out):  # type: ignore[attr-defined]
            return
        autocast = torch.is_autocast_enabled(out.device.type)
        trained = torch.is_grad_enabled()
        see = self.operations.see
        self.safely(see, function, (args, kwargs), result, where, place, autocast=autocast, trained=trained)

    def _loss(self, function: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._stack() and torch.is_grad_enabled():  # else the mode has seen it
            self._see(function, args, kwargs, result, Where())
        return result

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self.safely(self._loss_format, tensors)
        return original(tensors, *args, **kwargs)

    def _loss_format(self, tensors: Any) -> None:
        for loss in tensors_of(tensors):
            if is_narrow(loss.dtype) and loss.numel() == 1:
                self.operations.see_module("loss", format_name(loss.dtype), [loss], loss, Where())

    def _see_opaque_module(self, where: Where, module: nn.Module, args: Any, output: Any) -> None:
        out = next(tensors_of(output), None)
        kind, inside = _kind_of(module, where, out)
        if kind is not None and out is not None:
            self.operations.see_module(kind, inside, [*tensors_of(args)], out, where)

    def _hook_gradient(self, where: Where, block: bool, output: Any) -> None:
        out = next(tensors_of(output), None)
        if out is not None and out.requires_grad and not out.is_leaf and (block or is_narrow(out.dtype)):
            if where.name not in self.gradients.places:
                self.gradients.places[where.name] = place()
            out.register_hook(partial(self.safely, self.gradients.see, where.name))

    def _count_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        self._finished = self._finished or self._steps[id(optimizer)] == UPDATES
        if self._finished and not self._stack():  # a module may step in its forward: then when that has ended
            self.unwatch()


class ResultMode(TorchFunctionMode):
    """Shows each function after it has run. Functions that it calls are not seen: they are a part of it."""

    def __init__(self, see: Callable[[Any, Any, Any, Any], None]):
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(func, args, kwargs or {}, result)
        return result


def _kind_of(module: nn.Module, where: Where, out: Tensor | None) -> tuple[Any, str | None]:
    """Returns the operation of a module whose functions are hidden, and the format that it states."""
    precision = _precision_of(module)
    if where.norm:
        return "norm", None if precision is None else str(precision.norm)
    matrix = next((p for p in module.parameters(recurse=False) if p.dim() == 2), None)
    if matrix is not None and not isinstance(module, nn.Embedding):
        router = where.router and matrix.shape[0] < matrix.shape[1]
        inside = str(precision.operand.format) if precision is not None else None
        return ("router" if router else "matmul"), inside or (format_name(out.dtype) if out is not None else None)
    return None, None


def switches(models: Mapping[str, nn.Module], fp8_calls: int) -> dict[str, str | float | bool | None]:
    """Returns what the device rounds fp32 operands to, who chose fp8, and how many layers run in it."""
    modules = [m for root in models.values() for m in root.modules()]
    devices = {p.device.type for root in models.values() for p in root.parameters()}
    rounded = _cuda_fp32_precision() if "cuda" in devices else "ieee"
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.AcceleratorState._shared_state
    asked = "Accelerate" if shared.get("_mixed_precision") == "fp8" else None
    layers = sum(_runs_fp8(m) for m in modules)
    if any(_precision_of(m) is not None and _runs_fp8(m) for m in modules):
        asked = asked or "the policy"
    return {
        "fp32_matmul": "ieee" if rounded == "none" else rounded,
        "fp8_asked": asked,
        "fp8_layers": max(layers, int(fp8_calls > 0)),
    }


def _precision_of(module: nn.Module) -> Precision | None:
    """Returns what a layer of halfstep's computes in; None of any other module."""
    precision = getattr(module, "precision", None)
    return precision if isinstance(precision, Precision) else None


def _cuda_fp32_precision() -> str:
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9
        return str(matmul.fp32_precision)
    return "tf32" if matmul.allow_tf32 else "ieee"


def _runs_fp8(module: nn.Module) -> bool:
    precision = _precision_of(module)
    if precision is not None:
        return precision.narrow
    return type(module).__name__.startswith("Float8") or type(module).__module__.startswith("transformer_engine")
