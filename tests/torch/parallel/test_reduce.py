"""The role `reduce`: what travels is narrow, and the sum over ranks is fp32."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from halfstep.torch import prepare
from tests.torch.parallel import jobs

SPLIT = ",param=fp32:split"
TABLE = [(*row, split) for row in (("ddp", 2), ("fsdp", 2), ("fsdp", 4)) for split in ("", SPLIT)]
WAYS = {"ddp": None, "fsdp": (), "hybrid": (2, 2)}


def one_step(policy, way):
    """The gradients that an update used, each rank's own before they were reduced, and what was sent."""
    model = jobs.net()
    run = prepare(model, policy)
    shape = WAYS[way]
    if shape is not None:
        jobs.shard(model, *shape)
    wrapped = DistributedDataParallel(model) if shape is None else model
    run.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    before = run.weights() if shape is None else jobs.whole(model)
    with jobs.Wire() as wire:
        run.step(jobs.loss_of(wrapped), jobs.batches(0, 1))
    after = run.weights() if shape is None else jobs.whole(model)
    plain = jobs.net()
    alone = prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0), "bf16-mixed")
    alone.backward(jobs.loss_of(plain)(*jobs.batches(0, 1)))
    own = {name: alone.accumulation.gradients([p])[id(p)].clone() for name, p in plain.named_parameters()}
    return own, {name: (before[name], after[name]) for name in before}, wire.sent


@pytest.mark.parametrize(("way", "number", "split"), jobs.few(TABLE, ("ddp", 2, SPLIT), ("fsdp", 2, "")))
def test_gradients_are_rounded_once_and_summed_in_fp32(ranks, way, number, split):
    """The step of SGD at a rate of 1 is the mean of what each rank sent, in the one order of the sum."""
    found = ranks(one_step, number, f"bf16-mixed,reduce=bf16{split}", way)
    for name, (before, after) in found[0][1].items():
        sent = torch.stack([own[name].bfloat16() for own, *_ in found])
        assert torch.equal(after, before - sent.sum(0, dtype=torch.float32) / number), name
    assert all(torch.equal(found[0][1][name][1], other[name][1]) for _, other, _ in found for name in other)


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=pytest.mark.prove)])
def test_less_travels(ranks, way):
    wide, narrow = (ranks(one_step, 2, f"bf16-mixed,reduce={reduce}", way)[0][2] for reduce in ("fp32", "bf16"))
    reduced = {"ddp": "allreduce", "fsdp": "reduce_scatter_base"}[way]
    before = sum(nbytes for name, dtype, nbytes in wide if name == reduced and nbytes > 100)
    after = [(dtype, nbytes) for name, dtype, nbytes in narrow if name == "alltoall_base"]
    assert {dtype for dtype, _ in after} == {torch.bfloat16}
    assert sum(nbytes for _, nbytes in after) == before // 2
    assert not [row for row in narrow if row[0] == reduced and row[2] > 100]


@pytest.mark.prove
def test_copies_of_shards_add_their_sums_in_fp32(ranks):
    found = ranks(one_step, 4, "bf16-mixed,reduce=bf16", "hybrid")
    for name, (before, after) in found[0][1].items():
        sent = torch.stack([own[name].bfloat16() for own, *_ in found]).float()
        halves = [(sent[0] + sent[1]) / 2, (sent[2] + sent[3]) / 2]
        assert torch.equal(after, before - (halves[0] + halves[1]) / 2), name


@pytest.mark.parametrize(
    "policy", ["bf16-true", pytest.param("bf16-mixed,accumulate=bf16", marks=pytest.mark.prove)]
)
def test_what_is_summed_beside_parameters_is_averaged_in_fp32(ranks, policy):
    """Narrow masters, and sums in another format: DDP does not see them."""
    (loss, norm), *_ = summed_beside(policy)
    for first, weights, sent in (found := ranks(summed_beside, 2, policy)):
        assert {dtype for name, dtype, _ in sent if name == "allreduce"} == {torch.float32}
        assert all(torch.equal(weights[name], found[0][1][name]) for name in weights)
        assert first[0] == pytest.approx(loss, rel=jobs.ROWS * 11 * 2.0**-23)  # the order of the sum
        assert first[1] == pytest.approx(norm, rel=2.0**-8)  # gradients of micro-batches are rounded to bf16


def summed_beside(policy):
    """Loss and norm of the first step of two, the weights after both, what the second sent. No DDP is needed."""
    model = jobs.net()
    run = prepare(model, policy)
    run.attach(jobs.OPTIMIZERS["ours"](model.parameters()))
    first = run.step(jobs.loss_of(model), jobs.batches(0, 2))
    with jobs.Wire() as wire:
        run.step(jobs.loss_of(model), jobs.batches(1, 2))
    return (float(first.loss), float(first.grad_norm)), run.weights(), wire.sent


def left_to_ddp(model):
    return getattr(model, "_ddp_params_and_buffers_to_ignore", None)


def prepared_again():
    model = jobs.net()
    run = prepare(model, "bf16-mixed,param=fp32:split")
    ignored = left_to_ddp(model)
    run.attach(jobs.OPTIMIZERS["ours"](model.parameters())).unprepare()
    return ignored, left_to_ddp(model)


def test_a_model_that_is_given_back_is_averaged_by_ddp_again(ranks):
    for ignored, after in ranks(prepared_again, 2):
        assert {"embedding.weight", "head.weight", "blocks.0.up.weight"} <= set(ignored)
        assert after is None
