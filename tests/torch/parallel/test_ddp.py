"""DDP: the same training as in one process, and masters that are split, whose gradients are reduced here."""

import pytest

from tests.torch.parallel import jobs
from tests.torch.parallel.bounds import assert_same


@pytest.mark.parametrize("optimizer", ["ours", "fused"])
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,param=fp32:split"])
def test_two_ranks_train_as_one(ranks, policy, optimizer):
    assert_same(policy, jobs.train(policy, optimizer), ranks(jobs.train, 2, policy, optimizer))


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split"])
def test_four_ranks_train_as_one(ranks, policy):
    alone = jobs.train(policy, micro_batches=2)
    assert_same(policy, alone, ranks(jobs.train, 4, policy, "ours", None, 2))


def test_split_masters_are_whole_shards_under_fsdp(ranks):
    policy = "bf16-mixed,param=fp32:split"
    assert_same(policy, jobs.train(policy), ranks(jobs.train, 2, policy, "ours", ()))
