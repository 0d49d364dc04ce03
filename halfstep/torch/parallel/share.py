"""How the processes of a job share a model that a policy was applied to, before it gets its optimizers.

none      every process holds everything, DDP averages gradients while the backward pass runs
full      FSDP2: each block is gathered when it computes, and a process holds its share of all else
hybrid    the same within a machine, over its fast links; machines hold the same and average their gradients
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from halfstep.core.errors import HalfstepError


def share(model: nn.Module, blocks: Sequence[nn.Module], shard: str, local: int) -> nn.Module:
    """Shares a model among all processes, `local` of them on each machine; returns what is called in its place."""
    if shard == "none":
        ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", [])}
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
        raise HalfstepError(
            f'parallel.shard = "hybrid" shards within a machine and copies between machines, and {machines}',
            hint='use parallel.shard = "full"; or start the same number of processes on each of several machines',
        )
    return init_device_mesh(device.type, (ranks // local, local), mesh_dim_names=("copies", "shards"))
