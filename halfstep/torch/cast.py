"""Casts in torch that agree with core.rounding bit for bit, on any device, under compile, without a sync.

core.rounding defines the results; here they are computed by few elementwise operations. Split masters are defined
by core.split, random words by core.philox. Nothing is differentiable: a layer that casts defines its own gradient.
A power of two, by which `quantize_scaled` scales an operand, changes no mantissa and has an exact inverse.

1. Eight exponent bits (tf32, bf16 and their kin): `_round_patterns`. fp32 has the same exponents, so the numbers
   of the format are the fp32 patterns whose last d = 23 - y bits are zero, subnormals included. Rounding is an
   addition and a mask; a carry moves into the exponent by itself, and beyond the last one it is inf.

2. Fewer exponent bits (fp16, fp8 and their kin): `_round_quanta`. Near x the numbers are multiples of the quantum

       q = max(2^E, 2^Emin) * 2^-y          E is read from the exponent bits of x

   Multiplication by a power of two is exact, so v = |x| / q is exact, and so are its integer part, its fraction
   and (integer part + 0 or 1) * q. All are normal numbers as long as q >= 2^-126, so a device that flushes
   subnormals changes nothing; other formats do the same in fp64. 1 / q is made from exponent bits, because
   compilers may divide approximately but never multiply so.

3. Native dtypes: `to_native`. x.to(torch.bfloat16).to(torch.float32) is the identity under torch.compile: inductor
   keeps fused values in fp32 and drops both conversions (torch 2.13), so an emulation made of it would silently
   train in fp32. So compiled code rounds before it converts to 16 bits; one to 8 bits is not dropped.
"""

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from halfstep.core.cast_constants import CastConstants, cast_constants, check_rule, check_word
from halfstep.core.errors import RoundingError
from halfstep.core.formats import BF16, FP16, FP32, Format, Overflow
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.torch.dtypes import FLOATS, dtype_of
from halfstep.torch.tracing import compiling

_SIGN = -(2**31)
_MAGNITUDE = 2**31 - 1
_INF = 0x7F800000
_NAN = 0x7FC00000
_TWICE_BIAS = 254 << 23
AT_ONCE = 2**23  # numbers: a part of a tensor that is cast at once in eager mode


def quantize(
    x: Tensor, fmt: Format, *, overflow: Overflow, rounding: Rounding = "nearest-even", bits: Tensor | None = None
) -> Tensor:
    """Rounds fp32, bf16 or fp16 numbers to those of `fmt`, carried in fp32: the emulated cast.

    `bits`, for stochastic rounding only, is an int64 word per element (`random_bits`). A NaN stays NaN even if the
    format has none; core.rounding refuses it, but that would mean reading the tensor.
    """
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    _check_bits(x, rounding, bits)
    plan = cast_constants(fmt)
    if plan.like_fp32:
        return _round_patterns(x, plan, overflow, rounding, bits)
    magnitude, nan = _round_quanta(x, plan, overflow, rounding, bits)
    return _with_sign(magnitude, x, nan, fmt)


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
    """Returns the largest power of two that keeps amax * scale <= fmt.max, elementwise, in fp32.

    With amax = m * 2^e and fmt.max = M * 2^E (1 <= m, M < 2) it is 2^(E - e), or half of that if m > M; 1 for amax
    0; within 2^-126 and 2^126, so that its inverse is normal too. An amax of inf or NaN gives NaN, and so does
    everything scaled by it: saturation would turn an infinity into an ordinary number.
    """
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
        if operand.amax == "delayed":
            raise RoundingError(
                f"`{operand.format}:delayed` takes its scale from earlier steps, and no `amax` was given",
                hint="pass amax=, kept from earlier steps, or use `current`",
            )
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
    if x.dtype != torch.float32:
        raise RoundingError(
            f"split takes the fp32 master, not {x.dtype}", hint="widen it with x.to(torch.float32)"
        )
    bits = x.detach().view(torch.int32)
    # (bits + 0x8000) >> 16 on the unsigned pattern, halved first so that the sum does not overflow.
    hi = ((bits >> 15) + 1) >> 1
    nan = (bits & _MAGNITUDE) > _INF
    hi = torch.where(nan, ((bits >> 16) & 0x8000) | 0x7FC0, hi).to(torch.int16)
    lo = bits.to(torch.int16).masked_fill_(nan, 0)
    return hi.view(torch.bfloat16), lo


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Returns the fp32 number that `split` took apart."""
    if (hi.dtype, lo.dtype) != (torch.bfloat16, torch.int16) or hi.shape != lo.shape:
        raise RoundingError(
            f"join takes bfloat16 and int16 of one shape, not {hi.dtype} of {tuple(hi.shape)} and {lo.dtype} of "
            f"{tuple(lo.shape)}",
            hint="pass both results of the same split",
        )
    upper = hi.detach().view(torch.int16).to(torch.int32) << 16
    lower = lo.to(torch.int32)
    lower = torch.where((upper & _MAGNITUDE) == 0, lower.clamp(min=0), lower)  # core.split.join says why
    return (upper + lower).view(torch.float32)


_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


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
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    count = size.numel()
    for name, value, limit in (("seed", seed, 64), ("tensor", tensor, 32), ("start", start, 63)):
        check_word(name, value, limit)
    if not isinstance(step, Tensor):
        check_word("step", step, 32)
        step = torch.full((), step, dtype=torch.int64, device=device)
    elif step.is_floating_point() or step.numel() != 1:
        raise RoundingError(
            f"`step` is {step.dtype} of shape {tuple(step.shape)}; random words need one integer",
            hint="count the steps in a scalar of torch.int64",
        )
    first, last = start // 4, -(-(start + count) // 4)
    block = torch.arange(first, last, dtype=torch.int64, device=device)
    c0, c1 = block & _WORD, block >> 32
    c2 = torch.full((), tensor, dtype=torch.int64, device=device)
    c3 = step.reshape(()).to(torch.int64) & _WORD
    k0, k1 = seed & _WORD, seed >> 32
    for _ in range(10):
        # The products wrap modulo 2^64; both of their halves are right whatever the sign.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) & _WORD) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = ((product0 >> 32) & _WORD) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    lanes = torch.stack((c0, c1, c2, c3), dim=-1)
    return lanes.reshape(-1)[start - 4 * first :][:count].reshape(size)


def _scales(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Returns the scale and its inverse, both made of exponent bits: compiled code may divide approximately."""
    pattern = _as_fp32(amax, fmt).view(torch.int32) & _MAGNITUDE
    # A pattern is (e + 127) * 2^23 plus the mantissa: the difference of two, floored, is E - e, or one less
    # if m > M.
    power = ((cast_constants(fmt).top - pattern) >> 23).clamp(-126, 126)
    power = torch.where(pattern == 0, 0, power)
    # NaN as bits: a NaN constant differs from itself, and a compiler would not merge two casts of the same x.
    scale = torch.where(pattern >= _INF, _NAN, (power + 127) << 23).view(torch.float32)
    if compiling():
        # `as_strided` makes inductor store the scale. Otherwise it would compute the scale again for each element,
        # or, if that makes the expression too long, store the scaled tensor in fp32.
        scale = scale.as_strided(scale.shape, scale.stride())
    # Exponents that add up to twice the bias.
    bits = scale.view(torch.int32)
    return scale, torch.where(bits == _NAN, _NAN, _TWICE_BIAS - bits).view(torch.float32)


def _round_patterns(
    x: Tensor, plan: CastConstants, overflow: Overflow, rounding: Rounding, bits: Tensor | None
) -> Tensor:
    pattern = x.view(torch.int32)
    magnitude = pattern & _MAGNITUDE
    drop = 23 - plan.mantissa_bits
    unit, largest = 1 << drop, _INF - (1 << drop)
    if drop == 0 or rounding == "truncate":
        rounded = magnitude & -unit
    elif rounding == "nearest-even":
        rounded = (magnitude >> drop).bitwise_and_(1).add_(magnitude).add_(unit // 2 - 1).bitwise_and_(-unit)
    elif bits is None:
        rounded = (magnitude + unit // 2).bitwise_and_(-unit)
    else:
        threshold = (magnitude & (unit - 1)).to(torch.int64) << (32 - drop)
        rounded = (magnitude & -unit) + (bits < threshold).to(torch.int32) * unit
    if overflow == "saturate":
        rounded.clamp_(max=largest)
    # What is beyond the largest number is an infinity already. A NaN is recognized by the pattern it had before:
    # rounding may have wrapped 0x7FFFFFFF around to zero.
    nan = magnitude > _INF
    if overflow == "nan":
        nan.logical_or_(rounded > largest)
    rounded.masked_fill_(nan, _NAN)
    return rounded.bitwise_or_(pattern & _SIGN).view(torch.float32)


def _round_quanta(
    x: Tensor, plan: CastConstants, overflow: Overflow, rounding: Rounding, bits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns magnitudes and where they must become NaN."""
    integers, bias, width = (torch.int32, 127, 23) if plan.fits_fp32 else (torch.int64, 1023, 52)
    wide = x if plan.fits_fp32 else x.double()
    magnitude = wide.abs().clamp_(max=plan.largest if overflow == "saturate" else plan.beyond)

    # Patterns of powers of two: 2^max(E, Emin), then the quantum, then its inverse.
    power = magnitude.view(integers) & ((2 * bias + 1) << width)
    power.clamp_(min=(plan.min_exponent + bias) << width).sub_(plan.mantissa_bits << width)
    v = magnitude.mul_((((2 * bias) << width) - power).view(magnitude.dtype))
    if rounding == "nearest-even":
        v = v.round_()
    elif rounding == "truncate":
        v = v.floor_()
    else:
        floor = v.floor()
        fraction = v.sub_(floor)
        if bits is None:
            v = floor.add_(fraction >= 0.5)
        else:
            v = floor.add_(bits < (fraction * 2.0**32).to(torch.int64))
    result = v.mul_(power.view(v.dtype))
    if overflow == "inf":
        result.masked_fill_(result > plan.largest, math.inf)
    # Not (x <= largest) is true of a NaN as well.
    nan = (result <= plan.largest).logical_not_() if overflow == "nan" else x.isnan()
    return result.float(), nan


def _with_sign(magnitude: Tensor, x: Tensor, nan: Tensor, fmt: Format) -> Tensor:
    """Gives magnitudes the signs of `x` and the canonical NaN, as bits, so that no payload passes."""
    pattern = magnitude.view(torch.int32).masked_fill_(nan, _NAN)
    sign = x.view(torch.int32) & _SIGN
    if not fmt.has_negative_zero:
        # Zero has no sign, and the code of negative zero is the NaN, which therefore has one.
        sign = sign.masked_fill_(pattern == 0, 0).masked_fill_(nan, _SIGN)
    return pattern.bitwise_or_(sign).view(torch.float32)


def _as_fp32(x: Tensor, fmt: Format) -> Tensor:
    if x.dtype == torch.float64:
        raise RoundingError(
            f"float64 would be rounded twice, to fp32 and then to {fmt}: near a tie, to the wrong number",
            hint="x.to(torch.float32) accepts the first rounding",
        )
    if x.dtype not in FLOATS:
        raise RoundingError(
            f"a cast to {fmt} takes fp32, bf16 or fp16 values, not {x.dtype}",
            hint="widen an 8-bit float exactly with x.to(torch.float32); integers are not cast by a policy",
        )
    return x.detach().to(torch.float32)


def _check_bits(x: Tensor, rounding: Rounding, bits: Tensor | None) -> None:
    if rounding == "stochastic" and (bits is None or bits.dtype != torch.int64 or bits.shape != x.shape):
        given = "none" if bits is None else f"{bits.dtype} of shape {tuple(bits.shape)}"
        raise RoundingError(
            f"stochastic rounding needs `bits`, torch.int64 of shape {tuple(x.shape)}; given: {given}",
            hint="random_bits(x.shape, seed=..., step=..., tensor=..., device=x.device) makes them",
        )
