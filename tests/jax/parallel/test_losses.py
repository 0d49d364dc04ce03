"""On four devices a loss means what it means on one, whether it is a mean over rows or not."""

import numpy as np
import pytest

from tests.jax.parallel import jobs, losses

# A loss here is some 30 operations deep, over sums of at most 16 * 8 terms. Order changes each term of a sum by a
# unit of fp32, and none of the losses multiplies an error by more than 8: logits and roots are of that size.
ERROR = (30 + losses.ROWS * losses.WIDTH) * 2.0**-24 * 8


def assert_as_on_one_device(alone, together):
    (rows, weights, _), (others, found, _) = alone, together
    for one, two in zip(rows, others, strict=True):
        assert two == pytest.approx(one, rel=ERROR)
    for name, weight in weights.items():
        assert np.abs(found[name] - weight).max() <= ERROR, name


@pytest.mark.prove
@pytest.mark.parametrize("micro", [None, 2])
def test_a_loss_of_the_whole_batch_trains_as_on_one_device(micro, devices):
    trained = devices(jobs.losses, [*losses.WHOLE], micro=micro)
    for name, (alone, *others) in trained.items():
        for each in others:
            assert_as_on_one_device(alone, each)
            assert len(each[2]) == 1, name
            assert ("changes with their number" if name == "summed" else "losses.py") in each[2][0]
        assert not alone[2]


def test_a_mean_over_rows_is_shared_by_rows_without_a_word(devices):
    trained = devices(jobs.losses, [*losses.APART])
    for name, (alone, *others) in trained.items():
        for each in others:
            assert not each[2], name
            if name != "dropout":  # whose noise is each device's own
                assert_as_on_one_device(alone, each)


def test_a_loss_that_names_the_axis_of_the_mesh_exchanges_by_itself(devices):
    together = devices(jobs.trained_by, "synced_batch_norm", (4,))
    assert not together[2]
    assert_as_on_one_device(devices(jobs.trained_by, "batch_norm", ()), together)


@pytest.mark.prove
@pytest.mark.parametrize(
    "policy", ["bf16-mixed", "fp16-mixed,scale=static:value=1024", "bf16-mixed,param=fp32:split"]
)
def test_gradients_of_a_whole_batch_are_exchanged_in_fp32(policy, devices):
    """What XLA's partitioner puts in: a sum of a weight's size is fp32. Activations may travel as they are."""
    shapes = [weight.shape for weight in losses.weights().values()]
    sizes = {",".join(map(str, each)) for shape in shapes for each in (shape, shape[::-1])}
    for name in ("contrastive", "masked_mean"):
        summed = [key for key in devices(jobs.exchanged_by, name, policy) if key[2] in sizes]
        assert summed
        assert {key[:2] for key in summed} == {("all-reduce", "f32")}


@pytest.mark.prove
def test_a_monitor_and_an_aux_of_a_whole_batch_have_one_part(devices):
    aux, layers, alone = devices(jobs.watched_whole)
    assert aux == (1, losses.ROWS)
    assert layers == alone
