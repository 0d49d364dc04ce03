"""A parameter that is the bf16 half of a split master: `parameter.grad` and `parameter.data` of it.

While `parameter.grad` is wider than the parameter, dynamo compiles nothing that uses it ("dtype mismatch between
tensor and its gradient"). So code that sums over micro-batches must take `parameter.grad` away each time.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.torch.split.operand import GRAD_OWNER, REMAINDER, is_split
from halfstep.torch.split.writes import DATA, WRITES, note_write, watch

_GUARD = "halfstep_guard"
_GRAD: Any = torch._C.TensorBase.grad  # of a plain parameter


def make_split(parameter: nn.Parameter, remainder: Tensor, name: str = "weight") -> None:
    """Makes a bf16 parameter the upper half of a master; `remainder`, the lower half, is updated in place."""
    make_whole(parameter)
    owner = torch.zeros((), device=parameter.device).expand(parameter.shape).requires_grad_()
    weak = weakref.ref(parameter)

    def refuse_use(grad: Tensor | None) -> None:
        parameter = weak()
        if grad is not None and parameter is not None and is_split(parameter):  # None: of compiled code
            raise HalfstepError(
                f"the loss uses `{name}` outside of its layer, where it is the bf16 half of a split master: the "
                "value and its gradient would be rounded to bf16",
                hint=f"hold it whole, by a rule such as `{name.rpartition('.')[0] or '**'}: param=fp32`; decay is "
                "the optimizer's; parametrize or prune before prepare()",
            )

    watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    setattr(parameter, _GUARD, parameter.register_hook(refuse_use))
    parameter.grad_dtype = torch.float32
    setattr(parameter, REMAINDER, remainder)
    setattr(parameter, GRAD_OWNER, owner)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = HalfOfSplitMaster
    if watched or type(parameter) is not HalfOfSplitMaster:
        _move_at_once(parameter)
    note_write(parameter)


def _move_at_once(parameter: Tensor) -> None:
    """Moves gradients as they come, not when they are read: somebody watches, or has a class of their own."""
    owner, weak = parameter.__dict__[GRAD_OWNER], weakref.ref(parameter)
    if not owner._post_accumulate_grad_hooks:
        owner.register_post_accumulate_grad_hook(lambda _: None if (p := weak()) is None else _move(p))


def _move(parameter: Tensor) -> None:
    owner = parameter.__dict__.get(GRAD_OWNER)
    if owner is not None and (grad := owner.grad) is not None:
        owner.grad = None
        _accumulate(parameter, grad)


def take_grad(parameter: Tensor) -> Tensor | None:
    """Returns a parameter's gradient and leaves it none."""
    owner = parameter.__dict__.get(GRAD_OWNER)
    if owner is not None and _GRAD.__get__(parameter) is None:
        grad: Tensor | None = owner.grad
        if grad is not None and grad.stride() == parameter.stride():
            owner.grad = None
            return grad
    grad, parameter.grad = parameter.grad, None
    return grad


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Does what autograd does with the gradient of a leaf: runs hooks, adds, runs hooks."""
    guard = getattr(parameter, _GUARD).id
    for hook in [hook for key, hook in (parameter._backward_hooks or {}).items() if key != guard]:
        changed = hook(grad)
        grad = grad if changed is None else changed
    if grad.stride() != parameter.stride():  # fused optimizers walk through memory: the layouts must agree
        grad = torch.empty_like(parameter.detach(), dtype=grad.dtype).copy_(grad)
    known = _GRAD.__get__(parameter)
    _GRAD.__set__(parameter, grad if known is None else known.add_(grad))
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


def make_whole(parameter: nn.Parameter) -> None:
    """Removes from a parameter what `make_split` added; its data stay."""
    _move(parameter)
    if (guard := parameter.__dict__.pop(_GUARD, None)) is not None:
        guard.remove()
    for name in (REMAINDER, GRAD_OWNER, WRITES):
        parameter.__dict__.pop(name, None)
    if type(parameter) is HalfOfSplitMaster:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.grad_dtype = None  # any dtype: the default that it had before cannot be set again


class HalfOfSplitMaster(nn.Parameter):
    """A parameter that is the bf16 half of a split master, by whose `data` nobody writes unnoticed."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, in fp32."""
        if not torch.compiler.is_compiling():
            _move(self)
        return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if (owner := self.__dict__.get(GRAD_OWNER)) is not None:
            owner.grad = None
        _GRAD.__set__(self, grad)

    def register_hook(self, hook: Any) -> Any:
        """Registers a hook, as torch does."""
        if _GUARD in self.__dict__:
            _move_at_once(self)
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Registers a hook, as torch does."""
        _move_at_once(self)
        return super().register_post_accumulate_grad_hook(hook)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The bf16 numbers."""
        if torch.compiler.is_compiling():
            return self.detach()
        data: Tensor = DATA.__get__(self)
        if is_split(self):
            watch(self, data)
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        DATA.__set__(self, data)
