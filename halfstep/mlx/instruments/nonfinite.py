"""Finds the layer that made a step not finite. MLX shows what layers meet, not each operation: none is named.

Forward, the cause lies between the last layer that was given finite numbers and the first that was not. Backward,
what left the layer whose gradient is the first that is not finite in the order of the pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from halfstep.core.audit.cause import Cause


def find(run: Any, loss_fn: Any, micro_batches: Sequence[Any], factor: float) -> Cause:
    """Runs a step again, its losses times a factor, and returns what made it not finite, as far as it can tell."""

    def scaled(model: Any, batch: Any) -> Any:
        loss, *rest = _as_tuple(loss_fn(model, batch))
        return (loss * factor, *rest) if rest else loss * factor

    with run.masters.swap_in():
        parameters: Any = tree_flatten(run.model.parameters())
        bad = next((name for name, array in parameters if not _fine(array)), None)
        cause = None if bad is None else Cause("forward", f"the weight `{bad}` itself", bad.rpartition(".")[0])
        losses = [_as_tuple(loss_fn(run.model, batch))[0] for batch in micro_batches]
    for number, (batch, loss) in enumerate(zip(micro_batches, losses, strict=True)):
        seen = [] if run.watching is None else run.watching.arrays_of_pass(scaled, batch)
        cause = cause or _in_pass(loss, seen, number)
        if cause is not None and not _fine(loss):
            alone = all(map(_fine, run.replay(scaled, batch).values()))
            return replace(cause, loss_alone=alone)
    return cause or Cause("backward", "the loss is finite, a gradient is not")


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def _in_pass(loss: mx.array, seen: Sequence[tuple[str, str, mx.array]], micro_batch: int) -> Cause | None:
    """Returns the first layer of a pass that saw something not finite, as a cause; None if none did.

    `seen` are (layer, role, array) in the order of the pass, with roles of core.observed.ROLES.
    """
    before = ""
    for name, role, array in seen:
        if role != "activation":
            continue
        if not _fine(array):
            what = f"{before or 'what is'} before `{name}`, which is given it"
            return Cause("forward", what, before, micro_batch=micro_batch)
        before = name
    if not _fine(loss):
        what = f"the loss, after `{before}`" if before else "the loss"
        return Cause("forward", what, before, micro_batch=micro_batch)
    for name, role, array in seen:
        if role == "gradient" and not _fine(array):
            return Cause("backward", f"gradient of the output of `{name}`", name, micro_batch=micro_batch)
    return None


def _fine(array: mx.array) -> bool:
    return bool(mx.isfinite(array).all().item())
