"""What only MLX does in a cast: compiled kernels, lazy arrays, three ways to round, one device that was tried.

tests/conformance/test_cast.py holds the rest.
"""

import math

import mlx.core as mx
import numpy as np
import pytest

from halfstep.core import philox, rounding
from halfstep.core import split as core_split
from halfstep.core.errors import RoundingError
from halfstep.core.formats import BF16, E4M3, FP16, Format
from halfstep.core.roles import Operand
from halfstep.mlx.numerics.cast import carried, join, quantize, quantize_scaled, random_bits, split


def patterns(count=2**16):
    return np.random.default_rng(7).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def assert_bits(found, expected):
    """numpy would read an MLX array by value, so its bits are compared."""
    assert np.array_equal(np.array(found.view(mx.uint32)), expected.view(np.uint32))


# One format for each of the three ways to round: on a CPU every kernel costs a run of the C++ compiler.
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
    fmt, x = Format.parse(name), patterns()
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)

    @mx.compile
    def casts(given, bits):
        return [
            quantize(given, fmt, overflow=rule, rounding=mode, bits=bits if mode == "stochastic" else None)
            for mode in modes
        ]

    for mode, found in zip(modes, casts(mx.array(x), mx.array(words)), strict=True):
        bits = words if mode == "stochastic" else None
        assert_bits(found, rounding.cast(x, fmt, overflow=rule, rounding=mode, bits=bits))


@pytest.mark.prove
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_compiled_the_emulated_cast_stays(fmt):
    x = patterns()
    x = x[~np.isnan(x)]
    assert_bits(mx.compile(lambda given: carried(given, fmt))(mx.array(x)), rounding.cast(x, fmt, overflow="inf"))


@pytest.mark.prove
def test_compiled_masters_are_split_and_joined_to_the_same_bits():
    x = patterns()
    hi, lo = mx.compile(split)(mx.array(x))
    expected_hi, expected_lo = core_split.split(x)
    assert np.array_equal(np.array(hi.view(mx.uint16)), expected_hi)
    assert np.array_equal(np.array(lo), expected_lo)
    assert_bits(mx.compile(join)(hi, lo), core_split.join(expected_hi, expected_lo))
    assert mx.grad(lambda x: (2 * x + join(*split(x))).sum())(mx.array([1.1])).tolist() == [2.0]


@pytest.mark.prove
def test_a_compiled_function_takes_the_step_as_it_comes():
    compiled = mx.compile(lambda step: random_bits((5, 3), seed=2**64 - 1, step=step, tensor=1))
    for step in (0, 1, 7):
        expected = philox.random_bits((5, 3), seed=2**64 - 1, step=step, tensor=1)
        assert np.array_equal(np.array(compiled(mx.array(step, mx.int32))), expected)


def test_nothing_is_evaluated():
    """A lazy array of a function that must not run: evaluation would allocate 2^50 bytes."""
    huge = mx.zeros((2**24, 2**24))
    outcomes = [
        quantize(huge, BF16, overflow="inf"),
        quantize(huge, E4M3, overflow="nan"),
        carried(huge, FP16),
        *quantize_scaled(huge, Operand(E4M3, granularity="row")),
        *split(huge),
        join(*split(huge)),
    ]
    assert outcomes[0].shape == (2**24, 2**24)


def test_on_a_gpu_the_emulated_cast_is_spelled_out(monkeypatch):
    """MLX's conversions were tried on every pattern on the CPU alone."""
    x = mx.array([math.nan, -math.nan, 1.0 + 2.0**-9, 1e-40])
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for fmt in (BF16, FP16):
        assert_bits(carried(x, fmt), rounding.cast(np.array(x), fmt, overflow="inf"))


def test_float64_is_refused():
    with mx.stream(mx.cpu), pytest.raises(RoundingError, match="twice"):
        quantize(mx.ones(3).astype(mx.float64), E4M3, overflow="nan")
