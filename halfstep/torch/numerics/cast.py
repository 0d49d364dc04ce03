"""Casts in torch that agree with core.rounding bit for bit, on any device, under compile, without a sync.

The arithmetic of casts, scales and split masters is core.arrays.cast, that of random words core.philox. Here is
what only torch needs: native conversions, what its compiler has to be told, and large tensors cast in parts.
Nothing is differentiable: a layer that casts defines its own gradient.

x.to(torch.bfloat16).to(torch.float32) is the identity under torch.compile: inductor keeps fused values in fp32 and
drops both conversions (torch 2.13), so an emulation made of it would silently train in fp32. So compiled code
rounds before it converts to 16 bits; one to 8 bits is not dropped.
"""

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from halfstep.core.arrays import cast as shared
from halfstep.core.arrays.cast import NAN, Arrays, cast_constants, check_amax, check_bits, check_rule
from halfstep.core.formats import BF16, FP16, FP32, Format, Overflow
from halfstep.core.philox import round_keys, rounds
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.torch.numerics.dtypes import FLOATS, dtype_of
from halfstep.torch.numerics.provenance import compiling

ARRAYS = Arrays(torch, Tensor.to)
AT_ONCE = 2**23  # numbers: a part of a tensor that is cast at once in eager mode
_TWICE_BIAS = 254 << 23
_WORD = 0xFFFFFFFF


def quantize(
    x: Tensor, fmt: Format, *, overflow: Overflow, rounding: Rounding = "nearest-even", bits: Tensor | None = None
) -> Tensor:
    """Rounds fp32, bf16 or fp16 numbers to those of `fmt`, carried in fp32: the emulated cast.

    `bits`, for stochastic rounding only, is an int64 word per element (`random_bits`). A NaN stays NaN even if the
    format has none; core.rounding refuses it, but that would mean reading the tensor.
    """
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    check_bits(rounding, bits, torch.int64, x.shape)
    return shared.quantize(ARRAYS, x, fmt, overflow, rounding, bits)


def carried(x: Tensor, fmt: Format) -> Tensor:
    """Rounds as hardware does, in fp32: to nearest even, and to infinity (e4m3: to NaN) beyond the largest number.

    In eager mode by way of the native dtype: the same bits, but for a NaN's payload, some 20 times faster.
    """
    if fmt == FP32:
        return x
    if fmt in (BF16, FP16) and not compiling():
        return x.to(dtype_of(fmt)).float()
    return quantize(x, fmt, overflow=fmt.native_overflow)


def to_native(x: Tensor, fmt: Format, *, overflow: Overflow) -> Tensor:
    """Rounds to nearest, ties to even, into the torch dtype of `fmt`, with an explicit overflow rule.

    Native fp8 casts disagree beyond the largest number (1000 becomes NaN in e4m3 on torch 2.11, 448 on 2.13), so
    torch's conversion never gets such a number. A NaN stays NaN; torch chooses its code.
    """
    dtype = dtype_of(fmt)
    hp = _as_fp32(x, fmt)
    check_rule(fmt, overflow)
    compiled, narrow = compiling(), fmt.bits <= 8
    if overflow == "saturate" and (narrow or not compiled):
        largest = cast_constants(fmt).largest
        return hp.clamp(-largest, largest).to(dtype)
    if overflow == "inf" and not narrow and not compiled:
        return hp.to(dtype)
    return quantize(hp, fmt, overflow=overflow).to(dtype)


def scale_for(amax: Tensor, fmt: Format) -> Tensor:
    """Returns the largest power of two that keeps amax * scale <= fmt.max, elementwise; NaN for inf and NaN."""
    return _scales(amax, fmt)[0]


def quantize_scaled(
    x: Tensor, operand: Operand, *, amax: Tensor | None = None, native: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns a matmul operand in a narrow format, saturated, and the inv_scale that undoes its scale.

    One scale per tensor (inv_scale is a scalar), or per row of the last dimension (kept with size 1), from the
    amax of `x` unless `amax` is given, as `delayed` operands need. Values are in fp32, or in the torch dtype if
    `native`.
    """
    if amax is None:
        check_amax(operand, given=False)
        amax = amax_of(x, operand)
    scale, inv_scale = _scales(amax, operand.format)

    def cast(x: Tensor, scale: Tensor) -> Tensor:
        scaled = _as_fp32(x, operand.format) * scale
        return (to_native if native else quantize)(scaled, operand.format, overflow="saturate")

    if compiling() or x.numel() <= AT_ONCE:
        return cast(x, scale), inv_scale
    # In eager mode every step of a cast writes fp32: for logits' gradients, many times their own size.
    rows = max(1, AT_ONCE // x[0].numel())
    scales = scale.split(rows) if scale.dim() else repeat(scale)
    values = x.new_empty(x.shape, dtype=dtype_of(operand.format) if native else torch.float32)
    for out, part, by in zip(values.split(rows), x.split(rows), scales, strict=False):
        out.copy_(cast(part, by))
    return values, inv_scale


def amax_of(x: Tensor, operand: Operand) -> Tensor:
    """Returns the largest magnitude of the tensor or of each row, by the operand's granularity, in fp32."""
    x, rows = x.detach(), operand.granularity == "row"
    if x.numel() == 0 and not rows:
        return torch.zeros((), device=x.device)
    if not compiling():  # a tensor of magnitudes would be written, and read again
        dims: dict[str, Any] = {"dim": -1, "keepdim": True} if rows else {}
        return torch.linalg.vector_norm(x, math.inf, **dims).float()
    # Fused code takes the maximum before the rounding to bf16. If the maximum were bf16, the code would round
    # what it stores but not what it continues with: forward and backward would be scaled by two numbers.
    largest = x.abs().float().amax(dim=-1, keepdim=True)
    return largest if rows else largest.amax()  # inductor takes up to 2.3 times as long for all at once


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest bf16, ties away from zero, and the int16 that makes it exact: core.split on a device."""
    hi, lo = shared.split(ARRAYS, x.detach())
    return hi.view(torch.bfloat16), lo


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Returns the fp32 number that `split` took apart."""
    return shared.join(ARRAYS, hi.detach(), lo)  # type: ignore[no-any-return]


def random_bits(
    shape: int | Sequence[int],
    *,
    seed: int,
    step: int | Tensor,
    tensor: int,
    start: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the words of core.philox.random_bits, in int64 on a device.

    `step` may be an integer scalar on the device, which is not read; a Python integer would compile again each
    step.
    """
    size, first, last = shared.word_range(shape, seed, tensor, start)
    if not isinstance(step, Tensor):
        shared.check_word("step", step, 32)
        step = torch.full((), step, dtype=torch.int64, device=device)
    else:
        shared.check_step(step, integer=not step.is_floating_point(), count="torch.int64")
    block = torch.arange(first, last, dtype=torch.int64, device=device)
    constant = torch.full((), tensor, dtype=torch.int64, device=device)
    counter = block & _WORD, block >> 32, constant, step.reshape(()).to(torch.int64) & _WORD

    def product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
        whole = word * multiplier  # wraps modulo 2^64; both of its halves are right whatever the sign
        return (whole >> 32) & _WORD, whole & _WORD

    lanes = torch.stack(rounds(counter, round_keys((seed & _WORD, seed >> 32)), product), dim=-1)
    return lanes.reshape(-1)[start - 4 * first :][: math.prod(size)].reshape(size)


def _scales(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Returns the scale and its inverse, both made of exponent bits: compiled code may divide approximately."""
    scale: Tensor = shared.power_of_two(ARRAYS, *shared.scale_for(ARRAYS, _as_fp32(amax, fmt), fmt))
    if compiling():
        # `as_strided` makes inductor store the scale. Otherwise it would compute the scale again for each element,
        # or, if that makes the expression too long, store the scaled tensor in fp32.
        scale = scale.as_strided(scale.shape, scale.stride())
    # Exponents that add up to twice the bias.
    bits = scale.view(torch.int32)
    return scale, torch.where(bits == NAN, NAN, _TWICE_BIAS - bits).view(torch.float32)


def _as_fp32(x: Tensor, fmt: Format) -> Tensor:
    if x.dtype not in FLOATS:
        shared.check_source(str(x.dtype), fmt, "x.to(torch.float32)")
    return x.detach().to(torch.float32)
