"""What counts as a lost update, on numbers that can be checked by hand."""

import numpy as np
import pytest

from halfstep.core.audit.updates import Intended, Seen, count, count_unknown, lion

ONE = np.array([1.0, 1.0, 0.0, 2.0])


def test_an_update_is_lost_if_it_is_not_zero_and_nothing_changed():
    update = np.array([-1e-3, 0.0, -1e-3, -0.5])  # in bf16, 1 - 1e-3 rounds to 1 (half an ulp below 1 is 2^-9)
    after = np.array([1.0, 1.0, -1e-3, 1.5])
    counts = count(ONE, after, Intended(update), "bf16", update)
    assert (counts.elements, counts.intended, counts.lost) == (4, 3, 1)
    assert counts.arrived == pytest.approx((1e-6 + 0.25) / (2e-6 + 0.25), rel=1e-12)
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
    assert (counts.intended, counts.lost, counts.exact, counts.arrived) == (2, 2, False, None)


def test_lion_steps_by_the_sign_of_its_mix():
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.5}
    gradient, m = np.array([1.0, -1.0, 0.0, 1.0]), np.array([-1.0, 0.0, 0.0, -0.05])
    seen = Seen(ONE, gradient, {}, {"exp_avg": m}, settings)
    assert lion(seen).update.tolist() == [0.1, 0.1, -0.0, -0.1]
    assert lion(seen).decay.tolist() == [-0.05, -0.05, -0.0, -0.1]
