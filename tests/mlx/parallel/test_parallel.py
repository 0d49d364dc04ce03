"""Data parallel training on a ring of two processes: the bits of one process that accumulates the same batches."""

import mlx.core as mx
import pytest

from halfstep.core.errors import HalfstepError
from halfstep.mlx.parallel.job import open_host
from halfstep.mlx.parallel.ranks import ranks_of
from halfstep.training.job import open_job
from tests.mlx.parallel import jobs
from tests.mlx.parallel.ring import ring
from tests.refusals import refuses

FP16 = "compute=fp16,emulate=true,scale=dynamic:init=1024:interval=2:floor=256"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with ring(tmp_path_factory.mktemp("ring")) as call:
        yield call


@pytest.mark.prove
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


@pytest.mark.prove
def test_a_session_trains_with_the_others_of_its_job(ranks):
    alone, alone_state, *_ = jobs.session(True)
    for rows, state, trains_alone, shared in ranks(jobs.session, False):
        assert rows == [row | {"bad_rank": -1.0} for row in alone]
        assert state == alone_state
        assert trains_alone
        assert shared == ["a folder", ["", "!"]]


def test_nan_on_one_rank_skips_on_both_with_the_same_scale(ranks):
    (rows, states), other = ranks(jobs.skip, FP16)
    assert (rows, states) == other
    assert rows == [(False, 1024, -1), (True, 1024, 1), (False, 512, -1)]
    assert states[0] == states[1] != states[2]
    for refusal in ranks(jobs.skip, FP16.replace("floor=256", "floor=1024")):
        assert refusal.endswith("at its floor, 1024; forward: the loss of rank 1")


@pytest.mark.parametrize("what", ["policy", "clip_norm", "learning_rate", "weights"])
def test_ranks_with_different_settings_are_refused(ranks, what):
    name = {"weights": "arrays"}.get(what, what)
    for refusal in ranks(jobs.differ, what):
        assert refusal.startswith(f"processes differ in {name}: ")
        assert "rank 0" in refusal
        assert "rank 1" in refusal


def test_auto_is_refused_because_ranks_could_choose_differently(ranks):
    for refusal in ranks(jobs.differ, "auto"):
        assert refusal.startswith("`auto` is measured in each process")


def test_ranks_that_do_different_things_are_refused(ranks):
    one, two = ranks(jobs.stray)
    assert one.startswith("rank 0 is at update 3, and rank 1 at an evaluation")
    assert two.startswith("rank 1 is at an evaluation, and rank 0 at update 3")


def test_they_tell_each_other_texts_of_any_length(ranks):
    for lengths in ((0, 3), (5, 3000), (3000, 600)):
        assert ranks(jobs.tell, lengths) == [["x" * n for n in lengths]] * 2


def test_the_arrays_of_rank_0_come_bit_for_bit(ranks):
    one, two = ranks(jobs.first_weights)
    assert one == two
    assert one["a"][1] == bytes([0, 0, 0, 128] * 3)
    assert one["d"][1] == bytes([7, 0, 249, 255])


def test_small_arrays_are_summed_together_and_in_fp32(ranks):
    expected = {str(n): ("mlx.core.float32", [2.0 * n] * n) for n in range(1, 7)}
    assert ranks(jobs.sum_in_buckets, 2**23) == [([21], expected)] * 2
    assert ranks(jobs.sum_in_buckets, 6) == [([6, 9, 6], expected)] * 2


def test_a_rank_that_waited_too_long_says_for_what_and_ends(ranks, tmp_path):
    (answers, codes, printed), (_, none, nothing) = ranks(jobs.arrive_late, 0.2, tmp_path / "ended")
    assert (codes, none, nothing) == ([1], [], "")
    assert printed.startswith(
        "error: rank 0 has waited for 0.2 s at `the sums of update 7`: rank 1 did not arrive"
    )
    assert answers == [0, 1]


def test_a_group_is_asked_for_and_never_taken(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    monkeypatch.delenv("MLX_RANK", raising=False)
    assert ranks_of(None, 1.0) is None
    assert ranks_of(mx.distributed.init(), 1.0) is None  # of one process
    with refuses(HalfstepError, "the group is a `int`", "mx.distributed.init"):
        ranks_of(2, 1.0)
    with refuses(HalfstepError, "timeout=0", "600"):
        ranks_of(None, 0)
    monkeypatch.setenv("MLX_RANK", "1")
    with refuses(HalfstepError, "rank 1 of mlx.launch", "group=mx.distributed.init()"):
        ranks_of(None, 1.0)
    hosts = tmp_path / "hosts.json"
    hosts.write_text("\n")  # what `mlx.launch -n 1` writes, which MLX itself cannot read
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    assert ranks_of(None, 1.0) is None
    assert open_host() is None
    assert open_job().ranks == 1
