"""A torch function mode, by which a policy reaches the functions that a model's own code calls.

Converted modules have a class that casts (convert/modules.py). The code between them, `F.softmax(q @ k.mT)`, a
norm as a function, a product with a parameter, would run in whatever dtype it gets. So while the forward of a
third-party module runs, a `PolicyMode` is on: it sees each torch function before it runs, and table.py decides.

**Where it is on.** The model enters it, and so does every third-party module in it, unless it is on already:
code that runs again in a backward pass (checkpointing), or is called on a part of the model, is reached too. Our
own layers switch it off. Narrow operands (fp8) are for layers; products in functions are in compute.

**In a leaf**, whose parameters and inputs are fp32, a product with a parameter is in compute and its result is
widened again, because code that was written for one dtype may refuse two. Everything else there is as written.

**Emulated** tensors are all fp32, so dtypes do not show which are narrow. A product of activations is recognized
by its gradient: without one, in evaluation, it runs unchanged, and the next layer rounds its result. Sums and
activation functions in between are not rounded themselves.

torch.compile traces through all of this with fullgraph=True. In eager mode each function that a module's own code
calls costs one Python call more (benchmarks/measure/interception_cost.py).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep.core.formats import FP32
from halfstep.torch.convert.functions.entry import Scope, Skip, is_weight, map_tensors
from halfstep.torch.convert.functions.narrow_logits import to_fp32
from halfstep.torch.convert.functions.table import TABLE, VIEWS
from halfstep.torch.numerics.lowering import Casts
from halfstep.torch.numerics.recompute import recompute_in_backward
from halfstep.torch.numerics.split.parameter import HalfOfSplitMaster

SPLIT, UNFLATTEN, FROM_NUMBER = Tensor.split, Tensor.unflatten, Tensor.__rsub__
SUBTRACTION = TABLE[FROM_NUMBER]
PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer, HalfOfSplitMaster))
# Classes of arguments that are no split parameter.
NEVER_SPLIT = frozenset((Tensor, int, float, bool, str, slice, tuple, list, torch.Size, torch.dtype, type(None)))


ACTIVATIONS = frozenset((F.gelu, F.mish, torch.square, Tensor.square, torch.pow, Tensor.pow))
POWER = Tensor.__pow__  # Python code, which dynamo of torch 2.13 does not find in a set
# Compiled, a product with the result is marked, and of two marks in a row torch would keep the first result.
GATES = frozenset((F.silu,))
PRODUCTS = frozenset((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply))


def recompute_if_cheap(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns the result of a function that is cheap to compute again; None for others."""
    if not _is_cheap(func, args, kwargs or {}):
        return None
    others, options = args[1:], kwargs or {}
    with torch._C.DisableTorchFunction():
        if func in PRODUCTS:
            return recompute_in_backward(lambda x, y: func(x, y), *args)
        return recompute_in_backward(lambda x: func(x, *others, **options), args[0])


def _is_cheap(func: Any, args: Any, kwargs: Any) -> bool:
    if func in PRODUCTS:
        return len(args) == 2 and not kwargs and all(map(_is_activation, args)) and args[0].shape == args[1].shape
    if func is not POWER and func not in ACTIVATIONS and (func not in GATES or torch.compiler.is_compiling()):
        return False
    if not args or not _is_activation(args[0]) or any(isinstance(given, Tensor) for given in args[1:]):
        return False
    return not kwargs.get("inplace") and "out" not in kwargs


def _is_activation(given: Any) -> bool:
    return isinstance(given, Tensor) and given.requires_grad and given.dim() > 1 and not is_weight(given)


class PolicyMode(TorchFunctionMode):
    """The mode of one scope."""

    def __init__(self, scope: Scope):
        super().__init__()
        self.scope, self.has_split, self.lean = scope, scope.has_split, scope.lean
        precision = scope.casts.precision
        islands = {precision.norm, precision.softmax, precision.loss}
        self.inert = scope.casts.plain and islands == {FP32} and not scope.has_split and not scope.lean

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # dynamo of torch 2.13 does not find a function that Python code of torch defines, in a table that has it.
        entry = SUBTRACTION if func is FROM_NUMBER else TABLE.get(func)
        if self.lean and not WATCHERS and (result := recompute_if_cheap(func, args, kwargs)) is not None:
            return result
        if entry is None:
            # Hundreds of times per micro-batch: a view of an activation, or a function that no policy is about.
            half = self.has_split and ("input" in (kwargs or ()) or not NEVER_SPLIT.issuperset(map(type, args)))
            if not half and not WATCHERS:
                if func is SPLIT:  # in the form that torch's cache of compiled graphs knows
                    return args[0].split(*args[1:], **(kwargs or {}))
                if func is UNFLATTEN:  # whose own code calls super(), which dynamo cannot follow
                    return torch.unflatten(*args, **(kwargs or {}))
                return func(*args, **kwargs) if kwargs else func(*args)
            entry = VIEWS.get(func) if half else None
        kwargs = kwargs or {}
        # Tensors of classes that define their own functions, such as quantized ones, run as those define.
        if types and entry is not None and not PLAIN.issuperset(types):
            entry = None
        why = "" if entry is None else entry.skip_reason(self.scope, args, kwargs)
        if WATCHERS:
            WATCHERS[-1](self.scope, func, args, kwargs, entry, why)
        if entry is None or why == Skip.NOT_MIXED:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs) if why else entry.run(self.scope, func, args, kwargs)


# Called with (scope, function, args, kwargs, entry, skip reason) for each function, while a pass is recorded.
WATCHERS: list[Callable[..., None]] = []


@cache
def mode_of(casts: Casts, leaf: bool, has_split: bool, lean: bool, /) -> PolicyMode:
    """Returns the mode of a precision, one object for each scope: entered again inside itself, it does nothing."""
    return PolicyMode(Scope(casts.wide or casts, leaf, has_split, lean))


def current_mode() -> PolicyMode | None:
    """Returns the mode of the code that runs now, which others, such as `with torch.device(...)`, may be above."""
    if torch._C._is_torch_function_mode_enabled():
        for depth in reversed(range(torch._C._len_torch_function_stack())):
            mode = torch._C._get_function_stack_at(depth)
            if isinstance(mode, PolicyMode):
                return mode
    return None


def run_in_mode(mode: PolicyMode | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a forward with the mode on; if it is None, with every mode off."""
    if mode is None:
        args, kwargs = map_tensors(to_fp32, (args, kwargs))  # which would look narrow
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)
    depth = torch._C._len_torch_function_stack()
    top = torch._C._get_function_stack_at(depth - 1) if depth else None
    if top is mode or (mode.inert and not isinstance(top, PolicyMode)):
        return forward(*args, **kwargs)
    with mode:
        return forward(*args, **kwargs)
