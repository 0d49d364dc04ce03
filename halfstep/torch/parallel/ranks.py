"""What the processes of a job agree on at each update, in one small reduction.

    norm      of gradients whose shards each rank has: the root of the sum of squares. It decides whether the step
              is finite, so all ranks skip together
    weights   of the micro-batches, and their losses: means over ranks, as the engine averages gradients

A process group makes its processes one job: a run is then one run on all of them.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def num_ranks() -> int:
    """Returns how many processes there are; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks. Without importing torch's module for such, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def copies(parameters: Sequence[Tensor]) -> int:
    """Returns how many ranks have the same shard of each parameter; 0 if parameters are not sharded."""
    numbers = {_copies(p) for p in parameters if is_shard(p)}
    return numbers.pop() if len(numbers) == 1 else 0


def _copies(parameter: Any) -> int:
    number = 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        number *= size if placement.is_replicate() else 1
    return number


def mean(value: Tensor | float, device: torch.device) -> Tensor:
    """Returns the mean over ranks of a number."""
    total = torch.as_tensor(value, dtype=torch.float32, device=device).clone()
    dist.all_reduce(total)
    return total / num_ranks()


def agree(norm: Tensor, num_copies: int, weights: Tensor | float, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm of all shards, and the means of weights and losses; `num_copies` is that of `copies`."""
    device = norm.device
    rows = [norm.square() if num_copies else norm.new_zeros(()), torch.as_tensor(weights, device=device), losses]
    total = torch.stack([row.to(torch.float32) for row in rows])
    dist.all_reduce(total)
    squares, weight, loss = total.unbind()
    every = num_ranks()
    return (squares / num_copies).sqrt() if num_copies else norm, weight / every, loss / every
