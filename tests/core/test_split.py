"""Split masters: every kind of pattern. benchmarks/prove/split_all.py tries every pattern."""

import numpy as np
import pytest

from halfstep.core.errors import RoundingError
from halfstep.core.rounding import cast, decode, encode
from halfstep.core.split import join, split
from tests.refusals import refuses


def patterns() -> np.ndarray:
    """Around every multiple of 2^15, hence every tie, every bf16 and every exponent; and one of each 4096."""
    borders = np.arange(0, 2**32, 2**15, dtype=np.int64)[:, None] + [-2, -1, 0, 1, 2]
    strata = np.arange(2**20, dtype=np.int64) * 4096
    strata += np.random.default_rng(7).integers(0, 4096, 2**20)
    return np.concatenate([borders.ravel() % 2**32, strata]).astype(np.uint32)


ALL = patterns()
NAN = (ALL & 0x7FFFFFFF) > 0x7F800000
NUMBERS = ALL[~NAN].view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def test_join_undoes_split_on_every_kind_of_number_in_its_shape():
    hi, lo = split(NUMBERS)
    assert (hi.dtype, lo.dtype) == (np.uint16, np.int16)
    assert np.array_equal(bits(join(hi, lo)), bits(NUMBERS))
    whole = (hi.astype(np.int64) << 16) + lo
    assert np.array_equal(whole, bits(NUMBERS).astype(np.int64))
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    hi, lo = split(x)
    assert hi.shape == lo.shape == x.shape
    assert np.array_equal(join(hi, lo), x)


def test_hi_is_the_nearest_bf16_and_differs_from_nearest_even_on_exact_ties_only():
    hi, lo = split(NUMBERS)
    nearest = cast(NUMBERS, "bf16", overflow="inf", rounding="nearest-away")
    assert np.array_equal(hi, encode(nearest, "bf16"))
    even = encode(cast(NUMBERS, "bf16", overflow="inf"), "bf16")
    differs = hi != even
    assert np.array_equal(differs, (lo == -32768) & (hi % 2 == 1))
    # Every even magnitude below infinity has one tie above it: 0x7F80 / 2, in both signs.
    assert len(np.unique(bits(NUMBERS)[differs])) == 0x7F80


def test_every_nan_stays_nan_with_its_sign():
    x = ALL[NAN].view(np.float32)
    hi, lo = split(x)
    assert np.array_equal(hi, np.where(np.signbit(x), 0xFFC0, 0x7FC0))
    assert not lo.any()
    assert np.isnan(decode(hi, "bf16")).all()
    assert np.isnan(join(hi, lo)).all()


@pytest.mark.parametrize(
    ("pattern", "hi", "lo"),
    [
        (0x80000000, 0x8000, 0),
        (0x00000001, 0x0000, 1),  # the smallest subnormal
        (0x3F808000, 0x3F81, -32768),  # a tie above an even bf16: away from zero, where nearest-even stays
        (0x3F818000, 0x3F82, -32768),  # a tie above an odd one: both go up
        (0x7F7F8000, 0x7F80, -32768),  # finite, and infinite in use
        (0xFF800000, 0xFF80, 0),
        (0x7F800001, 0x7FC0, 0),  # the plain rule says infinity
        (0x7FFFFFFF, 0x7FC0, 0),  # the plain rule says -0.0
    ],
)
def test_by_hand(pattern, hi, lo):
    x = np.array(pattern, np.uint32).view(np.float32)  # 0-d: numpy warns of wrapped sums here, and only here
    result = split(x)
    assert (int(result[0]), int(result[1])) == (hi, lo)
    back = join(*result)
    assert back.shape == ()
    assert np.isnan(back) if np.isnan(x) else bits(back) == pattern


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: split(np.zeros(2)), "`x` is float64, not float32"),
        (lambda: join(np.zeros(2, np.int16), np.zeros(2, np.int16)), "`hi` is int16, not uint16"),
        (lambda: join(np.zeros(2, np.uint16), np.zeros(2, np.uint16)), "`lo` is uint16, not int16"),
        (lambda: join(np.zeros(2, np.uint16), np.zeros(1, np.int16)), r"\(2,\) and lo \(1,\)"),
    ],
)
def test_errors(call, text):
    with refuses(RoundingError, text):
        call()
