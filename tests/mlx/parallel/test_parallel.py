"""Data parallel training on a ring of two processes: the bits of one process that accumulates the same batches."""

import mlx.core as mx
import pytest

from halfstep.core.errors import HalfstepError
from halfstep.mlx.parallel import ranks_of
from tests.mlx.parallel import jobs
from tests.mlx.parallel.ring import ring
from tests.refusals import refuses

FP16 = "compute=fp16,emulate=true,scale=dynamic:init=1024:interval=2:floor=256"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with ring(tmp_path_factory.mktemp("ring")) as call:
        yield call


@pytest.mark.parametrize(
    ("policy", "unscales"),
    [("bf16-mixed,emulate=true", False), (FP16, True), ("bf16-mixed,param=fp32:split,accumulate=bf16", False)],
)
def test_two_ranks_train_as_one_process_does(ranks, policy, unscales):
    """Rank 0 has two micro-batches and rank 1 the third: the sum (a + b) + c is the one that one process takes."""
    both = ranks(jobs.train, policy, False, unscales)
    (rows, end, summed, summary), (other_rows, other_end, other_summed, _) = both
    assert (rows, end, summed) == (other_rows, other_end, other_summed)
    if "accumulate" not in policy:  # else one process rounds what ranks sum in fp32
        alone, alone_end, none, _ = jobs.train(policy, True, unscales)
        statistics = {name for name in end if "running" in name}  # of rank 0's batches
        assert rows == alone
        assert {k: v for k, v in end.items() if k not in statistics} == {
            k: v for k, v in alone_end.items() if k not in statistics
        }
        assert not none
    gradients = [entry for entry in summed if entry[0] != "mlx.core.uint8"]
    assert gradients == [("mlx.core.float32", 4 * 8 + 3 * 8)] * jobs.STEPS  # one sum per update
    assert "rank 0 of 2: each update sums 224 bytes of fp32 gradients over ranks" in summary
