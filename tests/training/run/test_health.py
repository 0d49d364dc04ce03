"""When a loss has jumped: a rule, with its memory in the checkpoint."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.training.run.health import (
    HOPELESS,
    IN_A_ROW,
    NEEDED,
    REMEMBERED,
    ROLLBACKS,
    DivergedError,
    Health,
    Spikes,
)


def primed(threshold=1.0, losses=(3.0,) * NEEDED):
    spikes = Spikes(threshold)
    for loss in losses:
        assert not spikes.observe(loss)
    return spikes


def test_a_loss_is_compared_with_the_median_once_there_are_enough():
    losses = [2.0] * 5 + [2.9] * 4
    assert primed(losses=losses).median == 2.0
    assert not primed(losses=losses).observe(3.0)
    assert primed(losses=losses).observe(3.001)
    assert not primed(losses=(3.0,) * (NEEDED - 1)).observe(1e9)
    assert not primed(threshold=0.0).observe(1e9)
    assert primed(threshold=0.0).median is None


def test_three_in_a_row_are_needed_and_spikes_never_become_the_median():
    spikes = primed()
    assert [spikes.observe(9.0) for _ in range(IN_A_ROW - 1)] == [True] * (IN_A_ROW - 1)
    assert not spikes.is_due
    assert not spikes.observe(3.5)
    assert spikes.streak == 0
    for _ in range(IN_A_ROW):
        spikes.observe(9.0)
    assert spikes.is_due
    assert spikes.median == 3.0  # spikes are not remembered
    spikes = primed()
    assert all(spikes.observe(9.0) for _ in range(2 * REMEMBERED))
    assert spikes.median == 3.0
    spikes = primed()
    spikes.observe(9.0)
    assert not spikes.observe(math.nan)
    assert not spikes.observe(math.inf)
    assert spikes.streak == 1


@given(st.lists(st.floats(0, 20), max_size=3 * REMEMBERED), st.lists(st.floats(0, 20), max_size=10))
def test_a_restored_memory_decides_as_the_first_would(before, after):
    one = Spikes(1.0)
    for loss in before:
        one.observe(loss)
    other = Spikes(1.0)
    other.load(json.loads(json.dumps(one.state())))
    assert [one.observe(loss) for loss in after] == [other.observe(loss) for loss in after]
    assert one.state() == other.state()


def step(loss=3.0, skipped=0, grad_norm=math.nan):
    return {"loss": loss, "skipped": skipped, "grad_norm": grad_norm}


def test_the_good_step_stays_while_later_ones_are_bad():
    health = Health(1.0)
    for number in range(1, 11):
        assert health.observe(number, step()) is None
    assert health.good == 9  # the update of step 10 may have ruined what it left
    assert health.observe(10, step(loss=math.inf, skipped=1, grad_norm=1.0)) == "not_finite"
    assert health.observe(11, step(skipped=1)) == "skip"
    assert health.good == 9
    assert health.observe(12, step()) is None
    assert (health.good, health.in_a_row) == (11, 0)
    assert health.observe(13, step(loss=9.0)) == "spike"
    assert health.good == 11
    health.note_evaluation(13)
    assert health.good == 11  # a finite look does not undo a spike
    without = Health(0.0)
    without.note_evaluation(13)
    assert without.good == 13


def test_hopeless_is_a_long_row_that_continues_after_a_resume_and_not_many_in_all():
    health = Health(0.0)
    for number in range(HOPELESS - 1):
        health.observe(number, step(skipped=1))
    assert not health.is_hopeless
    health.observe(HOPELESS, step())
    health.observe(HOPELESS + 1, step(skipped=1))
    assert not health.is_hopeless
    health = Health(0.0)
    for number in range(1, HOPELESS):
        health.observe(number, step(skipped=1))
    resumed = Health(0.0)
    resumed.load(json.loads(json.dumps(health.state())))
    resumed.observe(HOPELESS, step(skipped=1))
    assert resumed.is_hopeless


def test_skipped_data_adds_up_and_rollbacks_to_one_step_are_limited():
    health = Health(1.0)
    saved = health.state()
    assert health.roll_back(13, 8, saved) == 5
    assert health.good == 8
    assert health.roll_back(20, 16, saved) == 4
    assert health.shift == 9
    for _ in range(ROLLBACKS - 1):
        resumed = Health(1.0)  # a kill in between does not start the count again
        resumed.load(json.loads(json.dumps(health.state())))
        health = resumed
        health.roll_back(20, 16, saved)
    with pytest.raises(DivergedError, match="after 3 rollbacks to step 16"):
        health.roll_back(20, 16, saved)
