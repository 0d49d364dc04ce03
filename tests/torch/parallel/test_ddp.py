"""DDP: policies that change, what travels, and numbers that are not finite on one rank."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.torch import prepare
from tests.torch.parallel import jobs
from tests.torch.parallel.bounds import assert_same

SPLIT = "bf16-mixed,param=fp32:split"


def change_policy_between(policies):
    """Two steps under the first policy, one under each of the others; None changes nothing. Also a refusal."""
    run, wrapped = jobs.begin(policies[0])
    results = [run.step(jobs.loss_of(wrapped), jobs.batches(step, 1)) for step in range(2)]
    for step, policy in enumerate(policies[1:], 2):
        if policy is not None:
            run.change_policy(policy)
        results.append(run.step(jobs.loss_of(wrapped), jobs.batches(step, 1)))
    rows = jobs.rows_of(results)
    try:
        run.change_policy("fp32")
    except HalfstepError as error:
        return rows, run.weights(), error.message
    return rows, run.weights(), ""


@pytest.mark.prove
def test_two_ranks_change_their_policy_as_one_unless_ddp_would_have_to_know(ranks):
    policies = (SPLIT, f"{SPLIT},norm=bf16", SPLIT)
    *alone, _ = change_policy_between(policies)
    results = ranks(change_policy_between, 2, policies)
    assert_same(SPLIT, tuple(alone), [tuple(each) for *each, _ in results])
    assert all("when it wrapped the model" in message for *_, message in results)


@pytest.mark.prove
def test_a_change_of_policy_leaves_what_ddp_sends(ranks):
    policy = "bf16-mixed,reduce=bf16"
    changed, kept = (ranks(change_policy_between, 2, (policy, other, other)) for other in (policy, None))
    for (rows, weights, _), (others, before, _) in zip(changed, kept, strict=True):
        assert rows == others
        assert all(torch.equal(weight, before[name]) for name, weight in weights.items())


def sent_in_a_step(policy):
    """What a step of two micro-batches sends, from a list and from a generator."""
    run, wrapped = jobs.begin(policy)
    run.step(jobs.loss_of(wrapped), jobs.batches(0, 1))
    run.step(jobs.loss_of(wrapped), jobs.batches(0, 1))  # DDP orders its buckets again in the second
    found = []
    for batches in (jobs.batches(2, 2), iter(jobs.batches(3, 2))):
        with jobs.Wire() as wire:
            run.step(jobs.loss_of(wrapped), batches)
        found.append(wire.sent)
    with torch.no_grad(), jobs.Wire() as wire:
        wrapped(jobs.batches(0, 1)[0])
    return found


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split"])
def test_gradients_travel_once_for_all_micro_batches_in_fp32(ranks, policy):
    every = 4 * sum(p.numel() for p in jobs.net().parameters())
    for found in ranks(sent_in_a_step, 2, policy):
        for sent in found:
            assert {(name, dtype) for name, dtype, _ in sent} == {("allreduce", torch.float32)}
            assert sum(nbytes for *_, nbytes in sent) == every + 4 * (3 + 2)


def without_a_wrapper():
    model = jobs.net()
    run = prepare(model, jobs.OPTIMIZERS["ours"](model.parameters()), "bf16-mixed")
    with pytest.raises(HalfstepError, match="nothing averages their gradients") as caught:
        run.step(jobs.loss_of(model), jobs.batches(0, 1))
    return caught.value.hint


def test_replicas_that_would_part_are_refused(ranks):
    for hint in ranks(without_a_wrapper, 2):
        assert "DistributedDataParallel(model)" in hint


def with_nan_on_one_rank(shape, where):
    """One rank's loss, or a gradient alone, is not finite in the second step; the scale cannot fall."""
    run, wrapped = jobs.begin("fp16-mixed,scale=dynamic:init=2:floor=2", "fused", shape)
    rows, bad = [], jobs.rank_and_ranks()[0] == 1

    def loss_fn(rows):
        loss = jobs.loss_of(wrapped)(rows)
        if bad and where != "gradient":
            return loss * float("nan") if where == "loss" else loss - float("inf")
        if bad:
            loss.register_hook(lambda grad: grad * float("inf"))
        return loss

    for step in range(3):
        result = run.step(loss_fn if step == 1 else jobs.loss_of(wrapped), jobs.batches(step, 2))
        rows.append((bool(result.skipped), float(result.scale), int(result.bad_rank)))
        if step == 1:
            with pytest.raises(ScalingError) if where != "loss alone" else nullcontext() as caught:
                run.check(result)
    said = str(caught.value) if caught else str(run.blame(loss_fn, jobs.batches(1, 2)))
    return rows, said, jobs.whole(run.model)


@pytest.mark.parametrize(
    ("shape", "where"),
    jobs.few(
        [*product((None, ()), ("loss", "gradient", "loss alone"))],
        *((None, "gradient"), ((), "loss"), (None, "loss alone"), ((), "loss alone")),
    ),
)
def test_a_nan_on_one_rank_skips_the_step_on_all_and_names_the_rank(ranks, shape, where):
    (first, said, weights), (second, same, others) = ranks(with_nan_on_one_rank, 2, shape, where)
    rank = -1 if where == "gradient" else 1
    assert first == second == [(False, 2.0, -1), (True, 2.0, rank), (False, 2.0, -1)]
    assert all(torch.equal(weights[name], others[name]) and weights[name].isfinite().all() for name in weights)
    assert said == same
    assert "rank 1: " + ("backward: gradient of" if where == "gradient" else "forward: the loss itself") in said
    assert said.endswith("; the loss was not finite, its gradients were") == (where == "loss alone")


def blamed(shape):
    """What is named if an exponential overflows on rank 1, and if the sum of gradients is beyond fp32."""
    run, wrapped = jobs.begin("bf16-mixed", "fused", shape)
    rank = jobs.rank_and_ranks()[0]

    def overflows(rows):
        loss = jobs.loss_of(wrapped)(rows)
        return loss + (loss * 0 + 1e4 * rank).exp()

    def adds_up(rows):
        loss = jobs.loss_of(wrapped)(rows)
        return loss + (run.model.norm.bias * 3e38).sum()  # its own value is 0

    return [run.blame(loss_fn, jobs.batches(0, 1)) for loss_fn in (overflows, adds_up)]


@pytest.mark.parametrize("shape", [None, pytest.param((), marks=pytest.mark.prove)])
def test_a_computation_on_one_rank_is_no_sum_over_ranks(ranks, shape):
    (overflow, total), others = ranks(blamed, 2, shape)
    assert others == [overflow, total]
    assert (overflow.where, overflow.operation, overflow.rank, overflow.micro_batch) == ("forward", "exp", 1, 0)
    assert (total.where, total.rank) == ("reduction", None), str(total)
