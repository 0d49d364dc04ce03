"""How the processes of a job share a model, and what they agree on at each update, in one small reduction.

    norm      of gradients whose shards each rank has: the root of the sum of squares. It decides whether the step
              is finite, so all ranks skip together
    weights   of the micro-batches, and their losses: means over ranks, as the engine averages gradients
    bad_rank  the first rank whose own loss is not finite

A process group makes its processes one job: a run is then one run on all of them. `share` gives each its part of a
model that a policy was applied to, before it gets its optimizers:

    none      every process holds everything, DDP averages gradients while the backward pass runs
    full      FSDP2: each block is gathered when it computes, and a process holds its share of all else
    hybrid    the same within a machine, over its fast links; machines hold the same and average their gradients
"""

import gc
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from halfstep.core.errors import ParallelError
from halfstep.torch.numerics.record import record_of, update_record
from halfstep.torch.numerics.shards import is_shard
from halfstep.torch.parallel.wire import sum_all

BUCKET = 2**23  # numbers that are reduced together
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # an attribute of a model, which DDP reads


def in_group() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def num_ranks() -> int:
    """Returns how many processes there are; 1 without a process group."""
    return dist.get_world_size() if in_group() else 1


def exclude_from_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Says to DDP, which will wrap the model, which parameters it must not wait for: they are averaged here."""
    ours = record_of(model).averaged
    before = [name for name in getattr(model, _IGNORED, []) if name not in ours]
    first = {p: name for name, p in model.named_parameters()}
    tied = [name for name, p in model.named_parameters(remove_duplicate=False) if first[p] in set(names)]
    update_record(model, averaged=tuple(tied) if in_group() else ())
    if in_group() and (ignored := [*before, *tied]):
        setattr(model, _IGNORED, ignored)
    elif hasattr(model, _IGNORED):
        delattr(model, _IGNORED)


def copies(parameters: Sequence[Tensor]) -> int:
    """Returns how many ranks have the same shard of each parameter; 0 if parameters are not sharded."""
    shards: list[Any] = [p for p in parameters if is_shard(p)]
    numbers = {
        math.prod(n for n, kind in zip(p.device_mesh.shape, p.placements, strict=True) if kind.is_replicate())
        for p in shards
    }
    return numbers.pop() if len(numbers) == 1 else 0


def from_all_ranks(value: Any) -> list[Any]:
    """Returns what each rank has, any Python object. Waits for the slowest."""
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def mean(value: Tensor | float, device: torch.device) -> Tensor:
    """Returns the mean over ranks of a number."""
    total = torch.as_tensor(value, dtype=torch.float32, device=device).clone()
    dist.all_reduce(total)
    return total / num_ranks()


def agree(
    norm: Tensor, num_copies: int, weights: Tensor | float, losses: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the norm of all shards, means of weights and of losses, and the first rank whose loss is not finite.

    That is -1 if all losses are finite; `num_copies` is that of `copies`.
    """
    every = num_ranks()
    total = torch.zeros(3 + every, device=norm.device)  # and for each rank whether its loss is bad
    rows = [norm.square() if num_copies else 0.0, weights, losses]
    for place, row in enumerate(rows):
        total[place] = row
    total[3 + dist.get_rank()] = ~total[2].isfinite()
    dist.all_reduce(total)
    squares, weight, loss = total[:3].unbind()
    bad = total[3:]
    first = torch.where(bad.any(), bad.argmax(), -1)
    return (squares / num_copies).sqrt() if num_copies else norm, weight / every, loss / every, first


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Returns the DDP modules around a model, which knows nothing of them; refuses replicas that would diverge."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    around = [wrapper for wrapper in found if any(module is model for module in wrapper.modules())]
    if not around:
        raise ParallelError(
            f"{num_ranks()} processes train, and nothing averages their gradients: their weights would part",
            hint="wrapped = DistributedDataParallel(model) after prepare(), and call `wrapped` in the loss "
            "function; or fully_shard(model) before run.attach(optimizers)",
        )
    return around


@torch.no_grad()
def same_as_rank_0(tensors: Sequence[Tensor]) -> None:
    """Makes tensors those of the first rank, as DDP does with those that it knows."""
    for tensor in tensors:
        dist.broadcast(torch.atleast_1d(tensor.detach()).view(torch.uint8), 0)  # gloo has no int16


@torch.no_grad()
def average(tensors: Sequence[Tensor], wire: torch.dtype) -> None:
    """Makes tensors their means over ranks, many of them in one reduction, which sends `wire` and sums in fp32."""
    bucket, size = list[Tensor](), 0
    for place, tensor in enumerate(tensors):
        bucket.append(tensor)
        size += tensor.numel()
        if size >= BUCKET or place == len(tensors) - 1:
            flat = _flatten_dense_tensors(bucket).float()
            if wire == torch.float32:
                dist.all_reduce(flat)
            else:
                flat = sum_all(flat, wire)
            flat.div_(num_ranks())
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))
            bucket, size = [], 0


@torch.no_grad()
def largest(tensor: Tensor) -> None:
    """Makes the numbers of a tensor the largest over ranks."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX)


def share(model: nn.Module, blocks: Sequence[nn.Module], shard: str, local: int) -> nn.Module:
    """Shares a model among all processes, `local` of them on each machine; returns what to call instead of it."""
    if shard == "none":
        ignored = {*getattr(model, _IGNORED, [])}
        if all(name in ignored for name, p in model.named_parameters() if p.requires_grad):
            return model  # the run averages all gradients itself
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    # A block returns its attention's values, which are a view; nothing writes to them.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPBlock\) returned a view tensor")
    device = next(model.parameters()).device
    mesh = _mesh(device, shard, local)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _mesh(device: torch.device, shard: str, local: int) -> Any:
    ranks = dist.get_world_size()
    if shard == "full":
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shards",))
    if local == ranks or ranks % local:
        machines = (
            "all processes are on one machine" if local == ranks else f"{ranks} processes are not {local} each"
        )
        raise ParallelError(
            f'parallel.shard = "hybrid" shards within a machine and copies between machines, and {machines}',
            hint='use parallel.shard = "full"; or start the same number of processes on each of several machines',
        )
    return init_device_mesh(device.type, (ranks // local, local), mesh_dim_names=("copies", "shards"))
