"""Many ranks train as one process: replicas (DDP) and shards (FSDP2), with every optimizer and kind of format."""

from itertools import product

import pytest

from tests.torch.parallel import jobs
from tests.torch.parallel.bounds import assert_same

SPLIT = "bf16-mixed,param=fp32:split"
EMULATED = "bf16-mixed,emulate=true"
FP8 = "fp8-mixed,emulate=true; **: compute=e4m3,grad=e5m2"
REPLICAS, SHARDS, FOUR_SHARDS, HYBRID = None, (), (4,), (2, 2)
# Every optimizer in fp16, whose steps may be skipped, and ours under every policy.
TABLE = [
    *product((2,), ("bf16-mixed", "fp16-mixed", SPLIT), ("ours", "fused"), (REPLICAS,)),
    *product((2,), ("fp16-mixed",), jobs.OPTIMIZERS, (SHARDS,)),
    *product((2,), ("fp32", "bf16-mixed", SPLIT), ("ours",), (SHARDS,)),
    *product((2,), (EMULATED, FP8), ("ours",), (REPLICAS, SHARDS)),
    *product((2,), ("bf16-mixed",), ("muon",), (REPLICAS, SHARDS)),
    *product((4,), ("bf16-mixed", SPLIT), ("ours",), (REPLICAS,)),
    *product((4,), ("bf16-mixed",), ("ours",), (FOUR_SHARDS, HYBRID)),
    *product((4,), (SPLIT, EMULATED), ("muon",), (REPLICAS,)),
    *product((4,), ("fp16-mixed", SPLIT), ("muon",), (SHARDS,)),
    *product((4,), ("fp16-mixed", EMULATED), ("muon",), (HYBRID,)),
]
QUICK = [(2, SPLIT, "ours", REPLICAS), (2, SPLIT, "ours", SHARDS), (2, "bf16-mixed", "ours", SHARDS)]
QUICK += [(2, "fp16-mixed", "fused", SHARDS), (2, "bf16-mixed", "muon", SHARDS)]


@pytest.mark.parametrize(("number", "policy", "optimizer", "shape"), jobs.few(TABLE, *QUICK))
def test_ranks_train_as_one(ranks, number, policy, optimizer, shape):
    micro_batches = number // 2
    alone = jobs.train(policy, optimizer, micro_batches=micro_batches)
    assert_same(policy, alone, ranks(jobs.train, number, policy, optimizer, shape, micro_batches))
