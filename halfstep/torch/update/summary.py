"""Describes what a run will do: conversions with reasons, masters, gradients, and what each optimizer costs."""

from collections.abc import Iterator
from typing import cast

import torch

from halfstep.core.audit.coverage import some
from halfstep.core.choice.layers import with_outcome
from halfstep.core.formats import FP16, FP32
from halfstep.core.host import format_bytes
from halfstep.core.roles import print_value
from halfstep.torch import fusion
from halfstep.torch.convert.fp8_choice import uses_history
from halfstep.torch.convert.known_packages import kept_wide
from halfstep.torch.layers import Layer, Matmul
from halfstep.torch.model import Decoder
from halfstep.torch.numerics import attention
from halfstep.torch.optim.drivers import label
from halfstep.torch.parallel.ranks import num_ranks
from halfstep.torch.update.own_steps import why_not
from halfstep.torch.update.parts import RunParts
from halfstep.torch.update.switches import fp32_is_fp32

SPLIT = "bf16 and a 16-bit remainder, together fp32: run.edit() opens them to other code"

CAUSAL = "without a mask where none is needed, compiled too: checked for padding, packing, a cache and a window"


def summarize(run: RunParts) -> list[str]:
    """Returns the lines of `Run.summary`."""
    policy = with_outcome(run.policy, run.conversion.measured.outcome)
    note = [f"  {run.note}"] if run.note else []
    return [policy, *note, *(line for part in _PARTS for line in part(run))]


def _modules(run: RunParts) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, form in run.conversion.changes:
        groups.setdefault((kind, form), []).append(name or "the model")
    total = sum(len(names) for (kind, _), names in groups.items() if kind != "Parameter")
    yield f"  converted {run.conversion.modules} of {total} modules"
    for (kind, form), names in groups.items():
        yield f"  {len(names)} {kind} ({some(names)}): {form}"
    if (again := run.conversion.recomputed) is not None:
        modules = f" {len(again)} modules ({some([*again])}) and" if again else ""
        yield f"  lean: the backward pass computes{modules} activation functions of the model's code again"


def _attention(run: RunParts) -> Iterator[str]:
    """How our decoder computes attention, and how that of transformers' models is masked."""
    for how in run.model.attention_kernels() if isinstance(run.model, Decoder) else ():
        yield f"  attention: {how}"
    for row in run.conversion.attention:
        form = f"masks are transformers' own: {row.why_not}" if row.why_not else CAUSAL
        yield f"  attention of {row.model}: {form}"


def _decoder(run: RunParts) -> Iterator[str]:
    """How our decoder computes its GELU, when it is compiled, and its loss, on a device that may fuse them."""
    model = run.model
    if not isinstance(model, Decoder) or model.cos_TK.device.type not in attention.FUSED_ON:
        return
    if model.config.mlp == "gelu":
        why = model.why_gelu_apart()
        yield f"  GELU: apart from the matmuls: {why}" if why else "  GELU: if compiled, by the matmuls around it"
    fused = f"with the head, its gradient over the logits{model.lm_head.gradient_codes()}"
    yield f"  loss: {f'of logits in fp32: {why}' if (why := model.why_not_fused()) else fused}"


def _fused(run: RunParts) -> Iterator[str]:
    """What was fused in the code that this process has compiled, and what was not."""
    if fusion.FUSED:
        yield f"  compiled, fused: {', '.join(f'{times} {name}' for name, times in fusion.FUSED.items())}"
    for (name, why), times in fusion.APART.items():
        yield f"  compiled, not fused: {times} {name}: {why}"


def _measured(run: RunParts) -> Iterator[str]:
    if how := run.conversion.measured.description:
        yield f"  measured: {how}"
    if run.amaxes is not None:
        modules, past = dict(run.model.named_modules()), run.amaxes.history.shape[-1]
        count = sum(uses_history(cast(Matmul, modules[name])) for name in run.amaxes.layers)
        yield f"  delayed: {count} matmuls are scaled by the largest amax of their last {past} updates"


def _given(run: RunParts) -> Iterator[str]:
    """What the model brought with it that a policy does not change, and that the user should know."""
    narrow = [name for name, b in run.model.named_buffers() if b.dtype in (torch.bfloat16, torch.float16)]
    if narrow:
        yield (
            f"  {len(narrow)} buffers ({some(narrow)}) were already rounded, and stay so; a model that is loaded "
            "in fp32 has them in full"
        )
    modules = dict(run.model.named_modules())
    kept = [n for n in kept_wide(run.model) if isinstance(m := modules[n], Layer) and m.precision.compute == FP16]
    if kept:
        rule = f"`**.{kept[0].rpartition('.')[2]}: compute=fp32`"
        yield f"  {len(kept)} modules ({some(kept)}) that their authors keep in fp32 run in fp16 here: {rule}"


def _functions(run: RunParts) -> Iterator[str]:
    if run.last_coverage is None:
        yield "  functions of the model's own code: run.coverage(loss_fn, batch) lists how each runs"
        return
    counts = {True: 0, False: 0}
    for row in run.last_coverage.rows:
        counts[row.how == "covered"] += row.calls
    yield f"  functions of the model's own code: {counts[True]} calls covered, {counts[False]} unchanged"
    yield from (f"  {line}" for line in str(run.last_coverage).splitlines())


def _masters(run: RunParts) -> Iterator[str]:
    held: dict[str, list[int]] = {}
    emulated = " (emulated)" if run.policy.emulate else ""
    for p, name in run.masters.names.items():
        if name in run.masters.held:
            split = SPLIT if name in run.masters.remainders else ""
            held.setdefault(split or print_value(run.masters.held[name]) + emulated, []).append(p.numel())
    for form, sizes in held.items():
        yield f"  masters: {len(sizes)} parameters, {sum(sizes):,} numbers, in {form}"
    if run.conversion.widened:
        names = list(run.conversion.widened)
        yield f"  widened to fp32 masters: {len(names)} parameters that were narrower ({some(names)})"
    taken = set(run.parameters)
    idle = [n for p, n in run.masters.names.items() if p.requires_grad and p not in taken]
    if idle and run.optimizers:
        yield f"  not trained: {len(idle)} parameters that no optimizer holds ({some(idle)})"
    if run.averages is not None:
        yield f"  averages of the masters in fp32, decay {run.averages.decay:g}"


def _gradients(run: RunParts) -> Iterator[str]:
    clip = f"clipped to {run.clip_norm:g}" if run.clip_norm else "not clipped"
    if run.clipped_by:
        clip = f"clipped where {run.clipped_by} says"
    scale = print_value(run.policy.scale)
    if run.switches.before:
        yield "  matmuls sum in fp32: torch's reduced-precision reductions are off until unprepare()"
    if not fp32_is_fp32():
        yield "  fp32 matmuls outside of the policy, such as in leaves, may be TF32: that is how torch is set"
    evaluated = run.policy.evaluation()
    if evaluated != run.policy:
        yield f"  evaluation: in {evaluated.compute.format}, inside run.evaluation()"
    yield f"  gradients: summed in {run.policy.accumulate}, {clip}; loss scale: {scale}; not finite: skipped"


def _ranks(run: RunParts) -> Iterator[str]:
    """What travels between the processes of a job."""
    every = num_ranks()
    if every == 1:
        if run.policy.reduce != FP32:
            yield f"  one process: nothing travels, so `reduce={run.policy.reduce}` changes nothing"
        return
    if not run.optimizers:
        return
    sent, sharded = run.sent(), run.sharded is not None
    form = f"shards on {every // run.num_copies} of them" if sharded else "replicas"
    weights = f"{format_bytes(sent.forward + sent.backward)} of weights per micro-batch and " if sharded else ""
    yield (
        f"  {every} ranks, {form}: each sends {weights}{format_bytes(sent.gradients)} of gradients per update, in "
        f"{run.policy.reduce}, summed in fp32"
    )
    if sharded and run.conversion.split_later:
        yield "  split masters are fp32 shards here: what is gathered has the bits of their bf16 halves"


def _optimizers(run: RunParts) -> Iterator[str]:
    if not run.optimizers:
        yield "  no optimizers: it can be evaluated; run.attach(optimizers) before it is trained"
    for driver in run.drivers:
        yield f"  {label(driver.optimizer)}: {driver.cost}"
    if run.optimizers:
        why = why_not(run)
        yield f"  in a plain loop, loss.backward() and optimizer.step(): {f'refused, {why}' if why else 'exact'}"


_PARTS = (
    _modules, _attention, _decoder, _fused, _given, _functions, _measured, _masters, _gradients, _ranks,
    _optimizers,
)  # fmt: skip
