"""What host.py and batches.py time: an update of a GPT-2 under autocast, and under `prepare` in several ways.

All clip to a norm of 1. `autocast` steps with torch's fused AdamW; `split masters` and `whole masters` with
halfstep's; `torch's AdamW` keeps whole masters and steps with that same fused one. `split, graph` and
`whole, graph` are one CUDA graph per update.
"""

from collections.abc import Callable, Sequence

import torch

from halfstep.torch import AdamW, prepare

POLICIES = {
    "split masters": "bf16-mixed,param=fp32:split",
    "whole masters": "bf16-mixed",
    "torch's AdamW": "bf16-mixed",
}
GRAPHS = {"split, graph": "bf16-mixed,param=fp32:split", "whole, graph": "bf16-mixed"}
Update = Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], object]  # of inputs and targets per micro-batch


def make_update(name: str, model: torch.nn.Module, *, compiled: bool = False) -> Update:
    """Returns a function that makes one update of the model from its micro-batches."""
    stock = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name == "autocast":
        return _under_autocast(model, stock, torch.compile(model) if compiled else model)
    optimizer = stock if name == "torch's AdamW" else AdamW(model.parameters(), lr=1e-4)
    policy = (POLICIES | GRAPHS)[name]
    run = prepare(model, optimizer, policy, clip_norm=1.0, graph=name in GRAPHS)
    forward = torch.compile(model) if compiled else model
    return lambda batches: run.step(lambda batch: forward(*batch), batches)


def _under_autocast(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[..., torch.Tensor]
) -> Update:
    device = next(model.parameters()).device.type

    def update(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        num_batches = len(batches)
        for inputs, targets in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = forward(inputs, targets)
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
