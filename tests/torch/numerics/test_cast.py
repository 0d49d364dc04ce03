"""What only torch does in a cast: native conversions, compiled casts, and a GPU, which has the bits of the CPU.

tests/conformance/test_cast.py holds the rest, on the CPU.
"""

from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch

from halfstep.core import rounding
from halfstep.core.errors import FormatError, RoundingError
from halfstep.core.formats import E4M3, Format
from halfstep.core.roles import Operand
from halfstep.core.rounding import Rounding
from halfstep.torch.numerics.cast import quantize, quantize_scaled, random_bits, to_native
from halfstep.torch.numerics.dtypes import DTYPES
from tests.conformance.test_cast import EVERY, assert_bits, samples
from tests.patterns import rules
from tests.refusals import refuses

CUDA = torch.cuda.is_available()
on_each_device = pytest.mark.parametrize("device", ["cpu", *(["cuda"] if CUDA else [])])


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("name", EVERY)
def test_a_gpu_gives_the_bits_of_the_cpu(name):
    fmt, x = Format.parse(name), torch.from_numpy(samples(name))

    def casts(x):
        step = torch.tensor(2**32 - 1, device=x.device)
        words = random_bits(x.shape, seed=3 + (9 << 32), step=step, tensor=0xFFFFFFFF, start=5, device=x.device)
        yield words
        for mode, rule in product(get_args(Rounding), rules(fmt)):
            bits = words if mode == "stochastic" else None
            yield quantize(x, fmt, overflow=rule, rounding=mode, bits=bits)
        if fmt.bits <= 8:
            rows = x.nan_to_num().reshape(-1, 32)
            for granularity, native in product(("tensor", "row"), (False, fmt in DTYPES)):
                yield from quantize_scaled(rows, Operand(fmt, granularity=granularity), native=native)

    for found, expected in zip(casts(x.cuda()), casts(x), strict=True):
        assert found.dtype == expected.dtype
        assert_bits(found.float().cpu().numpy(), expected.float().numpy(), expected.float().numpy())


@on_each_device
@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_to_native_overflows_by_the_rule_on_every_version(fmt, device):
    x = samples(fmt.name)
    given = torch.from_numpy(x).to(device)
    for rule in rules(fmt):
        found = to_native(given, fmt, overflow=rule)
        assert found.dtype == DTYPES[fmt]
        wide, expected = found.float().cpu().numpy(), rounding.cast(x, fmt, overflow=rule)
        number = ~np.isnan(expected)
        assert_bits(wide[number], expected[number], x[number])
        assert np.isnan(wide[~number]).all()


# One function over several formats: dynamo makes what differs between them symbolic, unless forbidden.
@pytest.mark.prove
@on_each_device
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


def test_a_compiled_native_cast_is_rounded_before_it_is_converted():
    """Inductor drops a conversion to bf16 and back; the graph must hold the rounding itself."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.code)
        return graph.forward

    fmt = Format.parse("bf16")

    def there_and_back(x):
        return to_native(x, fmt, overflow="inf").float()

    x = torch.randn(64)
    found = torch.compile(there_and_back, fullgraph=True, backend=keep)(x)
    assert torch.equal(found, x.bfloat16().float())
    assert "torch.int32" in graphs[0]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: to_native(x, E4M3, overflow="raise"), RoundingError, "sync"),
        (lambda x: to_native(x, E4M3, overflow="inf"), FormatError, "`saturate` or `nan`"),
        (lambda x: to_native(x, Format.parse("tf32"), overflow="inf"), FormatError, "no torch dtype"),
        (lambda x: quantize(x.double(), E4M3, overflow="nan"), RoundingError, "twice"),
    ],
)
def test_errors_say_what_is_allowed(call, error, text):
    with refuses(error, text):
        call(torch.ones(3))
