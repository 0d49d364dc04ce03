"""A model's own casts, which the fp32 passes of a shadow leave out: a narrow float that its code asks for is fp32.

Seen as operations, `x.to(torch.float8_e4m3fn)`, `x.half()`, `torch.empty(dtype=...)`, `x.type_as(y)`,
`softmax(dtype=...)` and what autocast does are alike: a narrow dtype among the arguments. Who asks is read off the
Python stack: the first line that is neither torch's nor one of ours that only passes a call on.

Where a pass fails on wide numbers, the module and those around it run as written, and the shadow says so, as it
does of bits, of other packages' kernels and of memory that is read by its address.
"""

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.torch.instruments.collect.patches import Patches
from halfstep.torch.instruments.collect.tensors import is_narrow

_PASS_ON = {__name__, "halfstep.torch.instruments.noise"} | {
    *(f"halfstep.torch.instruments.collect.{name}" for name in ("patches", "guard")),
    *(f"halfstep.torch.convert.functions.{name}" for name in ("mode", "custom", "entry")),
}
_OF_TORCH = ("aten", "prims", "c10d", "_c10d_functional", "fsdp")


class OwnCasts:
    """What a model's own code casts, by module, and what of it passes in fp32 could not leave out."""

    def __init__(self, model: nn.Module, names: Iterable[str]):
        modules = dict(model.named_modules())
        self.kinds = {name: type(modules[name]) for name in names}
        self.as_written: Collection[str] = ()  # modules that a pass examines
        self.casts: dict[str, str] = {}
        self.unwidened: dict[str, str] = {}
        self._kept, self._last = set[type](), ""

    def keep(self, error: Exception) -> bool:
        """Lets the module that failed and those around it run as written, then all. False if all do."""
        around = {kind for name, kind in self.kinds.items() if f"{self._last}.".startswith(f"{name}.") or not name}
        around = {*self.kinds.values()} if around <= self._kept else around
        if around <= self._kept:
            return False
        self._kept |= around
        self.casts.clear()
        self._note(self.unwidened, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return True

    def widen(self, func: Any, args: Any, kwargs: Any, module: str, *, product: bool) -> tuple[Any, Any]:
        """Returns the arguments of an operation, with fp32 in place of narrow floats."""
        self._last, kept, asked = module, self.kinds[module] in self._kept, kwargs.get("dtype")
        floats = {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
        if floats and func.namespace not in _OF_TORCH and (place := _asked_at()):
            self._note(self.unwidened, f"`{func}` is a kernel of its own ({place})")
        of_bits = func is torch.ops.aten.view.dtype and bool(floats) != args[1].is_floating_point
        if of_bits and (place := _asked_at()):
            self._note(self.unwidened, f"reads or writes bits ({place})")
            if args[1].itemsize < args[0].itemsize and not kept:
                raise ValueError  # they would be those of the wide number
        if asked is not None and is_narrow(asked) and (place := _asked_at()):
            what = f"casts to {str(asked).removeprefix('torch.')} ({place})"
            self._note(self.unwidened if kept else self.casts, what)
            kwargs = kwargs if kept or module in self.as_written else {**kwargs, "dtype": torch.float32}
        if product and len(floats) > 1:  # with a batch, or a buffer, that is narrow before any pass
            args = [x.float() if isinstance(x, Tensor) and is_narrow(x.dtype) else x for x in args]
        return args, kwargs

    def watch_memory(self) -> Patches:
        """Notes, until undone, whose kernels read memory by its address: what they cast is out of sight."""

        def data_ptr(original: Any, x: Tensor) -> Any:
            if place := _asked_at("triton"):
                self._note(self.unwidened, f"a kernel reads its memory ({place})")
            return original(x)

        patches = Patches()
        patches.wrap(Tensor, "data_ptr", data_ptr)
        return patches

    def _note(self, where: dict[str, str], what: str) -> None:
        if not self.as_written:
            where.setdefault(self._last, what)


def _asked_at(through: str = "torch") -> str:
    """Returns the line of others' code that asks for an operation; empty if torch or halfstep does."""
    frame = sys._getframe(1)
    while (at := frame.f_back) is not None:
        frame, name = at, str(at.f_globals.get("__name__"))
        package = name.partition(".")[0]
        if package != through and name not in _PASS_ON:
            ours = package in ("torch", "halfstep")
            return "" if ours else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ""
