"""What a format does to a step, one kind of operation at a time, with everything else in fp32.

    matmul           operands and results, of layers and of products in the model's own code
    embedding        the rows that are looked up, and their gradients; not in fp8, which is for operands
    norm, softmax    inside
    loss             inside and out, and what the model returns
    residual         sums of two activations, and of their gradients, moved by half an ulp (noise.py)
    update           weights held in the format, and a step as long as the learning rate, as Adam's first is

The measure is that of tuning (tuning.py): the share of a step's descent that is lost. Formats are emulated.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import ReplayError
from halfstep.core.formats import FP32, Format
from halfstep.core.precision import Precision
from halfstep.core.roles import Operand, is_narrow
from halfstep.torch.convert.modules import Embedding, Island, Normalization
from halfstep.torch.instruments.noise import PassMode, RandomNumbers
from halfstep.torch.instruments.replay import precisions_of, replay, switch_formats
from halfstep.torch.instruments.tuning import share_lost
from halfstep.torch.numerics.cast import carried


def sensitivity(run: Any, loss_fn: Callable[[Any], Any], batches: Iterable[Any], fmt: Format) -> dict[str, float]:
    """Returns the share of a step's descent that each kind of operation loses in a format, the largest first."""
    if run.sharded is not None:
        raise ReplayError("shards are compared with shards only", hint="run.sensitivity() before fully_shard")
    batches = [*batches]

    def gradients(precisions: Mapping[str, Precision], mode: Any = None) -> dict[str, Tensor]:
        with switch_formats(run, precisions), mode or nullcontext():
            torch.manual_seed(0)  # the same dropout each time
            return replay(run, loss_fn, batches, FP32).gradients

    reference, kinds = gradients({}), _kinds(run.model, fmt)
    lost = {kind: share_lost(reference, gradients(narrow)) for kind, narrow in kinds.items() if narrow}
    sums = PassMode(RandomNumbers(), precisions={"": Precision(compute=fmt, grad=fmt)})
    lost["residual"] = share_lost(reference, gradients({}, sums))
    lost["update"] = _lost_of_update(run, reference, fmt)
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


def _kinds(model: nn.Module, fmt: Format) -> dict[str, dict[str, Precision]]:
    """Returns the precisions that make one kind of operation narrow, by kind."""
    modules, names, wide = dict(model.named_modules()), precisions_of(model), Precision(emulate=True)
    around = FP32 if is_narrow(fmt) else fmt
    narrow = replace(wide, compute=around, grad=around, operand=Operand(fmt), grad_operand=Operand(fmt))
    tables = [name for name in names if isinstance(modules[name], Embedding) and around != FP32]
    others = [name for name in names if not isinstance(modules[name], Embedding | Normalization | Island)]
    inside = {role: replace(wide, **dict[str, Any]({role: fmt})) for role in ("norm", "softmax", "loss")}
    islands = {role: dict.fromkeys(names, precision) for role, precision in inside.items()}
    return {"matmul": dict.fromkeys(others, narrow), "embedding": dict.fromkeys(tables, narrow), **islands}


def _lost_of_update(run: Any, gradients: Mapping[str, Tensor], fmt: Format) -> float:
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    rates = {p: float(group["lr"]) for group in groups for p in group["params"]}
    named, wide, rows = dict(run.model.named_parameters()), run.weights(), []
    for name, g in gradients.items():
        step, held = -rates[named[name]] * g / g.square().mean().sqrt(), carried(wide[name], fmt)
        moved = (carried(held + step, fmt) - held).double()
        kept = (moved * step).sum() / step.double().square().sum()
        rows.append(torch.stack([g.norm().double(), kept.nan_to_num(1.0)]))  # no gradient, or a rate of zero
    norms, kept = torch.stack(rows).unbind(1)
    return float((norms * (1 - kept)).sum() / norms.sum())
