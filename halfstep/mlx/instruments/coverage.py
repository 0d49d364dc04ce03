"""How each function in a model's own code runs: the list of `run.coverage(loss_fn, batch)`.

One pass is run with a watcher on the wrappers (convert/functions.py), and its effects are undone. The list has
every island, every product and every combination with an fp32 array in the model's own code, with how it ran. Of
the functions that no role reaches it has those that lose precision: sums, exponentials and the like of narrow
numbers, such as in hand-written norms.
"""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import mlx.core as mx

from halfstep.core.audit.coverage import Coverage, Row
from halfstep.mlx.convert.scope import NARROW, current, note, swap_functions, watching

# Functions that lose accuracy in narrow formats and belong to no role.
_SENSITIVE = ["mean", "sum", "var", "std", "rsqrt", "exp", "log", "cumsum", "prod", "logaddexp"]


def record(replay: Callable[[Any], Any], loss_fn: Callable[[Any, Any], Any]) -> Coverage:
    """Lists the functions of one pass; `replay` runs a loss function and leaves no trace."""
    counts: Counter[Row] = Counter()

    def watch(function: str, module: str, how: Literal["covered", "unchanged"], why: str) -> None:
        counts[Row(function, module or "the loss function", how, why)] += 1

    def watched(model: Any, batch: Any) -> Any:
        wrappers = {
            id(function): _noted(function, name)
            for place in (mx, mx.array)
            for name, function in vars(place).items()
            if name in _SENSITIVE
        }
        with watching(watch), swap_functions((mx, mx.array), wrappers):
            return loss_fn(model, batch)

    replay(watched)
    return Coverage(tuple(row._replace(calls=calls) for row, calls in counts.items()))


def _noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if current().streams and isinstance(x, mx.array) and x.dtype in NARROW:
            note(name, f"computed in {str(x.dtype).rpartition('.')[2]}, no role reaches it", reached=False)
        return function(*args, **kwargs)

    return call
