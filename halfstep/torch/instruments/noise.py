"""Passes of a shadow: all repeat the random numbers of the first, and some add noise to the operands of matmuls.

A dispatch mode sees each operation of the forward and of the backward pass.

**Random numbers.** Generators give other numbers for other dtypes on some devices: dropout in fp32 would have
another mask than in bf16. So the first pass keeps the results of its random operations, and the others reuse them.

**Noise.** Every operand of a matmul, a convolution or fused attention is moved by half an ulp of the format that
its module has for operands, up or down by a hash of its bits and of the draw. As with rounding, equal numbers move
alike: a weight is the same in the forward and in the backward pass. Operands that an amax scales (fp8) have the
ulps of the scaled numbers; in the backward pass, the coarser of both formats counts. No number moves beyond zero.
Sums of two activations, as of the residual stream and its gradient, which every block rounds once more, move in
the same way.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.core.errors import ReplayError
from halfstep.core.formats import Format
from halfstep.core.precision import Precision
from halfstep.core.roles import is_narrow
from halfstep.torch.instruments.own_casts import OwnCasts
from halfstep.torch.instruments.replay import RunningModules

# Where the operands of an operation are among its arguments.
_OPERANDS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "convolution", "_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), (1, 2)),
    **dict.fromkeys(("convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), (0, 1, 2)),
}
_ATTENTION = "_scaled_dot_product"
_RANDOM = ("bernoulli", "rand", "normal", "uniform", "exponential", "geometric", "multinomial", "random", "cauchy")
_EXPONENT = 0x7F800000
_Precisions = Mapping[str, Precision] | None


def shift_by_half_ulp(x: Tensor, fmt: Format, draw: int) -> Tensor:
    """Moves fp32 numbers by half an ulp of a format, up or down."""
    bits = x.view(torch.int32)
    size = (bits & _EXPONENT).view(torch.float32) * 2.0 ** -(fmt.mantissa_bits + 1)
    least: Tensor | float = fmt.smallest_subnormal / 2
    if is_narrow(fmt):  # scaled so that the largest number fits
        least = torch.linalg.vector_norm(x, torch.inf) * (least / float(fmt.max))
    size = torch.minimum(torch.clamp(size, min=least), x.abs())
    return x + torch.where(_is_up(bits, draw), size, -size)


def _is_up(bits: Tensor, draw: int) -> Tensor:
    """Returns a random bit for each pattern, the same for the same pattern and draw."""
    h = (bits.long() & 0xFFFFFFFF) ^ (draw * 0x9E3779B1 & 0xFFFFFFFF)
    for shift in (15, 13, 16):
        h = (h ^ (h >> shift)) * 0x5BD1E995 & 0xFFFFFFFF  # below 2^63: no overflow
    return (h >> 31).bool()


class RandomNumbers:
    """The random numbers of a pass, for other passes."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Tensor]] = []
        self._next: int | None = None  # None in the first pass, which keeps its numbers

    def rewind(self) -> None:
        """Returns to the first number, for another pass."""
        self._next = 0

    def draw(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a random operation, or returns what it returned in the first pass."""
        if self._next is None:
            returned = func(*args, **kwargs)
            numbers = returned[1] if name == "native_dropout" else returned
            self._kept.append((name, numbers.detach().clone()))
            return returned
        known, numbers = self._kept[self._next] if self._next < len(self._kept) else ("nothing", torch.empty(0))
        self._next += 1
        if known != name:
            raise ReplayError(
                f"the model draws random numbers by `{name}` in fp32 where it drew by `{known}` before",
                hint="shadow compares passes with the same random numbers: draw as many in every format",
            )
        if name == "native_dropout":
            x, p = args[:2]
            return x * numbers * (0.0 if p == 1 else 1 / (1 - p)), numbers
        if name.endswith("_"):
            return args[0].copy_(numbers)
        like = args[0] if args and isinstance(args[0], Tensor) and numbers.is_floating_point() else numbers
        return numbers.to(kwargs.get("dtype") or like.dtype, copy=True)


class PassMode(TorchDispatchMode):
    """One pass: random numbers from `draws`; without `own` casts, and with noise number `draw`, if given."""

    def __init__(
        self, draws: RandomNumbers, own: OwnCasts | None = None, precisions: _Precisions = None, draw: int = 0
    ):
        super().__init__()
        self._numbers, self._own, self._precisions, self._draw = draws, own, precisions, draw
        self._running = RunningModules()

    def watch(self, model: nn.Module) -> ExitStack:
        """Follows which module runs, until the stack is closed."""
        stack = self._running.follow(model, self._own.kinds if self._own else ())
        if self._own is not None:
            stack.callback(self._own.watch_memory().undo)
        return stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, with kept random numbers and noise where they apply."""
        kwargs, name, module = kwargs or {}, func.overloadpacket.__name__, self._running.here()
        if self._own is not None:
            args, kwargs = self._own.widen(func, args, kwargs, module, product=name in _OPERANDS)
        if name == "native_dropout" or name.startswith(_RANDOM):
            return self._numbers.draw(name, func, args, kwargs)
        if name.startswith(_ATTENTION):
            _check_dropout(func, args, kwargs)
        if self._precisions is None:
            return func(*args, **kwargs)
        node = torch._C._current_autograd_node()
        returned = func(*self._add_noise(name, args, module, node), **kwargs)
        if name in ("add", "add_") and _is_stream(*args[:2]) and "AccumulateGrad" not in str(node and node.name()):
            base = self._precisions.get("") or Precision()
            returned.copy_(
                shift_by_half_ulp(returned.detach(), base.compute if node is None else base.grad, self._draw)
            )
        return returned

    def _add_noise(self, name: str, args: Any, module: str, node: Any) -> Any:
        places: tuple[int, ...] = _OPERANDS.get(name, ())
        if name.startswith(_ATTENTION):
            places = (0, 1, 2, 3) if name.endswith("_backward") else (0, 1, 2)
        if not places:
            return args
        fmt, args = self._format(module, backward=node is not None), list(args)
        for place in places:
            if args[place].dtype is torch.float32:
                args[place] = shift_by_half_ulp(args[place].detach(), fmt, self._draw)
        return args

    def _format(self, module: str, *, backward: bool) -> Format:
        assert self._precisions is not None
        precision = self._precisions.get(module) or Precision()
        operands = precision.operands if backward else (precision.operand,)
        return min((operand.format for operand in operands), key=lambda fmt: fmt.mantissa_bits)


def _is_stream(a: Any, b: Any) -> bool:
    """Whether two tensors are activations of one shape, as the residual stream and its gradient are summed."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and a.dtype is b.dtype is torch.float32 and a.shape == b.shape and a.dim() > 2


def _check_dropout(func: Any, args: Any, kwargs: Any) -> None:
    """Refuses dropout inside a fused kernel, whose mask depends on the format."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dropout_p"):
        raise ReplayError(
            "the model has dropout inside fused attention, whose mask is another one in fp32: a shadow cannot "
            "repeat the step",
            hint="compute attention in steps (Hugging Face: attn_implementation='eager'), or without dropout",
        )
