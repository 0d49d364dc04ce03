"""What each rank holds and sends, counted, against the formulas that docs and summaries use."""

import math

import pytest
import torch

from halfstep.torch import prepare
from halfstep.torch.numerics.shards import local
from halfstep.torch.parallel.sizes import ring_share
from tests.torch.parallel import jobs

SPLIT = "bf16-mixed,param=fp32:split"
SHAPES = {"ddp": None, "fsdp": (), "hybrid": (2, 2)}


def held(shapes, rank, shards, *, split=False):
    """Bytes of weights, remainders, gradients and AdamW's moments of a rank; FSDP2 deals rows."""
    numbers = 0
    for shape in shapes:
        part = -(-shape[0] // shards)
        numbers += max(0, min(part, shape[0] - rank * part)) * math.prod(shape[1:])
    half = 2 * numbers if split and shards == 1 else 0  # shards of split masters are whole
    return [4 * numbers - half, half, 4 * numbers, 8 * numbers]


def counted(policy, way):
    """What a rank of a job holds and sends in a step of two micro-batches; what formulas and summary say."""
    rank, ranks = jobs.rank_and_ranks()
    shapes = [tuple(p.shape) for p in jobs.net().parameters()]
    matrices = [shape for shape in shapes if len(shape) == 2]
    shape = SHAPES[way] if ranks > 1 else None
    run, wrapped = jobs.begin(policy, shape=shape, clip_norm=0.0)
    for step in range(2):
        run.step(jobs.loss_of(wrapped), jobs.batches(step, 2))
    with jobs.Wire() as wire:
        run.step(jobs.loss_of(wrapped), jobs.batches(3, 2))
    run.backward(jobs.loss_of(wrapped)(*jobs.batches(4, 1)))
    parameters, sums = [*run.model.parameters()], run.accumulation.sums
    states = [s for p in parameters for k, s in run.optimizers[0].state[p].items() if k != "step"]
    found = [[local(p) for p in parameters], [*run.masters.remainders.values()]]
    found += [[local(sums.get(id(p), p.grad)) for p in parameters], [*map(local, states)]]
    shards = 1 if shape is None else shape[-1] if shape else ranks
    place = rank % shards
    expected = [held(shapes, place, shards)]
    if policy == SPLIT:  # the matrices
        rest = [s for s in shapes if s not in matrices]
        expected = [held(matrices, place, shards, split=True), held(rest, place, shards)]
    here = [sum(t.nbytes for t in tensors) for tensors in found]
    return here, [sum(column) for column in zip(*expected, strict=True)], wire.sent, run.sent(), run.summary()


POLICIES = ("bf16-mixed", SPLIT, "bf16-mixed,reduce=bf16")
# With four ranks as with two, but for their number: of what is not hybrid, that with the most to send.
TABLE = [(*row, p) for row in (("fsdp", 2), ("ddp", 2), ("hybrid", 4)) for p in POLICIES]
TABLE += [("fsdp", 4, POLICIES[2]), ("ddp", 4, POLICIES[2])]


def sent_around(rows, ring):
    """What a rank has sent of what it gave to the engine."""
    each = {"allreduce": 2, "reduce_scatter_base": 1, "alltoall_base": 1}
    whole = [
        (each.get(name, 1), ring * nbytes if name == "allgather_base" else nbytes) for name, _, nbytes in rows
    ]
    return sum(times * ring_share(ring, nbytes) for times, nbytes in whole)


@pytest.mark.parametrize(("way", "number", "policy"), jobs.few(TABLE, ("fsdp", 2, SPLIT)))
def test_ranks_hold_and_send_what_the_formulas_say(ranks, way, number, policy):
    shards = {"ddp": number, "fsdp": number, "hybrid": 2}[way]
    for here, expected, rows, formula, summary in ranks(counted, number, policy, way):
        assert here == expected
        rows = [row for row in rows if row[2] > 100]  # not what ranks agree on
        gathers = [row for row in rows if row[0] == "allgather_base" and way != "ddp"]
        assert sent_around(gathers, shards) == 2 * (formula.forward + formula.backward)
        copies = [row for row in rows if row[0] == "allreduce" and way == "hybrid"]
        others = [row for row in rows if row not in gathers and row not in copies]
        gradients = sent_around(others, shards) + sent_around(copies, number // shards)
        # Buckets of DDP are padded to numbers that divide.
        assert gradients == pytest.approx(formula.gradients, abs=8 * number * len(rows) if way == "ddp" else 0)
        assert f"{number} ranks, " in summary
        assert ("split masters are fp32 shards" in summary) == (policy == SPLIT and way != "ddp")


@pytest.mark.parametrize("policy", ["bf16-mixed", SPLIT])
def test_one_process_holds_what_the_formula_says(policy):
    here, expected, sent, _, summary = counted(policy, "ddp")
    assert here == expected
    assert not sent
    assert "ranks" not in summary


def test_one_process_says_that_nothing_travels():
    model = torch.nn.Linear(4, 4)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed,reduce=bf16")
    assert "one process: nothing travels, so `reduce=bf16` changes nothing" in run.summary()
