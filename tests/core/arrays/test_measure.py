from types import SimpleNamespace

import pytest

from halfstep.core.arrays.measure import ACCELERATOR_SHAPES, CPU_SHAPES, block_limits, halved, time_blocks
from halfstep.core.choice import Timing
from halfstep.core.formats import BF16, FP16, FP32


@pytest.mark.parametrize(("tokens", "counts"), [(64, [8, 16, 32, 64]), (20, [10, 20]), (4, [4])])
def test_a_block_is_timed_on_halves_of_its_tokens(tokens, counts):
    assert halved(tokens) == counts


def test_blocks_are_started_once_before_the_clock_and_only_where_matmuls_are_not_too_slow():
    started, ticks = [], iter(range(10**6))

    def start(fmt, model, tokens):
        started.append((fmt, tokens))
        return lambda count: None

    model, clock = SimpleNamespace(width=16, size_of_mlp=64), lambda: float(next(ticks))
    timings = time_blocks(start, {FP32: 2.0, BF16: 2.0}, model, (8, 16), budget=1e9, clock=clock)
    assert started[:2] == [(FP32, 8), (BF16, 8)]
    assert {(t.format, t.shape, t.work) for t in timings} == {
        (fmt, (tokens, 16, 64), "training steps of a block") for fmt in (FP32, BF16) for tokens in (8, 16)
    }
    for shapes in (CPU_SHAPES, ACCELERATOR_SHAPES):
        sizes = [m * k * n for m, k, n in shapes]
        assert sizes == sorted(sizes)
        assert all(n == 4 * k for _, k, n in shapes)
    assert (4096, 768, 3072) in ACCELERATOR_SHAPES
    seconds = {FP32: 1.0, BF16: 0.5, FP16: 5.0}
    matmuls = [Timing(fmt, (8, 8, 8), (second,)) for fmt, second in seconds.items()]
    assert block_limits(matmuls, seconds) == {FP32: 2.0, BF16: 2.0}
    assert block_limits([*matmuls[:2], Timing(FP16, (8, 8, 8), (2.0,))], seconds)[FP16] == pytest.approx(4.0)
    assert block_limits(matmuls[1:], [BF16]) == {}  # nothing to compare with
