"""The monitor's columns and samples: limits against casts, merging, and what is written."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfstep.core.formats import FP32, parse
from halfstep.core.observed import (
    AMAX,
    COLUMNS,
    OVERFLOW,
    SAMPLED_ROLES,
    LayerInfo,
    Observation,
    Sample,
    limits,
    merge,
)
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.core.stats.tensors import TensorStats
from halfstep.core.stats.what_if import SPECS, scales_of
from tests.columns import row_of

FORMATS = ["fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2", "e4m3fnuz", "e3m4ieee", "e2m1"]
tensors = arrays(np.uint32, st.integers(0, 60), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_where_casts_change(name):
    format = parse(name)
    edges = np.float32([edge for edge in limits(format) if np.isfinite(edge)])
    around = np.concatenate([np.nextafter(edges, np.float32(-1)), edges, np.nextafter(edges, np.float32(np.inf))])
    around = around[np.isfinite(around)]
    for x in (around, -around):
        for one in x:
            assert _row(np.float32([one]), format) == _stats(np.float32([one]), format), one


@given(tensors, st.sampled_from(FORMATS))
@example(np.uint32([0x7F800001, 0x3F800000]).view(np.float32), "e4m3")
def test_columns_are_what_tensor_stats_say(x, name):
    assert _row(x, parse(name)) == _stats(x, parse(name))


def _row(x, format):
    return dict(zip(COLUMNS, row_of(x, format), strict=True))


def _stats(x, format, scale=1.0):
    stats = TensorStats.of(x[~np.isnan(x)] if not format.has_nan else x, format, scale)
    beyond = stats.overflow + int((~np.isfinite(x)).sum())
    return dict(zip(COLUMNS, (x.size, stats.amax, beyond, stats.underflow, stats.subnormal), strict=True))


@given(tensors)
@example(np.uint32([0x7F800001, 0x3F800000]).view(np.float32))  # a signaling NaN
def test_scaled_columns_are_those_of_a_narrow_operand(x):
    format = parse("e4m3")
    finite = x[np.isfinite(x)]
    scale = float(scales_of(np.float32(np.abs(finite).max(initial=0)), format))
    row = dict(zip(COLUMNS, row_of(x, format, scaled=True), strict=True))
    assert row == _stats(x, format, scale)


def test_merge():
    x = np.float32([1, 1e-9, np.nan]), np.float32([3e5, 1e-6, 0])
    rows = [row_of(each, parse("fp16")) for each in x]
    np.testing.assert_array_equal(merge(*rows), row_of(np.concatenate(x), parse("fp16")))
    assert (merge(*rows)[AMAX], merge(*rows)[OVERFLOW]) == (np.float32(3e5), 2)


def test_layers_and_samples_read_back():
    layer = LayerInfo("blocks.0.mlp.up", "matmul", dict.fromkeys(SAMPLED_ROLES, "e4m3:row"))
    assert LayerInfo(**json.loads(json.dumps(layer.to_dict()))) == layer
    assert layer.format("gradient") == parse("e4m3")
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    for tensor in (x, np.zeros_like(x), x[:0], x * np.float32(np.inf)):
        sample = Observation.of(tensor, parse("bf16")).sample()
        written = json.loads(json.dumps(sample.to_dict(), allow_nan=False))
        exponents = {int(exponent): n for exponent, n in written["exponents"].items()}
        assert Sample(**{**written, "exponents": exponents}) == sample
        assert [*sample.what_if] == [*SPECS]
    with np.errstate(invalid="ignore"):
        exact = Observation.of(x.astype(np.float16).astype(np.float32), parse("fp16")).sample()
    assert (exact.exact, exact.sqnr, exact.what_if["fp16"]["exact"]) == (True, None, True)
    assert not exact.what_if["e4m3"]["exact"]
    assert exact.what_if["e4m3"]["sqnr"] > exact.what_if["e5m2"]["sqnr"] > 20


def test_observations_merge():
    x = np.random.default_rng(0).standard_normal((4, 40)).astype(np.float32)
    halves = Observation.of(x[:2], FP32) + Observation.of(x[2:], FP32)
    whole = Observation.of(x, FP32).sample()
    assert halves.sample().exponents == whole.exponents
    assert halves.sample().what_if["e4m3:row"] == whole.what_if["e4m3:row"]


def test_a_narrow_operand_is_that_of_a_matmul_alone():
    fp8 = precisions(Policy.parse("fp8-mixed,emulate=true"), ["layer"])["layer"]
    assert LayerInfo.of("up", "matmul", fp8, FP32).formats["gradient"] == "e5m2"
    assert LayerInfo.of("norm", "norm", fp8, FP32).formats == {
        "activation": "bf16",
        "gradient": "bf16",
        "weight": "fp32",
    }
