"""Casts in MLX against core.rounding, core.split and core.philox: bits, on every code, boundary and mode."""

import math
from functools import cache
from typing import get_args

import mlx.core as mx
import numpy as np
import pytest

from halfstep.core import philox, rounding
from halfstep.core import split as core_split
from halfstep.core.cast_constants import plan_of
from halfstep.core.errors import FormatError, RoundingError
from halfstep.core.formats import ALIASES, BF16, FP16, FP32, Format
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.mlx.cast import (
    amax_of,
    carried,
    join,
    quantize,
    quantize_scaled,
    random_bits,
    scale_for,
    split,
    to_native,
)
from halfstep.mlx.dtypes import DTYPES

NARROW = ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1", "e3m4ieee", "e4m3b11fnuz"]
WIDE = ["fp32", "tf32", "bf16", "fp16", "e6m9fn", "e7m16ieee", "e5m12f"]
# Formats whose numbers fp32 only has as subnormals, or that reach its last binade: they go through integers.
STRANGE = ["e8m2fnuz", "e8m7b128ieee", "e7m3b0f", "e5m2b130ieee", "e2m5b124f", "e8m13fnuz"]
EVERY = [*NARROW, *WIDE, *STRANGE]
SPECIAL = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]


def rules(fmt):
    return ["saturate"] + ["inf"] * fmt.has_inf + ["nan"] * fmt.has_nan


@cache
def samples(name):
    """Raw patterns, NaN among them; numbers spread over the format's range; midpoints and neighbors."""
    fmt = Format.parse(name)
    rng = np.random.default_rng(20261115)
    raw = rng.integers(0, 2**32, 2**15, dtype=np.uint32)
    low, high = fmt.min_exponent - fmt.mantissa_bits - 3, fmt.max_exponent + 2
    with np.errstate(over="ignore", under="ignore"):
        spread = np.ldexp(rng.uniform(1, 2, 2**14), rng.integers(low, high, 2**14)).astype(np.float32)
    positive = np.concatenate([boundaries(fmt), spread.view(np.uint32), np.uint32(SPECIAL)])
    x = np.concatenate([raw, positive, positive | np.uint32(0x80000000)]).view(np.float32)
    return x if fmt.has_nan else x[~np.isnan(x)]


def boundaries(fmt):
    """Numbers and midpoints, each with one ulp less and more: all of a format up to 12 bits, or its ends."""
    count = 2 ** (fmt.bits - 1)
    codes = np.arange(min(count, 2**12), dtype=np.int64)
    if count > 2**12:
        middle = np.random.default_rng(1).integers(0, count, 2**12)
        codes = np.unique(np.concatenate([codes[:512], count - 1 - codes[:512], middle]))
    values = rounding.decode(codes, fmt)
    numbers = np.unique(values[np.isfinite(values)]).astype(np.float64)
    step = math.ldexp(1.0, fmt.max_exponent - fmt.mantissa_bits)
    numbers = np.append(numbers, fmt.max + step)  # where overflow begins
    with np.errstate(over="ignore"):
        exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2]).astype(np.float32)
    near = exact.view(np.uint32).astype(np.int64)[:, None] + [-1, 0, 1]
    return np.unique(near[(near >= 0) & (near <= 0x7F800000)]).astype(np.uint32)


@cache
def million():
    return np.random.default_rng(7).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)


@cache
def every_16_bits(name):
    """All numbers of a 16-bit format, widened."""
    return np.array(
        mx.array(np.arange(2**16, dtype=np.uint16)).view(DTYPES[Format.parse(name)]).astype(mx.float32)
    )


def patterns(array):
    """The bits of an fp32 array: numpy would read an MLX array by value."""
    return np.array(array.view(mx.uint32))


def assert_bits(found, expected, x):
    assert found.dtype == mx.float32
    found, expected = patterns(found), expected.view(np.uint32)
    wrong = np.flatnonzero(found != expected)
    assert len(wrong) == 0, (
        f"{len(wrong)} differ; "
        f"{[(float(x[i]), hex(x.view(np.uint32)[i]), hex(expected[i]), hex(found[i])) for i in wrong[:4]]}"
    )


def as_is(function):
    return function


COMPILED = pytest.param(mx.compile, marks=pytest.mark.prove)  # some ten seconds of g++ for each kernel
HOW = pytest.mark.parametrize("how", [as_is, COMPILED], ids=["eager", "compiled"])


@pytest.mark.parametrize("name", EVERY)
def test_every_mode_and_rule_gives_the_bits_of_the_reference(name):
    fmt, x = Format.parse(name), samples(name)
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)
    for mode in get_args(Rounding):
        bits = words if mode == "stochastic" else None
        given = None if bits is None else mx.array(bits)
        for rule in rules(fmt):
            found = quantize(mx.array(x), fmt, overflow=rule, rounding=mode, bits=given)
            assert_bits(found, rounding.cast(x, fmt, overflow=rule, rounding=mode, bits=bits), x)


@pytest.mark.parametrize("name", ["bf16", "tf32", "fp16", "e4m3", "e8m2fnuz"])
def test_stochastic_rounding_turns_where_the_word_reaches_the_fraction(name):
    """Fractions of 0, 1/4, 1/2 and 3/4 of a step above one, and words at each of them and beside."""
    fmt = Format.parse(name)
    fractions = np.arange(4)
    values = (1 + fractions / 4 * fmt.epsilon).astype(np.float32)
    words = (fractions[:, None] * 2**30 + [-1, 0, 1]).reshape(-1)
    words = np.append(words[words >= 0], 2**32 - 1).astype(np.uint32)
    x, bits = (np.ascontiguousarray(t) for t in np.broadcast_arrays(values[:, None], words))
    found = quantize(mx.array(x), fmt, overflow="saturate", rounding="stochastic", bits=mx.array(bits))
    up = bits < (fractions[:, None].astype(np.int64) << 30)
    assert np.array_equal(np.array(found), np.where(up, 1 + fmt.epsilon, 1).astype(np.float32))


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e4m3fnuz", "e8m2fnuz"])
def test_a_million_patterns(name):
    x = million()
    found = quantize(mx.array(x), Format.parse(name), overflow="nan")
    assert_bits(found, rounding.cast(x, name, overflow="nan"), x)


# One format for each of the three roads: on a CPU every kernel costs a run of the C++ compiler.
@pytest.mark.parametrize(
    ("name", "rule", "modes"),
    [
        ("bf16", "nan", ["nearest-even", "stochastic"]),
        ("e4m3", "saturate", ["nearest-even", "stochastic"]),
        ("e8m2fnuz", "nan", ["nearest-even"]),
    ],
)
@pytest.mark.prove
def test_compiled_it_gives_the_same_bits(name, rule, modes):
    fmt, x = Format.parse(name), np.concatenate([samples(name), million()])
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)

    @mx.compile
    def casts(given, bits):
        return [
            quantize(given, fmt, overflow=rule, rounding=mode, bits=bits if mode == "stochastic" else None)
            for mode in modes
        ]

    for mode, found in zip(modes, casts(mx.array(x), mx.array(words)), strict=True):
        bits = words if mode == "stochastic" else None
        assert_bits(found, rounding.cast(x, fmt, overflow=rule, rounding=mode, bits=bits), x)


@pytest.mark.parametrize("source", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e8m2fnuz"])
def test_all_numbers_of_16_bits(name, source):
    fmt, dtype = Format.parse(name), DTYPES[Format.parse(source)]
    wide = every_16_bits(source)
    codes = mx.array(np.arange(2**16, dtype=np.uint16)).view(dtype)
    for rule in rules(fmt):
        assert_bits(quantize(codes, fmt, overflow=rule), rounding.cast(wide, name, overflow=rule), wide)
    if name == source:
        back = np.array(quantize(codes, fmt, overflow="inf").astype(dtype).view(mx.uint16))
        number = ~np.isnan(wide)
        assert np.array_equal(back[number], np.arange(2**16)[number])


def test_a_format_without_nan_keeps_it_visible():
    x = mx.array([math.nan, 1.0, -7.0])
    found = quantize(x, Format.parse("e2m1"), overflow="saturate")
    assert mx.isnan(found).tolist() == [True, False, False]
    assert found[1:].tolist() == [1.0, -6.0]


def test_half_and_strided_inputs():
    x = mx.linspace(-500, 500, 24).reshape(2, 3, 4)
    fmt = Format.parse("e4m3")
    strided = [x.transpose(2, 0, 1), x[:, ::2], x[0, 0, 0], x[:0]]
    for view in (x, x.astype(mx.float16), x.astype(mx.bfloat16), *strided):
        found = quantize(view, fmt, overflow="nan")
        wide = np.array(view.astype(mx.float32))
        assert found.shape == view.shape
        assert_bits(found, rounding.cast(wide, fmt, overflow="nan"), wide.reshape(-1))


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e8m2fnuz"])
def test_no_gradient_passes(name):
    fmt = Format.parse(name)

    def doubled(x):
        return (2 * x + quantize(x, fmt, overflow="saturate")).sum()

    assert mx.grad(doubled)(mx.array([1.1, 1000.0])).tolist() == [2.0, 2.0]
    assert mx.grad(lambda x: (2 * x + carried(x, BF16)).sum())(mx.array([1.1])).tolist() == [2.0]
    assert mx.grad(lambda x: (2 * x + join(*split(x))).sum())(mx.array([1.1])).tolist() == [2.0]


def test_nothing_is_evaluated():
    """A lazy array of a function that must not run: evaluation would allocate 2^50 bytes."""
    huge = mx.zeros((2**24, 2**24))
    outcomes = [
        quantize(huge, BF16, overflow="inf"),
        quantize(huge, Format.parse("e4m3"), overflow="nan"),
        carried(huge, FP16),
        to_native(huge, FP16, overflow="saturate"),
        *quantize_scaled(huge, Operand(Format.parse("e4m3"), granularity="row")),
        *split(huge),
        join(*split(huge)),
    ]
    assert outcomes[0].shape == (2**24, 2**24)


# --- native dtypes ---------------------------------------------------------------------------------------


@HOW
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_carried_is_the_reference_cast_but_for_the_bits_of_a_nan(fmt, how):
    x = np.concatenate([samples(fmt.name), million(), every_16_bits("bf16"), every_16_bits("fp16")])
    found = how(lambda given: carried(given, fmt))(mx.array(x))
    expected = rounding.cast(x, fmt, overflow="inf")
    number = ~np.isnan(x)
    assert np.array_equal(patterns(found)[number], expected.view(np.uint32)[number])
    assert np.isnan(np.array(found))[~number].all()


def test_carried_on_a_gpu_is_spelled_out(monkeypatch):
    """MLX's conversions were tried on every pattern on the CPU alone."""
    x = mx.array([math.nan, -math.nan, 1.0 + 2.0**-9, 1e-40])
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for fmt in (BF16, FP16):
        assert_bits(carried(x, fmt), rounding.cast(np.array(x), fmt, overflow="inf"), np.array(x))


def test_carried_in_fp32_is_the_array_itself():
    x = mx.array([0.1])
    assert carried(x, FP32) is x


@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_to_native_overflows_by_the_rule(fmt):
    x = samples(fmt.name)
    for rule in rules(fmt):
        found = to_native(mx.array(x), fmt, overflow=rule)
        assert found.dtype == DTYPES[fmt]
        expected = rounding.cast(x, fmt, overflow=rule)
        number = ~np.isnan(expected)
        wide = found.astype(mx.float32)
        assert np.array_equal(patterns(wide)[number], expected.view(np.uint32)[number])
        assert np.isnan(np.array(wide))[~number].all()


@pytest.mark.parametrize(
    ("name", "x", "rule", "expected"),
    [
        ("e4m3", 465.0, "saturate", 448.0),
        ("e4m3", 1000.0, "saturate", 448.0),
        ("e4m3", -math.inf, "saturate", -448.0),
        ("e4m3", 465.0, "nan", math.nan),
        ("e4m3", math.inf, "nan", math.nan),
        ("e4m3", math.nan, "saturate", math.nan),  # 448 in MLX's own conversion
        ("e5m2", 61440.0, "inf", math.inf),
        ("e5m2", 61440.0, "saturate", 57344.0),
        ("fp16", 65520.0, "saturate", 65504.0),
        ("bf16", 3.4e38, "inf", math.inf),
    ],
)
def test_where_native_casts_disagree(name, x, rule, expected):
    found = quantize(mx.array([x]), Format.parse(name), overflow=rule).item()
    assert found == expected or (math.isnan(found) and math.isnan(expected))


# --- masters in two halves -------------------------------------------------------------------------------


@HOW
def test_split_and_join_are_those_of_the_reference(how):
    edges = np.arange(2**16, dtype=np.uint32)[:, None] * 2**16 + np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = np.concatenate([million(), edges.reshape(-1).view(np.float32)])
    hi, lo = how(split)(mx.array(x))
    assert (hi.dtype, lo.dtype) == (mx.bfloat16, mx.int16)
    expected_hi, expected_lo = core_split.split(x)
    assert np.array_equal(np.array(hi.view(mx.uint16)), expected_hi)
    assert np.array_equal(np.array(lo), expected_lo)
    joined = how(join)(hi, lo)
    assert_bits(joined, core_split.join(expected_hi, expected_lo), x)
    number = ~np.isnan(x)
    assert np.array_equal(patterns(joined)[number], x.view(np.uint32)[number])
    assert np.isnan(np.array(joined))[~number].all()


# --- random words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "start"), [(0, 0), (1, 0), (7, 3), ((3, 5), 1), ((), 2), (1000, 4 * 2**32 - 6), (64, 2**62 + 1)]
)
def test_random_words_are_those_of_the_reference(shape, start):
    key = {"seed": 3 + (9 << 32), "tensor": 0xFFFFFFFF, "start": start}
    expected = philox.random_bits(shape, step=2**32 - 1, **key)
    for step in (2**32 - 1, mx.array(2**32 - 1, mx.uint32), mx.array([-1], mx.int64)):
        found = random_bits(shape, step=step, **key)
        assert found.dtype == mx.uint32
        assert found.shape == expected.shape
        assert np.array_equal(np.array(found), expected)


@pytest.mark.prove
def test_a_compiled_function_takes_the_step_as_it_comes():
    compiled = mx.compile(lambda step: random_bits((5, 3), seed=2**64 - 1, step=step, tensor=1))
    for step in (0, 1, 7):
        expected = philox.random_bits((5, 3), seed=2**64 - 1, step=step, tensor=1)
        assert np.array_equal(np.array(compiled(mx.array(step, mx.int32))), expected)


def test_every_part_of_the_key_changes_the_words():
    base = {"seed": 1, "step": 2, "tensor": 3, "start": 0}
    first = random_bits(1000, **base)
    for name in ("seed", "step", "tensor", "start"):
        assert not (random_bits(1000, **{**base, name: 8}) == first).any()
    assert mx.array_equal(random_bits(1000, **base), first)


# --- scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e3m2"])
def test_the_scale_is_the_largest_power_of_two_that_fits(name):
    fmt = Format.parse(name)
    rng = np.random.default_rng(3)
    amax = np.ldexp(rng.uniform(1, 2, 5000), rng.integers(-100, 127, 5000)).astype(np.float32)
    exact = np.float32([fmt.max * 2.0**k for k in (-40, 0, 3, 100)])
    amax = np.concatenate([amax, exact, np.nextafter(exact, np.float32(np.inf))])
    scale = np.array(scale_for(mx.array(amax), fmt)).astype(np.float64)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (amax * scale <= fmt.max).all()
    assert (amax * scale * 2 > fmt.max).all()


def test_the_scale_of_zero_tiny_huge_and_broken():
    fmt = Format.parse("e4m3")
    amax = np.float32([0.0, 1e-45, 1e-38, 3.4028235e38, math.inf, math.nan])
    scale = np.array(scale_for(mx.array(amax), fmt))
    assert scale[0] == 1.0
    assert scale[1] == scale[2] == 2.0**126
    assert 0 < amax[3] * scale[3] <= 448
    assert np.isnan(scale).tolist() == [False] * 4 + [True] * 2
    inverse = 1 / scale[:4]
    assert (np.isfinite(inverse) & (inverse >= 2.0**-126)).all()


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_scaled_operand_is_the_reference_cast_of_the_scaled_values(granularity):
    x = np.random.default_rng(0).standard_normal((6, 5, 32), np.float32)
    x *= np.logspace(-20, 20, 5, dtype=np.float32)[:, None]
    x[2, 3] = 0
    operand = Operand(Format.parse("e4m3"), granularity=granularity)
    values, inv_scale = quantize_scaled(mx.array(x), operand)
    amax = np.abs(x).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(x).max()
    assert inv_scale.shape == np.shape(amax)
    expected = rounding.cast(x / np.array(inv_scale), "e4m3", overflow="raise")
    assert_bits(values, expected, x)
    # The largest number of every row (or of the tensor) lies in the top binade of the format.
    top = np.abs(expected).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(expected).max()
    assert ((top > 220) | (amax == 0)).all()


def test_a_delayed_amax_is_given_and_what_is_larger_saturates():
    operand = Operand(Format.parse("e4m3"), amax="delayed")
    x = mx.array([1.0, 4.0])
    with pytest.raises(RoundingError, match="no `amax`"):
        quantize_scaled(x, operand)
    values, inv_scale = quantize_scaled(x, operand, amax=mx.array(1.0))
    assert (values * inv_scale).tolist() == [1.0, 1.75]


def test_an_infinity_does_not_hide_behind_saturation():
    x = mx.array([[1.0, math.inf], [1.0, 2.0]])
    values, inv_scale = quantize_scaled(x, Operand(Format.parse("e4m3"), granularity="row"))
    assert mx.isnan(values * inv_scale).tolist() == [[True, True], [False, False]]
    values, _ = quantize_scaled(x, Operand(Format.parse("e4m3")))
    assert mx.isnan(values).all()


def test_an_empty_array_has_an_amax():
    operand = Operand(Format.parse("e5m2"))
    assert amax_of(mx.zeros((0, 4)), operand) == 0
    values, inv_scale = quantize_scaled(mx.zeros((0, 4)), operand)
    assert values.shape == (0, 4)
    assert inv_scale == 1


@pytest.mark.parametrize("name", EVERY)
def test_each_format_takes_the_road_it_is_listed_for(name):
    plan = plan_of(Format.parse(name))
    assert plan.like_fp32 == (name in ("fp32", "tf32", "bf16"))
    assert plan.fits_fp32 == (name not in STRANGE and not plan.like_fp32)


# --- mistakes --------------------------------------------------------------------------------------------

E4M3 = Format.parse("e4m3")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: quantize(x, E4M3, overflow="raise"), RoundingError, "sync.*core.rounding.cast"),
        (lambda x: to_native(x, BF16, overflow="raise"), RoundingError, "sync"),
        (lambda x: quantize(x, E4M3, overflow="inf"), FormatError, "`saturate` or `nan`"),
        (lambda x: quantize(x.astype(mx.float64), E4M3, overflow="nan"), RoundingError, "twice"),
        (lambda x: quantize(x.astype(mx.int64), E4M3, overflow="nan"), RoundingError, "not mlx.core.int64"),
        (lambda x: quantize(x, E4M3, overflow="nan", rounding="up"), RoundingError, "unknown rounding"),
        (lambda x: quantize(x, E4M3, overflow="nan", bits=x), RoundingError, "uses none"),
        (lambda x: quantize(x, E4M3, overflow="nan", rounding="stochastic"), RoundingError, "given: none"),
        (
            lambda x: quantize(x, E4M3, overflow="nan", rounding="stochastic", bits=x.astype(mx.int32)),
            RoundingError,
            "given: mlx.core.int32",
        ),
        (lambda x: to_native(x, E4M3, overflow="nan"), FormatError, "no MLX dtype"),
        (lambda x: quantize_scaled(x, Operand(E4M3), native=True), RoundingError, "no dtype in MLX"),
        (lambda x: split(x.astype(mx.bfloat16)), RoundingError, "bfloat16, not mlx.core.float32"),
        (lambda x: join(x, x), RoundingError, "two halves"),
        (lambda x: join(split(x)[0], split(x)[1][:2]), RoundingError, "two halves"),
        (lambda x: random_bits(3, seed=-1, step=0, tensor=0), RoundingError, "`seed` is -1"),
        (lambda x: random_bits(3, seed=0, step=2**32, tensor=0), RoundingError, "`step`"),
        (lambda x: random_bits(3, seed=0, step=x, tensor=0), RoundingError, "one integer"),
        (lambda x: random_bits(3, seed=0, step=0, tensor="w"), RoundingError, "`tensor` is 'w'"),
    ],
)
def test_errors_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call(mx.ones(3))
    assert caught.value.hint


def test_the_named_formats_are_all_tried():
    assert set(ALIASES) <= set(EVERY)
