"""What a precision means in torch (`Casts`), and the casts at the border of an operation.

`Casts` holds dtypes instead of formats, so that compiled code never hashes a format. The casts themselves:

    to_compute                an activation, or a result, to the compute format
    island, island_parameter  a tensor, or a parameter, to the format of a role (`norm`, `softmax`, `loss`)
    exit_island               the result of an island to compute
    with_weight_grad_format   a parameter whose gradient is rounded to the format of weight gradients
    round_to_compute          emulation only: a result in compute, which natively has its dtype already

Natively each is one `to`. **Emulated**, a tensor is carried in fp32 and holds values of its format; every tensor
that hardware would store in the format is rounded by the reference cast, and so is its gradient.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from halfstep.core.arrays import lowering
from halfstep.core.errors import AutocastError, HalfstepError
from halfstep.core.formats import FP32, Format
from halfstep.torch.numerics.cast import carried
from halfstep.torch.numerics.provenance import recording, transforming
from halfstep.torch.numerics.split.operand import is_split, route_gradient, widen_parameter

CAST = "halfstep_cast"  # an attribute of an fp32 parameter: a `CachedCast`

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Casts(lowering.Casts[torch.dtype]):
    """A precision in torch's terms; `layers.casts_of` makes them."""

    whole: bool  # operands need more of a split master than its bf16 half
    fp32_grads: bool  # weight gradients are fp32
    direct: bool  # linear layers are native, activations and their gradients in compute, those of weights fp32
    fp32_norm: bool  # norms are native and fp32 inside, gains and their gradients too
    fast: bool  # forward matmuls of narrow operands may sum in less than fp32
    delayed: bool  # some operands are scaled by amaxes of earlier updates
    wide: "Casts | None"  # of narrow operands: the same layer with operands in compute
    words: str = ""  # of narrow operands: the precision, by which dynamo's graph names it (fp8/linear.py)


def bypass_mode(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hides what a function calls from function modes (functions/mode.py): the function casts by itself."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def check_autocast() -> None:
    """Refuses to run if torch would cast as well, on any kind of device."""
    if torch._C._is_any_autocast_enabled():
        raise autocast_error()


def autocast_error() -> HalfstepError:
    """Returns the error for a layer that is used under torch.autocast."""
    return AutocastError(
        "a layer that casts by itself is used under torch.autocast, which would cast inside its islands",
        hint="leave torch.autocast out: the modules cast by themselves",
    )


def to_compute(x: Tensor, casts: Casts) -> Tensor:
    """Casts an activation to the compute format of the module it enters."""
    # Asked without a Python call: this runs some forty times per micro-batch of a small model.
    if torch._C._is_any_autocast_enabled():
        raise autocast_error()
    compute = casts.compute
    if x.dtype is not compute:  # a cast that changes nothing still costs a call into torch
        # The same cast; the host takes 4.0 us for the first and 5.8 us for the second.
        x = x.bfloat16() if compute is torch.bfloat16 else x.to(compute)
    return round_to_compute(x, casts) if casts.emulate else x


def round_to_compute(x: Tensor, casts: Casts) -> Tensor:
    """Rounds the result of an operation to compute where it is emulated; natively it is in compute already."""
    if not casts.emulate or casts.plain:
        return x
    return _round(x, casts.precision.compute, casts.precision.grad)


def with_weight_grad_format(parameter: Tensor, casts: Casts) -> Tensor:
    """Returns a parameter, not of a matmul, whose gradient is rounded to the format of weight gradients."""
    if is_split(parameter):
        parameter = widen_parameter(parameter, casts.whole)
    if casts.fp32_grads or parameter.dtype != torch.float32:
        return parameter  # a bf16 parameter has a bf16 gradient anyway
    return _round(parameter, FP32, casts.precision.grad_weight)


def cached_cast(parameter: Tensor, compute: torch.dtype) -> Tensor:
    """Returns a parameter's values: in compute if the update has cast it, else unchanged, with a mark to do so."""
    if parameter.dtype is not compute:
        made = parameter.__dict__.get(CAST)
        if type(made) is not CachedCast:
            setattr(parameter, CAST, CachedCast(compute))
        elif made.cast is None:
            if made.dtype is not compute:
                made.dtype = compute
                CachedCast.changes += 1
        elif made.cast.dtype is compute:
            made.taken = True
            if made.version == parameter._version and made.pointer == parameter.data_ptr():
                return made.cast
    return parameter.detach()


class CachedCast:
    """The dtype that a layer casts a parameter to, and while an update has it (update/parts.py), that cast.

    The cast is valid until the parameter is written to.
    """

    __slots__ = ("cast", "dtype", "pointer", "taken", "version")
    changes = 0  # of marks, in this process: an update that finds none since the last need not look for marks

    def __init__(self, dtype: torch.dtype):
        CachedCast.changes += 1
        self.dtype = dtype
        self.cast: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A parameter is saved and copied without it, and `torch.load` knows no class of ours."""
        return OrderedDict, ()

    def hold(self, cast: Tensor, parameter: Tensor) -> None:
        """Keeps the cast of the parameter as it is now."""
        self.cast = cast
        self.taken = False  # by a layer
        self.version, self.pointer = parameter._version, parameter.data_ptr()


def island(x: Any, role: str, casts: Casts) -> Any:
    """Casts a tensor (or None) to the format of an island's role: `norm`, `softmax` or `loss`."""
    if x is None:
        return None
    inside = getattr(casts, role)
    if x.dtype is not inside:
        x = x.to(inside)
    if not casts.emulate:
        return x
    fmt: Format = getattr(casts.precision, role)
    return x if fmt == FP32 else _round(x, fmt, fmt)


def island_parameter(parameter: Tensor | None, role: str, casts: Casts) -> Any:
    """Casts a parameter of an island, or None, to the format that it computes in."""
    if parameter is None:
        return None
    return island(with_weight_grad_format(parameter, casts), role, casts)


def exit_island(x: Tensor, role: str, casts: Casts) -> Tensor:
    """Casts the result of an island to the island's format first, then to compute."""
    return to_compute(island(x, role, casts), casts)


def _round(x: Tensor, value: Format, grad: Format) -> Tensor:
    if transforming():
        return route_gradient(carried(x.detach(), value), x, grad)
    return _Round.apply(x, value, grad)  # type: ignore[no-any-return]


class _Round(torch.autograd.Function):
    """Rounds the value forward and the gradient backward, as storing both in narrow tensors would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Format, grad: Format) -> Tensor:
        ctx.grad = grad
        return carried(x, value)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if recording():
            return route_gradient(carried(g.detach(), ctx.grad), g), None, None
        return carried(g, ctx.grad), None, None
