"""How each function in a model's own code runs: the list of `run.coverage(loss_fn, batch)`.

One forward pass is run, eagerly and for real, with a watcher on the function mode (functions/mode.py), and without
lasting effects; fake tensors would not do: mixtures branch on what their routers decide.

The list has every product, attention, island and look-up of the model's own code, with how it ran and why. Of the
functions that no role reaches it has those that lose precision: sums of narrow numbers, such as in hand-written
norms, and arithmetic that an fp32 tensor promotes. Positions that are counted in a narrow format are a warning,
too. Of attention on a GPU it has the kernel that torch takes, or why it takes none.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import resolve_name

from halfstep.core.audit.coverage import Coverage, Row
from halfstep.core.errors import warn_caller
from halfstep.torch.convert.functions.entry import Entry, Scope, Skip, tensors_of
from halfstep.torch.convert.functions.mode import WATCHERS
from halfstep.torch.convert.functions.table import ATTENTION, SENSITIVE, is_arithmetic
from halfstep.torch.instruments.collect.counts import Counts
from halfstep.torch.instruments.collect.formats import ResultMode
from halfstep.torch.instruments.replay import RunningModules, extra_pass
from halfstep.torch.numerics import attention
from halfstep.torch.numerics.dtypes import NARROW, format_of
from halfstep.torch.numerics.lowering import bypass_mode, to_compute


def record(model: nn.Module, loss_fn: Callable[[Any], Any], batch: Any) -> Coverage:
    """Runs one forward pass and lists its functions."""
    counts = Counter[Row]()
    running, followed = RunningModules(), Counts()

    def watch(scope: Scope, func: Any, args: Any, kwargs: Any, entry: Entry | None, why: str) -> None:
        how = _how(scope, func, args, kwargs, entry, why)
        if how is not None:
            kernel = _kernel(scope, args, kwargs) if func is F.scaled_dot_product_attention else ""
            known = resolve_name(func)
            name = known if known and "<" not in known else getattr(func, "__name__", str(func))
            counts[Row(name, _inside(running), how[0], how[1] + kernel)] += 1

    def see(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = followed.see(func, args, kwargs, result)
        if count is not None and (rounded := int(count.rounded)):
            fmt, module = format_of(count.dtype), _inside(running)
            why = f"counts in {fmt}, which rounds {rounded} of {count.elements} positions: count in integers"
            warn_caller(f"`{count.function}` {why}" + (f" (`{module}`)" if module else ""))
            counts[Row(count.function, module, "unchanged", why)] += 1

    WATCHERS.append(watch)
    try:
        with extra_pass(model), running.follow(model), ResultMode(see):
            loss_fn(batch)
    finally:
        WATCHERS.remove(watch)
    return Coverage(tuple(row._replace(calls=calls) for row, calls in counts.items()))


def _inside(running: RunningModules) -> str:
    return (running.names[-1] or "the model") if len(running.names) > 1 else ""


def _how(
    scope: Scope, func: Any, args: Any, kwargs: Any, entry: Entry | None, why: str
) -> tuple[Literal["covered", "unchanged"], str] | None:
    if entry is not None and not why:
        return "covered", entry.description
    if entry is not None and why != Skip.NOT_MIXED and not is_arithmetic(entry):
        return "unchanged", why
    dtypes = {t.dtype for t in tensors_of(args, kwargs) if t.dim() and t.is_floating_point()}
    if entry is None:
        narrow = func in SENSITIVE and any(dtype in NARROW for dtype in dtypes)
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return ("unchanged", f"computed in {names}, no role reaches it") if narrow else None
    promoted = is_arithmetic(entry) and torch.float32 in dtypes and any(dtype in NARROW for dtype in dtypes)
    why = "an fp32 tensor that is not a parameter makes it fp32"
    return ("unchanged", why) if promoted and not scope.leaf else None


@bypass_mode
def _kernel(scope: Scope, args: Any, kwargs: Any) -> str:
    """Returns by which kernel attention runs; empty where torch has one way to compute it."""
    given = {**dict(zip(ATTENTION, args, strict=False)), **kwargs}
    q, k, v = (to_compute(given[name], scope.casts) for name in ATTENTION[:3])
    if q.device.type not in attention.FUSED_ON or not scope.casts.fused_softmax:
        return ""
    mask = attention.cast_mask(given.get("attn_mask"), q.dtype)
    options = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
    causal, dropout = given.get("is_causal", False), given.get("dropout_p", 0.0)
    return f", {attention.kernel_of(q, k, v, mask, dropout=dropout, causal=causal, **options)}"
