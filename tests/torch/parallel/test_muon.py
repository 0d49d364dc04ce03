"""Muon shared over ranks: each orthogonalizes some of the matrices, and all make the same updates."""

import pytest
import torch

from halfstep.torch import Muon
from halfstep.torch.optim.owners import owners
from tests.torch.parallel import jobs

SHAPES = [(33, 16), (16, 33), (16, 16), (33, 16), (5, 7), (1, 3)]  # uneven shards, and ranks with no row


def test_owners_have_about_the_same_work():
    shapes = [torch.Size(s) for s in [(64, 64)] * 5 + [(32, 64)] * 6 + [(8, 8)] * 3]
    for ranks in (1, 2, 3, 4, 8):
        chosen = owners(shapes, ranks)
        costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
        loads = [sum(c for c, o in zip(costs, chosen, strict=True) if o == rank) for rank in range(ranks)]
        assert max(loads) - min(loads) <= max(costs)
    assert owners(shapes[:2], 4) == [0, 1]


def three_updates(shape, iteration, bad=()):
    """Steps Muon with the same gradients on all ranks; returns weights and momenta, whole."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList(torch.randn(s, generator=generator) for s in SHAPES)
    if shape is not None:
        model.blocks = []
        jobs.shard(model, *shape)
    parameters = [*model.weights]
    optimizer = Muon(parameters, lr=0.1, weight_decay=0.1, iteration=iteration)
    optimizer._shares = shape is None and jobs.rank_and_ranks()[1] > 1
    for step in range(3):
        for p, s in zip(parameters, SHAPES, strict=True):
            grad = torch.randn(s, generator=generator)
            p.grad = jobs.like(grad, p)
        optimizer.step(found_inf=torch.tensor(float(step in bad)))
    states = [optimizer.state[p]["momentum"] for p in parameters]
    return [jobs.whole_tensor(t) for t in (*parameters, *states)]


TABLE = [(*row, it) for row in ((None, 2), ((), 2), (None, 4), ((), 4), ((2, 2), 4)) for it in ("fp32", "bf16")]


@pytest.mark.parametrize(("shape", "number", "iteration"), jobs.few(TABLE, (None, 2, "bf16"), ((), 2, "bf16")))
def test_ranks_make_the_updates_of_one_process_bit_for_bit(ranks, shape, number, iteration):
    alone = three_updates(None, iteration, (1,))
    for found in ranks(three_updates, number, shape, iteration, (1,)):
        assert all(map(torch.equal, found, alone))
