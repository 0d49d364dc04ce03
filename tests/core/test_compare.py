"""What is concluded from the losses of two ways to train, without training anything."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from halfstep.core.compare.divergence import Series, band, first_divergence
from halfstep.core.compare.gaps import (
    IncomparableError,
    correlation,
    holm,
    seed_spread,
    steps_behind,
    t_quantile,
    unpaired_verdict,
    verdict,
)

# By probability and degrees of freedom, as printed in the NIST/SEMATECH e-Handbook, 1.3.6.7.2.
PUBLISHED = {
    (0.95, 1): 6.314,
    (0.995, 1): 63.657,
    (0.95, 2): 2.920,
    (0.995, 2): 9.925,
    (0.95, 3): 2.353,
    (0.995, 3): 5.841,
    (0.95, 7): 1.895,
    (0.995, 7): 3.499,
    (0.95, 10): 1.812,
    (0.995, 15): 2.947,
    (0.95, 30): 1.697,
    (0.995, 30): 2.750,
    (0.995, 100): 2.626,
}


@pytest.mark.parametrize(("probability", "degrees"), PUBLISHED)
def test_quantiles_of_students_t_are_the_published_ones(probability, degrees):
    assert round(t_quantile(probability, degrees), 3) == PUBLISHED[probability, degrees]


@pytest.mark.parametrize("probability", [0.75, 0.95, 0.995])
def test_one_and_two_degrees_of_freedom_have_closed_forms(probability):
    cauchy = math.tan(math.pi * (probability - 0.5))
    two = (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    assert t_quantile(probability, 1) == pytest.approx(cauchy, rel=1e-13)
    assert t_quantile(probability, 2) == pytest.approx(two, rel=1e-13)


def test_equal_runs_are_the_same():
    result = verdict([0.0, 0.0, 0.0], delta=0.0)
    assert (result.kind, result.mean, result.interval90, result.more_seeds) == ("same", 0.0, (0.0, 0.0), None)


@pytest.mark.parametrize(
    ("gaps", "kind"),
    [
        ([0.001, -0.002, 0.0015, -0.0005], "same"),
        ([0.005, 0.0051, 0.0049, 0.005], "same"),  # a gap that is certain, and smaller than delta
        ([0.5, 0.52, 0.48, 0.51], "different"),
        ([-0.5, -0.52, -0.48, -0.51], "different"),
        ([0.1, 0.9], "cannot tell"),  # above delta, in two wild pairs
    ],
)
def test_small_gaps_are_the_same_and_large_ones_different(gaps, kind):
    assert verdict(gaps, delta=0.01).kind == kind


def test_the_intervals_are_those_of_a_textbook():
    result = verdict([1.0, 2.0, 3.0, 4.0], delta=0.1)  # mean 2.5, standard deviation 1.2910, standard error 0.6455
    assert result.interval90 == pytest.approx((2.5 - 2.3534 * 0.6455, 2.5 + 2.3534 * 0.6455), abs=1e-3)
    assert result.interval99 == pytest.approx((2.5 - 5.8409 * 0.6455, 2.5 + 5.8409 * 0.6455), abs=1e-3)


@pytest.mark.parametrize("gaps", [[0.01, -0.01, 0.012, -0.008], [0.05, 0.01, 0.07, 0.02]])
def test_the_seeds_that_are_asked_for_decide_at_this_spread(gaps):
    result = verdict(gaps, delta=0.005)
    assert result.kind == "cannot tell"
    mean, spread = np.mean(gaps), np.std(gaps, ddof=1)

    def as_many(n):
        """Returns n gaps with the same mean and spread."""
        noise = np.resize([1.0, -1.0], n) - (n % 2) / n
        return list(mean + spread * noise / np.std(noise, ddof=1))

    n = len(gaps) + result.more_seeds
    assert verdict(as_many(n), delta=0.005).kind != "cannot tell"
    assert verdict(as_many(n - 1), delta=0.005).kind == "cannot tell"


def test_a_gap_right_at_delta_would_need_more_seeds_than_anyone_trains():
    assert verdict([0.1, 0.3], delta=0.2).more_seeds is None


def test_one_pair_decides_nothing():
    result = verdict([5.0], delta=0.01)
    assert (result.kind, result.interval90, result.more_seeds) == ("cannot tell", (-math.inf, math.inf), None)


def test_a_run_that_diverged_is_different():
    result = verdict([0.0, math.inf, 0.0, 0.0], delta=0.1)
    assert (result.kind, result.diverged) == ("different", 1)


@pytest.mark.parametrize(("gaps", "delta"), [([], 0.1), ([math.nan], 0.1), ([0.1, 0.2], -1.0)])
def test_what_is_no_gap_is_refused(gaps, delta):
    with pytest.raises(IncomparableError):
        verdict(gaps, delta)


def test_the_spread_does_not_grow_with_the_number_of_seeds():
    draws = np.random.default_rng(0).normal(size=4096)
    few = np.mean([seed_spread(list(draws[i : i + 4])) ** 2 for i in range(0, 4096, 4)])
    many = np.mean([seed_spread(list(draws[i : i + 64])) ** 2 for i in range(0, 4096, 64)])
    assert few == pytest.approx(many, rel=0.02)  # sums of the same 4096 squares, up to the means


def test_one_seed_has_no_spread():
    with pytest.raises(IncomparableError) as caught:
        seed_spread([1.0])
    assert "--delta" in str(caught.value.hint)


STEPS = np.arange(1, 201)


def curves(seeds, rng, kind="loss"):
    return Series(STEPS, 5 / np.sqrt(STEPS) + rng.normal(scale=0.1, size=(seeds, len(STEPS))), kind)


def test_curves_part_where_one_of_them_leaves():
    rng = np.random.default_rng(1)
    reference = curves(4, rng)
    late = np.where(STEPS > 120, (STEPS - 120) * 0.01, 0.0)
    left = first_divergence({"loss": Series(STEPS, reference.values + late, "loss")}, {"loss": reference})
    assert left.name == "loss"
    assert 120 < left.step < 160  # the band is 4 sigma / sqrt(2) or so: reached some 30 steps after the bend
    assert abs(left.gap) > left.band


def test_the_same_curves_never_part():
    reference = curves(4, np.random.default_rng(2))
    assert first_divergence({"loss": reference}, {"loss": reference}) is None


def test_a_layer_that_leaves_before_the_loss_is_named():
    rng = np.random.default_rng(3)
    loss, layer = curves(4, rng), curves(4, rng, "layers")
    left = first_divergence(
        {"loss": loss, "blocks.1": Series(STEPS, layer.values + np.where(STEPS >= 50, 3.0, 0.0), "layers")},
        {"loss": loss, "blocks.1": layer},
    )
    assert (left.step, left.name) == (50, "blocks.1")


def test_a_loss_that_is_infinite_has_parted():
    reference = curves(4, np.random.default_rng(4))
    values = reference.values.copy()
    values[2, 80:] = np.inf
    left = first_divergence({"loss": Series(STEPS, values, "loss")}, {"loss": reference})
    assert left.step == 81


@pytest.mark.parametrize("seeds", [4, 8])
def test_other_seeds_stay_inside_the_band_of_all_steps_and_layers(seeds):
    """The band is simultaneous: 25 layers of 200 steps are 5,000 places, and a band drawn place by place at 99 %
    would be left in every one of these draws."""
    left = 0
    for draw in range(20):
        rng = np.random.default_rng(100 + draw)
        names = [f"layer {i}" for i in range(25)]
        reference, other = ({name: curves(seeds, rng) for name in names} for _ in range(2))
        left += first_divergence(other, reference) is not None
    # At 1 % none of 20 is expected; more than 2 have a chance of 0.1 %.
    assert left <= 2


def test_a_reference_that_diverged_has_no_band():
    reference = curves(4, np.random.default_rng(6))
    reference.values[1, 30] = np.nan
    with pytest.raises(IncomparableError, match="loss"):
        band({"loss": reference}, runs=4)


def test_seeds_that_stay_apart_for_the_whole_run_are_no_parting():
    """Of a few seeds two may lie close together by chance, and a third seed then seems far away from both."""
    left = 0
    for draw in range(40):
        rng = np.random.default_rng(draw)
        whole = [rng.normal(size=(4, 1)) + 0.1 * rng.normal(size=(4, len(STEPS))) for _ in range(50)]
        reference = {f"layer {i}": Series(STEPS, values, "layers") for i, values in enumerate(whole[:25])}
        other = {f"layer {i}": Series(STEPS, values, "layers") for i, values in enumerate(whole[25:])}
        left += first_divergence(other, reference) is not None
    assert left <= 4  # at 1 % of 40; a spread for each layer alone is left by nearly all


def test_seeds_that_change_nothing_leave_no_room():
    same = Series(STEPS, np.ones((4, len(STEPS))), "loss")
    assert first_divergence({"loss": same}, {"loss": same}) is None
    left = first_divergence({"loss": Series(STEPS, same.values + 1e-9, "loss")}, {"loss": same})
    assert left.step == 1


def test_a_band_needs_four_seeds():
    with pytest.raises(IncomparableError, match="4 seeds"):
        band({"loss": curves(3, np.random.default_rng(5))}, runs=3)


def test_p_values_say_what_the_intervals_say():
    chance = np.random.default_rng(0)
    kinds = Counter()
    for _ in range(100):
        gaps = list(chance.normal(chance.choice([0.0, 0.01, 0.03]), 0.01, chance.integers(2, 12)))
        losses = list(chance.normal(2, 0.01, len(gaps))), list(chance.normal(2.02, 0.01, 5))
        for each in (verdict(gaps, delta=0.01), unpaired_verdict(*losses, delta=0.01)):
            assert (each.p_different < 0.01) == (each.kind == "different")
            assert (each.p_same <= 0.05) == (each.kind == "same")
            assert holm([each]) == [each.kind]
            kinds[each.kind] += 1
    assert min(kinds.values()) > 10


def test_holm_corrects_for_the_number_of_verdicts():
    """The ps of Holm's own paper would do; these are chosen so that the second falls only after the first."""

    def worth(*ps, kind="p_different"):
        given = [
            None if p is None else replace(verdict([0.0, 0.0], delta=0.0), **{"p_same": 1.0, kind: p}) for p in ps
        ]
        return [found != "cannot tell" for found in holm(given)]

    assert worth(0.006) == [True]
    assert worth(0.006, 0.9) == [False, False]
    assert worth(0.006, 0.004) == [True, True]
    assert worth(0.006, None) == [False, False]  # a row that is still to run counts
    assert worth(0.03, 0.02, kind="p_same") == [True, True]
    assert worth(0.03, 0.03, kind="p_same") == [False, False]
    two_looks = replace(verdict([0.0, 0.0], delta=0.0), p_same=0.04)
    assert (holm([two_looks]), holm([two_looks], looks=2)) == (["same"], ["cannot tell"])


def test_a_family_of_equal_ways_is_called_different_in_one_case_of_a_hundred():
    chance, any_verdict = np.random.default_rng(1), verdict([0.0, 0.0], delta=0.0)
    families = chance.random((2000, 10))  # without a difference, a p is anywhere between 0 and 1
    wrong = sum("different" in holm([replace(any_verdict, p_different=p) for p in ps]) for ps in families)
    assert abs(wrong - 20) <= 3 * math.sqrt(20)


def test_pairs_that_go_together_are_correlated():
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(1.0)
    assert correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert correlation([1.0, 2.0], [1.0, 2.0]) is None  # two points are always on a line
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_the_steps_behind_are_those_that_the_slope_needs():
    steps = np.arange(10, 1001, 10)
    falling = 4 - 0.001 * steps + 0.001 * np.resize([1.0, -1.0], 100)
    assert steps_behind(steps, falling, 0.0105) == pytest.approx(11, abs=1)
    assert steps_behind(steps, 4 + 0 * falling, 0.01) is None
    assert steps_behind(steps, falling, 2.0) is None  # more than there were
    assert steps_behind(steps, np.where(steps > 900, np.nan, falling), 0.01) is None
