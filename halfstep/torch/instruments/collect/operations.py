"""The operations of a record: which functions a model calls, in which formats, and whether their numbers fit.

`Operations.see` takes one call at a time, of a running model (formats.py) or of a graph that dynamo has traced
(graphs.py). It keeps its numbers on their device, and reads them when the record is filled.

    promoted    An fp32 tensor meets a narrow one, and the result is fp32. The result is marked, and so is what is
                computed from it without a cast; a matmul of marked tensors runs in fp32 though nobody asked.
    by hand     exp, its sum and their quotient in a narrow format are a softmax. rsqrt, or a mean or a square in a
                module that is called a norm, belongs to a norm.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.core.audit.record import Operation
from halfstep.core.torch_functions import KERNELS, LOSSES, NORMS, SOFTMAX, named
from halfstep.torch.instruments.collect import tensors
from halfstep.torch.instruments.collect.counts import Count, Counts
from halfstep.torch.instruments.collect.tensors import format_name, is_narrow, local, tensors_of

_PLACES = (torch, torch.Tensor)
_PRODUCTS = "linear matmul __matmul__ __rmatmul__ mm bmm mv addmm baddbmm einsum grouped_mm _grouped_mm _scaled_mm"
_ARITHMETIC = (
    "add sub mul div multiply divide true_divide subtract pow square exp cumsum prod __add__ __radd__ __iadd__ "
    "__sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __pow__ add_ mul_ "
    "div_ sub_ addcmul lerp"
)
_STATISTICS = "mean sum var std var_mean std_mean norm vector_norm rsqrt pow square __pow__"
_CASTS = "to half bfloat16 float type type_as double"

# softmax and norm are torch's own: their kernels sum in fp32, on every device, whatever they are given.
KINDS: dict[Any, str] = {
    **dict.fromkeys(named(_STATISTICS, torch.linalg, *_PLACES), "arithmetic"),
    **dict.fromkeys(named(_ARITHMETIC, *_PLACES), "arithmetic"),
    **dict.fromkeys([operator.add, operator.sub, operator.mul, operator.truediv, operator.pow], "arithmetic"),
    **dict.fromkeys([operator.iadd, operator.isub, operator.imul, operator.itruediv], "arithmetic"),
    **dict.fromkeys(named(_CASTS, torch.Tensor), "cast"),
    **dict.fromkeys(named(SOFTMAX, F, torch.special, *_PLACES), "softmax"),
    **dict.fromkeys(named("log_softmax logsumexp", F, torch.special, *_PLACES), "logarithm"),
    **dict.fromkeys(named(NORMS, F, torch), "norm"),
    **dict.fromkeys(named(LOSSES, F, torch), "loss"),
    **dict.fromkeys(named(_PRODUCTS, F, torch.linalg, *_PLACES), "matmul"),
    **dict.fromkeys(named(KERNELS, F, *_PLACES), "matmul"),
    operator.matmul: "matmul",
    F.scaled_dot_product_attention: "attention",
    F.multi_head_attention_forward: "attention",
}
# Parts of hand-written norms and softmax.
STATISTICS = frozenset([*named(_STATISTICS, torch.linalg, *_PLACES), operator.pow])
SQUARE_ROOT = frozenset(named("rsqrt", *_PLACES))
EXP = frozenset(named("exp", *_PLACES))
SUM = frozenset(named("sum", *_PLACES))
DIVISION = frozenset([*named("div divide true_divide __truediv__ div_ __itruediv__", *_PLACES), operator.truediv])

_NORM = re.compile(r"norm(?!al)", re.IGNORECASE)  # but not NormalDistribution
_ROUTER = re.compile(r"router|(^|\.)(gate|gating|wg)$")
# Torch writes this norm in Python, in the format of its input.
_BY_HAND = "normalize"


class Where(NamedTuple):
    """The module whose code calls a function."""

    name: str = ""
    norm: bool = False
    router: bool = False


def where_of(name: str, kind: str) -> Where:
    """Returns what is known of a module by its name and the name of its class."""
    is_router = _ROUTER.search(name.lower()) is not None or "router" in kind.lower()
    return Where(name, _NORM.search(kind) is not None, is_router)


@dataclass(slots=True)
class _Tally:
    operation: Operation
    amax: Tensor | None = None
    overflow: Tensor | None = None
    rounded: Tensor | int = 0

    def add(self, inputs: list[Tensor], out: Tensor) -> None:
        """Adds the numbers of a result; what is not finite counts if the inputs were, masks among them."""
        result = local(out.detach())
        self.operation.elements += result.numel()
        amax = result.abs().amax().float()
        given = [local(t.detach()) for t in inputs if t is not out and t.numel() and t.itemsize > 1]
        # Masks use the largest number of a format as they use infinity.
        ordinary = [(t.abs().amax() < torch.finfo(t.dtype).max).to(amax.device) for t in given]
        finite = torch.stack(ordinary).all() if ordinary else True
        bad = (~torch.isfinite(result)).sum() * finite
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        self.overflow = bad if self.overflow is None else self.overflow + bad

    def filled(self) -> Operation:
        """Returns the operation with its numbers."""
        if self.amax is not None and self.overflow is not None:
            self.operation.amax, self.operation.overflow = float(self.amax), int(self.overflow)
        self.operation.rounded = int(self.rounded)
        return self.operation


class Operations:
    """Gathers calls; `operations` returns what was gathered."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[Any, ...], _Tally] = {}
        self._marks: Any = WeakTensorKeyDictionary()  # of a tensor: "exp", "sum" or where it was promoted
        self._counts = Counts()
        self.calls = 0  # of functions that have a kind
        self.fp8 = 0

    def see(
        self,
        function: Any,
        args: Any,
        result: Any,
        where: Where,
        place: Callable[[], str | None],
        *,
        autocast: bool = False,
        values: bool = True,
        trained: bool = True,
    ) -> None:
        """Adds one call; of what runs without gradients, as tables of rotary positions do, only positions."""
        kind = KINDS.get(function)
        given, options = args
        if values and (count := self._counts.see(function, given, options, result)) is not None:
            self._add_positions(count, where, place)
        if not trained or (kind is None and not len(self._marks)):
            return
        inputs, out = [*tensors_of(args)], next(tensors_of(result), None)
        if not inputs or out is None:
            return
        mark = self._mark(function, kind, inputs, out, place, autocast)
        if kind is None:
            return
        self.calls += 1
        self.fp8 += any(t.dtype.itemsize == 1 for t in inputs) and kind == "matmul"
        name = getattr(function, "__name__", str(function)).strip("_")
        for what, inside in _readings(function, kind, inputs, out, where, mark):
            promoted = mark if what in ("matmul", "attention") else None
            is_promoted = promoted is not None
            operation = Operation(where.name, what, inside=inside, promoted=is_promoted, function=name)
            operation.place = promoted or place()
            self._add(operation, inputs, out, values=values and what != "loss")

    def _add_positions(self, count: Count, where: Where, place: Callable[[], str | None]) -> None:
        inside = format_name(count.dtype)
        operation = Operation(where.name, "positions", inside=inside, function=count.function, place=place())
        tally = self._count(operation)
        tally.operation.elements += count.elements
        tally.rounded = tally.rounded + count.rounded

    def see_module(self, kind: Any, inside: str | None, inputs: list[Tensor], out: Tensor, where: Where) -> None:
        """Adds a module whose functions are hidden: a kernel, or a layer that casts by itself."""
        self._add(Operation(where.name, kind, inside=inside, place=tensors.place()), inputs, out)

    def see_backward(self, where: Where, inside: str, place: Callable[[], str | None]) -> None:
        """Adds a matmul whose gradients are computed in another format than its result."""
        self._count(Operation(where.name, "matmul", inside=inside, place=place(), backward=True))

    def operations(self) -> Iterator[Operation]:
        """Yields the operations; arithmetic only if it overflowed."""
        for tally in self._tallies.values():
            operation = tally.filled()
            if operation.kind != "other" or operation.overflow:
                yield operation

    def _add(self, operation: Operation, inputs: list[Tensor], out: Tensor, *, values: bool = True) -> None:
        operation.inputs, operation.outputs = [format_name(t.dtype) for t in inputs], [format_name(out.dtype)]
        tally = self._count(operation)
        if values and is_narrow(out.dtype) and out.requires_grad and out.numel():
            tally.add(inputs, out)

    def _count(self, operation: Operation) -> _Tally:
        """Counts a call, and returns the tally of all that are alike; formats and place are those of the first."""
        promoted_at = operation.place if operation.promoted else None
        called = (operation.module, operation.kind, operation.function, operation.inside)
        key = (*called, operation.backward, promoted_at)
        tally = self._tallies.setdefault(key, _Tally(operation))
        tally.operation.count += 1
        return tally

    def _mark(self, function: Any, kind: Any, inputs: Any, out: Tensor, place: Any, autocast: bool) -> str | None:
        """Marks a result, and returns what the call means because of marks on its inputs."""
        marks = [self._marks.get(t) for t in inputs] if len(self._marks) else []
        if is_narrow(out.dtype):
            if function in EXP:
                self._marks[out] = "exp"
            elif function in SUM and marks[:1] == ["exp"]:
                self._marks[out] = "sum"
            return "softmax" if function in DIVISION and marks[:2] == ["exp", "sum"] else None
        if autocast or out.dtype != torch.float32 or kind == "cast":
            return None
        dtypes = {t.dtype for t in inputs if t.dim() and (t.dtype == torch.float32 or is_narrow(t.dtype))}
        inherited = next((m for m in marks if m not in (None, "exp", "sum")), None)
        if kind == "arithmetic" and len(dtypes) > 1:
            inherited = place() or "promoted"
        if inherited and kind not in ("matmul", "attention"):
            self._marks[out] = inherited
        return inherited


def _readings(
    function: Any, kind: str, inputs: list[Tensor], out: Tensor, where: Where, mark: str | None
) -> Iterator[tuple[Any, str | None]]:
    """Yields the kinds of operation that a call is, with the format it computes in."""
    result = format_name(out.dtype)
    wide = "fp32" if is_narrow(out.dtype) else result
    if kind == "matmul":
        # Fewer experts than channels; the gate of a GLU is wide.
        fewer = out.dim() > 0 and out.shape[-1] < inputs[0].shape[-1]
        yield ("router" if where.router and fewer else "matmul"), result
    elif kind in ("attention", "loss"):
        yield kind, result
    elif kind == "logarithm":
        yield "softmax", result
    elif kind == "norm" and function.__name__ == _BY_HAND:
        yield "norm", result
    elif kind in ("norm", "softmax"):
        yield kind, wide
    elif mark == "softmax":
        yield "softmax", result
    elif function in SQUARE_ROOT or (where.norm and function in STATISTICS):
        yield "norm", result
    else:
        yield "other", None
