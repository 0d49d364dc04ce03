"""Casts in MLX that agree with core.rounding bit for bit, eager and compiled, lazily, in few operations.

The arithmetic of casts, scales and split masters is core.arrays.cast. MLX's own conversions to bf16 and fp16 round
to nearest-even on every number (on a CPU: tests try the patterns); a NaN stays NaN, though bf16 loses its sign.
mx.compile keeps a pair of conversions, where torch's compiler drops it. MLX's conversion to fp8 is not used: it
turns a NaN into 448.

Nothing here is differentiable: results are detached, and a layer that casts states its own gradient. Nothing is
evaluated either: arrays stay lazy until someone reads them.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from halfstep.core.arrays import cast as shared
from halfstep.core.arrays.cast import Arrays, check_amax, check_bits, check_rule
from halfstep.core.formats import BF16, FP16, FP32, Format, Overflow
from halfstep.core.philox import round_keys, rounds
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.mlx.numerics.dtypes import dtype_of

ARRAYS = Arrays(mx, mx.array.astype)
_WORD = 0xFFFFFFFF


def quantize(
    x: mx.array,
    fmt: Format,
    *,
    overflow: Overflow,
    rounding: Rounding = "nearest-even",
    bits: mx.array | None = None,
) -> mx.array:
    """Rounds every element to a number of `fmt`, carried in fp32: the emulated cast.

    `bits` is one uint32 word per element (`random_bits`), for stochastic rounding only. A NaN in a format without
    one stays NaN here, where core.rounding refuses it: refusing would mean reading the array.
    """
    x = _as_fp32(x, fmt)
    check_rule(fmt, overflow, rounding, random=bits is not None)
    check_bits(rounding, bits, mx.uint32, x.shape)
    return shared.quantize(ARRAYS, x, fmt, overflow, rounding, bits)  # type: ignore[no-any-return]


def carried(x: mx.array, fmt: Format) -> mx.array:
    """Rounds as hardware does, carried in fp32; on a CPU by the native dtype, which has the same bits there.

    It differentiates like a cast: the rounding itself does not show.
    """
    return x if fmt == FP32 else _carrying(fmt)(x)  # type: ignore[no-any-return]


@cache
def _carrying(fmt: Format) -> Any:
    def forward(x: mx.array) -> mx.array:
        if fmt in (BF16, FP16) and mx.default_device().type == mx.cpu:
            return x.astype(dtype_of(fmt)).astype(mx.float32)
        return quantize(x, fmt, overflow="inf")

    stated = mx.custom_function(forward)
    stated.vjp(lambda x, g, _: g.astype(x.dtype))
    stated.jvp(lambda _, tangent: tangent.astype(mx.float32))
    return stated


def scale_for(amax: mx.array, fmt: Format) -> mx.array:
    """Returns the largest power of two that keeps amax * scale <= fmt.max, elementwise; NaN for inf and NaN."""
    scale = shared.scale_for(ARRAYS, _as_fp32(amax, fmt), fmt)
    return shared.power_of_two(ARRAYS, *scale)  # type: ignore[no-any-return]


def quantize_scaled(x: mx.array, operand: Operand, *, amax: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Returns a matmul operand in a narrow format, carried in fp32, and the inv_scale that undoes its scale.

    There is one scale per array, or per row along the last dimension. `amax` is that of `x` unless given;
    `delayed` operands require it, and what is larger saturates.
    """
    check_amax(operand, given=amax is not None)
    hp = _as_fp32(x, operand.format)
    if amax is None:
        amax = amax_of(hp, operand)
    scale = scale_for(amax, operand.format)
    return quantize(hp * scale, operand.format, overflow="saturate"), 1.0 / scale


def amax_of(x: mx.array, operand: Operand) -> mx.array:
    """Returns the largest magnitude of the array or of each row, as the operand's granularity asks, in fp32."""
    magnitude = mx.abs(mx.stop_gradient(x))
    if operand.granularity == "row":
        return magnitude.max(axis=-1, keepdims=True).astype(mx.float32)
    if magnitude.size == 0:
        return mx.zeros(())
    return magnitude.max().astype(mx.float32)


def split(x: mx.array) -> tuple[mx.array, mx.array]:
    """Returns an fp32 master as the nearest bf16, ties away from zero, and the int16 remainder (core.split)."""
    hi, lo = shared.split(ARRAYS, mx.stop_gradient(x))
    return hi.view(mx.bfloat16), lo


def join(hi: mx.array, lo: mx.array) -> mx.array:
    """Returns the fp32 number that `split` took apart."""
    return shared.join(ARRAYS, mx.stop_gradient(hi), lo)  # type: ignore[no-any-return]


def random_bits(
    shape: int | Sequence[int], *, seed: int, step: int | mx.array, tensor: int, start: int = 0
) -> mx.array:
    """core.philox.random_bits in uint32; under mx.compile `step` should be an array: an integer is compiled in."""
    size, first, last = shared.word_range(shape, seed, tensor, start)
    if not isinstance(step, mx.array):
        shared.check_word("step", step, 32)
        step = mx.array(step, mx.uint64)
    else:
        shared.check_step(step, integer=mx.issubdtype(step.dtype, mx.integer), count="mx.uint32")
    # The keys of all rounds are one array, and all words have one shape, so that compiled rounds share kernels:
    # numbers would be compiled into each.
    keys = [word for pair in round_keys((seed & _WORD, seed >> 32)) for word in pair]
    constants = mx.array([*keys, tensor, first], mx.uint64)
    block = mx.arange(last - first, dtype=mx.uint64) + constants[21]  # arange counts in fp64, so it starts at zero
    same = [mx.broadcast_to(word, block.shape) for word in (constants[20], step.astype(mx.uint64) & _WORD)]

    def product(word: mx.array, multiplier: int) -> tuple[mx.array, mx.array]:
        whole = word * multiplier
        return whole >> 32, whole & _WORD

    pairs = [(constants[2 * turn], constants[2 * turn + 1]) for turn in range(10)]
    words = rounds((block & _WORD, block >> 32, *same), pairs, product)
    lanes = mx.stack(list(words), axis=-1).astype(mx.uint32)
    return lanes.reshape(-1)[start - 4 * first :][: math.prod(size)].reshape(size)


def _as_fp32(x: mx.array, fmt: Format) -> mx.array:
    """Returns the input in fp32 and detached, or refuses what fp32 does not hold exactly."""
    shared.check_source(str(x.dtype), fmt, "x.astype(mx.float32)")
    return mx.stop_gradient(x).astype(mx.float32)
