"""Follows every NaN and infinity of an eager pass to the operation that made it.

A dispatch mode sees each operation of the forward and of the backward pass. An operation with a bad output and no
bad input is an origin; one with both hands on the origin of its input. Origins are kept by storage, so that views
and writes in place carry them, and only that of a tensor which matters is asked for: code may divide by zero and
replace the result, and then nothing happened.

    -inf    is how masks are written: an operation that was given -inf, as a number or in a tensor, may return it.
            What makes NaN of it is an origin, such as a softmax over nothing but -inf.
    empty   memory that nobody wrote to holds anything, and is not looked at.

Around compiled code a dispatch mode would turn compiling off without a word: this is for a pass that is eager.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.torch.shards import is_shard

FINE, MASKED, BAD = range(3)  # how bad a tensor is: -inf alone may be a mask


@dataclass(frozen=True)
class Origin:
    """An operation that made something not finite of finite numbers."""

    operation: str
    module: str  # whose forward pass it belongs to, or whose operation it differentiates
    backward: bool


class Origins(TorchDispatchMode):
    """Notes where bad numbers come from, while it is active."""

    def __init__(self, running: Callable[[], str]):
        super().__init__()
        self._running = running  # the module whose forward pass runs
        self._made: dict[int, Origin | None] = {}  # by storage; None: it was given so
        self._modules: dict[int, str] = {}  # by the number of the autograd node that differentiates an operation

    def of(self, tensor: Tensor) -> Origin | None:
        """Returns where the bad numbers of a tensor come from, if that was seen."""
        return self._made.get(_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and looks at what it was given, and at what it returns or wrote to."""
        given = tree_leaves((args, kwargs))
        worst, origin = FINE, None
        for each in given:
            how = MASKED if _is_mask(each) else badness(each)
            if how > worst:
                worst, origin = how, self.of(each) if isinstance(each, Tensor) else None
        node = torch._C._current_autograd_node()
        if node is None:
            newest = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            self._modules.setdefault(newest, self._running())  # others without a node of their own may follow
        returned = func(*args, **(kwargs or {}))
        before = {_key(each) for each in given if isinstance(each, Tensor) and each.is_floating_point()}
        written = "empty" not in func.overloadpacket.__name__
        for each in tree_leaves(returned):
            if (how := badness(each) if written else FINE) != FINE:
                mine = worst == FINE or (worst < how and origin is None)
                self._made[_key(each)] = self._origin(func, node) if mine else origin
            elif isinstance(each, Tensor) and each.is_floating_point() and (key := _key(each)) not in before:
                self._made.pop(key, None)  # the memory of a tensor that is gone
        return returned

    def _origin(self, func: Any, node: Any) -> Origin:
        name = func.overloadpacket.__name__
        if node is None:
            return Origin(name, self._running(), False)
        module = self._modules.get(node._sequence_nr(), "")
        return Origin(f"{name} of {node.name()}", module, True)


def badness(value: Any) -> int:
    """Returns whether a value is a tensor with NaN or infinities, and whether all of these are -inf."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or value.is_nested:
        return FINE
    values = value._local_tensor if is_shard(value) else value.detach()  # type: ignore[attr-defined]
    values = values.coalesce().values() if values.is_sparse else values
    values = values.float() if values.element_size() == 1 else values  # fp8 has no isfinite
    if bool(values.isfinite().all()):
        return FINE
    return MASKED if bool((values.isfinite() | (values == -torch.inf)).all()) else BAD


def _is_mask(value: Any) -> bool:
    return isinstance(value, float) and value == -math.inf


def _key(tensor: Tensor) -> int:
    values = tensor._local_tensor if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    values = values.coalesce().values() if values.is_sparse else values
    return int(values.untyped_storage()._cdata)
