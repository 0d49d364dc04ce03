"""Which matmuls may have narrow operands, and which are worth it: decided before anything is changed.

What cannot run is refused. What is not worth it stays wide, if a rule says `measured` (core.choice.layers).

**The head of a third-party model** is a linear layer with as many outputs as an embedding has rows. Compiled code
may compute its loss with it (plain.py), and rounds the gradient of the logits stochastically there. This is
timed, and the loss has casts of its own. Without its loss a head stays wide: if that is computed outside of the
model, the gradient would be rounded to the nearest, which costs loss (loss/fp8.py).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.core.arrays.ladder import Clock
from halfstep.core.choice.layers import (
    NO_LAYERS,
    Measured,
    Timer,
    measure_layers,
    narrow_formats,
    not_measured,
)
from halfstep.core.errors import DelayedScaleError, PolicyFitError, UnsupportedRoleError
from halfstep.core.formats import E4M3, Format
from halfstep.core.precision import Precision
from halfstep.core.refusal import EMULATE
from halfstep.core.roles import Param, is_narrow
from halfstep.torch import timers
from halfstep.torch.convert.attention import MultiheadAttention
from halfstep.torch.convert.functions import narrow_logits
from halfstep.torch.convert.plan import Plan, matmuls
from halfstep.torch.fp8.delayed import Amaxes
from halfstep.torch.fp8.linear import MULTIPLE
from halfstep.torch.layers import CastedLinear, Matmul, casts_of
from halfstep.torch.loss import plain as losses
from halfstep.torch.measure import LayerWork, time_layer_once
from halfstep.torch.model import Head
from halfstep.torch.numerics.dtypes import ROWS_INTO_FP32, dtype_of, product_failure
from halfstep.torch.numerics.memory import is_out_of_memory
from halfstep.torch.numerics.record import update_record

OF_LOSS = ":loss"  # after the name of a head: its loss in compiled code, which is measured apart
TO_NEAREST = "the gradient of its logits would be rounded to the nearest, which costs loss"
CPU_TOKENS = 256  # a CPU would take minutes for more, and the answer would be the same


def check_narrow(
    plans: Sequence[Plan], ruled: Mapping[str, Precision], base: Precision, device: torch.device
) -> None:
    """Refuses narrow operands that the device or a layer cannot take, and modifiers without effect."""
    layers = {plan: ruled.get(plan.name, base) for plan in matmuls(plans)}
    narrow = {plan: precision for plan, precision in layers.items() if precision.narrow}
    for plan, precision in narrow.items():
        _check_delayed(plan, precision)
    native = {plan: precision for plan, precision in narrow.items() if not precision.emulate}
    for precision in dict.fromkeys(native.values()):
        _check_pairs(precision, device)
    _check_sizes({plan: precision for plan, precision in native.items() if _pairs(precision)})


def check_fast(
    plans: Sequence[Plan], ruled: Mapping[str, Precision], base: Precision, device: torch.device
) -> None:
    """Refuses fast accumulation where it would have no effect, or an unknown one."""
    wanted = [base, *ruled.values()]
    if not any(precision.matmul.fast for precision in wanted):
        return
    what, hint = "`matmul=fp32:fast`", "leave `fast` out: matmuls sum in fp32"
    reached = [ruled[plan.name] for plan in matmuls(plans) if plan.name in ruled]
    if base.emulate:
        raise UnsupportedRoleError(f"{what} is what some hardware does inside, and is not emulated", hint=hint)
    if not any(precision.matmul.fast and is_narrow(precision.operand.format) for precision in reached):
        raise UnsupportedRoleError(f"{what} is for forward matmuls of fp8 operands, and there are none", hint=hint)
    if device.type != "cuda":
        raise UnsupportedRoleError(f"{what} is how NVIDIA's kernels may sum, and this is {device}", hint=hint)


def measure_all(
    plans: Sequence[Plan],
    ruled: Mapping[str, Precision],
    held: Mapping[Tensor, Param],
    tokens: int,
    *,
    compiled: bool = True,
    chunks: int = 1,
    timer: Timer[LayerWork] = time_layer_once,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Times every layer whose rule says `measured`, size by size, compiled or not.

    `chunks` are those of a loss that is fused with a head.
    """
    layers = {plan: ruled[plan.name] for plan in matmuls(plans) if plan.name in ruled}
    layers = {plan: precision for plan, precision in layers.items() if precision.measured and precision.narrow}
    if not layers:
        return NO_LAYERS
    if all(precision.emulate for precision in layers.values()):
        return not_measured(len(layers))
    works = {p.name: _layer_works(p, held, tokens, compiled, chunks, precision) for p, precision in layers.items()}
    keys = {p.name: [(work, precision) for work in works[p.name]] for p, precision in layers.items()}
    heads = {p.name: precision for p, precision in layers.items() if _is_head(p, plans, precision)}
    for name in heads:
        alone = keys.pop(name)
        if compiled:
            keys[name + OF_LOSS] = [(replace(work, loss=chunks), precision) for work, precision in alone]
    ahead = {"ahead": time_layer_once.time_ahead(timers.time_ahead)} if timer is time_layer_once else {}
    measured = measure_layers(keys, timer, is_out_of_memory, clock, **ahead)
    notes = {name: f"{note}, with its loss" for name, note in measured.notes.items() if keys[name][0][0].loss}
    notes |= {name: f"in {narrow_formats(p)} {TO_NEAREST}" for name, p in heads.items()}
    narrow = {**measured.narrow, **dict.fromkeys(heads, False)}
    return replace(measured, narrow=narrow, notes={**measured.notes, **notes})


def set_loss_casts(model: nn.Module, ruled: Mapping[str, Precision], measured: Measured) -> None:
    """Gives each head whose loss was measured apart the casts of that, if it is narrow and the head is not."""
    for name in _heads(measured):
        narrow = casts_of(ruled[name]) if _has_narrow_loss(measured, name) else None
        update_record(model.get_submodule(name), loss_casts=narrow)


def explain_choices(measured: Measured, ruled: Mapping[str, Precision]) -> dict[str, str]:
    """Returns why each measured layer is as it is, with its loss where that has formats of its own."""
    notes = dict(measured.notes)
    for name in _heads(measured):
        of_loss = notes.pop(name + OF_LOSS)
        if _has_narrow_loss(measured, name):
            formats = narrow_formats(ruled[name])
            where = "compiled in a model that returns its loss and not its logits"
            of_loss = f"{where}, it multiplies in {formats}, {of_loss}"
        notes[name] += f"; {of_loss}"
    return notes


def uses_history(module: Matmul) -> bool:
    """Whether a layer, or its loss, has delayed operands."""
    of_loss = module.halfstep.loss_casts
    return module.precision.delayed or (of_loss is not None and of_loss.delayed)


def _heads(measured: Measured) -> list[str]:
    return [name for name in measured.narrow if name + OF_LOSS in measured.narrow]


def _has_narrow_loss(measured: Measured, name: str) -> bool:
    return measured.narrow[name + OF_LOSS] and not measured.narrow[name]


def _is_head(plan: Plan, plans: Sequence[Plan], precision: Precision) -> bool:
    """Whether a layer makes logits of a vocabulary, and its loss can be computed with it."""
    if not issubclass(cast(type, plan.kind), CastedLinear):
        return False
    tables = {other.module.num_embeddings for other in plans if isinstance(other.module, nn.Embedding)}
    if not any(outputs in tables and outputs >= narrow_logits.LARGE for _, outputs in _sizes(plan)):
        return False
    casts = casts_of(precision)
    return not losses.why_no_kernel(cast(Tensor, plan.module.weight), casts.compute, casts)


def add_histories(plans: Sequence[Plan], ruled: Mapping[str, Precision], device: torch.device) -> Amaxes | None:
    """Gives each layer with delayed operands a history, even if it stays wide: a checkpoint may make it narrow."""
    layers = [plan for plan in matmuls(plans) if plan.name in ruled and ruled[plan.name].delayed]
    if not layers:
        return None
    amaxes = Amaxes([plan.name for plan in layers], device)
    for plan in layers:
        update_record(plan.module, history=amaxes.layers[plan.name])
    return amaxes


def try_row_scales(device: torch.device) -> None:
    """Tries whether products with one scale per row have a kernel into fp32, before code is compiled."""
    if device.type not in ROWS_INTO_FP32:
        ROWS_INTO_FP32[device.type] = not product_failure(E4M3, E4M3, device, rows=True, dtype=torch.float32)


def _sizes(plan: Plan) -> list[tuple[int, int]]:
    return cast(type[Matmul], plan.kind).matrix_sizes(cast(Matmul, plan.module))


def _layer_works(
    plan: Plan, held: Mapping[Tensor, Param], tokens: int, compiled: bool, chunks: int, precision: Precision
) -> list[LayerWork]:
    parameters = list(plan.module.parameters(recurse=False))
    split = any(held[p].split for p in (parameters or held) if p in held)  # a tied head holds none itself
    bias = any(p.dim() == 1 for p in parameters)
    beside, casts = parameters[0] if parameters else next(iter(held)), casts_of(precision)
    loss: tuple[Any, ...] = ()
    if isinstance(plan.module, Head) and not plan.module.why_not_fused(beside, casts, casts):
        loss = (chunks, plan.module.terms.softcap)
    if beside.device.type == "cpu":
        tokens, compiled = min(tokens, CPU_TOKENS), False
    given = (tokens, bias, split, beside.device, compiled, *loss)
    return [LayerWork(inputs, outputs, *given) for inputs, outputs in _sizes(plan)]


def _pairs(precision: Precision) -> list[tuple[Format, Format, bool, torch.dtype]]:
    """Returns the products of two narrow formats in a layer: if scaled per row, and the dtype of the result."""
    forward, backward = precision.operands
    products = [(forward, precision.compute), (backward, precision.grad), (backward, precision.grad_weight)]
    return [
        (a.format, forward.format, "row" in (a.granularity, forward.granularity), dtype_of(out))
        for a, out in products
        if is_narrow(a.format) and is_narrow(forward.format)
    ]


def _check_pairs(precision: Precision, device: torch.device) -> None:
    for a, b, rows, dtype in _pairs(precision):
        try_row_scales(device)
        if rows and dtype == torch.float32 and not ROWS_INTO_FP32[device.type]:
            rows = False  # its scales are undone after the sum
        failure = product_failure(a, b, device, rows=rows, dtype=dtype)
        if failure:
            scales = "one scale per row" if rows else "one scale per tensor"
            whole = rows and not product_failure(a, b, device, dtype=dtype)
            runs = "leave out `:row`" if whole else "e4m3 forward and e5m2 or e4m3 backward run where any fp8 does"
            raise UnsupportedRoleError(
                f"a matmul of {a} and {b} with {scales} cannot run on {device}: {failure}",
                hint=f"{runs}; or {EMULATE}",
            )


def _check_sizes(layers: Mapping[Plan, Precision]) -> None:
    bad: dict[str, str] = {}
    for plan, precision in layers.items():
        for inputs, outputs in _sizes(plan):
            wrong = [f"in_features is {inputs}"] * (inputs % MULTIPLE > 0)
            wrong += [f"out_features is {outputs}"] * (outputs % MULTIPLE > 0)
            if wrong:
                formats = narrow_formats(precision)
                bad.setdefault(plan.name, f"`{plan.name}` cannot run in {formats}: {' and '.join(wrong)}")
    if bad:
        first, *others = bad.values()
        more = f" (and {len(others)} more: {', '.join(f'`{name}`' for name in [*bad][1:])})" if others else ""
        wide = next(iter(layers.values())).compute
        rules = "; ".join(f"{name}: compute={wide}" for name in bad)
        raise PolicyFitError(
            f"{first}, an fp8 matmul needs a multiple of {MULTIPLE}{more}",
            hint=f"keep it in {wide} with a rule, `; {rules}`, or pad the layer",
        )


def _check_delayed(plan: Plan, precision: Precision) -> None:
    for operand in precision.operands:
        if operand.amax == "delayed" and operand.granularity == "row":
            raise DelayedScaleError(
                f"`{operand.format}:row:delayed` at `{plan.name}`: a row of activations is a token, and the next "
                "update has other tokens",
                hint=f"write `{operand.format}:row`, or `{operand.format}:delayed` with one scale per tensor",
            )
    if precision.delayed and issubclass(cast(type, plan.kind), MultiheadAttention):
        raise DelayedScaleError(
            f"`{plan.name}` projects queries, keys and values, and a delayed amax belongs to one matmul",
            hint=f"use the current amax by a rule, `; {plan.name}: compute=..., grad=...` without `delayed`",
        )
