"""What host.py times, an update of a GPT-2 as usual and under `prepare` in several ways; turns for ranks.py.

All clip to a norm of 1. `autocast` and the `plain loop` in fp32 step with torch's fused AdamW; `split masters` and
`whole masters` with halfstep's; `torch's AdamW` keeps whole masters and steps with that same fused one, as does
`fp32`.
"""

from collections.abc import Callable, Sequence

import torch

from halfstep.torch import AdamW, prepare

POLICIES = {
    "split masters": "bf16-mixed,param=fp32:split",
    "whole masters": "bf16-mixed",
    "torch's AdamW": "bf16-mixed",
    "fp32": "fp32",
}
USUAL = ("autocast", "plain loop")
Update = Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], object]  # of inputs and targets per micro-batch


def make_update(name: str, model: torch.nn.Module) -> Update:
    """Returns a function that makes one update of the model from its micro-batches."""
    stock = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name in USUAL:
        return _usual_update(model, stock, narrow=name == "autocast")
    optimizer = AdamW(model.parameters(), lr=1e-4) if name.endswith("masters") else stock
    run = prepare(model, optimizer, POLICIES[name], clip_norm=1.0)
    return lambda batches: run.step(lambda batch: model(*batch), batches)


def _usual_update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, narrow: bool) -> Update:
    device = next(model.parameters()).device.type

    def update(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        num_batches = len(batches)
        for inputs, targets in batches:
            with torch.autocast(device, torch.bfloat16, enabled=narrow):
                loss = model(inputs, targets)
            (loss / num_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def take_turns(arms: dict[str, Update], rounds: int, timed: Callable[[Update], float]) -> dict[str, list[float]]:
    """Times every arm in every round, in reverse order every other time; a first round warms up and is dropped."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for each in range(rounds + 1):
        for name, update in list(arms.items())[:: 1 if each % 2 else -1]:
            taken = timed(update)
            if each:
                times[name].append(taken)
    return times
