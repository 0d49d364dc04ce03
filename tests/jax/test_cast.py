"""Casts in JAX against core.rounding, core.philox and core.split: bits, on every code, boundary and mode.

Everything is tried under jit, and op by op where it matters. Promotion is strict: a dtype that changes unasked is
a failure.
"""

import math
from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.core import philox, rounding
from halfstep.core import split as reference_split
from halfstep.core.errors import FormatError, RoundingError
from halfstep.core.formats import ALIASES, BF16, FP16, Format
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.jax.cast import (
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
from halfstep.jax.dtypes import DTYPES

NARROW = ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1", "e3m4ieee", "e4m3b11fnuz"]
WIDE = ["fp32", "tf32", "bf16", "fp16", "e6m9fn", "e7m16ieee", "e5m12f"]
# Formats whose numbers fp32 only has as subnormals, or that reach its last binade.
STRANGE = ["e8m2fnuz", "e8m7b128ieee", "e7m3b0f", "e5m2b130ieee", "e2m5b124f", "e8m13fnuz"]
EVERY = [*NARROW, *WIDE, *STRANGE]
# Compiling is what these tests wait for.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick = partial(jax.jit, compiler_options=QUICK)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def rules(fmt):
    return ["saturate"] + ["inf"] * fmt.has_inf + ["nan"] * fmt.has_nan


@cache
def samples(name):
    """Raw patterns, NaN among them; numbers spread over the format's range; midpoints and neighbors."""
    fmt = Format.parse(name)
    rng = np.random.default_rng(20261115)
    raw = rng.integers(0, 2**32, 2**14, dtype=np.uint32)
    low, high = fmt.min_exponent - fmt.mantissa_bits - 3, fmt.max_exponent + 2
    with np.errstate(over="ignore", under="ignore"):
        spread = np.ldexp(rng.uniform(1, 2, 2**13), rng.integers(low, high, 2**13)).astype(np.float32)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    positive = np.concatenate([boundaries(fmt), spread.view(np.uint32), np.uint32(special)])
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


def assert_bits(found, expected, x):
    found = np.asarray(found).view(np.uint32)
    expected = np.asarray(expected, np.float32).view(np.uint32)
    wrong = np.flatnonzero(found != expected)
    assert len(wrong) == 0, (
        f"{len(wrong)} differ; "
        f"{[(float(x[i]), hex(x.view(np.uint32)[i]), hex(expected[i]), hex(found[i])) for i in wrong[:4]]}"
    )


def every_cast(fmt):
    """Every mode and rule in one function: what is compiled as one is compiled once."""
    # What overflow makes of a number does not depend on how it was rounded, so one mode has all the rules.
    combinations = [("nearest-even", rule) for rule in rules(fmt)]
    combinations += [(mode, rules(fmt)[-1]) for mode in get_args(Rounding) if mode != "nearest-even"]

    def casts(x, bits):
        return [
            quantize(x, fmt, overflow=rule, rounding=mode, bits=bits if mode == "stochastic" else None)
            for mode, rule in combinations
        ]

    return combinations, casts


def assert_every_cast(fmt, casts, combinations, x):
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)
    found = casts(x, jnp.asarray(words))
    for (mode, rule), result in zip(combinations, found, strict=True):
        bits = words if mode == "stochastic" else None
        assert result.dtype == jnp.float32
        assert_bits(result, rounding.cast(x, fmt, overflow=rule, rounding=mode, bits=bits), x)


@pytest.mark.parametrize("name", EVERY)
def test_every_mode_and_rule_gives_the_bits_of_the_reference(name):
    combinations, casts = every_cast(Format.parse(name))
    # One size for all formats: op by op, JAX compiles each operation once for a shape.
    with jax.disable_jit():
        assert_every_cast(Format.parse(name), casts, combinations, np.resize(samples(name), 2**17))


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e2m1", "e5m2b130ieee", "e8m13fnuz"])
def test_and_under_jit(name):
    combinations, casts = every_cast(Format.parse(name))
    assert_every_cast(Format.parse(name), quick(casts), combinations, samples(name))


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e4m3fnuz"])
def test_a_million_patterns(name):
    x = np.random.default_rng(7).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    assert_bits(quantize(x, Format.parse(name), overflow="nan"), rounding.cast(x, name, overflow="nan"), x)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_patterns_of_16_bits_come_back(name):
    fmt = Format.parse(name)
    codes = np.arange(2**16, dtype=np.uint16)
    x = jax.lax.bitcast_convert_type(codes, DTYPES[fmt])
    found = quantize(x, fmt, overflow="inf")
    wide = rounding.decode(codes, fmt)
    assert_bits(found, rounding.cast(wide, name, overflow="inf"), wide)
    back = np.asarray(jax.lax.bitcast_convert_type(found.astype(x.dtype), jnp.uint16))
    number = ~np.isnan(wide)
    assert np.array_equal(back[number], codes[number])


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
def test_carried_is_the_hardware_cast_and_no_compiler_drops_it(name):
    fmt, x = Format.parse(name), samples(name)
    expected = rounding.cast(x, fmt, overflow="inf")
    number = ~np.isnan(expected)
    # Also between operations that XLA would rather fuse, and keep more precision.
    found, fused = jax.jit(lambda x: (carried(x, fmt), -carried(-x, fmt)))(x)
    assert_bits(np.asarray(found)[number], expected[number], x[number])
    assert_bits(np.asarray(fused)[number], expected[number], x[number])
    assert np.isnan(np.asarray(found)[~number]).all()
    assert carried(x, Format.parse("fp32")) is x


def test_a_format_without_nan_keeps_it_visible():
    found = np.asarray(quantize(jnp.array([math.nan, 1.0, -7.0]), Format.parse("e2m1"), overflow="saturate"))
    assert np.isnan(found).tolist() == [True, False, False]
    assert found[1:].tolist() == [1.0, -6.0]


def test_other_inputs_and_shapes():
    x, fmt = jnp.linspace(-500.0, 500.0, 24).reshape(2, 3, 4), Format.parse("e4m3")
    for given in (np.asarray(x), x.astype(jnp.float16), x.astype(jnp.bfloat16), x[0, 0, 0], x[:0]):
        found = quantize(given, fmt, overflow="nan")
        assert found.shape == given.shape
        wide = np.asarray(given, np.float32)
        assert_bits(found.reshape(-1), rounding.cast(wide, fmt, overflow="nan").reshape(-1), wide.reshape(-1))
    assert quantize(1.1, BF16, overflow="inf") == 1.1015625


def test_no_gradient_passes_a_cast():
    for fmt in (BF16, FP16, Format.parse("e4m3")):
        assert (
            jax.grad(lambda x, fmt=fmt: carried(x, fmt) if fmt.bits > 8 else quantize(x, fmt, overflow="nan"))(1.1)
            == 0.0
        )


def test_under_vmap_and_grad_it_is_the_same_cast():
    x = jnp.linspace(-3.0, 3.0, 12).reshape(3, 4)
    fmt = Format.parse("e4m3")
    mapped = jax.vmap(lambda row: quantize(row, fmt, overflow="nan"))(x)
    assert_bits(mapped.reshape(-1), quantize(x, fmt, overflow="nan").reshape(-1), np.asarray(x).reshape(-1))


# --- native dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_to_native_overflows_by_the_rule(fmt):
    x = samples(fmt.name)
    results = quick(lambda x: [to_native(x, fmt, overflow=rule).astype(DTYPES[fmt]) for rule in rules(fmt)])(x)
    for rule, found in zip(rules(fmt), results, strict=True):
        assert found.dtype == DTYPES[fmt]
        expected = rounding.cast(x, fmt, overflow=rule)
        number, wide = ~np.isnan(expected), np.asarray(found).astype(np.float32)
        assert_bits(wide[number], expected[number], x[number])
        assert np.isnan(wide[~number]).all()


@pytest.mark.parametrize(
    ("name", "x", "rule", "expected"),
    [
        ("e4m3", 465.0, "saturate", 448.0),
        ("e4m3", 1000.0, "saturate", 448.0),
        ("e4m3", -math.inf, "saturate", -448.0),
        ("e4m3", 465.0, "nan", math.nan),
        ("e4m3", math.inf, "nan", math.nan),
        ("e4m3", math.nan, "saturate", math.nan),
        ("e5m2", 61440.0, "inf", math.inf),
        ("e5m2", 61440.0, "saturate", 57344.0),
        ("fp16", 65520.0, "saturate", 65504.0),
        ("bf16", 3.4e38, "inf", math.inf),
    ],
)
def test_where_native_casts_disagree(name, x, rule, expected):
    found = float(to_native(jnp.float32(x), Format.parse(name), overflow=rule))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


# --- split masters ---------------------------------------------------------------------------------------


def test_split_and_join_are_the_reference_bit_for_bit():
    rng = np.random.default_rng(0)
    special = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]
    nan = [0x7F800001, 0x7F808000, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF]
    positive = np.uint32([*special, *nan])
    every_upper = np.arange(2**16, dtype=np.uint32) << 16 | rng.integers(0, 2**16, 2**16, dtype=np.uint32)
    ties = np.arange(2**16, dtype=np.uint32) << 16 | np.uint32(0x8000)
    raw = rng.integers(0, 2**32, 2**18, dtype=np.uint32)
    x = np.concatenate([positive, positive | 0x80000000, every_upper, ties, raw]).view(np.float32)
    hi, lo = reference_split.split(x)
    for run in (split, jax.jit(split)):
        found_hi, found_lo = run(x)
        assert (found_hi.dtype, found_lo.dtype) == (jnp.bfloat16, jnp.int16)
        assert np.array_equal(np.asarray(found_hi).view(np.uint16), hi)
        assert np.array_equal(np.asarray(found_lo), lo)
    joined = jax.jit(join)(found_hi, found_lo)
    assert_bits(joined, reference_split.join(hi, lo), x)
    number = ~np.isnan(x)
    assert_bits(np.asarray(joined)[number], x[number], x[number])


# --- random words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "start"), [(0, 0), (1, 0), (17, 3), ((3, 5), 2), ((), 2), (16, 4 * 2**32 - 6), (14, 2**40 + 1)]
)
def test_random_words_are_those_of_the_reference(shape, start):
    key = {"seed": 3 + (9 << 32), "tensor": 0xFFFFFFFF, "start": start}
    expected = philox.random_bits(shape, step=2**32 - 1, **key)
    for step in (2**32 - 1, jnp.uint32(2**32 - 1), jnp.int32(-1)):
        words = random_bits(shape, step=step, **key)
        assert words.dtype == jnp.uint32
        assert np.array_equal(np.asarray(words), expected)


def test_every_part_of_the_key_changes_the_words():
    base = {"seed": 1, "step": 2, "tensor": 3, "start": 0}
    keys = [base, base, *({**base, name: 8} for name in base)]
    first, again, *others = (np.asarray(random_bits(1000, **key)) for key in keys)
    assert np.array_equal(again, first)
    assert all((words == first).sum() == 0 for words in others)


def test_a_step_that_is_traced_compiles_once():
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
        assert_bits(rounded(x, jnp.int32(step)), expected, x)
    assert count == 1


# --- scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e3m2"])
def test_the_scale_is_the_largest_power_of_two_that_fits(name):
    fmt = Format.parse(name)
    rng = np.random.default_rng(3)
    amax = np.ldexp(rng.uniform(1, 2, 5000), rng.integers(-100, 127, 5000)).astype(np.float32)
    exact = np.float32([fmt.max * 2.0**k for k in (-40, 0, 3, 100)])
    amax = np.concatenate([amax, exact, np.nextafter(exact, np.float32(np.inf))])
    scale = np.asarray(scale_for(amax, fmt)).astype(np.float64)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (amax * scale <= fmt.max).all()
    assert (amax * scale * 2 > fmt.max).all()


def test_the_scale_of_zero_tiny_huge_and_broken():
    amax = np.float32([0.0, 1e-45, 1e-38, 3.4028235e38, math.inf, math.nan])
    scale = np.asarray(scale_for(amax, Format.parse("e4m3")))
    assert scale[0] == 1.0
    assert scale[1] == scale[2] == 2.0**126
    assert 0 < amax[3] * scale[3] <= 448
    assert np.isnan(scale).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_scaled_operand_is_the_reference_cast_of_the_scaled_values(granularity, native):
    x = np.random.default_rng(0).standard_normal((6, 5, 32)).astype(np.float32)
    x *= np.logspace(-20, 20, 5, dtype=np.float32)[:, None]
    x[2, 3] = 0
    operand = Operand(Format.parse("e4m3"), granularity=granularity)
    values, inv_scale = quick(lambda x: quantize_scaled(x, operand, native=native))(x)
    assert values.dtype == (jnp.float8_e4m3fn if native else jnp.float32)
    amax = np.abs(x).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(x).max()
    assert inv_scale.shape == np.shape(amax)
    scale = 1 / np.asarray(inv_scale)
    expected = rounding.cast(x * scale, "e4m3", overflow="raise")
    assert_bits(np.asarray(values).astype(np.float32).reshape(-1), expected.reshape(-1), x.reshape(-1))
    # The largest number of every row (or of the array) lies in the top binade of the format.
    top = np.abs(expected).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(expected).max()
    assert ((top > 220) | (amax == 0)).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_subnormals_of_fp32_are_scaled_not_flushed(name):
    """XLA multiplies a subnormal to zero on a CPU; gradients may be as small as that."""
    fmt = Format.parse(name)
    rng = np.random.default_rng(5)
    tiny = (rng.integers(0, 2**32, (64, 32), dtype=np.uint32) & np.uint32(0x80FFFFFF)).view(np.float32)
    tiny[32:] = (tiny[32:].view(np.uint32) & np.uint32(0x807FFFFF)).view(np.float32)  # subnormals alone
    tiny[3] = 0
    operand = Operand(fmt, granularity="row")
    values, inv_scale = quick(lambda x: quantize_scaled(x, operand))(tiny)
    scale = 1 / np.asarray(inv_scale, np.float64)
    exact = (tiny.astype(np.float64) * scale).astype(np.float32)  # times a power of two: still exact
    assert_bits(np.asarray(values).reshape(-1), rounding.cast(exact, fmt, overflow="raise").reshape(-1), exact)
    assert (np.asarray(values) != 0).any(axis=1).sum() == 63


def test_every_mode_of_a_scaled_cast():
    x = np.concatenate([samples("e4m3")[::7], np.float32([448.0, 1e30, -1e30])])
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)
    operand = Operand(Format.parse("e4m3"), amax="delayed")

    @quick
    def casts(x, amax, bits):
        modes = [(mode, bits if mode == "stochastic" else None) for mode in get_args(Rounding)]
        scale = scale_for(amax, operand.format)
        return scale, [quantize_scaled(x, operand, amax=amax, rounding=m, bits=b)[0] for m, b in modes]

    for amax in np.float32([2.0**-20, 3.0, 2.0**40]):
        scale, found = casts(x, amax, words)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            scaled = x * np.asarray(scale)
        for mode, values in zip(get_args(Rounding), found, strict=True):
            bits = words if mode == "stochastic" else None
            assert_bits(values, rounding.cast(scaled, "e4m3", overflow="saturate", rounding=mode, bits=bits), x)


def test_a_row_may_run_along_other_axes():
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    operand = Operand(Format.parse("e4m3"), granularity="row")

    @quick
    def along(x):
        amax = amax_of(x, operand, (0, 2))
        return amax, amax_of(x, operand), quantize_scaled(x, operand, amax=amax)

    amax, last, (values, inv_scale) = along(x)
    assert np.array_equal(amax, np.abs(x).max(axis=(0, 2), keepdims=True))
    assert np.array_equal(last, np.abs(x).max(axis=-1, keepdims=True))
    assert inv_scale.shape == (1, 4, 1)
    assert (np.abs(np.asarray(values)).max(axis=(0, 2)) > 220).all()


def test_a_delayed_amax_is_given_and_what_is_larger_saturates():
    operand = Operand(Format.parse("e4m3"), amax="delayed")
    x = jnp.array([1.0, 4.0])
    with pytest.raises(RoundingError, match="no `amax`"):
        quantize_scaled(x, operand)
    values, inv_scale = quantize_scaled(x, operand, amax=jnp.float32(1.0))
    assert (values * inv_scale).tolist() == [1.0, 1.75]


def test_an_infinity_does_not_hide_behind_saturation():
    x = np.float32([[1.0, math.inf], [1.0, 2.0]])
    rows, whole = (Operand(Format.parse("e4m3"), granularity=g) for g in ("row", "tensor"))
    (values, inv_scale), (broken, _) = quick(lambda x: (quantize_scaled(x, rows), quantize_scaled(x, whole)))(x)
    assert np.isnan(values * inv_scale).tolist() == [[True, True], [False, False]]
    assert np.isnan(broken).all()


def test_an_empty_array_has_an_amax():
    operand = Operand(Format.parse("e5m2"))
    assert amax_of(jnp.zeros((0, 4)), operand) == 0
    values, inv_scale = quantize_scaled(jnp.zeros((0, 4)), operand)
    assert values.shape == (0, 4)
    assert inv_scale == 1


# --- mistakes --------------------------------------------------------------------------------------------

E4M3 = Format.parse("e4m3")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: quantize(x, E4M3, overflow="raise"), RoundingError, "sync.*core.rounding.cast"),
        (lambda x: to_native(x, E4M3, overflow="raise"), RoundingError, "sync"),
        (lambda x: quantize(x, E4M3, overflow="inf"), FormatError, "`saturate` or `nan`"),
        (lambda x: to_native(x, E4M3, overflow="inf"), FormatError, "`saturate` or `nan`"),
        (lambda x: quantize(np.ones(3), E4M3, overflow="nan"), RoundingError, "twice"),
        (lambda x: quantize(x.astype(jnp.int32), E4M3, overflow="nan"), RoundingError, "not int32"),
        (lambda x: quantize(x, E4M3, overflow="nan", rounding="up"), RoundingError, "unknown rounding"),
        (lambda x: quantize(x, E4M3, overflow="nan", bits=x), RoundingError, "uses none"),
        (lambda x: quantize(x, E4M3, overflow="nan", rounding="stochastic"), RoundingError, "given: none"),
        (
            lambda x: quantize(x, E4M3, overflow="nan", rounding="stochastic", bits=x.astype(jnp.int32)),
            RoundingError,
            "given: int32",
        ),
        (lambda x: to_native(x, Format.parse("tf32"), overflow="inf"), FormatError, "no JAX dtype"),
        (lambda x: split(x.astype(jnp.bfloat16)), RoundingError, "`x` is bfloat16"),
        (lambda x: join(x, x), RoundingError, "a bfloat16 and an int16 half"),
        (lambda x: random_bits(3, seed=-1, step=0, tensor=0), RoundingError, "`seed` is -1"),
        (lambda x: random_bits(3, seed=0, step=2**32, tensor=0), RoundingError, "`step`"),
        (lambda x: random_bits(3, seed=0, step=x, tensor=0), RoundingError, "one integer"),
        (lambda x: random_bits(3, seed=0, step=0, tensor="w"), RoundingError, "`tensor` is 'w'"),
    ],
)
def test_errors_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call(jnp.ones(3))
    assert caught.value.hint


def test_the_named_formats_are_all_tried():
    assert set(ALIASES) <= set(EVERY)
