"""The formats that operations have while a loss is computed, by the module that calls them.

MLX has no hooks. So while a loss function runs here, every module has a class that knows its name, and the
functions below are replaced under every name that mlx, the model's code or the loss function's has for them. What
`mx.compile` has traced before runs eagerly meanwhile, or nothing of it would be seen. What MLX's own do inside:

    fast.rms_norm, layer_norm     mean and root in fp32, whatever they are given; their result has the wider dtype
                                  of input and gain, so an fp32 gain makes bf16 activations fp32
    softmax                       sums in the dtype of its input, unless `precise=True`
    logsumexp, losses             round to the dtype of their input
    mean, var, rsqrt, sqrt        round to it too: the parts of a hand-written norm
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import environ
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.nn import losses
from mlx.nn.layers import activations
from mlx.nn.layers.base import Module

from halfstep.core.audit.record import Operation, OperationKind
from halfstep.mlx.convert.places import walk
from halfstep.mlx.convert.scope import swap_functions
from halfstep.mlx.numerics.dtypes import DTYPES, is_floating

_ROUTER = re.compile(r"router|(^|\.)(gate|gating|wg)$")
_NORM = re.compile(r"norm|(^|[._])ln(_?\w+)?$")
_FORMATS = {dtype: str(fmt) for fmt, dtype in DTYPES.items()}


def format_name(dtype: mx.Dtype) -> str:
    """Returns how records call a dtype."""
    return _FORMATS.get(dtype) or str(dtype).rpartition(".")[2]


@dataclass
class Where:
    """The module whose code runs."""

    name: str = ""
    is_norm: bool = False
    is_router: bool = False


@dataclass
class Watcher:
    """Counts operations by module, kind, function and formats, in the order they first came."""

    seen: dict[tuple[Any, ...], Operation] = field(default_factory=dict)
    overflows: list[tuple[Operation, mx.array]] = field(default_factory=list)
    stack: list[Where] = field(default_factory=lambda: [Where()])
    within: bool = False  # a function that was noted runs, and those that it calls are not noted

    def note(
        self, kind: OperationKind, function: str, given: list[mx.array], y: mx.array, inside: str
    ) -> Operation:
        """Counts a call; returns its operation."""
        inputs, out = [format_name(x.dtype) for x in given], format_name(y.dtype)
        module = self.stack[-1].name
        key = (module, kind, function, *inputs, out)
        if key not in self.seen:
            promoted = out == "fp32" and any(each in ("bf16", "fp16") for each in inputs)
            self.seen[key] = Operation(module, kind, inputs, [out], inside, promoted=promoted, function=function)
        self.seen[key].count += 1
        return self.seen[key]

    def operations(self) -> list[Operation]:
        """Returns what was seen, with the counts of numbers that became infinite or NaN."""
        for op, count in self.overflows:
            op.overflow += int(np.array(count))
        self.overflows = []
        return list(self.seen.values())


@contextmanager
def watching(model: Module, loss_fn: Any) -> Iterator[Watcher]:
    """Watches the operations of a model and its loss function inside."""
    watcher = Watcher()
    classes = [(module, type(module)) for _, module in walk(model)]
    codes = {type(module).__module__ for module, _ in classes} | {getattr(loss_fn, "__module__", "")}
    places = [mx, mx.fast, mx.array, mlx.nn, losses, activations, *map(sys.modules.get, codes)]
    for name, module in walk(model):
        module.__class__ = _named(type(module), name, watcher)
    compiles = not environ.get("MLX_DISABLE_COMPILE")
    mx.disable_compile()
    try:
        with swap_functions(places, _wrappers(watcher)):
            yield watcher
    finally:
        if compiles:
            mx.enable_compile()
        for module, own in classes:
            module.__class__ = own


def _named(own: type, name: str, watcher: Watcher) -> type:
    kind = own.__name__.lower()
    where = Where(
        name,
        "norm" in kind or _NORM.search(name.lower()) is not None,
        _ROUTER.search(name.lower()) is not None or "router" in kind,
    )

    def method(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            watcher.stack.append(where)
            try:
                y = function(self, *args, **kwargs)
            finally:
                watcher.stack.pop()
            if isinstance(y, mx.array) and not self.children():
                _look_at(watcher, where, own.__name__, args, y)
            return y

        return call

    methods = {key: method(getattr(own, key)) for key in ("__call__", "as_linear") if hasattr(own, key)}
    return type(own.__name__, (own,), {"__module__": own.__module__, "__doc__": own.__doc__, **methods})


def _look_at(watcher: Watcher, where: Where, kind: str, args: tuple[Any, ...], y: mx.array) -> None:
    """Notes what a layer without others in it returned: its format, and numbers that are not finite."""
    given = [x for x in args if is_floating(x)]
    if not given or not is_floating(y):
        return
    watcher.stack.append(where)
    op = watcher.note("other", kind, given, y, format_name(y.dtype))
    watcher.stack.pop()
    op.elements += y.size
    finite = mx.stack([mx.isfinite(mx.stop_gradient(x)).all() for x in given]).all()
    bad = mx.logical_not(mx.isfinite(mx.stop_gradient(y))).sum()
    watcher.overflows.append((op, mx.where(finite, bad, 0)))


# --- functions


def _wrappers(watcher: Watcher) -> dict[int, Any]:
    """Returns the functions that watch, by the id of those that they watch."""
    found = [(vars(place).get(name), name, kind) for place, names, kind in _FUNCTIONS for name in names]
    return {id(function): _watched(watcher, function, name, kind) for function, name, kind in found if function}


def _watched(watcher: Watcher, function: Any, name: str, kind: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if watcher.within:
            return function(*args, **kwargs)
        watcher.within = kind != "part"
        try:
            y = function(*args, **kwargs)
        finally:
            watcher.within = False
        if is_floating(y):
            given = [x for x in (*args, *kwargs.values()) if is_floating(x)]
            if given:
                _note_function(watcher, name, kind, given, y, precise=bool(kwargs.get("precise")))
        return y

    return call


def _note_function(
    watcher: Watcher, name: str, kind: str, given: list[mx.array], y: mx.array, *, precise: bool
) -> None:
    where, own = watcher.stack[-1], format_name(given[0].dtype)
    if kind == "matmul":
        operands = given[1:] if name == "addmm" else given
        is_router = where.is_router and y.shape[-1] < operands[0].shape[-1]
        watcher.note("router" if is_router else "matmul", name, operands, y, format_name(y.dtype))
    elif kind == "part":
        if where.is_norm or name == "rsqrt":
            watcher.note("norm", name, given[:1], y, own)
    elif kind == "norm" or kind == "attention":
        watcher.note(kind, name, given, y, "fp32")  # type: ignore[arg-type]
    else:
        watcher.note(kind, name, given[:1], y, "fp32" if precise else own)  # type: ignore[arg-type]


_LOSSES = tuple(name for name in dir(losses) if name.endswith(("_loss", "_entropy")))
_PARTS = ("mean", "var", "std", "rsqrt", "sqrt")
_FUNCTIONS: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (mx, ("softmax", "logsumexp"), "softmax"),
    (mx.array, ("logsumexp",), "softmax"),
    (activations, ("softmax", "log_softmax", "softmin"), "softmax"),
    (losses, _LOSSES, "loss"),
    (mx.fast, ("rms_norm", "layer_norm"), "norm"),
    (mx.fast, ("scaled_dot_product_attention",), "attention"),
    (mx, ("matmul", "addmm"), "matmul"),
    (mx.array, ("__matmul__",), "matmul"),
    (mx, _PARTS, "part"),
    (mx.array, _PARTS, "part"),
)
