"""A DDP loop for torchrun: fp32 weights, or bf16 ones, whose gradients DDP sums in bf16."""

import sys

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).to(getattr(torch, sys.argv[1]))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    try:
        for _ in range(50):
            optimizer.zero_grad()
            ddp(torch.randn(2, 8, dtype=model[0].weight.dtype)).float().square().mean().backward()
            optimizer.step()
    finally:
        dist.barrier()
        dist.destroy_process_group()
        print(f"rank {sys.argv[1]} left")


main()
