"""Casts in torch against core.rounding and core.philox: bits, on every code, boundary and mode.

CUDA, where there is one, takes the same tests as the CPU.
"""

import math
from functools import cache
from typing import get_args

import numpy as np
import pytest
import torch

from halfstep.core import philox, rounding
from halfstep.core.arrays.cast import cast_constants
from halfstep.core.errors import FormatError, RoundingError
from halfstep.core.formats import ALIASES, Format
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.torch.numerics.cast import amax_of, quantize, quantize_scaled, random_bits, scale_for, to_native
from halfstep.torch.numerics.dtypes import DTYPES
from tests.patterns import boundaries, rules
from tests.refusals import refuses

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NARROW = ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1", "e3m4ieee", "e4m3b11fnuz"]
WIDE = ["fp32", "tf32", "bf16", "fp16", "e6m9fn", "e7m16ieee", "e5m12f"]
# Formats whose numbers fp32 only has as subnormals, or that reach its last binade: they go through fp64.
STRANGE = ["e8m2fnuz", "e8m7b128ieee", "e7m3b0f", "e5m2b130ieee", "e2m5b124f", "e8m13fnuz"]
EVERY = [*NARROW, *WIDE, *STRANGE]

pytestmark = pytest.mark.parametrize("device", DEVICES)


@cache
def samples(name):
    """Raw patterns, NaN among them; numbers spread over the format's range; midpoints and neighbors."""
    fmt = Format.parse(name)
    rng = np.random.default_rng(20261115)
    raw = rng.integers(0, 2**32, 2**15, dtype=np.uint32)
    count = 2 ** (fmt.bits - 1)
    codes = np.arange(min(count, 2**12), dtype=np.int64)  # all of a format up to 12 bits, or its ends and some
    if count > 2**12:
        middle = np.random.default_rng(1).integers(0, count, 2**12)
        codes = np.unique(np.concatenate([codes[:512], count - 1 - codes[:512], middle]))
    low, high = fmt.min_exponent - fmt.mantissa_bits - 3, fmt.max_exponent + 2
    with np.errstate(over="ignore", under="ignore"):
        spread = np.ldexp(rng.uniform(1, 2, 2**14), rng.integers(low, high, 2**14)).astype(np.float32)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    positive = np.concatenate([boundaries(fmt, codes), spread.view(np.uint32), np.uint32(special)])
    x = np.concatenate([raw, positive, positive | np.uint32(0x80000000)]).view(np.float32)
    return x if fmt.has_nan else x[~np.isnan(x)]


def assert_bits(found, expected, x):
    found, expected = found.cpu().numpy().view(np.uint32), expected.view(np.uint32)
    wrong = np.flatnonzero(found != expected)
    assert len(wrong) == 0, (
        f"{len(wrong)} differ; "
        f"{[(float(x[i]), hex(x.view(np.uint32)[i]), hex(expected[i]), hex(found[i])) for i in wrong[:4]]}"
    )


@pytest.mark.parametrize("name", EVERY)
def test_every_mode_and_rule_gives_the_bits_of_the_reference(name, device):
    fmt, x = Format.parse(name), samples(name)
    words = philox.random_bits(x.shape, seed=1, step=2, tensor=3)
    given = torch.from_numpy(x).to(device)
    for mode in get_args(Rounding):
        stochastic = mode == "stochastic"
        bits = torch.from_numpy(words.astype(np.int64)).to(device) if stochastic else None
        for rule in rules(fmt):
            found = quantize(given, fmt, overflow=rule, rounding=mode, bits=bits)
            assert found.dtype == torch.float32
            expected = rounding.cast(x, fmt, overflow=rule, rounding=mode, bits=words if stochastic else None)
            assert_bits(found, expected, x)


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e4m3fnuz"])
def test_a_million_patterns(name, device):
    x = np.random.default_rng(7).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    found = quantize(torch.from_numpy(x).to(device), Format.parse(name), overflow="nan")
    assert_bits(found, rounding.cast(x, name, overflow="nan"), x)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_patterns_of_16_bits_come_back(name, device):
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    x = codes.view(DTYPES[Format.parse(name)])
    found = quantize(x, Format.parse(name), overflow="inf")
    wide = x.float().cpu().numpy()  # widened there: CUDA drops the sign of an fp16 NaN
    assert_bits(found, rounding.cast(wide, name, overflow="inf"), wide)
    number = ~x.isnan()
    assert torch.equal(found.to(x.dtype).view(torch.int16)[number], codes[number])


def test_half_strided_and_nan_inputs_are_cast_and_left_alone_without_a_gradient(device):
    x = torch.linspace(-500, 500, 24, device=device).reshape(2, 3, 4)
    fmt = Format.parse("e4m3")
    for view in (x, x.half(), x.bfloat16(), x.permute(2, 0, 1), x[:, ::2], x[0, 0, 0], x[:0]):
        found = quantize(view, fmt, overflow="nan")
        expected = rounding.cast(view.float().cpu().numpy(), fmt, overflow="nan")
        assert found.shape == view.shape
        assert_bits(found, expected, expected)
    x = torch.tensor([math.nan, 1.0, -7.0], device=device)
    found = quantize(x, Format.parse("e2m1"), overflow="saturate")
    assert found.isnan().tolist() == [True, False, False]
    assert found[1:].tolist() == [1.0, -6.0]
    x = torch.tensor([1.1, 1000.0], device=device, requires_grad=True)
    for name in ("bf16", "e4m3", "e8m2fnuz"):
        assert not quantize(x, Format.parse(name), overflow="saturate").requires_grad
    assert x.tolist() == [pytest.approx(1.1), 1000.0]


@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_to_native_overflows_by_the_rule_on_every_version(fmt, device):
    x = samples(fmt.name)
    given = torch.from_numpy(x).to(device)
    for rule in rules(fmt):
        found = to_native(given, fmt, overflow=rule)
        assert found.dtype == DTYPES[fmt]
        expected = rounding.cast(x, fmt, overflow=rule)
        number = ~np.isnan(expected)
        assert_bits(found.float()[torch.from_numpy(number)], expected[number], x[number])
        assert found.float().isnan().cpu().numpy()[~number].all()


@pytest.mark.parametrize(
    ("shape", "start"), [(0, 0), (1, 0), (7, 3), ((3, 5), 1), ((), 2), (1000, 4 * 2**32 - 6), (64, 2**40 + 1)]
)
def test_random_words_are_those_of_the_reference(shape, start, device):
    key = {"seed": 3 + (9 << 32), "tensor": 0xFFFFFFFF, "start": start}
    expected = philox.random_bits(shape, step=2**32 - 1, **key)
    for step in (2**32 - 1, torch.tensor(2**32 - 1, device=device)):
        found = random_bits(shape, step=step, device=device, **key)
        assert found.dtype == torch.int64
        assert found.device.type == device
        assert np.array_equal(found.cpu().numpy(), expected.astype(np.int64))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e3m2"])
def test_the_scale_is_the_largest_power_of_two_that_fits(name, device):
    fmt = Format.parse(name)
    rng = np.random.default_rng(3)
    amax = np.ldexp(rng.uniform(1, 2, 5000), rng.integers(-100, 127, 5000)).astype(np.float32)
    exact = np.float32([fmt.max * 2.0**k for k in (-40, 0, 3, 100)])
    amax = np.concatenate([amax, exact, np.nextafter(exact, np.float32(np.inf))])
    scale = scale_for(torch.from_numpy(amax).to(device), fmt).cpu().numpy().astype(np.float64)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (amax * scale <= fmt.max).all()
    assert (amax * scale * 2 > fmt.max).all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_scaled_operand_is_the_reference_cast_of_the_scaled_values(granularity, native, device):
    x = torch.randn(6, 5, 32, generator=torch.Generator().manual_seed(0)).to(device)
    x *= torch.logspace(-20, 20, 5, device=device)[:, None]
    x[2, 3] = 0
    operand = Operand(Format.parse("e4m3"), granularity=granularity)
    values, inv_scale = quantize_scaled(x, operand, native=native)
    assert values.dtype == (torch.float8_e4m3fn if native else torch.float32)
    wide = x.cpu().numpy()
    amax = np.abs(wide).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(wide).max()
    assert inv_scale.shape == np.shape(amax)
    scale = 1 / inv_scale.cpu().numpy()
    expected = rounding.cast(wide * scale, "e4m3", overflow="raise")
    assert_bits(values.float(), expected, wide)
    # The largest number of every row (or of the tensor) lies in the top binade of the format.
    top = np.abs(expected).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(expected).max()
    assert ((top > 220) | (amax == 0)).all()


def test_what_is_larger_than_a_delayed_amax_saturates_and_an_infinity_does_not_hide(device):
    operand = Operand(Format.parse("e4m3"), amax="delayed")
    x = torch.tensor([1.0, 4.0], device=device)
    with pytest.raises(RoundingError, match="no `amax`"):
        quantize_scaled(x, operand)
    values, inv_scale = quantize_scaled(x, operand, amax=torch.tensor(1.0, device=device))
    assert (values * inv_scale).tolist() == [1.0, 1.75]
    x = torch.tensor([[1.0, math.inf], [1.0, 2.0]], device=device)
    values, inv_scale = quantize_scaled(x, Operand(Format.parse("e4m3"), granularity="row"))
    assert (values * inv_scale).isnan().tolist() == [[True, True], [False, False]]
    values, _ = quantize_scaled(x, Operand(Format.parse("e4m3")))
    assert values.isnan().all()
    operand = Operand(Format.parse("e5m2"))
    assert amax_of(torch.empty(0, 4, device=device), operand) == 0
    values, inv_scale = quantize_scaled(torch.empty(0, 4, device=device), operand)
    assert (values.shape, inv_scale) == ((0, 4), 1)


@pytest.mark.parametrize("name", EVERY)
def test_the_plan_repeats_the_format(name, device):
    fmt = Format.parse(name)
    assert set(ALIASES) <= set(EVERY)
    plan = cast_constants(fmt)
    assert plan[:4] == (fmt.mantissa_bits, fmt.min_exponent, fmt.max_exponent, fmt.max)
    assert plan.like_fp32 == (name in ("fp32", "tf32", "bf16"))
    assert plan.fits_fp32 == (name not in STRANGE and not plan.like_fp32)


# One function over several formats: dynamo makes what differs between them symbolic, unless forbidden.
@pytest.mark.prove
@pytest.mark.parametrize("name", ["e4m3", "bf16", "fp16", "e8m2fnuz"])
def test_compiles_whole_and_gives_the_same_bits(name, device):
    fmt = Format.parse(name)
    operand = Operand(fmt) if fmt.bits <= 8 else None
    native = fmt in DTYPES

    def casts(x, step):
        bits = random_bits(x.shape, seed=3, step=step, tensor=4, device=x.device)
        results = [
            quantize(x, fmt, overflow="saturate"),
            quantize(x, fmt, overflow="nan", rounding="nearest-away"),
            quantize(x, fmt, overflow="nan", rounding="stochastic", bits=bits),
        ]
        if native:
            results.append(to_native(x, fmt, overflow="saturate").float())
        if operand is not None:
            results += quantize_scaled(x, operand)
        return results

    x = torch.from_numpy(samples(name)[:5000]).to(device)
    x = x[x.isfinite()]
    compiled = torch.compile(casts, fullgraph=True, backend="aot_eager")
    for step in (1, 2):
        count = torch.tensor(step, device=device)
        for found, expected in zip(compiled(x, count), casts(x, count), strict=True):
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_a_compiled_native_cast_is_rounded_before_it_is_converted(device):
    """Inductor drops a conversion to bf16 and back; the graph must hold the rounding itself."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.code)
        return graph.forward

    fmt = Format.parse("bf16")

    def there_and_back(x):
        return to_native(x, fmt, overflow="inf").float()

    x = torch.randn(64, device=device)
    found = torch.compile(there_and_back, fullgraph=True, backend=keep)(x)
    assert torch.equal(found, x.bfloat16().float())
    assert "torch.int32" in graphs[0]


E4M3 = Format.parse("e4m3")
STOCHASTIC = {"fmt": E4M3, "overflow": "nan", "rounding": "stochastic"}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: quantize(x, E4M3, overflow="raise"), RoundingError, "sync.*core.rounding.cast"),
        (lambda x: to_native(x, E4M3, overflow="raise"), RoundingError, "sync"),
        (lambda x: quantize(x, E4M3, overflow="inf"), FormatError, "`saturate` or `nan`"),
        (lambda x: to_native(x, E4M3, overflow="inf"), FormatError, "`saturate` or `nan`"),
        (lambda x: quantize(x.double(), E4M3, overflow="nan"), RoundingError, "twice"),
        (lambda x: quantize(x.long(), E4M3, overflow="nan"), RoundingError, "not torch.int64"),
        (lambda x: quantize(x, E4M3, overflow="nan", rounding="up"), RoundingError, "unknown rounding"),
        (lambda x: quantize(x, E4M3, overflow="nan", bits=x.long()), RoundingError, "uses none"),
        (lambda x: quantize(x, **STOCHASTIC), RoundingError, "given: none"),
        (lambda x: quantize(x, **STOCHASTIC, bits=x.int()), RoundingError, "given: torch.int32"),
        (lambda x: to_native(x, Format.parse("tf32"), overflow="inf"), FormatError, "no torch dtype"),
        (lambda x: random_bits(3, seed=-1, step=0, tensor=0), RoundingError, "`seed` is -1"),
        (lambda x: random_bits(3, seed=0, step=2**32, tensor=0), RoundingError, "`step`"),
        (lambda x: random_bits(3, seed=0, step=x, tensor=0), RoundingError, "one integer"),
        (lambda x: random_bits(3, seed=0, step=0, tensor="w"), RoundingError, "`tensor` is 'w'"),
    ],
)
def test_errors_say_what_is_allowed(call, error, text, device):
    with refuses(error, text):
        call(torch.ones(3, device=device))
