"""What a model's own code computes by functions: a torch function mode, by which a policy reaches it.

Modules change their class (modules.py). What is between them, `F.softmax(q @ k.mT)`, a norm as a function, a
product with a parameter, is in nobody's class, and would run in whatever it is given. Inside the forward of a
module that somebody else wrote a `Reach` is on. It sees each function of torch before it runs, and table.py
says what is done with it.

**Where it is on.** The model enters it, and so does every module in it that others wrote, unless it is on: what is
computed again in a backward pass (checkpointing), or called on a part of the model, is reached too. Layers of ours
turn it off (`layers.unreached`): they hand torch what they mean. Narrow operands (fp8) are for layers; products of
functions are in compute.

**In a leaf**, whose parameters and inputs are fp32, a product with a parameter is in compute and its result is
widened again, because code that was written for one dtype may refuse two. All else there is fp32, as written.

**Emulated**, dtypes do not tell what is narrow: every tensor is fp32. Islands and products with parameters are
reached all the same. A product of activations is known by its gradient: without one, in evaluation, it is left as
it is, and what it enters rounds it. What is between, a sum or an activation function, is not rounded itself.

torch.compile traces through all of this with fullgraph=True. Eager, each function that a module's own code calls
goes through a call of Python; benchmarks/measure/reach_cost.py measures what that is.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep.core.formats import FP32
from halfstep.torch.functions.entry import NOTHING_MET
from halfstep.torch.functions.table import TABLE, VIEWS, learn
from halfstep.torch.layers import Casts

PLAIN = (Tensor, nn.Parameter, nn.Buffer)

__all__ = ["WATCHERS", "Reach", "learn", "mode_of", "within"]


class Reach(TorchFunctionMode):
    """The mode of one precision; `wide` is that of a leaf whose inputs were widened."""

    def __init__(self, casts: Casts, wide: bool, halves: bool):
        super().__init__()
        self.casts, self.wide, self.halves = casts, wide, halves
        precision = casts.precision
        islands = (precision.norm, precision.softmax, precision.loss)
        self.inert = casts.plain and set(islands) == {FP32} and not halves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function of torch that is called while the mode is on."""
        entry = TABLE.get(func)
        if entry is None and self.halves:
            entry = VIEWS.get(func)
        kwargs = kwargs or {}
        # Tensors of classes that have functions of their own, as quantized ones, run as those say.
        if types and entry is not None and any(kind not in PLAIN for kind in types):
            entry = None
        why = "" if entry is None else entry.alone(self, args, kwargs)
        if WATCHERS:
            WATCHERS[-1](self, func, args, kwargs, entry, why)
        if entry is None or why == NOTHING_MET:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs) if why else entry.run(self, func, args, kwargs)


# (mode, function, args, kwargs, entry, why it is left alone): whoever records a pass; none, as a rule.
WATCHERS: list[Callable[..., None]] = []


@cache
def mode_of(casts: Casts, *, wide: bool = False, halves: bool = False) -> Reach:
    """The mode of a precision. `halves`: some parameters are halves of split masters, so views of them matter."""
    return Reach(casts.wide or casts, wide, halves)


def within(mode: Reach | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a forward makes of its arguments while the mode is on; without one, while none is."""
    if mode is None:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)
    depth = torch._C._len_torch_function_stack()
    top = torch._C._get_function_stack_at(depth - 1) if depth else None
    if top is mode or (mode.inert and not isinstance(top, Reach)):
        return forward(*args, **kwargs)
    with mode:
        return forward(*args, **kwargs)
