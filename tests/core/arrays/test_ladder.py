"""The law of climbing, on fake devices: nothing is multiplied, a clock is moved."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.arrays.ladder import REPEATS, climb
from halfstep.core.choice import Support, choose, gain
from halfstep.core.formats import BF16, E4M3, FP16, FP32
from halfstep.tools.probe import CEILING_BUDGET, CPU_CEILING

CUBES = tuple((size, size, size) for size in (32, 64, 128, 256, 512, 1024))


class Fake:
    def __init__(self, speeds, *, launch=5e-6, setup=1e-4, warm=1.0):
        self.now, self.speeds, self.launch, self.setup, self.warm = 100.0, speeds, launch, setup, warm
        self.started, self.trail = [], []

    def clock(self):
        return self.now

    def cost(self, fmt, shape):
        m, k, n = shape
        return self.launch + 2 * m * k * n * self.speeds[fmt]

    def start(self, fmt, shape):
        self.started.append((fmt, shape, self.now))
        self.now += self.setup
        cold = [self.warm]

        def run(count):
            self.trail.append((fmt, shape))
            self.now += self.cost(fmt, shape) * (count - 1 + cold[0])
            cold[0] = 1.0

        return run


def race(device, formats, budget, shapes=CUBES):
    timings = climb(device.start, formats, shapes, budget=budget, clock=device.clock)
    return timings, device.now - 100.0


def timed(timings, fmt):
    return [timing.shape for timing in timings if timing.format == fmt]


def test_a_format_300_times_slower_stays_within_the_budget():
    fp32 = 3.8e-3 / (2 * 512**3)  # a Neoverse-N1 core
    device = Fake({FP32: fp32, BF16: 290 * fp32, FP16: 280 * fp32})
    timings, spent = race(device, [FP32, BF16, FP16], 3.0)
    assert spent < 3.0
    for fmt, shape, now in device.started:
        assert device.cost(fmt, shape) < 103.0 - now, "a matmul was started that could not be afforded"
    assert timed(timings, FP32) == list(CUBES)
    assert timed(timings, BF16) == list(CUBES[: len(timed(timings, BF16))])
    assert CUBES[2] in timed(timings, BF16)
    assert CUBES[4] not in timed(timings, BF16)
    assert gain(timings, BF16).ratio == pytest.approx(1 / 290, rel=0.1)
    yes = Support(True, "x")
    choice = choose(timings, {BF16: yes, FP16: yes})
    assert choice.preset == "fp32"
    assert "bf16 matmuls are at least 2" in choice.reason


def test_a_cold_start_is_not_taken_for_the_speed_and_fp32_alone_is_repeated():
    """The first two matmuls take a millisecond, whatever their size: threads start, memory is mapped."""
    device, slow = Fake({FP32: 1 / 20e9}), [1e-3, 1e-3]
    cost = device.cost
    device.cost = lambda fmt, shape: slow.pop() if slow else cost(fmt, shape)
    timings, spent = race(device, [FP32], CEILING_BUDGET, CPU_CEILING)
    assert spent < CEILING_BUDGET
    assert timed(timings, FP32) == list(CPU_CEILING)
    assert max(timing.peak for timing in timings) == pytest.approx(20e9, rel=0.01)


def test_the_peak_of_one_format_takes_no_time_of_fp32_and_its_fastest_size_is_timed_again():
    """The first run of each size is stalled by other work, and the largest does not fit into the cache."""
    device, seen = Fake({FP32: 1 / 2e9, BF16: 1 / 3e9}), set()
    cost = device.cost

    def stalled(fmt, shape):
        slower = 3.0 if shape == CPU_CEILING[-1] else 1.0
        stall = 0.0 if len(seen | {shape}) == len(seen) else 5e-3
        seen.add(shape)
        return slower * cost(fmt, shape) + stall

    device.cost = stalled
    timings, spent = race(device, [BF16], CEILING_BUDGET, CPU_CEILING)
    assert {fmt for fmt, _, _ in device.started} == {BF16}
    assert spent < CEILING_BUDGET
    best = max(timings, key=lambda timing: timing.peak)
    assert best.peak == pytest.approx(3e9, rel=0.02)
    assert len(best.seconds) > 2
    assert best.shape not in (CPU_CEILING[0], CPU_CEILING[-1])


def test_a_fast_format_reaches_the_top_in_turns_with_fp32_and_short_matmuls_run_several_at_once():
    device = Fake({FP32: 1e-12, BF16: 1e-13, FP16: 1e-13})
    timings, spent = race(device, [BF16, FP32, FP16], 3.0)
    assert spent < 3.0
    at_top = {timing.format: timing for timing in timings if timing.shape == CUBES[-1]}
    assert {len(timing.seconds) for timing in at_top.values()} == {REPEATS}
    assert at_top[BF16].typical == pytest.approx(device.cost(BF16, CUBES[-1]))
    turns = [fmt for fmt, shape in device.trail if shape == CUBES[-1]][-9:]
    assert turns == [FP32, BF16, FP16] * 3
    device = Fake({FP32: 1e-15, BF16: 1e-15}, launch=1e-6)
    climb(device.start, [FP32, BF16], CUBES[:1], budget=1.0, clock=device.clock)
    assert device.now - 100 < 0.1
    long = Fake({FP32: 1e-9, BF16: 1e-9})
    timings, _ = race(long, [BF16, FP32], 10.0, CUBES[1:2])
    assert len(long.trail) <= 2 * (2 + REPEATS)
    assert all(len(timing.seconds) == REPEATS for timing in timings)


def test_fp32_climbs_first_and_no_other_higher_and_each_is_timed_where_nothing_is_afforded():
    device = Fake({FP32: 1e-9, BF16: 1e-13})
    timings, spent = race(device, [BF16, FP32], 1.0)
    assert device.started[0][0] == FP32
    assert 0 < len(timed(timings, FP32)) < len(CUBES)
    assert timed(timings, BF16) == timed(timings, FP32)
    assert spent < 1.0
    device = Fake({FP32: 1e-6, BF16: 1e-9, E4M3: 1e-5})
    timings, _ = race(device, [BF16, E4M3, FP32], 0.05)
    assert [(timing.format, timing.shape) for timing in timings] == [(f, CUBES[0]) for f in (FP32, BF16, E4M3)]


def test_a_slow_first_call_a_slow_start_a_pause_and_a_clock_that_stands_still():
    device = Fake({FP32: 1e-13, BF16: 1e-14}, warm=2000.0)
    timings, _ = race(device, [FP32, BF16], 3.0)
    assert timed(timings, BF16) == list(CUBES)
    # A rung takes 0.15 s, nearly all of it before the first matmul, and fp32 has 0.25 s to climb in.
    device = Fake({FP32: 1e-13, BF16: 1e-13}, setup=0.15)
    timings, spent = race(device, [FP32, BF16], 1.0)
    assert timed(timings, FP32) == [CUBES[0]]
    assert spent < 1.0
    now = iter([0.0, 0.0, 0.0, *(5.0 + 1e-6 * tick for tick in range(100))])
    both, idle = [FP32, BF16], lambda fmt, shape: lambda count: None
    timings = climb(idle, both, CUBES, budget=1.0, clock=lambda: next(now))
    assert [(timing.format, timing.shape) for timing in timings] == [(FP32, CUBES[0]), (BF16, CUBES[0])]
    timings = climb(idle, both, CUBES, budget=1.0, clock=lambda: 1.0)
    assert all(second > 0 for timing in timings for second in timing.seconds)


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_a_busy_machine_never_makes_a_slower_format_the_choice(slower):
    """Other work stalls most of the runs, some for fifty times as long, and takes most of the budget."""
    yes = Support(True, "x")
    for seed in range(60):
        chance = random.Random(seed)
        device = Fake({FP32: 1 / 20e9, BF16: slower / 20e9, FP16: slower / 20e9})
        cost = device.cost
        device.cost = lambda fmt, shape, c=cost, r=chance: c(fmt, shape) * r.choice([1, 1, 1, 2, 5, 10, 50])
        timings, _ = race(device, [FP32, BF16, FP16], 0.3)
        choice = choose(timings, {BF16: yes, FP16: yes})
        assert choice.preset == "fp32", (seed, choice)


@given(
    st.floats(1e-15, 1e-8),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3),
    st.floats(0.5, 10.0),
    st.floats(0.0, 1e-2),
)
def test_whatever_the_device_the_budget_holds(fp32, ratios, budget, setup):
    speeds = {FP32: fp32} | dict(zip([BF16, FP16, E4M3], [fp32 * ratio for ratio in ratios], strict=False))
    device = Fake(speeds, setup=setup, launch=1e-5)
    first = sum(3 * device.cost(fmt, CUBES[0]) + setup for fmt in speeds)  # the rungs that are started unseen
    timings, spent = race(device, list(speeds), budget)
    assert spent < budget + first
    assert all(gain(timings, fmt) is not None for fmt in speeds)
