"""The role `reduce`: gradients that travel in a narrower format than they are summed in.

A reduction in bf16 would also add in bf16, and lose what a sum of many ranks needs. So each rank sends every other
one the part that it is to sum, rounded once; the sum is fp32.

    FSDP2    instead of its reduce-scatter, through `set_custom_reduce_scatter`: half the bytes. Copies of shards
             (HSDP) then add their sums in fp32
    DDP      as a communication hook; the sums are gathered in fp32: three quarters of the bytes
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.functional import pad

from halfstep.core.errors import ParallelError
from halfstep.torch.numerics.shards import all_gather


def sum_part(given: Tensor, group: Any, wire: torch.dtype) -> Tensor:
    """Returns the fp32 sum over ranks of this rank's part of a flat tensor, whose parts travel in `wire`."""
    ranks = dist.get_world_size(group)
    sent = given.to(wire)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.view(ranks, -1).sum(0, dtype=torch.float32)


def sum_all(given: Tensor, wire: torch.dtype) -> Tensor:
    """Returns the fp32 sum over ranks of a flat tensor, which travels there in `wire` and back in fp32."""
    ranks = dist.get_world_size()
    part = sum_part(pad(given, (0, -given.numel() % ranks)), None, wire)
    total = part.new_empty(part.numel() * ranks)
    all_gather(total, part)
    return total[: given.numel()]


class NarrowReduceScatter:
    """What FSDP calls instead of its own reduce-scatter."""

    def __init__(self, wire: torch.dtype):
        self.wire = wire

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory, as FSDP's own would."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Writes the sum or the mean over ranks of this rank's part."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ParallelError(
                "FSDP was given a factor to divide gradients by, and the policy narrows what travels",
                hint="leave set_gradient_divide_factor out: run.step averages; or write `reduce=fp32`",
            )
        total = sum_part(input_tensor, group, self.wire)
        output_tensor.copy_(total / dist.get_world_size(group) if op == dist.ReduceOp.AVG else total)


def averaging_hook(wire: torch.dtype) -> Callable[[Any, GradBucket], torch.futures.Future[Tensor]]:
    """Returns a communication hook of DDP that averages a bucket of gradients."""
    streams: dict[torch.device, Any] = {}

    def average(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[flat.device] if flat.is_cuda else None
        )
        if not flat.is_cuda:
            future.set_result(sum_all(flat, wire).div_(dist.get_world_size()))
            return future
        # Beside the backward pass, which continues: DDP waits for the future.
        side = streams.setdefault(flat.device, torch.cuda.Stream(flat.device))
        side.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(side):
            flat.record_stream(side)
            future.set_result(sum_all(flat, wire).div_(dist.get_world_size()))
        return future

    return average
