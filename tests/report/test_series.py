import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.report.series import LIMIT, Series, StepHistory, as_data, downsample, smooth
from tests.report.page.made_up_runs import read_history

VALUES = st.lists(st.one_of(st.floats(), st.just(math.nan)), min_size=30, max_size=400)


def over_steps(values):
    return Series(list(range(1, len(values) + 1)), values)


@given(VALUES)
def test_few_points_keep_ends_extremes_and_gaps(values):
    series = over_steps(values)
    short = downsample(series, 20)
    assert len(short.steps) <= max(20, 0)
    assert list(short.steps) == sorted(set(short.steps))
    assert {1, len(values)} <= set(short.steps)
    at = dict(zip(series.steps, series.values, strict=True))
    assert all(at[s] is v for s, v in zip(short.steps, short.values, strict=True))
    if len(series.numbers):
        assert short.numbers.min() == series.numbers.min()
        assert short.numbers.max() == series.numbers.max()
    assert (short.num_gaps > 0) == (series.num_gaps > 0)


def test_every_spike_of_a_long_run_survives_and_a_short_one_is_left_alone():
    values = [1.0] * 1_000_000
    spikes = {3: 9.0, 400_000: -2.0, 777_777: 5.0, 999_990: 1.5}
    for step, value in spikes.items():
        values[step - 1] = value
    short = downsample(over_steps(values))
    assert len(short.steps) <= LIMIT
    assert spikes.items() <= dict(zip(short.steps, short.values, strict=True)).items()
    series = over_steps([1.0, math.nan, 2.0])
    assert downsample(series) is series


def test_smooth_is_the_centered_mean_that_does_not_lag_and_leaves_gaps():
    smoothed = smooth(over_steps([1.0, 4.0, 2.0, 8.0, 5.0, 1.0, 3.0]))  # two steps to each side
    wanted = [1.0, (1 + 4 + 2) / 3, (1 + 4 + 2 + 8 + 5) / 5, (4 + 2 + 8 + 5 + 1) / 5]
    assert smoothed.values == pytest.approx([*wanted, (2 + 8 + 5 + 1 + 3) / 5, (5 + 1 + 3) / 3, 3.0])
    line = [float(i) for i in range(500)]
    assert smooth(over_steps(line)).values == pytest.approx(line)
    smoothed = smooth(over_steps([1.0, math.nan, 3.0, math.inf, 5.0])).values
    assert (smoothed[0], smoothed[2]) == (1.0, pytest.approx(3.0))
    assert math.isnan(smoothed[1])
    assert math.isnan(smoothed[3])


def test_data_is_strict_json_with_nulls_for_gaps():
    data = as_data(over_steps([1.23456789, math.nan, -math.inf, 65536.0, 0.0]))
    assert data == {"x": [1, 2, 3, 4, 5], "y": [1.23457, None, None, 65536, 0]}


def event(step, **more):
    return {"event": "step", "step": step, "time": float(step), "loss": 2.0 + math.sin(step), **more}


def filled(steps):
    kept = StepHistory()
    for step in range(1, steps + 1):
        kept.add(step, event(step))
    return kept


@pytest.mark.parametrize("back", [0, 1, 60, 100])
def test_what_is_dropped_is_gone_and_the_rest_stays(back):
    steps = filled(100)
    steps.drop_from(101 - back)
    assert ([*steps], steps.last) == ([*range(1, 101 - back)], 100 - back)
    assert steps.column("loss").values.tolist() == [2.0 + math.sin(step) for step in range(1, 101 - back)]
    steps.add(101 - back, event(101 - back, loss=5.0))
    assert (steps.last, steps.latest("loss")) == (101 - back, 5.0)


def test_the_latest_value_is_that_of_the_last_record_of_the_last_step():
    """The line of the rollback in between may be lost, as on a full disk."""
    steps = filled(3)
    assert steps.latest("memory") is None
    steps.add(4, event(4, loss=math.nan))
    assert math.isnan(steps.latest("loss"))
    steps.drop_from(3)
    assert steps.latest("loss") == 2.0 + math.sin(2)
    assert StepHistory().latest("loss") is None
    evaluation = {"event": "validation", "step": 3, "time": 3.0, "loss": 1.0}
    repeated = [event(1), event(2), event(3), evaluation, event(2, loss=7.0)]
    history = read_history([{"event": "start", "time": 0.0}, *repeated])
    assert ([*history.steps], history.steps.latest("loss")) == ([1, 2], 7.0)
    assert not history.validations
