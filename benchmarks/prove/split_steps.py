"""Compares a thousand steps on split masters with a thousand on fp32 masters: the same bits, for every optimizer.

    python benchmarks/prove/split_steps.py [--steps 1000] [--device cuda] [--only "halfstep AdamW" "AdamW fused"]

Each optimizer trains a small language model with a tied head on random tokens twice, with fp32 compute, where the
joined master multiplies. Losses, masters and optimizer state must agree in every bit. The runs include
micro-batches, clipping and some non-finite steps. Exit code 1 if anything differs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from halfstep.torch import AdamW, Muon, prepare

WIDTH, VOCABULARY, CONTEXT = 24, 31, 12


class Net(nn.Module):
    """A block between an embedding and a head that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def rest(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim < 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "halfstep AdamW": lambda m: [AdamW(m.parameters(), lr=1e-3, weight_decay=0.1)],
    "halfstep Muon": lambda m: [Muon(matrices(m), lr=1e-3), AdamW(rest(m), lr=1e-3)],
    "AdamW fused": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True)],
    "AdamW foreach": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=True)],
    "AdamW plain": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False)],
    "SGD": lambda m: [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)],
    "Adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=1e-2)],
    "torch Muon": lambda m: [torch.optim.Muon(matrices(m), lr=1e-3), torch.optim.SGD(rest(m), lr=1e-3)],
}


def train(name: str, policy: str, steps: int, device: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    model = Net().to(device)
    run = prepare(model, OPTIMIZERS[name](model), policy, clip_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        tokens = torch.randint(0, VOCABULARY, (2, 4, CONTEXT + 1), generator=generator).to(device)
        bad = float("nan") if step % 97 == 0 else 1.0

        def loss(batch: torch.Tensor, bad: float = bad) -> torch.Tensor:
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) * bad

        result = run.step(loss, tokens.unbind())
        losses.append(torch.where(result.skipped, -1.0, result.loss))
    state = {k: v for k, v in run.state_dict()["tensors"].items() if k.startswith("optimizer.")}
    return torch.stack(losses).tolist(), {**run.weights(), **state}, int(run.num_applied)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    options = parser.parse_args()
    steps, device = options.steps, options.device
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    differing = 0
    for name in options.only:
        began = time.perf_counter()
        losses, whole, applied = train(name, "fp32", steps, device)
        others, split, _ = train(name, "param=fp32:split", steps, device)
        odd = [key for key in whole if not torch.equal(whole[key], split[key])]
        same = losses == others and whole.keys() == split.keys() and not odd
        differing += not same
        verdict = "equal in every bit" if same else f"DIFFER, first in {odd[:1] or 'the losses'}"
        seconds = time.perf_counter() - began
        print(
            f"{name:<16}{steps} steps, {applied} applied, {len(whole)} tensors: {verdict} ({seconds:.1f} s)",
            flush=True,
        )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
