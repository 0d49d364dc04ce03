"""Matrices that ranks share for work on whole ones: each rank owns some, works on those, and all get the results.

    replicas    every rank has every matrix. Owners work, then all gather the results: one exchange
    shards      every rank has some rows of every matrix. They travel to the owner, and the results' rows back: two

Owners are chosen so that ranks have about the same work, by a rule that every rank evaluates alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.core.errors import ParallelError
from halfstep.torch.numerics.shards import all_gather, is_shard

Work = Callable[[Tensor], Tensor]  # on matrices of one shape: a batch in, a batch of the same shape out
# Of parameters that have the same shape and group: what to work on, of each as much as this rank has.
Inputs = Callable[[Sequence[Tensor]], Tensor]


def owners(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Returns the owner of each matrix: the largest first, each to the rank that has the least work so far."""
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    loads, owner = [0] * ranks, [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owner[place] = min(range(ranks), key=loads.__getitem__)
        loads[owner[place]] += costs[place]
    return owner


def group_of(parameter: Any) -> Any:
    """Returns the ranks that have the rows of a shard."""
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard() and placement.dim != 0:
            raise ParallelError(
                f"a matrix of shape {tuple(parameter.shape)} is sharded by its columns, and Muon takes rows",
                hint="fully_shard without a shard_placement_fn shards by rows; or give it to AdamW",
            )
        if placement.is_shard():
            return parameter.device_mesh.get_group(dim)
    return None


def work_on_owned(
    batches: Sequence[Sequence[Tensor]], inputs: Sequence[Inputs], work: Work, out: torch.dtype
) -> Mapping[int, Tensor]:
    """Returns the results for batches of parameters, in `out`, by id; of shards, this rank's rows."""
    params = [p for batch in batches for p in batch]
    if is_shard(params[0]):
        return _of_shards(batches, inputs, work, out)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    owner = dict(zip(map(id, params), owners([p.shape for p in params], ranks), strict=True))
    done: dict[int, Tensor] = {}
    for batch, give in zip(batches, inputs, strict=True):
        if own := [p for p in batch if owner[id(p)] == rank]:
            done |= zip(map(id, own), work(give(own)).to(out), strict=True)
    return _gather_results(params, owner, done, ranks, out)


def _of_shards(
    batches: Sequence[Sequence[Tensor]], inputs: Sequence[Inputs], work: Work, out: torch.dtype
) -> Mapping[int, Tensor]:
    params = [p for batch in batches for p in batch]
    group = group_of(params[0])
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    owner = owners([p.shape for p in params], ranks)
    owned = [[p for p, each in zip(params, owner, strict=True) if each == r] for r in range(ranks)]
    mine = owned[rank]
    rows = {id(p): [_rows(p.shape[0], r, ranks) for r in range(ranks)] for p in params}
    given = [m for batch, give in zip(batches, inputs, strict=True) for m in give(batch)]
    here = dict(zip(map(id, params), given, strict=True))
    # My rows of each matrix, to its owner; from each rank, its rows of mine.
    received = _exchange(
        [[here[id(p)] for p in theirs] for theirs in owned],
        [[(rows[id(p)][r], p.shape[1]) for p in mine] for r in range(ranks)],
        torch.float32,
        group,
    )
    whole = {id(p): torch.cat(parts) for p, parts in zip(mine, zip(*received, strict=True), strict=True)}
    for batch in batches:
        if own := [p for p in batch if id(p) in whole]:
            whole |= zip(map(id, own), work(torch.stack([whole[id(p)] for p in own])).to(out), strict=True)
    parts = {id(p): whole[id(p)].split(rows[id(p)]) for p in mine}
    back = _exchange(
        [[parts[id(p)][r] for p in mine] for r in range(ranks)],
        [[(rows[id(p)][rank], p.shape[1]) for p in theirs] for theirs in owned],
        out,
        group,
    )
    return {id(p): m for theirs, got in zip(owned, back, strict=True) for p, m in zip(theirs, got, strict=True)}


def _rows(total: int, rank: int, ranks: int) -> int:
    """Returns how many rows of a matrix a rank has, as torch.chunk deals them."""
    each = -(-total // ranks)
    return max(0, min(each, total - rank * each))


def _gather_results(
    params: Sequence[Tensor], owner: Mapping[int, int], done: Mapping[int, Tensor], ranks: int, out: torch.dtype
) -> dict[int, Tensor]:
    """Returns the results of all ranks."""
    sizes, places = [0] * ranks, {}
    for p in params:
        places[id(p)] = sizes[owner[id(p)]]
        sizes[owner[id(p)]] += p.numel()
    sent = torch.zeros(max(sizes), dtype=out, device=params[0].device)
    for key, result in done.items():
        sent[places[key] : places[key] + result.numel()] = result.flatten()
    every = sent.new_empty(ranks * len(sent))
    all_gather(every, sent)
    starts = {id(p): owner[id(p)] * len(sent) + places[id(p)] for p in params}
    return {id(p): every[starts[id(p)] :][: p.numel()].view(p.shape) for p in params}


def _exchange(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, int]]], wire: torch.dtype, group: Any
) -> list[list[Tensor]]:
    """Sends each rank a list of matrices, and returns what each rank has sent, whose shapes are known."""
    flat = torch.cat([m.flatten() for matrices in sent for m in matrices]).to(wire)
    counts = [sum(rows * columns for rows, columns in given) for given in shapes]
    received = flat.new_empty(sum(counts))
    dist.all_to_all_single(received, flat, counts, [sum(m.numel() for m in ms) for ms in sent], group=group)
    found = []
    for part, given in zip(received.split(counts), shapes, strict=True):
        pieces = part.split([rows * columns for rows, columns in given])
        found.append([piece.view(shape) for piece, shape in zip(pieces, given, strict=True)])
    return found
