"""HS302 on two ranks: whatever sums gradients below fp32 is seen, and ranks agree."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfstep.core.audit.engine import check
from halfstep.core.audit.record import Record
from halfstep.torch.instruments.collect.watch import Watch
from tests.processes import run_ranks

BF16 = torch.bfloat16


def sharded(model, reduce):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce))


def wrapped(model, kind):
    """Gives a model one of the ways to sum gradients over ranks."""
    if kind.startswith("fsdp"):
        return sharded(model, BF16 if kind == "fsdp bf16" else torch.float32)
    if kind == "by hand":
        return model
    model = nn.parallel.DistributedDataParallel(model.to(BF16) if kind == "ddp bf16" else model)
    if kind == "ddp hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
    return model


def watched(kinds):
    """Trains a few updates in each way; returns the records as plain data."""
    dist.init_process_group("gloo")
    records = []
    for kind in kinds:
        with Watch(formats=False) as watch:
            torch.manual_seed(0)
            model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            dtype = BF16 if kind == "ddp bf16" else torch.float32
            for _ in range(2):
                model(torch.ones(2, 4, dtype=dtype)).float().mean().backward()
                if kind == "by hand":
                    dist.all_reduce(torch.ones(3, dtype=BF16))  # not a gradient
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
                optimizer.step()
                optimizer.zero_grad()
        records.append(watch.record().to_dict())
    dist.destroy_process_group()
    return records


@pytest.mark.prove
def test_sums_over_ranks():
    expected = {
        "ddp fp32": [],
        "ddp bf16": ["DistributedDataParallel sums gradients in bf16 over 2 ranks"],
        "ddp hook": ["fp16_compress_hook sums gradients in fp16 over 2 ranks"],
        "fsdp fp32": [],
        "fsdp bf16": ["reduce_scatter sums gradients in bf16 over 2 ranks"],
        "by hand": [],
    }
    ranks = run_ranks(watched, list(expected))
    for (kind, messages), *records in zip(expected.items(), *ranks, strict=True):
        found = check([Record.from_dict(each) for each in records], select=["HS302"])
        assert [finding.message for finding in found] == messages, kind
        assert all(finding.ranks == [0, 1] for finding in found)
