"""Checks that LoRA on a frozen bf16 base trains like LoRA on an fp32 copy of the same base.

    python benchmarks/measure/lora.py [--steps 200] [--device cpu] [--model gpt2 llama]

The script trains Peft adapters on a tiny model twice under bf16-mixed, from the same start on the same tokens:
once with the base held in bf16, once with the same numbers held in fp32. Layers of torch.nn use the same
operands either way, so GPT-2, which is built from them, must agree in every bit. Llama has its own norms. With a
bf16 gain they round before they multiply by it, which is one more rounding per norm. The script therefore
repeats the fp32 run with that rounding drawn at random (every norm's output and gradient times 1 + d, d uniform
in [-u, u]). The root mean square of the change is sigma, and the two runs must agree to 5 sigma.

It also counts adapter updates that fp32 can represent but that changed nothing: there must be none. Next to it
stands the share that the same updates would lose if the adapters were bf16. Exit code 1 if anything fails.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from halfstep.core.formats import BF16
from halfstep.torch import AdamW, prepare
from halfstep.torch.numerics.cast import carried

sys.path.insert(0, str(Path(__file__).parents[1]))
import zoo

TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "down_proj"]}
RATE, SIGMAS, DRAWS = 2e-3, 5.0, 6


@dataclass
class Trained:
    """The results of one training run."""

    losses: list[float] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    frozen: set[torch.dtype] = field(default_factory=set)
    lost: int = 0  # updates that fp32 can represent but that changed nothing
    updates: int = 0  # that are not zero
    narrow_lost: int = 0  # of those, applied to bf16 adapters
    below: int = 0  # updates below half a unit in the last place of an fp32 number


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """Returns a tiny model whose numbers fit bf16, held in `dtype`, with the same fp32 adapters every time."""
    from peft import LoraConfig, get_peft_model

    model, _ = zoo.FAMILIES[name].make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # gains of 1 would hide the rounding before them
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2")
    peft = get_peft_model(model.bfloat16().to(dtype), config)
    for key, p in peft.named_parameters():
        if p.requires_grad and "lora_A" in key:  # Peft draws them in the dtype of the base
            p.data = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
    return peft


def batches(steps: int, device: str) -> Iterator[Tensor]:
    """Yields four batches over and over: the model learns them, so rounding errors stop growing."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 48, (4, 2, 8), generator=generator).to(device)
    for step in range(steps):
        yield tokens[step % 4]


def train(model: nn.Module, steps: int, device: str = "cpu", *, count: bool = True) -> Trained:
    """Trains the adapters and counts the effects of their updates."""
    model.to(device)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = AdamW(list(named.values()), lr=RATE, weight_decay=0.0)
    run = prepare(model, optimizer, "bf16-mixed")
    out = Trained()
    for step, tokens in enumerate(batches(steps, device), start=1):
        before = {name: p.detach().clone() for name, p in named.items()}
        out.losses.append(float(run.step(lambda t: model(input_ids=t, labels=t).loss, [tokens]).loss))
        for name, p in named.items() if count else ():
            update = _update(optimizer.state[p], step)
            old = before[name]
            narrow, meant = carried(old, BF16), update != 0
            out.updates += int(meant.sum())
            out.narrow_lost += int((meant & (carried(narrow + update, BF16) == narrow)).sum())
            felt = old + update != old  # in fp32
            out.lost += int(((p.detach() == old) & felt).sum())
            out.below += int((~felt & (update != 0)).sum())
    out.adapters = {name: p.detach().clone() for name, p in named.items()}
    out.frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    return out


def _update(state: dict[str, Tensor], step: int, betas: tuple[float, float] = (0.9, 0.999)) -> Tensor:
    """Returns the update that AdamW made, computed from its moments after the step."""
    first = state["exp_avg"].double() / (1 - betas[0] ** step)
    second = state["exp_avg_sq"].double() / (1 - betas[1] ** step)
    return (-RATE * first / (second.sqrt() + 1e-8)).float()


def perturb_norms(model: nn.Module, seed: int) -> int:
    """Adds a random rounding to each of the model's own norms, forward and backward; returns their number."""
    generator, u = torch.Generator().manual_seed(seed), BF16.epsilon / 2

    def off(x: Tensor) -> Tensor:
        return (x.float() * (1 + u * (2 * torch.rand(x.shape, generator=generator).to(x.device) - 1))).to(x.dtype)

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return off(x)

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return off(g)

    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for module in norms:
        module.register_forward_hook(lambda _, args, out: Off.apply(out))
    return len(norms)


def distance(a: Trained, b: Trained) -> tuple[float, float]:
    """Returns the distance between all losses, and between the final adapters."""
    losses = math.dist(a.losses, b.losses)
    return losses, math.sqrt(sum(float((a.adapters[n] - b.adapters[n]).square().sum()) for n in a.adapters))


def bound(name: str, wide: Trained, steps: int, device: str = "cpu") -> tuple[float, float]:
    """Returns 5 sigma of one more rounding per norm; zero if the model has no norms of its own."""
    distances = []
    for seed in range(DRAWS):
        model = build(name, torch.float32)
        if not perturb_norms(model, seed):
            return 0.0, 0.0
        distances.append(distance(train(model, steps, device, count=False), wide))
    return tuple(SIGMAS * math.sqrt(sum(d[i] ** 2 for d in distances) / DRAWS) for i in range(2))  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", nargs="+", default=[*TARGETS], choices=[*TARGETS])
    options = parser.parse_args()
    failed = False
    for name in options.model:
        narrow, wide = (
            train(build(name, dtype), options.steps, options.device) for dtype in (torch.bfloat16, torch.float32)
        )
        losses, adapters = distance(narrow, wide)
        limits = bound(name, wide, options.steps, options.device)
        fine = losses <= limits[0] and adapters <= limits[1] and narrow.frozen == {torch.bfloat16}
        fine &= narrow.lost == 0
        failed |= not fine
        size = math.sqrt(sum(float(t.square().sum()) for t in wide.adapters.values()))
        print(f"{name}: {options.steps} steps, loss {narrow.losses[0]:.4f} to {narrow.losses[-1]:.4f}")
        print(f"  losses apart {losses:.2e} (bound {limits[0]:.2e})")
        print(f"  adapters apart {adapters:.2e} (bound {limits[1]:.2e}), their norm {size:.2f}")
        below = f"({narrow.below} more are too small for fp32)"
        print(f"  adapter updates lost: {narrow.lost} of {narrow.updates:,} {below}")
        print(f"  the same updates of bf16 adapters: {narrow.narrow_lost / max(1, narrow.updates):.1%} lost")
        print(f"  {'fine' if fine else 'FAILED'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
