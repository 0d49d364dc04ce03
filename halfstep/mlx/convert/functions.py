"""How a policy reaches the MLX functions that a model's own code calls, such as `mx.softmax(scores)`.

MLX has no function modes. So `reach_functions` replaces each function below by a wrapper, under every name that
mlx or a module of this process has for it. While the forward of a prepared model or its loss function runs,
there is a scope, and the wrappers do what the scope's precision says; elsewhere they call MLX's own.

    softmax, logsumexp, log_softmax, softmin   in the softmax format, compute out
    fast.rms_norm, fast.layer_norm             in the norm format, compute out
    fast.rope                                  in the rope format, compute out
    cross_entropy and the other losses         in the loss format, inside and out
    fast.scaled_dot_product_attention          fp32 scores and softmax, compute out
    x + table, x @ weight, ...                 an fp32 array does not widen the stream (promotion.py)
    checkpoint                                 computes again in the scope that it was called in

What is given fp32 by a policy that says fp32 runs as it is written. Everything else that a model calls computes in
the dtype of its inputs. halfstep's own layers (layers.py) do not pass through here.
"""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import mlx.core as mx
from mlx.nn import losses
from mlx.nn.layers import activations

from halfstep.core.errors import PolicyReachError
from halfstep.core.formats import FP32
from halfstep.mlx.convert.promotion import promotions
from halfstep.mlx.convert.scope import NARROW, Scope, current, enter_scope, map_floats, note, replace_functions
from halfstep.mlx.layers import exit_island, to_compute, to_island
from halfstep.mlx.numerics.dtypes import dtype_of
from halfstep.mlx.numerics.lowering import Casts
from halfstep.mlx.numerics.matmul import cast_to_format

Call = Callable[..., Any]
_SEARCHED: set[str] = set()  # modules whose names were replaced: what is imported later has the wrappers


def reach_functions() -> None:
    """Puts the wrappers into mlx, and into every module of this process that has imported functions by name."""
    found = {name: module for name, module in list(sys.modules.items()) if not name.startswith("halfstep.")}
    replace_functions([*(found[name] for name in found.keys() - _SEARCHED), mx.fast, mx.array], _WRAPPERS)
    _SEARCHED.update(found)


def _island(function: Call, role: str, args: Any, kwargs: Any, casts: Casts) -> Any:
    fmt = getattr(casts.precision, role)
    dtype = dtype_of(FP32 if casts.emulate else fmt)
    given: list[mx.array] = []
    map_floats(lambda x: given.append(x) or x, (args, kwargs))  # type: ignore[func-returns-value]
    narrow = any(x.dtype in NARROW for x in given)
    if not (casts.emulate or narrow or fmt != FP32):
        note(function.__name__, "it is given fp32", reached=False)
        return function(*args, **kwargs)
    note(function.__name__, f"the {role} format {'inside and out' if role == 'loss' else 'inside, compute out'}")
    args, kwargs = map_floats(lambda x: to_island(x, dtype, fmt, casts), (args, kwargs))
    y = function(*args, **kwargs)
    stays_wide = not casts.emulate and given and given[0].dtype not in NARROW
    if role == "loss" or stays_wide:
        return map_floats(lambda y: cast_to_format(y, dtype, fmt, casts), y)
    return map_floats(lambda y: exit_island(y, dtype, fmt, casts), y)


def _attention(function: Call, role: str, args: Any, kwargs: Any, casts: Casts) -> Any:
    if casts.precision.softmax != FP32:
        raise PolicyReachError(
            f"softmax={casts.precision.softmax} does not reach mx.fast.scaled_dot_product_attention: its softmax "
            "is fp32",
            hint="write `softmax=fp32`, or compute the attention with mx.softmax",
        )
    given = dict(zip("qkv", args, strict=False)) | kwargs
    if not casts.emulate and given["q"].dtype not in NARROW:
        note(function.__name__, "it is given fp32", reached=False)
        return function(*args, **kwargs)
    note(function.__name__, "fp32 scores and softmax, compute out")
    given |= {n: to_compute(given[n], casts) for n in "qkv"}  # a mask is added in fp32, and is not rounded
    return to_compute(function(**map_floats(lambda x: x.astype(mx.float32), given)), casts)


def _wrapped(function: Call, role: str, run: Call = _island) -> Call:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        casts, _, module = current()
        if casts is None:
            return function(*args, **kwargs)
        with enter_scope(Scope(module=module)):  # a function decides for those that it calls
            return run(function, role, args, kwargs, casts)

    return call


def _checkpoint(function: Call) -> Call:
    @wraps(function)
    def checkpoint(again: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            scope = current()

            def computed(*args: Any, **kwargs: Any) -> Any:
                with enter_scope(scope):
                    return again(*args, **kwargs)

            return function(computed)(*args, **kwargs)

        return call

    return checkpoint


def _functions() -> Iterator[tuple[Call, Call]]:
    for place, names, role in (
        (mx, "softmax logsumexp logcumsumexp", "softmax"),
        (mx.array, "logsumexp", "softmax"),
        (activations, "softmax log_softmax softmin", "softmax"),
        (mx.fast, "rms_norm layer_norm", "norm"),
        (mx.fast, "rope", "rope"),
        (mx.fast, "cross_entropy", "loss"),
        (losses, " ".join(name for name in dir(losses) if name.endswith(("_loss", "_entropy"))), "loss"),
    ):
        own = vars(place)
        for name in names.split():
            if name in own:  # MLX 0.30 has fewer
                yield own[name], _wrapped(own[name], role)
    attention = mx.fast.scaled_dot_product_attention
    yield attention, _wrapped(attention, "softmax", _attention)
    yield mx.checkpoint, _checkpoint(mx.checkpoint)
    for place, name, wrapper in promotions():
        yield vars(place)[name], wrapper


_FUNCTIONS = list(_functions())
_WRAPPERS = {id(function): wrapper for function, wrapper in _FUNCTIONS}
