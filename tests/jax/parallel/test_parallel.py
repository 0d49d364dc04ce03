"""Several devices: the update of one, gradients summed in fp32, one decision for all. They are those of a CPU."""

import math

import numpy as np
import pytest

from tests.jax.parallel import jobs

UNITS = {"fp32": 2.0**-23, "bf16-mixed": 2.0**-8, "fp16-mixed": 2.0**-11}  # of the format that rounds
SIZES = {"32", "32,32", "32,16", "16,32"}  # of the parameters


def assert_same(policy, alone, together):
    """All devices hold the same bits, and differ from one device by the order of fp32 sums.

    A loss is a sum of so many positive terms, each of which changes by one unit of fp32 at most in another order.
    After the first step a weight may differ in its last bit, and its cast be the next number of the format: each
    term then changes by the format's unit. So does each term of a gradient, over the same tokens. The terms of a
    mean, without their signs, add up to no more than the largest: an activation times what the loss passes back to
    it, whose magnitudes sum to 2 at the logits.
    """
    (rows, weights, _), (others, found, more) = alone, together
    assert more["same"]
    assert more["programs"] == 1
    assert [row[2:] for row in others] == [row[2:] for row in rows]
    error = jobs.ROWS * jobs.LENGTH * jobs.MICRO * UNITS["fp32"]
    assert others[0][0] == pytest.approx(rows[0][0], rel=error)
    error = max(error, UNITS[policy.partition(",")[0]])
    for one, two in zip(rows, others, strict=True):
        assert two[0] == pytest.approx(one[0], rel=error, nan_ok=True)
    x, up, down = (np.abs(weights[name]) for name in ("embed", "up", "down"))
    hidden = x.max() * up.sum(0).max()
    largest = {
        "bias": 2.0,
        "down": hidden,
        "up": 2 * x.max() * down.max(),
        "embed": 2 * down.max() * up.sum(1).max(),
    }
    for name, weight in weights.items():
        moved = len(rows) * jobs.RATE / (1 - 0.5)  # by gradients of 1 at every step, with the momentum
        assert np.abs(found[name] - weight).max() <= moved * error * largest[name] + error * 2.0**-16, name


def assert_summed_once_in_fp32(exchanged):
    """As it was partitioned, a program sums fp32 alone: each weight once, and three numbers. No loop does."""
    partitioned, optimized = exchanged
    for found in exchanged:
        assert {key[:2] for key in found} == {("all-reduce", "f32")}
        assert {key[2]: times for key, times in found.items()} == {**dict.fromkeys(SIZES, 1), "": 3}
    assert partitioned
    assert not any(outside for *_, outside in optimized)


@pytest.mark.prove
def test_jit_sums_over_devices_in_every_micro_batch(devices):
    """Without a mesh our step has fp32 gradients too, and the loop over micro-batches exchanges them."""
    partitioned, optimized = devices(jobs.followed)
    assert {key[:2] for key in partitioned} == {("all-reduce", "f32")}
    assert all(outside for *_, outside in optimized)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("policy", "shape", "options"),
    [
        ("bf16-mixed,scale=dynamic:init=1024", (4,), {"steps": 4, "broken": 2}),
        ("fp32", (4,), {"uneven": True}),
        ("fp32", (2,), {"micro": None}),
        ("fp16-mixed", (2, 2), {"broken": 1}),
        ("bf16-mixed,accumulate=bf16", (4,), {}),
    ],
)
def test_every_policy_makes_the_updates_of_one_device(policy, shape, options, devices):
    alone, together = (devices(jobs.train, place, policy, **options) for place in ((), shape))
    assert_same(policy, alone, together)
    assert_summed_once_in_fp32(together[2]["exchanged"])
    count, micro = math.prod(shape), options.get("micro", jobs.MICRO)
    assert together[2]["aux"] == (count, *[micro] * (micro is not None), jobs.ROWS // count, jobs.LENGTH)


@pytest.mark.prove
def test_every_device_draws_numbers_of_its_own(devices):
    drawn = devices(jobs.draw)
    assert drawn.shape == (4, 2)
    assert len({*drawn.flat}) == math.prod(drawn.shape)


@pytest.mark.prove
def test_what_is_not_trained_is_copied_too_and_restored(devices):
    here, resumed = devices(jobs.keys)
    assert here == resumed


REFUSED = {
    "rows": ("4 devices cannot share a batch of 6 rows equally", "such as 4 or 8"),
    "leaves": ("different numbers of rows: 4, 8", "close over"),
    "one device": ("lies elsewhere", "mesh=mesh"),
    "sharded": ("lies elsewhere", "leave the mesh out"),
    "name": ("mesh is a str", "jax.make_mesh"),
}


def test_what_devices_cannot_share_is_refused_with_a_remedy(devices):
    for said, (message, hint) in zip(devices(jobs.refusals, [*REFUSED]), REFUSED.values(), strict=True):
        assert message in said[0]
        assert hint in said[1]


@pytest.mark.prove
def test_split_masters_on_four_devices_are_the_whole_ones_bit_for_bit(devices):
    whole, split = (devices(jobs.train, (4,), f"bf16-mixed{how}", 3) for how in ("", ",param=fp32:split"))
    assert split[0] == whole[0]
    assert split[2]["same"]
    assert split[2]["programs"] == 1
    for name, weight in whole[1].items():
        assert np.array_equal(split[1][name], weight), name


@pytest.mark.prove
def test_delayed_amaxes_on_four_devices_are_those_of_the_whole_batch(devices):
    """A gradient is of the mean over a device's own rows, a quarter of all: four times as large, exactly."""
    policy = "bf16-mixed,emulate=true; up: compute=e4m3:delayed,grad=e5m2:delayed"
    alone, together = (devices(jobs.train, shape, policy, 1, None) for shape in ((), (4,)))
    one, all_ = (each[2]["amaxes"]["up"] for each in (alone, together))
    assert together[2]["same"]
    assert one[:, 0].all()
    assert np.array_equal(all_[:2], one[:2])
    assert np.array_equal(all_[2], 4 * one[2])
