"""Functions and methods of torch that are replaced while something is watched, and put back after it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._compile import _disable_dynamo

from halfstep.torch.instruments.collect.guard import Guard, Unguarded

Around = Callable[..., Any]


class Patches:
    """What was replaced, and by whom: `undo` puts everything back, the last first."""

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard or Unguarded()
        self._undo: list[Callable[[], None]] = []
        self._running: set[Around] = set()

    def wrap(self, owner: Any, name: str, around: Around, *, traced: bool = True, outermost: bool = False) -> None:
        """Replaces a function by one that calls `around(original, *args, **kwargs)`.

        Where dynamo traces the call, it meets the original: compiled code is unchanged. With `traced=False`
        it never traces the call. With `outermost`, calls inside a call of the same `around` go to the original: a
        method of a subclass calls the one it overrides.
        """
        original = getattr(owner, name)

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or around in self._running or self.guard.failure is not None:
                return original(*args, **kwargs)
            if not outermost:
                return self.guard.call(around, original, args, kwargs)
            self._running.add(around)
            try:
                return self.guard.call(around, original, args, kwargs)
            finally:
                self._running.discard(around)

        wrapper.__halfstep_watched__ = True  # type: ignore[attr-defined]
        self.put(owner, name, wrapper if traced else _disable_dynamo(wrapper))

    def wrap_everywhere(self, owners: list[Any], name: str, around: Around) -> None:
        """Replaces a function that several modules have under one name."""
        self.wrap(owners[0], name, around)
        for owner in owners[1:]:
            self.put(owner, name, getattr(owners[0], name))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute."""
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:  # inherited
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def hook(self, register: Callable[..., Any], function: Callable[..., Any], **settings: Any) -> None:
        """Registers a hook with torch."""
        self._undo.append(register(function, **settings).remove)

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Adds something to undo."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Puts everything back."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                self.guard.fail(error)


def is_watched(function: Any) -> bool:
    """Whether a function is one of our wrappers."""
    return getattr(function, "__halfstep_watched__", False)
