"""How a function of torch is met (mode.py): what is done with it, why not, and what its arguments are."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.torch.split import is_half, widened

if TYPE_CHECKING:
    from halfstep.torch.functions.mode import Reach

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)
# Why a function is left as it is.
GIVEN_FP32 = "it is given fp32"
IN_COMPUTE = "it is in compute already"
NO_PARAMETER = "fp32 operands, none of which is a parameter"
PARAMETERS = "parameters alone, in fp32"
IN_LEAF = "inside a leaf, which is fp32"
NO_GRADIENT = "emulated: nothing says that its fp32 operands are activations"
OTHER_DTYPE = "an operand is neither fp32, bf16 nor fp16"
OUT = "it writes to a tensor that is given"
NOTHING_MET = "no parameter meets an activation"
NOT_COMPILED = "torch compiles grouped matmuls of bf16 alone"


class Entry(NamedTuple):
    """What is done with a function."""

    alone: Callable[["Reach", Any, Any], str]  # why it is left as it is; empty where it is reached
    run: Callable[["Reach", Any, Any, Any], Any]
    told: str  # how it runs where it is reached


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def tensors_of(*trees: Any) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists too."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, list | tuple):
            yield from tensors_of(*tree)
        elif isinstance(tree, dict):
            yield from tensors_of(*tree.values())


def mapped(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Arguments with their tensors of fp32, bf16 and fp16 changed."""
    if isinstance(tree, Tensor):
        return fn(tree) if tree.dtype in FLOATS else tree
    if isinstance(tree, dict):
        return {key: mapped(fn, value) for key, value in tree.items()}
    return type(tree)([mapped(fn, value) for value in tree]) if type(tree) in (list, tuple) else tree


def whole(tensor: Tensor) -> Tensor:
    """A half of a split master as an fp32 tensor with an fp32 gradient; any other as it is."""
    return widened(tensor, whole=True) if is_half(tensor) else tensor
