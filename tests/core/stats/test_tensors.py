"""Statistics: a table worked by hand, and merging as a property."""

import json
import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfstep.core.errors import FormatError, HalfstepError, RoundingError
from halfstep.core.formats import Format
from halfstep.core.stats.tensors import FIRST_EXPONENT, NUM_EXPONENTS, TensorStats
from tests.refusals import refuses

FORMATS = ["fp16", "bf16", "e4m3", "e5m2", "e2m1", "e4m3fnuz"]
SUMS = ("signal", "noise", "fourth")
tensors = arrays(np.uint32, st.integers(0, 40), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)
stats = st.builds(TensorStats.of, tensors, st.just("e4m3"), st.sampled_from([1.0, 0.125, 3.0, 1e30]))


def histogram(result: TensorStats) -> dict[int, int]:
    return {FIRST_EXPONENT + i: n for i, n in enumerate(result.exponents) if n}


# e4m3: largest 448 (464 is the tie that stays), smallest normal 2^-6, smallest 2^-9 (2^-10 is the tie that
# goes to zero). Rounded: 1.0625 -> 1 (a tie), 1000 -> 448.
BY_HAND = np.float32(
    [0, -0.0, 1, 1.0625, -464, 465, 1000, np.inf, -np.inf, np.nan, 2**-6, 2**-7, 2**-10, -(2**-10) * 1.5, 2**-149]
)


def test_by_hand():
    result = TensorStats.of(BY_HAND, "e4m3")
    assert (result.count, result.zeros, result.nans, result.infs) == (15, 2, 1, 2)
    assert result.overflow == 2  # 465 and 1000; infinities are counted as such
    assert result.underflow == 2  # 2^-10 by the tie, and 2^-149
    assert result.subnormal == 2  # 2^-7, and 1.5 * 2^-10, which becomes 2^-9
    assert (result.amax, result.amin) == (1000.0, 2.0**-149)
    finite = [1, 1.0625, 464, 465, 1000, 2**-6, 2**-7, 2**-10, 1.5 * 2**-10, 2**-149]
    errors = [0, 0.0625, 16, 17, 552, 0, 0, 2**-10, 2**-11, 2**-149]
    # Sums of a dozen fp64 terms: off by at most twelve roundings.
    assert result.signal == pytest.approx(math.fsum(v * v for v in finite), rel=12 * 2**-53)
    assert result.noise == pytest.approx(math.fsum(e * e for e in errors), rel=12 * 2**-53)
    assert histogram(result) == {0: 2, 8: 2, 9: 1, -6: 1, -7: 1, -10: 2, -149: 1}
    assert (result.overflow_fraction, result.underflow_fraction) == (2 / 15, 2 / 15)
    assert (result.subnormal_fraction, result.zero_fraction) == (2 / 15, 2 / 15)
    assert result.nonfinite_fraction == 3 / 15
    x = np.ldexp(np.float32(1.5), np.arange(-148, 128)).astype(np.float32)
    result = TensorStats.of(np.append(x, np.float32(2.0**-149)), "fp32")
    assert result.exponents == (1,) * NUM_EXPONENTS
    assert result.sqnr_db == math.inf


@pytest.mark.parametrize(
    ("x", "format", "scale", "overflow", "underflow", "subnormal"),
    [
        ([65519.0, 65520.0], "fp16", 1.0, 1, 0, 0),
        ([2.0**-24, 2.0**-25, 1.01 * 2.0**-25, 2.0**-14], "fp16", 1.0, 0, 1, 2),
        ([2.0**-25, 2.0**-30, 2.0**-14], "fp16", 1024.0, 0, 0, 2),  # what loss scaling is for
        ([57344.0, 61440.0, 61439.0], "e5m2", 1.0, 1, 0, 0),
        ([3.39e38, 3.4e38], "bf16", 1.0, 1, 0, 0),
        ([3e38, 1.0], "e4m3", 1e10, 2, 0, 0),  # the product is beyond fp32 itself
        ([1e-30, 1.0], "e4m3", 1e-20, 0, 2, 0),
        ([6.0, 6.9, 7.0, -100.0], "e2m1", 1.0, 2, 0, 0),
        ([0.25, 0.26, 0.5, 1.0], "e2m1", 1.0, 0, 1, 2),
        ([240.0, 247.0, 248.0], "e4m3fnuz", 1.0, 1, 0, 0),
    ],
)
def test_table(x, format, scale, overflow, underflow, subnormal):
    result = TensorStats.of(np.float32(x), format, scale)
    assert (result.overflow, result.underflow, result.subnormal) == (overflow, underflow, subnormal)


def test_headroom_and_kurtosis():
    result = TensorStats.of(np.float32([0, 28, -3.5]), "e4m3")
    assert result.headroom_bits == 4  # 28 * 2^4 is 448
    assert TensorStats.of(np.float32([896]), "e4m3").headroom_bits == -1
    assert math.isnan(TensorStats.of(np.float32([0]), "e4m3").headroom_bits)
    assert math.isnan(TensorStats.of(np.float32([0]), "e4m3").kurtosis)
    assert TensorStats.of(np.float32([1, -1, np.inf]), "bf16").kurtosis == 1
    assert TensorStats.of(np.float32([0, 0, 0, 2, np.nan]), "bf16").kurtosis == 4
    normal = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    # The variance of the fourth power of a normal number is 96; five standard errors.
    assert TensorStats.of(normal, "bf16").kurtosis == pytest.approx(3, abs=5 * math.sqrt(96 / 10_000))


@pytest.mark.parametrize("format", ["e3m2", "e4m3", "e5m2", "bf16", "tf32"])
def test_sqnr_grows_by_6_db_a_bit(format):
    # The docstring's 13.5 dB are rounded to half a dB; 2^18 draws scatter by less than 0.1 dB around it.
    x = np.random.default_rng(3).standard_normal(2**18, dtype=np.float32)
    mantissa = Format.parse(format).mantissa_bits
    assert TensorStats.of(x, format).sqnr_db == pytest.approx(6.02 * mantissa + 13.5, abs=0.25)


def test_sqnr_at_its_ends_and_a_nan_where_the_format_has_none():
    assert math.isnan(TensorStats.empty("bf16").sqnr_db)
    assert math.isnan(TensorStats.of(np.zeros(4, np.float32), "bf16").sqnr_db)
    assert TensorStats.of(np.float32([1, 2]), "bf16").sqnr_db == math.inf
    assert TensorStats.of(np.float32([1e-30]), "e4m3").sqnr_db == 0  # all signal, all lost
    assert math.isnan(TensorStats.empty("bf16").overflow_fraction)
    result = TensorStats.of(np.float32([1, np.nan, np.inf]), "e2m1")
    assert (result.nans, result.infs, result.overflow) == (1, 1, 0)


@pytest.mark.parametrize("scale", [2.0**-20, 0.1, 3.0, 2.0**30])
def test_statistics_of_x_do_not_depend_on_the_scale(scale):
    x = np.random.default_rng(4).standard_normal(1000, dtype=np.float32)
    one, other = TensorStats.of(x, "bf16"), TensorStats.of(x, "bf16", scale)
    for name in ("count", "zeros", "amax", "amin", "signal", "exponents"):
        assert getattr(one, name) == getattr(other, name)
    if math.frexp(scale)[0] == 0.5:  # a power of two moves no number to another place between its neighbors
        assert one.noise == pytest.approx(other.noise, rel=1000 * 2**-53)
    else:
        assert one.sqnr_db == pytest.approx(other.sqnr_db, abs=1)


def assert_equal(one: TensorStats, other: TensorStats, additions: int) -> None:
    """Equal in all that is counted; sums of positive terms to one rounding for each addition."""
    for field in fields(TensorStats):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in SUMS:
            assert abs(a - b) <= 2 * additions * 2**-53 * max(a, b)
        else:
            assert a == b, field.name


@given(a=tensors, b=tensors, format=st.sampled_from(FORMATS), scale=st.sampled_from([1.0, 0.25, 3.0]))
def test_merging_parts_gives_the_whole(a, b, format, scale):
    if not Format.parse(format).has_nan:
        a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    merged = TensorStats.of(a, format, scale) + TensorStats.of(b, format, scale)
    assert_equal(merged, TensorStats.of(np.concatenate([a, b]), format, scale), additions=a.size + b.size)


@given(a=stats, b=stats, c=stats)
def test_merge_is_commutative_and_associative_with_an_identity(a, b, c):
    assert a + b == b + a
    assert_equal((a + b) + c, a + (b + c), additions=2)
    assert a + TensorStats.empty("e4m3") == a == TensorStats.empty("e4m3").merge(a)


@given(a=stats)
def test_reads_back_exactly_from_json(a):
    assert TensorStats.from_dict(json.loads(json.dumps(a.to_dict(), allow_nan=False))) == a


ONE = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: TensorStats.empty("bf16") + TensorStats.empty("fp16"), FormatError, "bf16 and of fp16"),
        (lambda: TensorStats.of(np.ones(2), "bf16"), RoundingError, "float64"),
        (lambda: TensorStats.of(ONE, "bf16", scale=0.0), RoundingError, "scale of 0.0"),
        (lambda: TensorStats.of(ONE, "bf16", scale=1e39), RoundingError, r"scale of 1e\+39"),
        (lambda: TensorStats.of(ONE, "bf16", scale=math.nan), RoundingError, "scale of nan"),
        (lambda: TensorStats.from_dict({"format": "bf16", "seen": 1}), HalfstepError, "given: format, seen"),
    ],
)
def test_errors(call, error, text):
    with refuses(error, text):
        call()
