"""What ranks do in tests: train a small model on their share of a batch, in one process or in many."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.torch import AdamW, Muon, prepare

WORDS, WIDTH, ROWS = 50, 16, 8


def few(rows, *kept):
    """Marks all rows of a table but some to be run only when everything is proved."""
    return [row if row in kept else pytest.param(*row, marks=pytest.mark.prove) for row in rows]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)  # 33: shards are uneven

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embeddings, norms, biases."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def shard(model: nn.Module, *shape: int) -> None:
    """Shards a model over all ranks; two numbers: so many copies of so many shards."""
    names = ("copies", "shards")[-len(shape) :] if shape else ("shards",)
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "ours": lambda p: AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "muon": lambda p: matrices_and_rest([*p]),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}


def matrices_and_rest(parameters):
    """Muon for the matrices in blocks, as recipes have it, and AdamW for the rest.

    Its iteration is fp32: after a norm gradients have a singular value of zero, along which five steps multiply a
    rounding to bf16 that tips the other way by 3.4445^5 = 485, and no bound is left. test_muon.py has it in bf16.
    """
    matrices = [p for p in parameters if p.ndim == 2 and p.shape[0] != WORDS]
    rest = [p for p in parameters if p.ndim != 2 or p.shape[0] == WORDS]
    return [Muon(matrices, lr=1e-2, iteration="fp32"), AdamW(rest, lr=1e-2)]


def rank_and_ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batches(step: int, micro_batches: int) -> tuple[torch.Tensor, ...]:
    """This rank's share of the batch of a step, whatever the number of ranks."""
    rank, ranks = rank_and_ranks()
    made = torch.Generator().manual_seed(step)
    rows = torch.randint(0, WORDS, (ROWS, 12), generator=made).chunk(ranks)[rank]
    return rows.chunk(micro_batches)


def loss_of(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    """The mean over the tokens of a batch."""
    return lambda rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


def begin(policy="bf16-mixed", optimizer="ours", shape=None, clip_norm=1.0, **options):
    """A run, and the model to call. No shape: whole on each rank, or in one process."""
    model = net()
    run = prepare(model, policy, clip_norm=clip_norm, **options)
    if shape is not None and dist.is_initialized():
        shard(model, *shape)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() and shape is None else model
    run.attach(OPTIMIZERS[optimizer](model.parameters()))
    return run, wrapped


def rows_of(results):
    """The loss, norm and scale of each step, and whether it was skipped."""
    return [(float(r.loss), float(r.grad_norm), float(r.scale), bool(r.skipped)) for r in results]


def train(policy, optimizer="ours", shape=None, micro_batches=1, steps=3, **options):
    """Trains; returns the rows of steps, and the whole weights."""
    run, wrapped = begin(policy, optimizer, shape, **options)
    results = [run.step(loss_of(wrapped), batches(step, micro_batches)) for step in range(steps)]
    return rows_of(results), whole(run.model) if shape is not None else run.weights()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights, gathered from all ranks."""
    return {name: whole_tensor(p) for name, p in model.named_parameters()}


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, if another one is sharded like that."""
    if not hasattr(tensor, "full_tensor"):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements)


class Wire(TorchDispatchMode):
    """Lists what is sent, as (operation, dtype, bytes of the tensors that this rank gives)."""

    def __init__(self):
        super().__init__()
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, function, types, args, kwargs=None):
        if function.namespace == "c10d":
            # Collectives take (outputs, inputs, ...), or the tensors that are both.
            name = function.name().removeprefix("c10d::").split(".")[0].strip("_")
            given = args[0] if name == "allreduce" else args[1]
            tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
            self.sent += [(name, t.dtype, t.nbytes) for t in tensors]
        return function(*args, **(kwargs or {}))
