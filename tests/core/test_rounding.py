"""The reference cast against three independent definitions.

    ml_dtypes, numpy    every format they have, 4 to 16 bits: all codes, all boundaries, drawn patterns
    the ladder          the numbers of a format by the formula of formats.py, in fp64, and exact comparison
    fractions           any ExMy, one number at a time, in Python's rationals

A boundary is the midpoint of two neighboring numbers; it is tried with one fp32 ulp less and more, in both
signs. The last one lies between the largest number and the one that would follow: where overflow begins.
"""

import math
from fractions import Fraction
from functools import cache, partial
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfstep.core.errors import FormatError, RoundingError
from halfstep.core.formats import Format, Overflow, Specials
from halfstep.core.rounding import Rounding, cast, decode, encode, overflows
from tests.core import oracles
from tests.refusals import refuses

ORACLES = {name: dtype for name, dtype in oracles.ORACLES.items() if name != "fp32"}
EIGHT_BIT = [name for name in ORACLES if Format.parse(name).bits == 8]
SAMPLE = {"bf16", "fp16", "e4m3", "e5m2"}  # the formats that layers compute in
MODES = ["nearest-even", "nearest-away", "truncate"]
patterns = arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, 2**32 - 1))


def rules(format: Format) -> list[Overflow]:
    return ["saturate"] + ["inf"] * format.has_inf + ["nan"] * format.has_nan


def floats(codes) -> np.ndarray:
    return np.asarray(codes, np.uint32).view(np.float32)


@cache
def ladder(format: Format) -> np.ndarray:
    """The finite numbers from zero up, and the one that would follow the largest: the formula, in fp64."""
    code = np.arange(2 ** (format.bits - 1) + 1)
    e, m = code >> format.mantissa_bits, code % 2**format.mantissa_bits
    y = format.mantissa_bits
    values = np.where(e > 0, np.ldexp(1 + m / 2**y, e - format.bias), np.ldexp(m / 2**y, 1 - format.bias))
    return values[: np.searchsorted(values, format.max) + 2]


@cache
def boundaries(format: Format) -> np.ndarray:
    steps = ladder(format)
    points = np.concatenate([(steps[1:] + steps[:-1]) / 2, steps[:-1]])
    exact = points.astype(np.float32)
    assert np.array_equal(exact, points), "a midpoint that fp32 does not hold"
    near = exact.view(np.uint32).astype(np.int64)[:, None] + [-1, 0, 1]
    magnitudes = np.unique(near[(near >= 0) & (near <= 0x7F800000)])
    return floats(np.concatenate([magnitudes, magnitudes | 0x80000000]))


def by_ladder(x: np.ndarray, format: Format, rounding: str, overflow: str) -> np.ndarray:
    """What the cast must give where x is no NaN; midpoints are exact in fp64, and so are comparisons."""
    steps = ladder(format)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 2.0**128)
    below = np.minimum(np.searchsorted(steps, magnitude, side="right") - 1, len(steps) - 2)
    middle = (steps[below] + steps[below + 1]) / 2
    up = magnitude >= steps[below + 1]
    if rounding == "nearest-even":
        up |= (magnitude > middle) | ((magnitude == middle) & (below % 2 == 1))
    elif rounding == "nearest-away":
        up |= magnitude >= middle
    result = steps[below + up]
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": format.max}[overflow]
    result = np.copysign(np.where(result > format.max, beyond, result), x)
    return (result if format.has_negative_zero else result + 0.0).astype(np.float32)


def by_oracle(x: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(ORACLES[name])


def codes_of(native: np.ndarray) -> np.ndarray:
    return native.view(np.uint8 if native.dtype.itemsize == 1 else np.uint16)


def assert_same(result: np.ndarray, expected: np.ndarray, x: np.ndarray) -> None:
    """Equal bits; any NaN equals any other."""
    assert result.dtype == expected.dtype == np.float32
    different = (result.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(result) & np.isnan(expected))
    assert not different.any(), list(zip(x[different][:5], result[different], expected[different], strict=False))


@cache
def raw_sample(size: int) -> np.ndarray:
    """All fp32 patterns alike: every exponent as often as any other, NaN once in 256."""
    return floats(np.random.default_rng(20261115).integers(0, 2**32, size, dtype=np.uint32))


SPECIAL = floats(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
)


@pytest.mark.parametrize("name", ORACLES)
def test_every_code_means_what_the_oracle_says(name):
    format = Format.parse(name)
    codes = np.arange(2**format.bits).astype(np.uint8 if format.bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # signaling NaN, on ARM
        expected = codes.view(ORACLES[name]).astype(np.float32)
    values = decode(codes, name)
    assert_same(values, expected, codes)
    assert np.array_equal(np.signbit(values), np.signbit(expected))
    back = encode(values, name)
    assert back.dtype == codes.dtype
    number = ~np.isnan(values)
    assert np.array_equal(back[number], codes[number])
    assert np.isnan(decode(back[~number], name)).all()
    assert number.all() or format.has_nan
    for mode in MODES:
        assert_same(cast(values, name, overflow=format.native_overflow, rounding=mode), values, values)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.prove) for name in ORACLES]
)
def test_boundaries_two_million_patterns_and_saturation_are_those_of_the_oracle(name):
    format = Format.parse(name)
    x = boundaries(format)
    result = encode(cast(x, name, overflow=format.native_overflow), name)
    expected = codes_of(by_oracle(x, name))
    assert np.array_equal(result, expected), x[result != expected][:5]
    x = np.concatenate([SPECIAL, raw_sample(2**21)])
    x = x[~np.isnan(x)] if not format.has_nan else x
    result = cast(x, name, overflow=format.native_overflow)
    expected = by_oracle(x, name).astype(np.float32)
    assert_same(result, expected, x)
    assert np.array_equal(np.signbit(result), np.signbit(expected)), "the sign of a NaN"
    x = np.concatenate([SPECIAL, boundaries(format), raw_sample(2**17)])
    x = x[~np.isnan(x)] if not format.has_nan else x
    expected = by_oracle(np.clip(x, -format.max, format.max), name).astype(np.float32)
    assert_same(cast(x, name, overflow="saturate"), expected, x)


@pytest.mark.parametrize("name", [*EIGHT_BIT, "e3m2", "e2m3", "e2m1", "e3m4fn", "e2m1ieee", "e2m5b9f", "e8m2fnuz"])
def test_every_boundary_in_every_mode_and_rule(name):
    format = Format.parse(name)
    x = np.concatenate([SPECIAL, boundaries(format)])
    for mode in MODES:
        for rule in rules(format):
            assert_same(cast(x, name, overflow=rule, rounding=mode), by_ladder(x, format, mode, rule), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["fp16", "bf16", *(pytest.param(n, marks=pytest.mark.prove) for n in ("tf32", "e6m9fn", "e8m7fnuz"))]
)
def test_wider_formats_in_every_mode(name, mode):
    format = Format.parse(name)
    every = boundaries(format)
    sample = every[np.random.default_rng(1).integers(0, len(every), 2**16)]
    x = np.concatenate([SPECIAL, every[:2000], every[-2000:], sample, raw_sample(2**16)])
    x = x[~np.isnan(x)]
    rule = format.native_overflow
    assert_same(cast(x, name, overflow=rule, rounding=mode), by_ladder(x, format, mode, rule), x)


@st.composite
def formats(draw):
    arguments = (
        draw(st.integers(2, 8)),
        draw(st.integers(1, 23)),
        draw(st.sampled_from(get_args(Specials))),
        draw(st.one_of(st.just(-1), st.integers(0, 140))),
    )
    try:
        return Format(*arguments)
    except FormatError:
        assume(False)


def by_fractions(x: float, format: Format, rounding: str, overflow: str, word: int) -> float:
    """The definition, word for word, with no bound on any integer."""
    exact = abs(Fraction(x)) if math.isfinite(x) else Fraction(2) ** 128
    exponent = format.min_exponent
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - format.mantissa_bits)
    below, part = divmod(exact / quantum, 1)
    up = {
        "nearest-even": part > Fraction(1, 2) or (part == Fraction(1, 2) and below % 2 == 1),
        "nearest-away": part >= Fraction(1, 2),
        "truncate": False,
        "stochastic": word < math.floor(part * 2**32),
    }[rounding]
    rounded = (below + up) * quantum
    if rounded > Fraction(format.max):
        magnitude = {"inf": math.inf, "nan": math.nan, "saturate": format.max}[overflow]
    else:
        magnitude = float(rounded)
    return math.copysign(magnitude, x) if format.has_negative_zero or magnitude != 0 else 0.0


@settings(max_examples=150)
@given(format=formats(), drawn=patterns, rounding=st.sampled_from(get_args(Rounding)), data=st.data())
def test_any_format_equals_exact_arithmetic(format, drawn, rounding, data):
    x = drawn.view(np.float32)
    x = x[np.isfinite(x)]
    # Raw patterns seldom fall where the format has its numbers: bring half of them there.
    with np.errstate(over="ignore"):
        x[::2] = np.ldexp(np.float32(1) + x[::2] % 1, data.draw(st.integers(-150, 128))).astype(np.float32)
    words = data.draw(arrays(np.uint32, len(x), elements=st.integers(0, 2**32 - 1)))
    rule = data.draw(st.sampled_from(rules(format)))
    bits = words if rounding == "stochastic" else None
    result = cast(x, format, overflow=rule, rounding=rounding, bits=bits)
    pairs = zip(x.tolist(), words.tolist(), strict=True)
    expected = [by_fractions(value, format, rounding, rule, word) for value, word in pairs]
    assert_same(result, np.array(expected, np.float32), x)
    if not np.isnan(result).any():
        assert_same(decode(encode(result, format), format), result, x)


@given(format=formats())
def test_the_numbers_of_any_format_follow_the_formula(format):
    codes = np.unique(np.linspace(0, 2 ** (format.bits - 1) - 1, 500).astype(np.uint32))
    finite = codes[np.isfinite(decode(codes, format))]
    e, m = finite >> format.mantissa_bits, finite % 2**format.mantissa_bits
    unit = np.maximum(e, 1).astype(np.int64) - format.bias - format.mantissa_bits
    expected = np.ldexp((m + (e > 0) * 2.0**format.mantissa_bits), unit)
    assert np.array_equal(decode(finite, format), expected)
    above, below = (encode(np.float32([sign * format.max]), format) for sign in (1, -1))
    assert above == below - 2 ** (format.bits - 1)


def stochastic(x: np.ndarray, name: str, words) -> np.ndarray:
    bits = np.broadcast_to(np.asarray(words, np.uint32), x.shape)
    return cast(x, name, overflow="saturate", rounding="stochastic", bits=bits)


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e2m1"])
def test_stochastic_rounding_turns_exactly_at_the_fraction(name):
    format = Format.parse(name)
    x = raw_sample(4000)
    x = x[np.abs(x) <= format.max]
    steps = ladder(format)
    below = np.minimum(np.searchsorted(steps, np.abs(x).astype(np.float64), side="right") - 1, len(steps) - 2)
    low, high = steps[below], steps[below + 1]
    threshold = np.array(
        [
            math.floor((Fraction(abs(v)) - Fraction(a)) / (Fraction(b) - Fraction(a)) * 2**32)
            for v, a, b in zip(x.tolist(), low.tolist(), high.tolist(), strict=True)
        ]
    )
    moves = threshold > 0
    assert moves.sum() > 100
    assert np.array_equal(np.abs(stochastic(x, name, threshold)), low)
    last = np.abs(stochastic(x[moves], name, threshold[moves] - 1))
    assert np.array_equal(last, np.minimum(high[moves], format.max))
    assert np.array_equal(np.abs(stochastic(x, name, 2**32 - 1)), low)


def test_stochastic_rounding_is_unbiased_also_far_below_the_smallest_subnormal():
    # n draws of a step that is taken with probability p: the count is binomial, with variance n p (1 - p).
    # Five standard deviations are exceeded once in 1.7 million; the seed makes it one draw for all time.
    n = 2**18
    words = np.random.default_rng(5).integers(0, 2**32, n, dtype=np.uint32)
    steps = [(1.001, 1.0, 1.0078125), (-3.3, -3.296875, -3.3125), (1e-40, 9.183550e-41, 1.83671e-40)]
    for value, low, high in steps:
        low, high = cast(np.float32([low, high]), "bf16", overflow="inf").astype(np.float64)
        p = (np.float64(np.float32(value)) - low) / (high - low)
        assert 0.01 < p < 0.99
        result = stochastic(np.full(n, value, np.float32), "bf16", words)
        ups = (result == high).sum()
        assert ups + (result == low).sum() == n
        assert abs(ups - n * p) < 5 * math.sqrt(n * p * (1 - p))
    x = np.float32([2.0**-41, 2.0**-42, 1.5 * 2.0**-41])  # e4m3's smallest is 2^-9
    assert stochastic(x, "e4m3", 0).tolist() == [2.0**-9, 0.0, 2.0**-9]
    assert stochastic(x, "e4m3", 1).tolist() == [0.0, 0.0, 0.0]


def test_nan_is_canonical_signs_are_kept_where_there_is_one_and_the_rule_has_no_default():
    x = floats([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001])
    for name in ["fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2"]:
        result = cast(x, name, overflow="saturate").view(np.uint32)
        assert result.tolist() == [0x7FC00000, 0x7FC00000, 0xFFC00000, 0xFFC00000]
    assert encode(x, "e4m3").tolist() == [0x7F, 0x7F, 0xFF, 0xFF]
    assert encode(x, "e4m3fnuz").tolist() == [0x80] * 4
    x = np.float32([-0.0, -1e-30, 0.0])
    assert cast(x, "e4m3fnuz", overflow="nan").view(np.uint32).tolist() == [0, 0, 0]
    assert np.signbit(cast(x, "e4m3", overflow="nan")).tolist() == [True, True, False]
    with pytest.raises(TypeError, match="overflow"):
        cast(ONE, "e4m3")


def test_fp32_is_the_identity_tf32_has_19_bits_and_any_shape_is_taken():
    x = raw_sample(2**16)
    x = x[~np.isnan(x)]
    assert_same(cast(x, "fp32", overflow="inf"), x, x)
    assert np.array_equal(encode(x, "fp32"), x.view(np.uint32))
    codes = encode(cast(x, "tf32", overflow="inf", rounding="truncate"), "tf32")
    assert codes.dtype == np.uint32
    assert np.array_equal(codes, x.view(np.uint32) >> 13)
    x = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    for view in (x, x.transpose(2, 0, 1), x[:, ::2], x[0, 0, 0], x[:0], x.astype(np.float32)[..., ::-1]):
        result = cast(view, "e5m2", overflow="inf")
        assert result.shape == view.shape
        assert np.array_equal(result, view.astype(ml_dtypes.float8_e5m2).astype(np.float32))
        assert np.array_equal(decode(encode(result, "e5m2"), "e5m2"), result)
    words = np.random.default_rng(0).integers(0, 2**32, (4, 2, 3), dtype=np.uint32)
    turned = cast(x.transpose(2, 0, 1), "e2m1", overflow="saturate", rounding="stochastic", bits=words)
    flat = x.transpose(2, 0, 1).ravel()
    again = cast(flat, "e2m1", overflow="saturate", rounding="stochastic", bits=words.ravel())
    assert np.array_equal(turned.ravel(), again)


def test_overflows_are_counted_and_raise_shows_the_first():
    x = np.zeros((2, 3), np.float32)
    x[0, 2], x[1, 1] = 1000, -np.inf
    with pytest.raises(RoundingError, match=r"2 of 6 values .*index \(0, 2\): 1000.0.* beyond e4m3.* 448"):
        cast(x, "e4m3", overflow="raise")
    words = np.full((2, 3), 2**32 - 1, np.uint32)
    x[:] = 460
    assert (cast(x, "e4m3", overflow="raise", rounding="stochastic", bits=words) == 448).all()
    with pytest.raises(RoundingError, match="6 of 6"):
        cast(x, "e4m3", overflow="raise", rounding="stochastic", bits=words * 0)
    x = np.float32([1, 464, 465, -480, np.inf, -np.inf, np.nan, 0])
    assert overflows(x, "e4m3").tolist() == [False, False, True, True, True, True, False, False]
    assert overflows(x, "e4m3", rounding="nearest-away").tolist()[1]
    assert not overflows(x, "e4m3", rounding="truncate")[2]


ONE = np.ones(3, np.float32)
stochastic_with = partial(cast, ONE, "e4m3", overflow="nan", rounding="stochastic")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cast(np.ones(3), "bf16", overflow="inf"), RoundingError, r"twice.*astype"),
        (lambda: cast(np.ones(3, int), "bf16", overflow="inf"), RoundingError, "not int64"),
        (lambda: cast(ONE.astype(ml_dtypes.bfloat16), "e4m3", overflow="nan"), RoundingError, "not bfloat16"),
        (lambda: cast(ONE, "e4m3", overflow="inf"), FormatError, "`nan`, `saturate` or `raise`"),
        (lambda: cast(ONE, "e2m1", overflow="nan"), FormatError, "`saturate` or `raise`"),
        (lambda: cast(ONE, "e4m3", overflow="saturated"), FormatError, "did you mean `saturate`"),
        (lambda: cast(ONE, "e4m3", overflow="nan", rounding="nearest"), RoundingError, "unknown rounding"),
        (lambda: cast(ONE, "e4m3", overflow="nan", bits=np.zeros(3, np.uint32)), RoundingError, "uses none"),
        (lambda: cast(ONE, "e4m3", overflow="nan", rounding="stochastic"), RoundingError, "given: none"),
        (lambda: stochastic_with(bits=np.zeros(2, np.uint32)), RoundingError, r"shape \(2,\)"),
        (lambda: stochastic_with(bits=np.zeros(3, np.int64)), RoundingError, "given: int64"),
        (lambda: cast(np.float32([0, np.nan]), "e2m1", overflow="saturate"), RoundingError, "1 of 2.*NaN"),
        (lambda: encode(np.float32([1, 1.01]), "e4m3"), RoundingError, r"1 of 2.*index \(1,\): 1.01"),
        (lambda: encode(np.float32([1000]), "e4m3"), RoundingError, "no code"),
        (lambda: encode(np.float32([np.inf]), "e4m3"), RoundingError, "no code"),
        (lambda: encode(np.float32([1e6]), "e5m2"), RoundingError, "no code"),
        (lambda: encode(np.float32([-0.0]), "e4m3fnuz"), RoundingError, "no code"),
        (lambda: encode(np.float32([np.nan]), "e2m1"), RoundingError, "NaN"),
        (lambda: decode(np.uint8([64]), "e2m3"), RoundingError, "0 to 63"),
        (lambda: decode(np.int8([-1]), "e4m3"), RoundingError, "0 to 255"),
        (lambda: decode(np.float32([1]), "e4m3"), RoundingError, "integers"),
        (lambda: cast(ONE, "e4m4", overflow="nan"), FormatError, "does not say"),
    ],
)
def test_errors_say_what_is_allowed(call, error, text):
    with refuses(error, text):
        call()
