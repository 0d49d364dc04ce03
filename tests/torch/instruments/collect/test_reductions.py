"""On two ranks: whatever sums gradients below fp32 is seen, ranks agree, and a sharded tensor has one name."""

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


def sharded_in_bf16():
    """Trains a pure bf16 model whose block and root are sharded; returns the record as plain data."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    with Watch(formats=False) as watch:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 1)).to(BF16)
        fully_shard(model[1])
        fully_shard(
            model
        )  # between forward and backward, the root has its whole parameters in place of the shards
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(torch.arange(4)).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    return watch.record().to_dict()


def test_a_sharded_tensor_is_named_once():
    (found,) = check([*map(Record.from_dict, run_ranks(sharded_in_bf16))], select=["HS101"])
    assert found.where == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert found.ranks == [0, 1]
    assert "test_reductions.py" in found.place


def averaged_shards(dtypes):
    """Trains a sharded model beside an average of its shards in each format; returns errors."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    gathered, found = [], []
    DTensor.full_tensor = DTensor.redistribute = lambda *_, **__: gathered.append(1)
    for dtype in dtypes:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 32), nn.Sequential(*(nn.Identity() for _ in range(500))), nn.Linear(32, 1)
        )
        fully_shard(fully_shard(model[0]) and model)
        with Watch() as watch:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            average = [p.detach().clone().to(dtype) for p in model.parameters()]
            for _ in range(6):
                model(torch.randn(2, 16)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, p in zip(average, model.parameters(), strict=True):
                        mean.lerp_(p.to(dtype), 1e-4)
        record = watch.record()
        found.append([(each.rule, each.where[0]) for each in check(record) if each.severity == "error"])
        assert (record.updates, gathered, watch.guard.failure) == (6, [], None)
    dist.destroy_process_group()
    return found


@pytest.mark.prove
def test_averages_of_shards_are_seen_and_nothing_is_gathered():
    for found in run_ranks(averaged_shards, [torch.float32, BF16, torch.float64]):
        assert found == [[], [("HS108", "0.weight")], []]
