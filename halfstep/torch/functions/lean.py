"""Functions of a model's own code whose results the backward pass computes again (recompute.py), if it is lean.

Those alone whose own gradient needs their inputs: then nothing is kept that would not be kept anyway. relu, tanh
and dropout keep their results instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.torch.functions.entry import is_weight
from halfstep.torch.recompute import again

ACTIVATIONS = frozenset((F.gelu, F.mish, torch.square, Tensor.square, torch.pow, Tensor.pow))
POWER = Tensor.__pow__  # Python code, which dynamo of torch 2.13 does not find in a set
# Compiled, a product with the result is marked, and of two marks in a row torch would keep the first result.
GATES = frozenset((F.silu,))
PRODUCTS = frozenset((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply))


def recomputed(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns the result of a function that is cheap to compute again; None for others."""
    if not _is_cheap(func, args, kwargs or {}):
        return None
    others, options = args[1:], kwargs or {}
    with torch._C.DisableTorchFunction():
        if func in PRODUCTS:
            return again(lambda x, y: func(x, y), *args)
        return again(lambda x: func(x, *others, **options), args[0])


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
