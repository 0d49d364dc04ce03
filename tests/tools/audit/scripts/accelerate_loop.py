"""A loop in the shape of Accelerate's nlp_example: prepare, accumulate, clip, step, schedule."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, mixed_precision=sys.argv[1], gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    data = DataLoader(TensorDataset(torch.randn(512, 16), torch.randint(4, (512,))), batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    total = 0.0
    for x, y in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            total += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"mean loss {total / len(data)}")


main()
