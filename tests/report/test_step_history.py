"""The steps of runs of any length: all of them, or as many as their charts need, and every spike."""

import math
import random
import tracemalloc

import numpy as np
import pytest

from halfstep.report import step_history as module
from halfstep.report.page import render
from halfstep.report.step_history import BUCKET, NAMES, StepHistory
from tests.report.page.made_up_runs import read_history

LIMIT = 4 * BUCKET


def event(step, **more):
    return {"event": "step", "step": step, "time": float(step), "loss": 2.0 + math.sin(step), **more}


def filled(steps, limit=LIMIT, **odd):
    """A history of `steps` steps; `odd` changes some of them, such as s123={...}."""
    kept_steps = StepHistory(limit)
    for step in range(1, steps + 1):
        kept_steps.add(step, event(step, tokens_per_second=1000.0 + step % 7, **odd.get(f"s{step}", {})))
    return kept_steps


def at(series):
    return dict(zip(map(int, series.steps), map(float, series.values), strict=True))


def test_a_run_up_to_the_limit_is_kept_as_it_is():
    kept_steps = filled(LIMIT - 1)
    assert list(kept_steps) == list(range(1, LIMIT))
    for name in NAMES:
        whole, even = kept_steps.column(name), kept_steps.even(name)
        assert whole.whole
        np.testing.assert_array_equal(whole.values, even.values)
    assert at(kept_steps.column("loss")) == {step: 2.0 + math.sin(step) for step in range(1, LIMIT)}


@pytest.mark.parametrize("steps", [LIMIT, 3 * LIMIT + 5, 20 * LIMIT, 100 * LIMIT + 1])
def test_a_longer_one_keeps_its_ends_its_spikes_and_a_bounded_number_of_steps(steps):
    spikes = {2: 9.0, LIMIT // 2: -3.0, steps // 3: 7.5, steps - 1: 8.0}
    kept_steps = filled(steps, **{f"s{step}": {"loss": value} for step, value in spikes.items()})
    loss = at(kept_steps.column("loss"))
    assert {1, steps} <= set(loss)
    for step, value in spikes.items():
        assert loss[step] == value
    assert (list(kept_steps), kept_steps.last) == (sorted(loss), steps)
    assert not kept_steps.column("loss").whole
    assert len(kept_steps) <= 4 * LIMIT
    assert len(kept_steps.even("loss").values) <= 2 * LIMIT


def test_every_value_that_is_kept_was_recorded_and_one_not_finite_leaves_its_gap():
    steps = 30 * LIMIT
    for name, recorded in (("loss", lambda s: 2.0 + math.sin(s)), ("tokens_per_second", lambda s: 1000.0 + s % 7)):
        for series in (filled(steps).column(name), filled(steps).even(name)):
            assert all(value == recorded(step) for step, value in at(series).items())
    loss = at(filled(10 * LIMIT, s777={"loss": math.nan}, s778={"loss": math.inf}).column("loss"))
    assert not math.isfinite(loss[777])


def test_the_even_ones_are_equally_far_from_each_other_and_give_the_median():
    chance = random.Random(0)
    kept_steps, speeds = StepHistory(LIMIT), []
    for step in range(1, 40 * LIMIT):
        speeds.append(chance.lognormvariate(0, 0.5))
        kept_steps.add(step, event(step, tokens_per_second=speeds[-1]))
    even = kept_steps.even("tokens_per_second")
    assert len(set(np.diff(even.steps))) == 1
    assert len(even.values) >= LIMIT / 2
    # The median of n values of a density f at the median m is off by 1 / (2 f(m) sqrt n), here 0.63 / sqrt(n).
    assert np.median(even.values) == pytest.approx(np.median(speeds), abs=3 * 0.63 / math.sqrt(len(even.values)))


@pytest.mark.parametrize("steps", [100, 10 * LIMIT])
@pytest.mark.parametrize("back", [1, 2, 60, LIMIT, 3 * LIMIT, 9 * LIMIT])
def test_what_is_dropped_is_gone_and_the_rest_stays(steps, back):
    if back > steps:
        return
    kept_steps = filled(steps, **{f"s{steps - back}": {"loss": 99.0}, f"s{steps}": {"loss": -99.0}})
    kept = steps - back
    kept_steps.drop_from(kept + 1)
    assert kept_steps.last <= kept
    assert -99.0 not in kept_steps.column("loss").values
    assert kept == 0 or 99.0 in kept_steps.column("loss").values
    kept_steps.add(kept + 1, event(kept + 1, loss=5.0))
    assert (kept_steps.last, kept_steps.latest("loss")) == (kept + 1, 5.0)


def test_the_latest_value_is_that_of_the_last_record_of_the_last_step():
    """The line of the rollback in between may be lost, as on a full disk."""
    kept_steps = filled(3)
    assert kept_steps.latest("memory") is None
    kept_steps.add(4, event(4, loss=math.nan))
    assert math.isnan(kept_steps.latest("loss"))
    kept_steps.drop_from(3)
    assert kept_steps.latest("loss") == 2.0 + math.sin(2)
    assert StepHistory().latest("loss") is None
    evaluation = {"event": "validation", "step": 3, "time": 3.0, "loss": 1.0}
    repeated = [event(1), event(2), event(3), evaluation, event(2, loss=7.0)]
    history = read_history([{"event": "start", "time": 0.0}, *repeated])
    assert (list(history.steps), history.steps.latest("loss")) == ([1, 2], 7.0)
    assert not history.validations


def test_skips_are_counted_in_a_long_run_too(monkeypatch):
    monkeypatch.setattr(StepHistory.__init__, "__defaults__", (LIMIT,))
    events, skipped = [{"event": "start", "time": 0.0}], 0
    for step in range(1, 20 * LIMIT):
        skipped += step % 300 == 0
        events.append(event(step, skipped=skipped))
    history = read_history(events)
    assert not history.steps.column("loss").whole
    assert sum(history.skips().values()) == skipped


def test_a_page_takes_no_more_memory_for_a_longer_run(monkeypatch):
    def events(steps):
        yield {"event": "start", "time": 0.0, "policy": "fp32"}
        for step in range(1, steps + 1):
            yield event(step)

    def peak(steps):
        tracemalloc.start()
        render(events(steps), "long")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    monkeypatch.setattr(StepHistory.__init__, "__defaults__", (LIMIT,))
    render(events(1), "what is loaded once")
    short = peak(10 * LIMIT)
    assert peak(80 * LIMIT) < 1.5 * short
    assert module.ROWS * 8 * (1 + len(NAMES)) < 32e6  # bytes, of each selection
