"""What another format would have lost: by hand, against the statistics of one scale, and merged."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfstep.core.formats import parse
from halfstep.core.stats.tensors import TensorStats
from halfstep.core.stats.what_if import BLOCK, SPECS, SignalLost, groups, scales_of, signal_lost, spec_of

tensors = arrays(
    np.uint32, st.tuples(st.integers(0, 3), st.integers(0, 70)), elements=st.integers(0, 2**32 - 1)
).map(lambda bits: bits.view(np.float32))


def test_scales_are_the_largest_powers_of_two_that_fit():
    amax = np.float32([448, 449, 224, 1, 0, np.inf, np.nan, 2**-149, 3e38])
    expected = np.float32([1, 0.5, 2, 256, 1, np.nan, np.nan, 2.0**126, 2.0**-120])
    np.testing.assert_array_equal(scales_of(amax, parse("e4m3")), expected)


def test_blocks_are_parts_of_rows():
    x = np.arange(2 * 40, dtype=np.float32).reshape(2, 40)
    blocks = groups(x, "block")
    assert blocks.shape == (4, BLOCK)
    assert blocks[1].tolist() == [*range(32, 40), *[0] * 24]
    assert blocks[2, 0] == 40


def test_finer_scales_lose_less():
    # Two rows that are 2^30 apart: with one scale the smaller one is lost.
    x = np.float32([[1, 1.0625] * 32, [2.0**-30, 1.0625 * 2.0**-30] * 32])
    whole, by_row = signal_lost(x, "e4m3"), signal_lost(x, "e4m3:row")
    assert (whole.count, whole.underflow, by_row.underflow) == (128, 64, 0)
    assert by_row.noise == 32 * 0.0625**2 * (1 + 2.0**-60)
    assert whole.overflow == by_row.overflow == 0
    x[:, 0] = 2.0**20  # an outlier in each row: blocks without one keep their scale
    assert signal_lost(x, "e4m3:row").underflow == 126
    assert signal_lost(x, "e4m3:block").underflow == 62


def test_what_is_not_finite_takes_its_row_along():
    x = np.float32([[1, 2, np.inf], [1, 2, 3]])
    assert signal_lost(x, "e4m3").overflow == 5
    assert signal_lost(x, "e4m3:row").overflow == 2
    assert signal_lost(x, "e4m3:row").signal == 14
    assert signal_lost(x, "fp16").overflow == 0  # no scale: each element on its own


@given(tensors, st.sampled_from(["fp16", "bf16"]))
def test_without_a_scale_it_is_what_tensor_stats_say(x, spec):
    lost, stats = signal_lost(x, spec), TensorStats.of(x, spec)
    assert (lost.count, lost.overflow, lost.underflow) == (stats.count, stats.overflow, stats.underflow)
    assert (lost.signal, lost.noise) == (stats.signal, stats.noise)


@given(tensors)
def test_one_scale_is_what_tensor_stats_say(x):
    x = np.where(np.isfinite(x), x, np.float32(1))
    scale = float(scales_of(np.float32(np.abs(x).max(initial=0)), parse("e4m3")))
    lost, stats = signal_lost(x, "e4m3"), TensorStats.of(x, "e4m3", scale)
    assert (lost.overflow, lost.underflow, lost.noise) == (stats.overflow, stats.underflow, stats.noise)


@pytest.mark.parametrize("spec", SPECS)
def test_halves_merge(spec):
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32) ** 7
    if spec_of(spec).scaled == "tensor":
        x[:, 0] = 1e5  # the same scale in both halves
    whole, merged = signal_lost(x, spec), signal_lost(x[:2], spec) + signal_lost(x[2:], spec)
    assert (whole.count, whole.overflow, whole.underflow) == (merged.count, merged.overflow, merged.underflow)
    assert merged.noise == pytest.approx(whole.noise, rel=x.size * 2**-53)


def test_nothing():
    assert signal_lost(np.zeros((0, 3), np.float32), "e4m3:block") == SignalLost()
    assert signal_lost(np.zeros((3, 0), np.float32), "e4m3:row") == SignalLost()
    assert math.isnan(SignalLost().sqnr_db)
    assert math.isnan(SignalLost().overflow_fraction)
    assert signal_lost(np.float32(3), "e4m3:row").sqnr_db == math.inf
