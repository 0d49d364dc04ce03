"""An fp32 mask, table or weight does not widen the activations that a model combines with it.

In MLX bf16 and fp32 make fp32, and so is everything after it. In the code of a module that a policy gives a narrow
stream, the operators and functions below work on a pair of both in fp32 and return the compute format:

    +  -, where, maximum, minimum    in fp32, then in compute. A mask's finite numbers stay finite
    *  /, concatenate, stack         in fp32, then in compute
    @, matmul                        the casted matmul (matmul.py) with a wide matrix on the right: a head
                                     `x @ table.weight.T` has fp32 weight gradients. Otherwise all in compute
    einsum                           all operands in compute

Two fp32 arrays stay fp32: code that widens its activations by .astype(mx.float32) computes in fp32, as it says.
Emulated, all arrays are fp32, and nothing distinguishes a table from an activation: the next layer rounds.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import mlx.core as mx

from halfstep.core.audit.coverage import IN_COMPUTE
from halfstep.mlx.convert.scope import NARROW, current, map_floats, note
from halfstep.mlx.layers import cast_input, to_compute
from halfstep.mlx.numerics.lowering import Casts
from halfstep.mlx.numerics.matmul import multiply

Call = Callable[..., Any]

_SUMS = "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__"
_FACTORS = "__mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__"


def promotions() -> Iterator[tuple[Any, str, Call]]:
    """Yields where a function is, its name, and what takes its place."""
    for place, names, run in (
        (mx.array, _SUMS, _sum),
        (mx, "add subtract where maximum minimum", _sum),
        (mx.array, _FACTORS, _wide),
        (mx, "multiply divide concatenate stack", _wide),
        (mx.array, "__matmul__ __imatmul__", _product),
        (mx, "matmul einsum", _product),
    ):
        own = vars(place)
        for name in names.split():
            if name in own:  # MLX 0.30 has fewer
                yield place, name, _wrap(own[name], name.strip("_"), run)


def _wrap(function: Call, name: str, run: Call) -> Call:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        scope = current()
        if not scope.streams or not _mixes_widths(args, kwargs):
            if run is _product and scope.streams:
                narrow = any(isinstance(x, mx.array) and x.dtype in NARROW for x in args)
                note(name, IN_COMPUTE if narrow else "fp32 operands, as the code has them", reached=False)
            return function(*args, **kwargs)
        return run(function, name, args, kwargs, scope.casts)

    return call


def _mixes_widths(args: Any, kwargs: Any) -> bool:
    """Whether an array of the stream is among the arguments, and an fp32 one."""
    if not kwargs and len(args) == 2 and isinstance(args[0], mx.array):  # nearly all calls: be quick
        if not isinstance(args[1], mx.array) or (one := args[0].dtype) == (two := args[1].dtype):
            return False
        return _differ([one, two])
    arrays: list[mx.array] = []
    for each in (*args, *kwargs.values()):
        arrays += [x for x in (each if isinstance(each, list | tuple) else (each,)) if isinstance(x, mx.array)]
    return _differ([array.dtype for array in arrays])


def _differ(dtypes: list[mx.Dtype]) -> bool:
    return mx.float32 in dtypes and any(dtype in dtypes for dtype in NARROW)


def _wide(function: Call, name: str, args: Any, kwargs: Any, casts: Casts) -> Any:
    return to_compute(_in_fp32(function, name, args, kwargs), casts)


def _sum(function: Call, name: str, args: Any, kwargs: Any, casts: Casts) -> Any:
    return cast_input(_in_fp32(function, name, args, kwargs), casts)


def _in_fp32(function: Call, name: str, args: Any, kwargs: Any) -> Any:
    note(name, "fp32 inside, compute out")
    return function(*map_floats(_widened, args), **map_floats(_widened, kwargs))


def _product(function: Call, name: str, args: Any, kwargs: Any, casts: Casts) -> Any:
    note(name, "in compute")
    if name != "einsum" and len(args) == 2 and args[1].ndim == 2 and args[1].dtype == mx.float32:
        return multiply(to_compute(args[0], casts), args[1].T, casts)
    args, kwargs = map_floats(lambda x: to_compute(x, casts), (args, kwargs))
    return to_compute(function(*args, **kwargs), casts)


def _widened(x: mx.array) -> mx.array:
    return x.astype(mx.float32)
