"""What a job sends, by formula: bytes of each rank.

What a rank sends of a tensor of B bytes, with n ranks that each send to a neighbor (a ring):

    gather              (n - 1) / n B       every rank has one part, and all get the whole
    reduce to parts     (n - 1) / n B       every rank has the whole, and each gets one part of the sum
    reduce              2 (n - 1) / n B     the two after each other
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from halfstep.core.policy import Policy
from halfstep.torch.numerics.dtypes import dtype_of


class Sent(NamedTuple):
    """Bytes that one rank sends."""

    forward: int  # weights, for each micro-batch
    backward: int  # weights again, for each micro-batch
    gradients: int  # for each update


def ring_share(ring: int, nbytes: int) -> int:
    """Returns what a rank sends when this many bytes are gathered, or reduced to parts, around a ring."""
    return nbytes * (ring - 1) // ring


def gradient_traffic(numbers: int, policy: Policy, ranks: int) -> Sent:
    """Returns what replicas send of the gradients of a number of elements."""
    narrow = dtype_of(policy.reduce).itemsize
    return Sent(0, 0, ring_share(ranks, numbers * narrow) + ring_share(ranks, numbers * 4))


def shard_traffic(groups: Iterable[tuple[Any, bool]], gathered_in: Any, policy: Policy) -> Sent:
    """Returns what FSDP sends for groups of parameters, each with whether the backward pass gathers it again."""
    forward = backward = gradients = 0
    for group, again in groups:
        shards = group.mesh_info.shard_mesh_size
        copies = getattr(group.mesh_info, "replicate_mesh_size", 1)
        parts = [(p, p.padded_sharded_param_size.numel()) for p in group.fsdp_params]
        weights = ring_share(shards, shards * sum(part * gathered_in(p).itemsize for p, part in parts))
        forward += weights
        backward += weights if again else 0
        trained = sum(part for p, part in parts if p.sharded_param.requires_grad)
        gradients += ring_share(shards, shards * trained * dtype_of(policy.reduce).itemsize)
        gradients += 2 * ring_share(copies, trained * 4)
    return Sent(forward, backward, gradients)


def block_traffic(
    inside: Sequence[tuple[int, int]], outside: Sequence[tuple[int, int]], policy: Policy, shards: int, copies: int
) -> Sent:
    """Returns what FSDP will send of a model whose blocks are sharded one by one, and the rest with the model.

    Parameters are (numbers, bytes of each that travel). The backward pass gathers those `inside` blocks again.
    """
    within, around_them = (ring_share(shards, sum(n * width for n, width in part)) for part in (inside, outside))
    numbers = sum(n for n, _ in (*inside, *outside))
    gradients = ring_share(shards, numbers * dtype_of(policy.reduce).itemsize) + 2 * ring_share(
        copies, numbers * 4 // shards
    )
    return Sent(within + around_them, within, gradients)
