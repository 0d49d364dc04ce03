"""A parameter that is the bf16 half of a split master: its gradient, its data, and what others do with them.

    read            `parameter.grad` is fp32, fetched from the grad_owner; `parameter.data` is bf16
    written         noticed and refused (writes.py)
    copied          refused: averages (`[p.clone() for p in model.parameters()]`) would be of bf16 numbers
    moved           by `model.cpu()`, `model.to(device)`: the remainder follows
    differentiated  by `torch.autograd.grad`: unused to torch, because the grad_owner is in the graph instead

Inside `run.edit()` it is the whole master, and all of this is as in torch.

While `parameter.grad` is wider than the parameter, dynamo compiles nothing that uses it ("dtype mismatch between
tensor and its gradient"). So code that sums over micro-batches must take `parameter.grad` away each time.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from halfstep.core.errors import SplitMasterError
from halfstep.torch.numerics.split.operand import SPLIT, SplitMaster, is_split
from halfstep.torch.numerics.split.writes import DATA, note_write, unwritten, watch

NAME = "halfstep_name"  # a copy has it before it is a half again
_GRAD: Any = torch._C.TensorBase.grad  # of a plain parameter
_copies_run = ContextVar("copies_run", default=False)


def make_split(parameter: nn.Parameter, remainder: Tensor, name: str = "weight") -> None:
    """Makes a bf16 parameter the upper half of a master; `remainder`, the lower half, is updated in place."""
    make_whole(parameter)
    owner = _zeros(parameter).requires_grad_()
    weak = weakref.ref(parameter)

    def refuse_use(grad: Tensor | None) -> None:
        parameter = weak()
        if grad is not None and parameter is not None and is_split(parameter):  # None: of compiled code
            raise SplitMasterError(
                f"the loss uses `{name}` outside of its layer, where it is the bf16 half of a split master: the "
                "value and its gradient would be rounded to bf16",
                hint=f"hold it whole, by a rule such as `{name.rpartition('.')[0] or '**'}: param=fp32`; decay is "
                "the optimizer's; parametrize or prune before prepare()",
            )

    watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    setattr(parameter, SPLIT, SplitMaster(remainder, owner, parameter.register_hook(refuse_use)))
    parameter.grad_dtype = torch.float32
    setattr(parameter, NAME, name)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = HalfOfSplitMaster
        parameter.__dict__["__torch_function__"] = torch._C._disabled_torch_function_impl
    if watched or type(parameter) is not HalfOfSplitMaster:
        _move_at_once(parameter)
    note_write(parameter)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros((), device=parameter.device).expand(parameter.shape)


def _move_at_once(parameter: Tensor) -> None:
    """Moves gradients as they come, not when they are read: for a hook, or a parameter of another class."""
    owner, weak = parameter.__dict__[SPLIT].grad_owner, weakref.ref(parameter)
    if not owner._post_accumulate_grad_hooks:
        owner.register_post_accumulate_grad_hook(lambda _: None if (p := weak()) is None else _move(p))


def _move(parameter: Tensor) -> None:
    half = parameter.__dict__.get(SPLIT)
    if half is not None and (grad := half.grad_owner.grad) is not None:
        half.grad_owner.grad = None
        _accumulate(parameter, grad)


def take_grad(parameter: Tensor) -> Tensor | None:
    """Returns a parameter's gradient and leaves it none."""
    half = parameter.__dict__.get(SPLIT)
    if half is not None and _GRAD.__get__(parameter) is None:
        grad: Tensor | None = half.grad_owner.grad
        if grad is not None and grad.stride() == parameter.stride():
            half.grad_owner.grad = None
            return grad
    grad, parameter.grad = parameter.grad, None
    return grad


def drop_grads(parameters: Iterable[Tensor]) -> None:
    """Leaves parameters without a gradient; asks those that have none without a call of Python's each."""
    for p in parameters:
        half = p.__dict__.get(SPLIT)
        if _GRAD.__get__(p) is not None or (half is not None and half.grad_owner.grad is not None):
            take_grad(p)


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Does what autograd does with the gradient of a leaf: runs hooks, adds, runs hooks."""
    guard = parameter.__dict__[SPLIT].guard.id
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
    if (half := parameter.__dict__.pop(SPLIT, None)) is not None:
        half.guard.remove()
    parameter.__dict__.pop(NAME, None)
    if type(parameter) is HalfOfSplitMaster:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        parameter.__dict__.pop("__torch_function__")
    parameter.grad_dtype = None  # any dtype: the default that it had before cannot be set again


@contextmanager
def copying_run() -> Iterator[None]:
    """Inside, halves may be copied: their remainders are too."""
    token = _copies_run.set(True)
    try:
        yield
    finally:
        _copies_run.reset(token)


def check_copy(name: str) -> None:
    """Refuses a copy of a half alone."""
    if not _copies_run.get():
        refuse_copy(name)


def refuse_copy(name: str, *_: Any, **__: Any) -> NoReturn:
    """Says why, and what to do instead."""
    raise SplitMasterError(
        f"`{name}` is the bf16 half of a split master: averages and other arithmetic on a copy of it would be "
        "rounded to bf16",
        hint="for averages, prepare(..., ema=0.999) and run.ema; inside `with run.edit():` a copy is the whole "
        "fp32 master; run.weights() returns them; copy.deepcopy(run) copies everything; or hold masters whole, "
        "with `param=fp32`",
    )


class HalfOfSplitMaster(nn.Parameter):
    """A parameter that is the bf16 half of a split master; a whole one inside `run.edit()`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without it, a compiled model that reads `weight.dtype` or `weight.shape` breaks its graph there. It is
        # dynamo alone that comes here: torch finds that of the parameter itself.
        with torch._C.DisableTorchFunction():
            return function(*args, **(kwargs or {}))

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, in fp32."""
        if not torch.compiler.is_compiling():
            _move(self)
        return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if (half := self.__dict__.get(SPLIT)) is not None:
            half.grad_owner.grad = None
        _GRAD.__set__(self, grad)

    def register_hook(self, hook: Any) -> Any:
        """Registers a hook, as torch does."""
        if SPLIT in self.__dict__:
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
            return self._handed_out(data)
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        moved = is_split(self) and unwritten([self]) and _is_move(DATA.__get__(self), data)
        DATA.__set__(self, data)
        if moved:
            self._follow()

    def detach(self) -> Tensor:
        """Returns the bf16 numbers, as torch does."""
        numbers = super().detach()
        return numbers if torch.compiler.is_compiling() else self._handed_out(numbers)

    def clone(self, **options: Any) -> Tensor:  # type: ignore[override]
        """Copies a whole master. A model's own code gets a copy of the joined one (functions/mode.py)."""
        copied = super().clone(**options)
        if copied.dtype is torch.bfloat16 and not torch.compiler.is_compiling() and is_split(self):
            check_copy(getattr(self, NAME))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:  # type: ignore[override]
        if id(self) not in memo:
            memo[id(self)] = copied = nn.Parameter(DATA.__get__(self).clone(), self.requires_grad)
            if is_split(self):
                name = getattr(self, NAME)
                check_copy(name)
                setattr(copied, NAME, name)  # a Holder makes it a half again
        return memo[id(self)]  # type: ignore[no-any-return]

    def _handed_out(self, numbers: Tensor) -> Tensor:
        """Lets others read and write the numbers, not copy them. The class stays Tensor: torch looks at it."""
        if numbers.dtype is torch.bfloat16 and (name := self.__dict__.get(NAME)) is not None:
            for way in ("clone", "__deepcopy__", "__reduce_ex__"):
                setattr(numbers, way, partial(refuse_copy, name))
        return numbers

    def _follow(self) -> None:
        """Moves the remainder and the owner of the gradient to where the data are now."""
        half = self.__dict__[SPLIT]
        remainder, owner = half.remainder, half.grad_owner
        if (remainder.device, remainder.stride()) != (self.device, self.stride()):
            DATA.__set__(remainder, torch.empty_like(DATA.__get__(self), dtype=torch.int16).copy_(remainder))
        if owner.device != self.device:
            _move(self)
            DATA.__set__(owner, _zeros(self))
        note_write(self)


def _is_move(data: Tensor, other: Tensor) -> bool:
    """Whether data are the same on another device. On its own device they are a write that rounding undid."""
    if (data.dtype, data.shape) != (other.dtype, other.shape) or not _elsewhere(data, other):
        return False
    return torch.equal(data.view(torch.int16), other.detach().to(data.device).view(torch.int16))


def _elsewhere(data: Tensor, other: Tensor) -> bool:
    return data.device != other.device
