"""Describes what a state holds and how its policy runs, in the lines of the other backends' summaries."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from halfstep.config.model import owner
from halfstep.core.arrays.cast import HISTORY
from halfstep.core.audit.coverage import some
from halfstep.core.roles import print_value
from halfstep.jax.convert.apply import Applied

SPLIT = "bf16 and a 16-bit remainder, together fp32: state.masters() joins them"


def summarize(
    applied: Applied,
    trained: Mapping[str, Any],
    note: str,
    widened: Sequence[str],
    decay: float,
    measured: str,
) -> list[str]:
    """Returns the lines of `summary(state)`."""
    policy = applied.policy
    lines = [str(policy), *([f"  {note}"] if note else []), *_modules(applied), *_masters(applied, trained)]
    if measured:
        lines.append(f"  measured: {measured}")
    if widened:
        lines.append(f"  widened to their masters: {len(widened)} parameters that were narrower ({some(widened)})")
    if count := sum(applied.measured.narrow.get(name, True) for name in applied.delayed):
        lines.append(f"  delayed: {count} matmuls are scaled by the largest amax of their last {HISTORY} updates")
    if decay:
        lines.append(f"  averages of the masters in fp32, decay {decay:g}")
    scale = print_value(policy.scale)
    return [
        *lines,
        f"  gradients: summed in {policy.accumulate}; loss scale: {scale}; not finite: skipped",
        "  functions of the loss function: step.coverage(state, batch) lists how each runs",
    ]


def _modules(applied: Applied) -> Iterator[str]:
    groups: dict[str, dict[str, None]] = {}
    for name, precision in applied.precisions.items():
        form = f"computes in {precision.compute}"
        timed = applied.measured.notes.get(owner(name), "")
        if precision.narrow:
            x, g = (print_value(replace(o, measured=o.measured and not timed)) for o in precision.operands)
            form += f", multiplies in {x}, with gradients in {g}"
        form += f", weight gradients in {precision.grad_weight}{timed and f' ({timed})'}"
        groups.setdefault(form, {})[owner(name)] = None
    for form, names in groups.items():
        word = "module" if len(names) == 1 else "modules"
        yield f"  {len(names)} {word} ({some([*names])}): {form}"


def _masters(applied: Applied, trained: Mapping[str, Any]) -> Iterator[str]:
    held: dict[str, list[int]] = {}
    emulated = " (emulated)" if applied.policy.emulate else ""
    for name, param in applied.masters.items():
        moments = applied.moments[name]
        form = SPLIT if param.split else f"{print_value(param)}{emulated}"
        form += f", moments in {moments}"
        held.setdefault(form, []).append(trained[name].size)
    for form, sizes in held.items():
        yield f"  masters: {len(sizes)} parameters, {sum(sizes):,} numbers, in {form}"
