"""Casts, random words, scales and split masters: the bits of core, on every backend.

Most of it is a sample in the fast suite and all of it in `make prove`.
"""

import math
from functools import cache
from typing import get_args

import numpy as np
import pytest

from halfstep.core import philox, rounding
from halfstep.core import split as reference_split
from halfstep.core.errors import FormatError, HalfstepError, RoundingError
from halfstep.core.formats import ALIASES, BF16, E4M3, E5M2, FP16, FP32, Format
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from tests.patterns import boundaries, rules

NARROW = ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1", "e3m4ieee", "e4m3b11fnuz"]
WIDE = ["fp32", "tf32", "bf16", "fp16", "e6m9fn", "e7m16ieee", "e5m12f"]
# Formats whose numbers fp32 only has as subnormals, or that reach its last binade.
STRANGE = ["e8m2fnuz", "e8m7b128ieee", "e7m3b0f", "e5m2b130ieee", "e2m5b124f", "e8m13fnuz"]
EVERY = [*NARROW, *WIDE, *STRANGE]
# One format for each way to round and each set of special values.
SAMPLED = ["bf16", "fp16", "e4m3", "e2m1", "e4m3fnuz", "e8m2fnuz"]
SPECIAL = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
prove = pytest.mark.prove


@cache
def samples(name):
    """2^16 patterns: boundaries, numbers spread over the format's range, and raw ones, NaN among them."""
    fmt, rng = Format.parse(name), np.random.default_rng(20261115)
    count = 2 ** (fmt.bits - 1)
    codes = np.arange(min(count, 2**11), dtype=np.int64)
    if count > len(codes):
        codes = np.unique(np.concatenate([codes[:256], count - 1 - codes[:256], rng.integers(0, count, 2**11)]))
    low, high = fmt.min_exponent - fmt.mantissa_bits - 3, fmt.max_exponent + 2
    with np.errstate(over="ignore", under="ignore"):
        spread = np.ldexp(rng.uniform(1, 2, 2**11), rng.integers(low, high, 2**11)).astype(np.float32)
    positive = np.concatenate([np.uint32(SPECIAL), boundaries(fmt, codes), spread.view(np.uint32)])
    raw = rng.integers(0, 2**32, 2**16, dtype=np.uint32)
    # One size for all formats: JAX compiles each operation once for a shape.
    x = np.concatenate([positive, positive | np.uint32(0x80000000), raw])[: 2**16].view(np.float32)
    return x if fmt.has_nan else np.where(np.isnan(x), np.float32(1), x)


def assert_bits(found, expected, x):
    found, expected = (np.ascontiguousarray(a, np.float32).view(np.uint32).ravel() for a in (found, expected))
    wrong = np.flatnonzero(found != expected)
    at = wrong[:3]
    assert len(wrong) == 0, f"{len(wrong)} differ: {np.ravel(x)[at]} -> {found[at]} not {expected[at]}"


def assert_casts(backend, fmt, x, combinations):
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)
    for mode, overflow in combinations:
        bits = words if mode == "stochastic" else None
        found = backend.quantize(x, fmt, overflow=overflow, rounding=mode, bits=bits)
        assert_bits(found, rounding.cast(x, fmt, overflow=overflow, rounding=mode, bits=bits), x)


@pytest.mark.parametrize("name", [n if n in SAMPLED else pytest.param(n, marks=prove) for n in EVERY])
def test_every_mode_and_rule_gives_the_bits_of_the_reference(backend, name):
    fmt = Format.parse(name)
    # What overflow makes of a number does not depend on how it was rounded, so one mode has all the rules.
    combinations = [("nearest-even", rule) for rule in rules(fmt)]
    combinations += [(mode, rules(fmt)[-1]) for mode in get_args(Rounding) if mode != "nearest-even"]
    assert_casts(backend, fmt, samples(name), combinations)


@prove
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
def test_every_number_and_midpoint_of_a_wide_format(backend, name):
    fmt = Format.parse(name)
    positive = np.concatenate([np.uint32(SPECIAL), boundaries(fmt, np.arange(2 ** (fmt.bits - 1)))])
    x = np.concatenate([positive, positive | np.uint32(0x80000000)]).view(np.float32)
    assert_casts(backend, fmt, x, [(mode, rules(fmt)[-1]) for mode in get_args(Rounding)])


@prove
@pytest.mark.parametrize("source", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e8m2fnuz"])
def test_all_numbers_of_16_bits(backend, name, source):
    fmt, wide = Format.parse(name), rounding.decode(np.arange(2**16), source)
    wide = wide[~np.isnan(wide)]
    given = backend.as_dtype(wide, source)
    for rule in rules(fmt):
        found = backend.numpy(backend.cast.quantize(given, fmt, overflow=rule))
        assert_bits(found, rounding.cast(wide, name, overflow=rule), wide)


ORACLE = {"bf16": "bfloat16", "fp16": "float16", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz"}


@pytest.mark.parametrize("name", ORACLE)
def test_every_implementation_agrees_with_an_independent_one(implementation, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fmt, x = Format.parse(name), samples(name)
    dtype = np.float16 if name == "fp16" else getattr(ml_dtypes, ORACLE[name])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    found = implementation.quantize(x, fmt, overflow="inf" if fmt.has_inf else "nan")
    nan = np.isnan(expected)
    assert np.isnan(found[nan]).all()
    assert_bits(found[~nan], expected[~nan], x[~nan])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_emulated_cast_is_the_native_one(backend, name):
    """`carried` is what emulation rounds by; the native dtype is what runs without it."""
    fmt, x = Format.parse(name), samples(name)
    expected = rounding.cast(x, fmt, overflow="inf")
    number = ~np.isnan(x)
    for found in (backend.carried(x, fmt), backend.numpy(backend.as_dtype(x, fmt))):
        assert_bits(found[number], expected[number], x[number])
        assert np.isnan(found[~number]).all()
    x = backend.array(x)
    assert backend.cast.carried(x, FP32) is x


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
        ("e2m1", math.nan, "saturate", math.nan),  # a format without NaN keeps it visible
        ("e2m1", -7.0, "saturate", -6.0),
    ],
)
def test_where_native_casts_disagree_the_rule_decides(backend, name, x, rule, expected):
    found = backend.quantize(np.float32([x]), Format.parse(name), overflow=rule)
    np.testing.assert_equal(found, np.float32([expected]))


@pytest.mark.parametrize("name", ["bf16", "tf32", "fp16", "e4m3", "e8m2fnuz"])
def test_stochastic_rounding_turns_where_the_word_reaches_the_fraction(backend, name):
    """Fractions of 0, 1/4, 1/2 and 3/4 of a step above one, and words at each of them and next to it."""
    fmt, fractions = Format.parse(name), np.arange(4)
    values = (1 + fractions / 4 * fmt.epsilon).astype(np.float32)
    words = (fractions[:, None] * 2**30 + [-1, 0, 1]).reshape(-1)
    words = np.append(words[words >= 0], 2**32 - 1).astype(np.uint32)
    x, bits = (np.ascontiguousarray(t) for t in np.broadcast_arrays(values[:, None], words))
    found = backend.quantize(x, fmt, overflow="saturate", rounding="stochastic", bits=bits)
    up = bits < (fractions[:, None].astype(np.int64) << 30)
    assert np.array_equal(found, np.where(up, 1 + fmt.epsilon, 1).astype(np.float32))


def test_half_inputs_views_and_empty_arrays(backend):
    x = backend.array(np.linspace(-500, 500, 24, dtype=np.float32).reshape(2, 3, 4))
    views = [x, x.swapaxes(0, 2), x[:, ::2], x[0, 0, 0], x[:0]]
    for view in [*views, backend.as_dtype(x, FP16), backend.as_dtype(x, BF16)]:
        wide = backend.numpy(view)
        found = backend.numpy(backend.cast.quantize(view, E4M3, overflow="nan"))
        assert found.shape == wide.shape
        assert_bits(found, rounding.cast(np.ascontiguousarray(wide), E4M3, overflow="nan"), wide)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e8m2fnuz"])
def test_no_gradient_passes_quantize_and_all_of_it_a_cast_that_stands_for_a_native_one(backend, name):
    cast, fmt = backend.cast, Format.parse(name)
    calls = {2.0: lambda x: cast.quantize(x, fmt, overflow="saturate"), 3.0: lambda x: cast.carried(x, BF16)}
    for slope, call in calls.items():
        _, [(_, grad)] = backend.vjp(lambda x, call=call: 2 * x + call(x), [np.float32([1.1, 1000.0])], None)
        assert grad.tolist() == [slope, slope]


@pytest.mark.parametrize(
    ("shape", "start"), [(0, 0), (7, 3), ((3, 5), 1), ((), 2), (100, 4 * 2**32 - 6), (64, 2**40 + 1)]
)
def test_random_words_depend_on_the_key_alone(implementation, shape, start):
    key = {"seed": 2**40 + 17, "tensor": philox.tensor_id("blocks.0.mlp.up.weight"), "start": start}
    expected = philox.random_bits(shape, step=2**31 - 1, **key)
    steps = [2**31 - 1]
    if implementation.name != "numpy":
        steps.append(implementation.array(np.int32(2**31 - 1)))  # counted on the device, and not read
    for step in steps:
        found = implementation.random_bits(shape, step=step, **key)
        assert found.shape == expected.shape
        assert np.array_equal(found, expected)


def test_every_part_of_the_key_changes_the_words(implementation):
    base = {"seed": 1, "step": 2, "tensor": 3, "start": 0}
    first = implementation.random_bits(100, **base)
    for name in base:
        assert not (implementation.random_bits(100, **{**base, name: 8}) == first).any()


def scales(backend, amax, fmt):
    """The scale that an operand of this largest magnitude is multiplied by."""
    zeros, operand = np.zeros((len(amax), 1), np.float32), Operand(fmt, granularity="row")
    return 1 / np.float64(backend.quantize_scaled(zeros, operand, amax=amax[:, None])[1].ravel())


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e3m2"])
def test_the_scale_is_the_largest_power_of_two_that_fits(backend, name):
    fmt, rng = Format.parse(name), np.random.default_rng(3)
    amax = np.ldexp(rng.uniform(1, 2, 500), rng.integers(-100, 127, 500)).astype(np.float32)
    exact = np.float32([fmt.max * 2.0**k for k in (-40, 0, 3, 100)])
    amax = np.concatenate([amax, exact, np.nextafter(exact, np.float32(np.inf))])
    scale = scales(backend, amax, fmt)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (amax * scale <= fmt.max).all()
    assert (amax * scale * 2 > fmt.max).all()


def test_the_scale_of_zero_tiny_huge_and_broken(backend):
    amax = np.float32([0.0, 1e-45, 1e-38, 3.4028235e38, math.inf, math.nan])
    scale = scales(backend, amax, E4M3)
    assert scale[0] == 1.0
    assert scale[1] == scale[2] == 2.0**126
    assert 0 < amax[3] * scale[3] <= 448
    assert np.isnan(scale).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_scaled_operand_is_the_reference_cast_of_the_scaled_values(backend, granularity):
    check_scaled_operand(backend, granularity)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_native_scaled_operand_is_the_reference_cast_of_the_scaled_values(fp8_backend, granularity):
    check_scaled_operand(fp8_backend, granularity, native=True)


def check_scaled_operand(backend, granularity, **given):
    x = np.random.default_rng(0).standard_normal((6, 5, 32)).astype(np.float32)
    x *= np.logspace(-20, 20, 5, dtype=np.float32)[:, None]
    x[2, 3] = 0
    values, inv_scale = backend.quantize_scaled(x, Operand(E4M3, granularity=granularity), **given)
    amax = np.abs(x).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(x).max()
    assert inv_scale.shape == np.shape(amax)
    expected = rounding.cast(x / inv_scale, E4M3, overflow="raise")
    assert_bits(values, expected, x)
    # The largest number of every row (or of the array) lies in the top binade of the format.
    top = np.abs(expected).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(expected).max()
    assert ((top > 220) | (amax == 0)).all()


def test_a_delayed_amax_is_given_and_what_is_larger_saturates_but_hides_no_infinity(backend):
    operand, x = Operand(E4M3, amax="delayed"), np.float32([1.0, 4.0])
    with pytest.raises(RoundingError, match="no `amax`"):
        backend.quantize_scaled(x, operand)
    values, inv_scale = backend.quantize_scaled(x, operand, amax=np.float32(1.0))
    assert (values * inv_scale).tolist() == [1.0, 1.75]
    x = np.float32([[1.0, math.inf], [1.0, 2.0]])
    values, inv_scale = backend.quantize_scaled(x, Operand(E4M3, granularity="row"))
    assert np.isnan(values * inv_scale).tolist() == [[True, True], [False, False]]
    assert np.isnan(backend.quantize_scaled(x, Operand(E4M3))[0]).all()


def test_an_empty_array_has_an_amax(backend):
    empty, operand = np.zeros((0, 4), np.float32), Operand(E5M2)
    assert backend.cast.amax_of(backend.array(empty), operand) == 0
    values, inv_scale = backend.quantize_scaled(empty, operand)
    assert values.shape == (0, 4)
    assert inv_scale == 1


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=prove)])
def test_split_masters_are_exact_and_differ_from_the_native_cast_on_ties_alone(splitting, stride):
    codes = np.arange(0, 2**16, stride, dtype=np.uint32)[:, None] << 16
    raw = np.random.default_rng(5).integers(0, 2**32, 2**18 // stride, dtype=np.uint64).astype(np.uint32)
    patterns = np.concatenate([(codes | np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).ravel(), raw])
    patterns = np.concatenate([patterns, np.uint32(SPECIAL), np.uint32(SPECIAL) | np.uint32(0x80000000)])
    x = patterns.view(np.float32)
    hi, lo = splitting.split(x)
    expected_hi, expected_lo = reference_split.split(x)
    assert np.array_equal(hi, expected_hi)
    assert np.array_equal(lo, expected_lo)
    back = splitting.join(hi, lo)
    nan = np.isnan(x)
    assert np.isnan(back[nan]).all()
    assert (back[~nan].view(np.uint32) == patterns[~nan]).all()
    native = rounding.cast(x[~nan], BF16, overflow="inf").view(np.uint32) >> 16
    ties = (patterns[~nan] & 0xFFFF) == 0x8000
    assert (native == hi[~nan])[~ties].all()
    assert (native != hi[~nan])[ties].any()  # half of the ties: those whose lower neighbor is even


def test_a_zero_has_no_remainder_below_it(splitting):
    hi, lo = np.uint16([0, 0x8000]), np.int16([-5, -1])  # a number that was set to zero; its bits would be a NaN
    assert np.array_equal(splitting.join(hi, lo), reference_split.join(hi, lo))
    assert (splitting.join(hi, lo) == 0).all()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c, x: c.quantize(x, E4M3, overflow="raise"), RoundingError, "sync.*core.rounding.cast"),
        (lambda c, x: c.quantize(x, E4M3, overflow="inf"), FormatError, "`saturate` or `nan`"),
        (lambda c, x: c.quantize(x, E4M3, overflow="nan", rounding="up"), RoundingError, "unknown rounding"),
        (lambda c, x: c.quantize(x, E4M3, overflow="nan", bits=x), RoundingError, "uses none"),
        (lambda c, x: c.quantize(x, E4M3, overflow="nan", rounding="stochastic"), RoundingError, "given: none"),
        (
            lambda c, x: c.quantize(x, E4M3, overflow="nan", rounding="stochastic", bits=x),
            RoundingError,
            "given: .*float32",
        ),
        (lambda c, x: c.random_bits(3, seed=-1, step=0, tensor=0), RoundingError, "`seed` is -1"),
        (lambda c, x: c.random_bits(3, seed=0, step=2**32, tensor=0), RoundingError, "`step`"),
        (lambda c, x: c.random_bits(3, seed=0, step=x, tensor=0), RoundingError, "one integer"),
        (lambda c, x: c.random_bits(3, seed=0, step=0, tensor="w"), RoundingError, "`tensor` is 'w'"),
    ],
)
def test_errors_say_what_is_allowed(backend, call, error, text):
    with pytest.raises(error, match=text) as caught:
        call(backend.cast, backend.array(np.ones(3, np.float32)))
    assert caught.value.hint


def test_what_cannot_be_cast_or_split_is_refused(backend):
    integers = backend.array(np.arange(3, dtype=np.int32))
    with pytest.raises(RoundingError, match=r"not .*int32"):
        backend.cast.quantize(integers, E4M3, overflow="nan")
    one = backend.array(np.ones(3, np.float32))
    half, (hi, lo) = backend.as_dtype(one, BF16), backend.cast.split(one)
    for call in (lambda: backend.cast.split(half), lambda: backend.cast.join(one, one)):
        with pytest.raises(HalfstepError, match=r"float32") as caught:
            call()
        assert caught.value.hint
    with pytest.raises(RoundingError, match=r"int16"):
        backend.cast.join(hi, lo[:2])


def test_the_named_formats_are_all_tried():
    assert set(ALIASES) <= set(EVERY)
