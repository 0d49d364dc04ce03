"""What functions in a model's own code compute in: a scope around the code of a module or a loss function.

MLX has no hooks: a function is replaced under every name that a module or a class has for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import mlx.core as mx

from halfstep.mlx.numerics.dtypes import is_floating
from halfstep.mlx.numerics.lowering import Casts

T = TypeVar("T")
NARROW = (mx.bfloat16, mx.float16)
# (function, module, whether the policy reached it, how it ran): what `Run.coverage` lists
Watch = Callable[[str, str, Literal["covered", "unchanged"], str], None]


class Scope(NamedTuple):
    """Whose code runs, and in what."""

    casts: Casts | None = None  # None: whatever MLX does
    streams: bool = False  # its activations are in compute, and arrays that they meet do not widen them
    module: str = ""


_OUTSIDE = Scope()
_SCOPE: ContextVar[Scope] = ContextVar("halfstep_scope", default=_OUTSIDE)
_WATCH: ContextVar[Watch | None] = ContextVar("halfstep_watch", default=None)


def current() -> Scope:
    """Returns the scope of the code that runs."""
    return _SCOPE.get()


@contextmanager
def set_inside(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets a context variable for the code inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def enter_scope(scope: Scope) -> AbstractContextManager[None]:
    """Runs code in a scope."""
    return set_inside(_SCOPE, scope)


def scope(casts: Casts | None, module: str | None = None) -> AbstractContextManager[None]:
    """Says what functions called inside compute in; the code of a module has a stream in compute."""
    streams = module is not None and casts is not None and not casts.emulate and casts.compute in NARROW
    return enter_scope(Scope(casts, streams, module or ""))


def watching(watch: Watch) -> AbstractContextManager[None]:
    """Shows `watch` every call, inside, of a function that has a wrapper."""
    return set_inside(_WATCH, watch)


def note(function: str, why: str, *, reached: bool = True) -> None:
    """Shows a call to a watcher, if there is one."""
    if (watch := _WATCH.get()) is not None:
        watch(function, current().module, "covered" if reached else "unchanged", why)


def replace_functions(places: Iterable[Any], wrappers: Mapping[int, Any]) -> list[tuple[Any, str, Any]]:
    """Puts wrappers, by the id of what they wrap, into modules and classes; returns what was where."""
    replaced = [
        (place, name, value)
        for place in places
        for name, value in (list(vars(place).items()) if isinstance(place, ModuleType | type) else ())
        if id(value) in wrappers
    ]
    for place, name, value in replaced:
        setattr(place, name, wrappers[id(value)])
    return replaced


@contextmanager
def swap_functions(places: Iterable[Any], wrappers: Mapping[int, Any]) -> Iterator[None]:
    """Replaces functions inside, and restores them after."""
    replaced = replace_functions(places, wrappers)
    try:
        yield
    finally:
        for place, name, function in replaced:
            setattr(place, name, function)


def map_floats(fn: Callable[[mx.array], mx.array], tree: Any) -> Any:
    """Applies a function to the floating arrays of plain tuples, lists and dicts, and keeps everything else."""
    if isinstance(tree, mx.array):
        return fn(tree) if is_floating(tree) else tree
    if type(tree) is dict:
        return {key: map_floats(fn, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_floats(fn, value) for value in tree)
    return tree
