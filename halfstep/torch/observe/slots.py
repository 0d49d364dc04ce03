"""Counts of every step: in the graph of a compiled step, and for all layers together after an eager one.

**How numbers leave a compiled backward pass.** Writing to a tensor there would be a side effect. Instead each
layer has a `slot`, a leaf that nothing is computed from, and its output passes through an identity whose backward
pass returns parts of what entered the layer and of the gradient as the gradient of the slot. So it compiles with
`fullgraph`, in as many graphs as without it, and neither gradient checkpointing, DDP nor FSDP sees more than a
function. The graph only copies (a small kernel per layer); `collect` counts the parts of all layers at once, in a
few kernels for a whole pass. Counted in the graph they took 3.6 % of a step of the 124M on an H200.

Autograd adds the gradients of a slot that one pass uses twice, and sums of parts say nothing. Such a layer is
found out when its numbers are read (`USES`), and from then on counted in the graph: counts add. Its amax is then
the sum over its uses, at most so many times the largest.

**Eagerly**, a hook of the output copies both parts.

**What is counted** (core.observed): `part` takes `slice` elements, evenly spaced over the leading dimensions,
with whole rows where they fit. Counts are cumulative, so that each is one comparison and one sum; the host
subtracts them.

    count, amax, overflow,  <= 0,  <= underflow limit,  < subnormal limit

After each backward pass, `collect` adds the numbers to one buffer on the device.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.core.formats import Format
from halfstep.core.observed import AMAX, COLUMNS, COUNT, OVERFLOW, ROLES, SUBNORMAL, UNDERFLOW, LayerInfo, limits
from halfstep.core.roles import is_narrow
from halfstep.torch.losses import part
from halfstep.torch.lowering import bypass_mode
from halfstep.torch.observe.readback import Unread, wide
from halfstep.torch.tracing import transforming

# What is counted on the device; `_columns` makes `COLUMNS` of it. `uses` of a pass that counts nothing are 0.
_RAW = ("count", "amax", "overflow", "zero", "at_most_underflow", "below_subnormal", "uses", "passes")
_COUNTED, USES, PASSES = len(_RAW) - 2, len(_RAW) - 2, len(_RAW) - 1


class _Seen:
    """What an eager backward pass has met: (layer, part of what entered, part of the gradient)."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Tensor, Tensor]] = []

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a layer is not watched."""

    def __reduce__(self) -> Any:
        return type(None), ()


class LayerWatch:
    """The slots of all layers of a model, and the buffer that their numbers are added to."""

    def __init__(self, layers: Mapping[str, tuple[nn.Module, LayerInfo]], slice: int, device: torch.device):
        self.layers, self.slice, self.device = [info for _, info in layers.values()], slice, device
        self.modules = [module for module, _ in layers.values()]
        self.slots: list[Tensor] = []
        self._seen = _Seen()
        self._places, self._constants = dict[tuple[int, ...], Tensor](), dict[tuple[int, ...], Tensor]()
        shared: dict[Any, Tensor] = {}
        _guard_hooks()
        for at, (module, info) in enumerate(layers.values()):
            near = next((t.device for t in (*module.parameters(), *module.buffers())), device)
            formats = tuple(info.format(role) for role in ROLES)
            # One more than a part has: what is there is -1 for each use.
            slot = torch.zeros(len(ROLES), max(slice, _COUNTED) + 1, device=near, requires_grad=True)
            given = {"slot": slot, "slice": slice, "seen": self._seen, "place": at}
            given["limits"] = shared.setdefault((formats, near), _constants(formats).to(near))
            given["is_lookup"] = info.kind == "embedding"
            given["is_scaled"], given["is_repeated"] = any(map(is_narrow, formats)), False
            given["observe_loss"] = observe_loss
            for name in _ATTRIBUTES:
                setattr(module, name, given[name.removeprefix("halfstep_")])
            module.register_forward_hook(_observe, with_kwargs=True)
            self.slots.append(slot)
        self._is_scaled = any(is_narrow(info.format(role)) for info in self.layers for role in ROLES)
        self._limits = [_constants([info.format(role) for role in ROLES]).to(device) for info in self.layers]
        self.numbers = torch.zeros(len(layers), len(ROLES), len(_RAW), device=device, dtype=wide(device))

    def remove(self) -> None:
        """Stops watching."""
        for module in self.modules:
            unwatch(module)

    def clear(self) -> None:
        """Drops what a backward pass of somebody else has left."""
        self._seen.parts.clear()
        for slot in self.slots:
            slot.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Adds the numbers of a backward pass to the buffer."""
        given, seen = [slot.grad for slot in self.slots], [*self._seen.parts]
        self.clear()
        there = {at: grad.to(self.device, non_blocking=True) for at, grad in enumerate(given) if grad is not None}
        repeated = {at for at in there if self.modules[at].halfstep_is_repeated}
        if repeated:
            counted = torch.stack([there[at][:, :_COUNTED] for at in sorted(repeated)])
            self._add(F.pad(counted, (0, 2), value=1.0), self._at(repeated))
        if parts := there.keys() - repeated:
            table = torch.stack([there[at] for at in sorted(parts)])
            self._count_table(table.flatten(0, 1), tuple(sorted(parts)), -table[..., -1:])
        while seen:  # one of each layer at a time
            once = {place: parts for place, *parts in reversed(seen)}
            seen = [each for each in seen if once.get(each[0], [None])[0] is not each[1]]
            self._count(once)

    def _count(self, seen: Mapping[int, Sequence[Tensor]]) -> None:
        places = tuple(sorted(seen))
        parts = [x.to(self.device, non_blocking=True) for place in places for x in seen[place]]
        table = torch.full((len(parts), max(x.numel() for x in parts)), -1.0, device=self.device)
        cells = [row[: x.numel()] for row, x in zip(table, parts, strict=True)]
        torch._foreach_copy_(cells, torch._foreach_abs(parts))
        self._count_table(table, places, torch.ones(len(places), len(ROLES), 1, device=self.device))

    def _count_table(self, table: Tensor, places: tuple[int, ...], uses: Tensor) -> None:
        """Counts magnitudes, two rows for each layer; -1 is nothing."""
        if places not in self._constants:
            self._constants[places] = torch.cat([self._limits[place] for place in places])
        rows = _rows(table, self._constants[places], self._is_scaled, compiled=False)
        rows = rows.unflatten(0, (-1, len(ROLES)))
        self._add(torch.cat([rows, uses, torch.ones_like(uses)], -1), self._at(places))

    def _at(self, places: Iterable[int]) -> Tensor:
        """Returns the places of layers as an index on the device, made once."""
        key = tuple(sorted(places))
        if key not in self._places:
            self._places[key] = torch.tensor(key, device=self.device)
        return self._places[key]

    def _add(self, now: Tensor, places: Tensor) -> None:
        before = self.numbers[places]
        both = before + now
        both[..., AMAX] = torch.maximum(before[..., AMAX], now[..., AMAX].to(before.dtype))
        self.numbers[places] = both

    def launch(self) -> Unread:
        """Copies the numbers to the host, without waiting, and starts again from zero."""
        unread = Unread(self.numbers, self._columns)
        self.numbers.zero_()
        return unread

    def _columns(self, raw: NDArray[Any]) -> NDArray[np.float64]:
        repeated = np.asarray((raw[..., USES] > raw[..., PASSES]).any(-1))
        for at in np.flatnonzero(repeated):
            self.modules[at].halfstep_is_repeated = True  # type: ignore[assignment]
        return _columns(np.where(repeated[:, None, None], 0.0, raw))


def _guard_hooks() -> None:
    """Makes torch.compile look at a module's hooks before it takes what it compiled for one without them.

    It does not by default. What was compiled until now has no such guards and is compiled again, once per process.
    """
    dynamo = sys.modules.get("torch._dynamo")  # if it was not imported, nothing was compiled
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()


_NAMES = ("slot", "slice", "limits", "seen", "place", "is_lookup", "is_scaled", "is_repeated", "observe_loss")
_ATTRIBUTES = tuple(f"halfstep_{name}" for name in _NAMES)


def unwatch(module: nn.Module) -> None:
    """Removes every trace of a watch from a module, also from the copy of one."""
    for key in [key for key, hook in module._forward_hooks.items() if hook is _observe]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
    for name in _ATTRIBUTES:
        vars(module).pop(name, None)


def _constants(formats: Sequence[Format]) -> Tensor:
    """Returns what each role is compared with; a tensor, because compiled code has no guards on its numbers.

    The last number is the format's largest, up to which a narrow operand is scaled; 0 if it is not.
    """
    return torch.tensor([[*limits(fmt), fmt.max if is_narrow(fmt) else 0.0] for fmt in formats])


def _columns(raw: NDArray[Any]) -> NDArray[np.float64]:
    columns = np.zeros((*raw.shape[:-1], len(COLUMNS)))
    columns[..., [COUNT, AMAX, OVERFLOW]] = raw[..., :3]
    columns[..., UNDERFLOW] = raw[..., 4] - raw[..., 3]
    columns[..., SUBNORMAL] = raw[..., 5] - raw[..., 4]
    return columns


# --- in the graph


class _Paused:
    now = False


@contextmanager
def paused() -> Iterator[None]:
    """Inside, nothing is counted. For eager code: compiled code would be compiled again."""
    _Paused.now = True
    try:
        yield
    finally:
        _Paused.now = False


@bypass_mode
def _observe(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """A forward hook: compiled, passes the first tensor of the output through the identity; eagerly, hooks it."""
    if _Paused.now or not torch.is_grad_enabled() or transforming():
        return None
    y = first_tensor(output if isinstance(output, tuple) else (output,))
    # Without a gradient nothing runs backward, and the identity must not be the reason that something does.
    if y is None or not y.requires_grad:
        return None
    x = None if module.halfstep_is_lookup else first_tensor((*args, *kwargs.values()))
    size = module.halfstep_slice
    kept = part((y if x is None else x).detach(), size).clone().reshape(-1)
    if not torch.compiler.is_compiling():
        if module.halfstep_seen is not None:
            y.register_hook(partial(_keep, module.halfstep_seen.parts, module.halfstep_place, kept, size))
        return None
    seen = _pass_through(module, y, kept, None)
    if isinstance(output, Tensor):
        return seen
    return tuple(seen if item is y else item for item in output)


@bypass_mode
def observe_loss(module: Any, x: Tensor, loss: Tensor, sample: Tensor) -> Tensor:
    """As `_observe`, of a head that is fused with its loss: its logits' gradient is `sample` times the loss's."""
    if _Paused.now or not loss.requires_grad or transforming():
        return loss
    kept = part(x.detach(), module.halfstep_slice).clone().reshape(-1)
    if torch.compiler.is_compiling():
        return _pass_through(module, loss, kept, sample)
    if module.halfstep_seen is not None:
        loss.register_hook(partial(_keep_product, module.halfstep_seen.parts, module.halfstep_place, kept, sample))
    return loss


def _keep_product(parts: list[Any], place: int, kept: Tensor, sample: Tensor, g: Tensor) -> None:
    parts.append((place, kept, sample * g))


def _pass_through(module: Any, y: Tensor, kept: Tensor, sample: Tensor | None) -> Tensor:
    ways = (module.halfstep_slice, module.halfstep_is_scaled, module.halfstep_is_repeated)
    return _Observed.apply(y, kept, sample, module.halfstep_slot, module.halfstep_limits, *ways)  # type: ignore[no-any-return]


def _keep(parts: list[Any], place: int, kept: Tensor, size: int, g: Tensor) -> None:
    parts.append((place, kept, part(g.detach(), size).clone().reshape(-1)))


def first_tensor(given: Sequence[Any]) -> Tensor | None:
    """Returns the first tensor of floating-point numbers, if there is one."""
    for item in given:
        if isinstance(item, Tensor) and item.is_floating_point():
            return item
    return None


class _Observed(torch.autograd.Function):
    """The identity; the gradient of its slot is the magnitudes of both parts, or what was counted of them."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        kept: Tensor,
        sample: Tensor | None,
        slot: Tensor,
        constants: Tensor,
        size: int,
        scaled: bool,
        repeated: bool,
    ) -> Tensor:
        ctx.size, ctx.scaled, ctx.repeated, ctx.width = size, scaled, repeated, slot.shape[-1]
        ctx.save_for_backward(kept, constants, sample)
        return y.detach()  # no view to autograd: somebody may write to it in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kept, constants, sample = ctx.saved_tensors
        with torch.no_grad():
            parts = [kept, part(g.detach(), ctx.size).reshape(-1) if sample is None else sample * g]
            both = torch.stack([F.pad(x.float().abs(), (0, ctx.width - x.shape[0]), value=-1.0) for x in parts])
            if ctx.repeated:
                rows = _rows(both, constants, ctx.scaled, compiled=True)
                both = F.pad(rows, (0, ctx.width - rows.shape[-1]))
        return g, None, None, both, None, None, None, None


def _rows(both: Tensor, constants: Tensor, scaled: bool, *, compiled: bool) -> Tensor:
    """Returns what is counted of rows of magnitudes, (rows, raw columns); -1 is nothing."""
    over, under, subnormal, top = constants.unsqueeze(-1).unbind(1)
    amax = (torch.where(both < torch.inf, both, 0.0) if compiled else both.nan_to_num(0.0, 0.0)).amax(-1, True)
    magnitude = both
    if scaled:
        power = ((top.view(torch.int32) - amax.view(torch.int32)) >> 23).clamp(-126, 126)
        scale = ((power + 127) << 23).view(torch.float32)
        magnitude = both * torch.where((top > 0) & (amax > 0), scale, 1.0)

    def count(compare: Any, given: Tensor, limit: Any) -> Tensor:
        if compiled:
            return compare(given, limit).sum(-1, keepdim=True, dtype=torch.float32)  # type: ignore[no-any-return]
        # As numbers: a CPU adds truth values several times slower.
        return compare(given, limit, out=torch.empty_like(given)).sum(-1, keepdim=True)  # type: ignore[no-any-return]

    inside = count(torch.lt, magnitude, over)  # not true of a NaN
    overflow = both.shape[-1] - inside
    small = (count(torch.le, magnitude, under), count(torch.lt, magnitude, subnormal))
    return torch.cat([count(torch.ne, both, -1.0), amax, overflow, count(torch.le, both, 0.0), *small], -1)
