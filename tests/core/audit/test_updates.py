"""What counts as a lost update, on numbers that can be checked by hand."""

import math

import numpy as np
import pytest

from halfstep.core.audit.updates import Intended, Seen, _round_as_stored, count, count_each, count_unknown, lion
from halfstep.core.rounding import cast, decode

ONE = np.array([1.0, 1.0, 0.0, 2.0])


def test_an_update_is_lost_if_it_is_not_zero_and_nothing_changed():
    update = np.array([-1e-3, 0.0, -1e-3, -0.5])  # in bf16, 1 - 1e-3 rounds to 1 (half an ulp below 1 is 2^-9)
    after = np.array([1.0, 1.0, -1e-3, 1.5])
    counts = count(ONE, after, Intended(update), "bf16", update)
    assert (counts.elements, counts.intended, counts.lost) == (4, 3, 1)
    assert counts.applied_fraction == pytest.approx((1e-6 + 0.25) / (2e-6 + 0.25), rel=1e-12)
    assert counts.moved


@pytest.mark.parametrize(("decay", "lost"), [(2.0**-10, 3), (2.0**-8, 0)])
def test_a_decay_is_lost_below_half_an_ulp(decay, lost):
    weight = np.array([1.0, 1.5, 0.0, -2.0])
    intended = Intended(np.zeros(4), -decay * weight)
    counts = count(weight, weight, intended, "bf16", np.zeros(4))
    assert (counts.decay_intended, counts.decay_lost) == (3, lost)
    assert (counts.intended, counts.lost) == (0, 0)  # no gradient: only the decay was meant


def test_a_weight_that_is_not_finite_is_counted_without_a_warning():
    weight = np.array([np.nan, np.inf])
    counts = count(weight, weight, Intended(np.ones(2), -weight), "bf16", np.ones(2))
    assert counts.lost == 1
    assert counts.decay_intended == 0


def test_an_unknown_optimizer_is_judged_by_the_gradient_alone():
    counts = count_unknown(ONE, ONE, np.array([1.0, 0.0, 2.0, 0.0]))
    assert (counts.intended, counts.lost, counts.exact, counts.applied_fraction) == (2, 2, False, None)


def test_lion_steps_by_the_sign_of_its_mix():
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.5}
    gradient, m = np.array([1.0, -1.0, 0.0, 1.0]), np.array([-1.0, 0.0, 0.0, -0.05])
    seen = Seen(ONE, gradient, {}, {"exp_avg": m}, settings)
    assert lion(seen).update.tolist() == [0.1, 0.1, -0.0, -0.1]
    assert lion(seen).decay.tolist() == [-0.05, -0.05, -0.0, -0.1]


@pytest.mark.parametrize("format", ["bf16", "fp16", "e4m3", "fp32"])
def test_what_is_stored_is_what_the_reference_cast_gives(format):
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    values = np.concatenate([values, values * 2.0**-20, [0.0, -0.0, 1 + 2.0**-9, 1 + 3 * 2.0**-9]]).astype(
        np.float32
    )
    expected = cast(values, format, overflow="saturate")
    assert np.array_equal(_round_as_stored(values.astype(np.float64), format).astype(np.float32), expected)
    assert np.isnan(_round_as_stored(np.array([np.nan]), format)).all()


def test_tensors_that_are_counted_together_are_counted_as_apart():
    rng = np.random.default_rng(0)
    parts = []
    for size in (5, 1, 9):
        before = cast(rng.normal(size=size).astype(np.float32), "bf16", overflow="saturate").astype(np.float64)
        update, decay = rng.normal(size=size) * 1e-3, -1e-3 * before
        after = _round_as_stored(before + update + decay, "bf16")
        parts.append((before, after, update, decay))
    apart = [count(b, a, Intended(u, d), "bf16", u) for b, a, u, d in parts]
    before, after, update, decay = (np.concatenate(column) for column in zip(*parts, strict=True))
    together = count_each(before, after, Intended(update, decay), "bf16", update, [5, 1, 9])
    assert together == apart
    assert sum(c.lost for c in together) > 0


@pytest.mark.parametrize(("lr", "hazard"), [(1e-4, 0.118), (3e-5, 0.695), (1e-5, 0.844), (1e-6, 0.98)])
def test_lost_updates_of_the_hazards(lr, hazard):
    """bf16 weights N(0, 0.02), updates of +lr or -lr."""
    # The law: each bf16 number has the probability of the interval that rounds to it, both signs alike.
    numbers = decode(np.arange(0x7F80, dtype=np.uint16), "bf16")
    middles = (numbers[1:].astype(np.float64) + numbers[:-1]) / 2
    below = [math.erf(middle / 0.02 / math.sqrt(2)) for middle in middles]
    probability = np.diff(below, prepend=0, append=1)
    lost = [cast(numbers + np.float32(u), "bf16", overflow="inf") == numbers for u in (lr, -lr)]
    law = float(probability @ np.mean(lost, axis=0))
    assert abs(law - hazard) < 1e-3  # the law says 11.78, 69.58, 84.50 and 98.05 %; the hazards were sampled

    n = 2**20
    rng = np.random.default_rng(2026)
    weight = cast(rng.normal(0, 0.02, n).astype(np.float32), "bf16", overflow="inf")
    update = np.float32(lr) * rng.choice(np.float32([-1, 1]), n)
    before, after = (x.astype(np.float64) for x in (weight, cast(weight + update, "bf16", overflow="inf")))
    counts = count(before, after, Intended(update.astype(np.float64)), "bf16", update)
    assert counts.intended == n
    # Five standard deviations of the fraction of n draws: exceeded once in 1.7 million.
    assert abs(counts.lost / n - law) < 5 * math.sqrt(law * (1 - law) / n)
