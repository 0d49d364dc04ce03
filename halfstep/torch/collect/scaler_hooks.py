"""Hooks on torch's GradScaler, and on the classes that inherit from it."""

from typing import Any

from torch.amp.grad_scaler import GradScaler

from halfstep.torch.collect.patches import Patches, is_watched
from halfstep.torch.collect.seen import Seen, unwrapped

METHODS = ("scale", "unscale_", "step", "update")


def install(seen: Seen, patches: Patches) -> None:
    """Installs them."""
    ScalerHooks(seen, patches).wrap(GradScaler)


class ScalerHooks:
    """Writes down what a scaler does. One that is not enabled does nothing, and is not seen."""

    def __init__(self, seen: Seen, patches: Patches):
        self.seen, self.patches = seen, patches
        self.running: set[str] = set()  # a method of a subclass calls the one it overrides

    def wrap(self, kind: type) -> None:
        """Wraps the methods that a class has itself."""
        around = {"scale": self.scale, "unscale_": self.unscale, "step": self.step, "update": self.update}
        for name in METHODS:
            if name in vars(kind) and not is_watched(vars(kind)[name]):
                self.patches.wrap(kind, name, around[name])
        if "__init__" in vars(kind) and not is_watched(vars(kind)["__init__"]):
            self.patches.wrap(kind, "__init__", self.made)

    def made(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        """Wraps the class of a new scaler."""
        for kind in type(scaler).__mro__[:-1]:
            if issubclass(kind, GradScaler):
                self.wrap(kind)
        original(scaler, *args, **kwargs)

    def scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Sees the loss before it is scaled."""
        if not scaler.is_enabled() or "scale" in self.running:
            return original(scaler, outputs)
        seen = self.seen
        seen.lose(outputs)
        seen.scaled_losses += len(outputs) if isinstance(outputs, list | tuple) else 1
        call = seen.call("scale", seen.scaler(scaler))
        result = self._run("scale", original, scaler, outputs)
        seen.number(call, "scale", scaler._scale)
        return result

    def unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        """Sees gradients unscaled, by hand or by `step`."""
        if not scaler.is_enabled() or "unscale_" in self.running:
            return original(scaler, optimizer)
        watched = self.seen.optimizer(optimizer)
        call = self.seen.call("unscale", watched.name)
        self.seen.number(call, "scale", scaler._scale)
        result = self._run("unscale_", original, scaler, optimizer)
        watched.scaled = False
        return result

    def step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Sees whether the optimizer was stepped; one that was not is a skipped update."""
        if not scaler.is_enabled() or "step" in self.running:
            return original(scaler, optimizer, *args, **kwargs)
        seen = self.seen
        inner = unwrapped(optimizer)
        watched = seen.optimizer(inner)
        seen.check_end(watched)
        before = watched.steps
        seen.scaler_steps += 1
        try:
            result = self._run("step", original, scaler, optimizer, *args, **kwargs)
        finally:
            seen.scaler_steps -= 1
        if watched.steps == before:
            seen.call("step", watched.name, update=before, skipped=True)
            seen.after_step(inner, True)
        return result

    def update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """Sees the scale before and after."""
        if not scaler.is_enabled() or "update" in self.running:
            return original(scaler, *args, **kwargs)
        call = self.seen.call("update", self.seen.scaler(scaler))
        self.seen.number(call, "before", scaler._scale)
        result = self._run("update", original, scaler, *args, **kwargs)
        self.seen.number(call, "after", scaler._scale)
        return result

    def _run(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.running.add(name)
        try:
            with self.seen.quiet():
                return original(*args, **kwargs)
        finally:
            self.running.discard(name)
