"""How an intercepted torch function is handled: where it is called (`Scope`), what is done (`Entry`), why not."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from halfstep.core.audit.coverage import IN_COMPUTE
from halfstep.torch.numerics.dtypes import FLOATS
from halfstep.torch.numerics.lowering import Casts
from halfstep.torch.numerics.split.operand import is_split, widen_parameter


class Skip:
    """Why a function runs unchanged."""

    GIVEN_FP32 = "it is given fp32"
    IN_COMPUTE = IN_COMPUTE
    NO_PARAMETER = "fp32 operands, none of which is a parameter"
    PARAMETERS = "parameters alone, in fp32"
    IN_LEAF = "inside a leaf, which is fp32"
    NO_GRADIENT = "emulated: nothing says that its fp32 operands are activations"
    OTHER_DTYPE = "an operand is neither fp32, bf16 nor fp16"
    OUT = "it writes to a tensor that is given"
    NOT_MIXED = "no parameter meets an activation"
    NOT_COMPILED = "torch compiles grouped matmuls of bf16 alone"


class Scope(NamedTuple):
    """The module whose code calls a function: its precision, and what else decides how the function runs."""

    casts: Casts
    leaf: bool  # a leaf whose inputs were widened to fp32
    has_split: bool  # some parameters of the model are split masters
    lean: bool = False  # cheap results are computed again in the backward pass (recompute.py)


class Entry(NamedTuple):
    """What is done with a function."""

    skip_reason: Callable[[Scope, Any, Any], str]  # why it runs unchanged; empty if `run` runs it
    run: Callable[[Scope, Any, Any, Any], Any]
    description: str  # how `run` runs it


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def tensors_of(*trees: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments, those in lists too."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, list | tuple):
            yield from tensors_of(*tree)
        elif isinstance(tree, dict):
            yield from tensors_of(*tree.values())


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Applies `fn` to the fp32, bf16 and fp16 tensors in a tree of plain containers; the rest stays as it is."""
    if isinstance(tree, Tensor):
        return fn(tree) if tree.dtype in FLOATS else tree
    if isinstance(tree, PackedSequence):
        return tree._replace(data=map_tensors(fn, tree.data))
    if type(tree) is dict:
        return {key: map_tensors(fn, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([map_tensors(fn, value) for value in tree])
    if isinstance(tree, dict) and is_dataclass(tree):  # such as the outputs of Hugging Face's models
        return type(tree)(**{key: map_tensors(fn, value) for key, value in tree.items()})
    return tree


def join_if_split(tensor: Tensor) -> Tensor:
    """Returns a split master as an fp32 tensor with an fp32 gradient; any other tensor as it is."""
    return widen_parameter(tensor, whole=True) if is_split(tensor) else tensor
