"""What only JAX does in a cast: jit, vmap, rows along any axes, subnormals that XLA would flush.

tests/conformance/test_cast.py holds the rest. Promotion is strict: a dtype that changes unasked is a failure.
"""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.core import philox, rounding
from halfstep.core.errors import RoundingError
from halfstep.core.formats import BF16, E4M3, Format
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.jax.numerics.cast import amax_of, carried, quantize, quantize_scaled, random_bits

# Compiling is what these tests wait for.
quick = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


pytestmark = pytest.mark.usefixtures("strict")


def patterns(count=2**14, *, nan=True):
    x = np.random.default_rng(7).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    return x if nan else np.where(np.isnan(x), np.float32(0), x)


def assert_bits(found, expected):
    found, expected = (np.asarray(x, np.float32).view(np.uint32).ravel() for x in (found, expected))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "name", ["bf16", "e4m3", *(pytest.param(n, marks=pytest.mark.prove) for n in ("fp16", "e2m1", "e8m13fnuz"))]
)
def test_every_mode_under_jit_gives_the_bits_of_the_reference(name):
    fmt = Format.parse(name)
    x, modes = patterns(nan=fmt.has_nan), get_args(Rounding)
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)

    @quick
    def casts(x, bits):
        pairs = [(mode, bits if mode == "stochastic" else None) for mode in modes]
        return [quantize(x, fmt, overflow="saturate", rounding=mode, bits=b) for mode, b in pairs]

    for mode, found in zip(modes, casts(x, words), strict=True):
        bits = words if mode == "stochastic" else None
        assert_bits(found, rounding.cast(x, fmt, overflow="saturate", rounding=mode, bits=bits))


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
def test_no_compiler_drops_the_emulated_cast(name):
    """XLA would fuse it with the operations around it, and keep more precision."""
    fmt, x = Format.parse(name), patterns(nan=False)
    found, fused = jax.jit(lambda x: (carried(x, fmt), -carried(-x, fmt)))(x)
    expected = rounding.cast(x, fmt, overflow="inf")
    assert_bits(found, expected)
    assert_bits(fused, expected)


def test_under_vmap_it_is_the_same_cast():
    x = jnp.linspace(-3.0, 3.0, 12).reshape(3, 4)
    assert_bits(jax.vmap(lambda row: quantize(row, E4M3, overflow="nan"))(x), quantize(x, E4M3, overflow="nan"))
    assert quantize(1.1, BF16, overflow="inf") == 1.1015625


def test_a_traced_step_compiles_once():
    count = 0

    @jax.jit
    def rounded(x, step):
        nonlocal count
        count += 1
        bits = random_bits(x.shape, seed=3, step=step, tensor=4)
        return quantize(x, BF16, overflow="inf", rounding="stochastic", bits=bits)

    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    for step in (1, 2):
        words = philox.random_bits(x.shape, seed=3, step=step, tensor=4)
        expected = rounding.cast(x, "bf16", overflow="inf", rounding="stochastic", bits=words)
        assert_bits(rounded(x, jnp.int32(step)), expected)
    assert count == 1


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_subnormals_of_fp32_are_scaled_not_flushed(name):
    """XLA multiplies a subnormal to zero on a CPU; gradients may be as small as that."""
    fmt, rng = Format.parse(name), np.random.default_rng(5)
    tiny = (rng.integers(0, 2**32, (64, 32), dtype=np.uint32) & np.uint32(0x80FFFFFF)).view(np.float32)
    tiny[32:] = (tiny[32:].view(np.uint32) & np.uint32(0x807FFFFF)).view(np.float32)  # subnormals alone
    tiny[3] = 0
    values, inv_scale = quick(lambda x: quantize_scaled(x, Operand(fmt, granularity="row")))(tiny)
    exact = (tiny.astype(np.float64) / np.asarray(inv_scale)).astype(np.float32)  # by a power of two: still exact
    assert_bits(values, rounding.cast(exact, fmt, overflow="raise"))
    assert (np.asarray(values) != 0).any(axis=1).sum() == 63


def test_a_row_may_run_along_other_axes():
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    operand = Operand(E4M3, granularity="row")

    @quick
    def along(x):
        amax = amax_of(x, operand, (0, 2))
        return amax, amax_of(x, operand), quantize_scaled(x, operand, amax=amax)

    amax, last, (values, inv_scale) = along(x)
    assert np.array_equal(amax, np.abs(x).max(axis=(0, 2), keepdims=True))
    assert np.array_equal(last, np.abs(x).max(axis=-1, keepdims=True))
    assert inv_scale.shape == (1, 4, 1)
    assert (np.abs(np.asarray(values)).max(axis=(0, 2)) > 220).all()


def test_float64_of_numpy_is_refused():
    with pytest.raises(RoundingError, match="twice"):
        quantize(np.ones(3), E4M3, overflow="nan")
