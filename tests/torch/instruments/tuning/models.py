"""Factories for `halfstep tune`: a regression by a small MLP, some of them with a fault."""

import torch
from torch import nn

WIDTH = 32


def net(fragile=""):
    model = nn.Sequential(
        nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16)
    )
    if fragile:  # a unit before it never fires, and its column is huge: see examples/fragile_layer.py
        with torch.no_grad():
            before, here = model[int(fragile) - 2], model[int(fragile)]
            before.weight[0], before.bias[0] = 0, -1
            here.weight[:, 0] = 2.0**16
    target = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    data = torch.Generator().manual_seed(2)
    inputs = [torch.randn(64, 16, generator=data) for _ in range(12)]
    batches = [(x, torch.relu(x @ target)) for x in inputs]

    def loss_fn(batch):
        return (model(batch[0]) - batch[1]).square().mean()

    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn, batches[:8], batches[8:]


def fragile():
    return net("2")


def one_batch():
    model, optimizer, loss_fn, batches, _ = net()
    return model, optimizer, loss_fn, batches[0]


def without_data():
    return net()[:2]


def no_batches():
    return *net()[:3], [], []


def alone():
    return nn.Linear(1, 1)
