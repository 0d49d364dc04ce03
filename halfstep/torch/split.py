"""Split masters in a model: a parameter that holds the bf16 half of an fp32 master.

`parameter.data` is the nearest bf16, which a bf16 matmul uses directly. Two attributes complete it:

    remainder     what the bf16 leaves out, int16. A layer that computes in anything but bf16 joins the two.
    grad_owner    an fp32 leaf of the parameter's shape that takes no memory (one zero, expanded). Autograd
                  computes its gradient instead of the parameter's; `parameter.grad` fetches it when it is read.

**Why a grad_owner?** A weight gradient that is summed in fp32 must arrive in fp32. `parameter.grad_dtype =
float32` is enough for eager autograd, but torch.compile differentiates copies of its inputs that lack it: there
the gradient is rounded to bf16, then widened (torch 2.13). A hook on the parameter makes the gradient move there
at once; a hook of ours for each matrix would take a large part of a small backward pass.
`torch.autograd.grad` does not work with split parameters: they are not in the graph, their grad_owner is.

**Writes by others** (`nn.init`, a clamp, an average) would be rounded to bf16, or lost. The next update refuses
them (`Masters.check_writes`) and names `run.edit()`, inside which a parameter is its whole master. Noticed is what
torch counts, data that were replaced, and a write to what is handed out: `parameter.data`, whose counter is its
own (`HalfOfSplitMaster`), and a tensor of a state dict, which is a joined copy here.

While `parameter.grad` is wider than the parameter, dynamo compiles nothing that uses it ("dtype mismatch between
tensor and its gradient"). So code that sums over micro-batches must take `parameter.grad` away each time.

A state dict contains the joined fp32 master, and loading splits it again. `copy.deepcopy` of a run works: it drops
the attributes of a parameter, and a `Holder` restores them. Of a model alone it is refused, because averages of
such a copy would be computed in bf16; inside `run.edit()` it gives a copy with whole masters.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import FP32, Format
from halfstep.torch.cast import carried, join, split
from halfstep.torch.tracing import transforming

REMAINDER, GRAD_OWNER, WRITES = "halfstep_remainder", "halfstep_grad_owner", "halfstep_writes"
_GUARD = "halfstep_guard"
# Of a plain parameter.
_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad
_VERSION, _POINTER, _NOTED = attrgetter("_version"), methodcaller("data_ptr"), attrgetter(WRITES)
_copies_run = ContextVar("copies_run", default=False)


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
        data: Tensor = _DATA.__get__(self)
        if is_split(self):
            _watch(self, data)
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        _DATA.__set__(self, data)


class _Handed(NamedTuple):
    """A tensor that was handed out, by what shares its version counter and none of its memory."""

    tensor: weakref.ref[Tensor]
    counter: Tensor
    version: int
    joined: bool  # a copy, in a state dict

    def was_written(self) -> bool:
        return self.counter._version != self.version


class _Watched:
    """Equals what `note_write` recorded for as long as nobody writes to the tensors that were handed out."""

    def __init__(self, noted: tuple[int, int], handed: list[_Handed]):
        self.noted, self.handed = noted, handed

    def __eq__(self, now: object) -> bool:
        return self.noted == now and not any(each.was_written() for each in self.handed)

    __hash__ = None  # type: ignore[assignment]


def note_write(parameter: Tensor) -> None:
    """Records that the last write to a split parameter also wrote its remainder."""
    if is_split(parameter):
        note_writes([parameter])


def note_writes(parameters: Sequence[Tensor]) -> None:
    """Does so for several, which are split."""
    for p, now in zip(parameters, _writes_of(parameters), strict=True):
        noted = p.__dict__.get(WRITES)
        if isinstance(noted, _Watched):
            alive = [h._replace(version=h.counter._version) for h in noted.handed if h.tensor() is not None]
            now = _Watched(now, alive) if alive else now
        p.__dict__[WRITES] = now


def _writes_of(parameters: Sequence[Tensor]) -> list[Any]:
    """Returns how often torch counted a write to each parameter, and where its data are, without a Python call."""
    return list(zip(map(_VERSION, parameters), map(_POINTER, parameters), strict=True))


def unwritten(parameters: Sequence[Tensor]) -> bool:
    """Whether nobody else wrote to split parameters since `note_writes`."""
    return _writes_of(parameters) == list(map(_NOTED, parameters))


def _watch(parameter: Tensor, tensor: Tensor, *, joined: bool = False) -> None:
    """Lets a write to a tensor that is handed out be noticed."""
    with torch.inference_mode(False):
        counter = tensor.detach()
        _DATA.__set__(counter, tensor.new_empty(0))
    handed = _Handed(weakref.ref(tensor), counter, counter._version, joined)
    noted = getattr(parameter, WRITES)
    if isinstance(noted, _Watched):
        noted.handed = [h for h in noted.handed if h.was_written() or h.tensor() is not None] + [handed]
    else:
        setattr(parameter, WRITES, _Watched(noted, [handed]))


def check_write(parameter: Tensor, name: str) -> None:
    """Refuses a split parameter that somebody else wrote to since `note_write`."""
    noted = getattr(parameter, WRITES)
    if unwritten([parameter]):
        return
    edit = "write inside `with run.edit():`, where it is the whole fp32 master"
    if isinstance(noted, _Watched) and any(each.joined and each.was_written() for each in noted.handed):
        raise HalfstepError(
            f"`{name}` of a state dict was written to: it is a copy of a split master, so the write is lost",
            hint=f"pass the dictionary to model.load_state_dict(), or {edit}",
        )
    raise HalfstepError(
        f"`{name}` was written to outside of run.edit(): it is the bf16 half of a split master, so what was "
        "written is rounded to bf16, or lost",
        hint=f"{edit}; an empty one takes the number as it is now; or hold masters whole, with `param=fp32`",
    )


def accept_write(parameter: Tensor) -> None:
    """Takes what somebody else wrote to a split parameter as the whole number, also data in fp32."""
    noted, remainder = getattr(parameter, WRITES), getattr(parameter, REMAINDER)
    if isinstance(noted, _Watched):
        through_data = any(not each.joined and each.was_written() for each in noted.handed)
        noted = None if through_data else noted.noted
    if parameter.dtype == torch.float32:
        parameter.data, lower = split(parameter.data)
        remainder.copy_(lower)
    elif noted != _writes_of([parameter])[0]:
        remainder.zero_()
    note_write(parameter)


@contextmanager
def copying_run() -> Iterator[None]:
    """Inside, split parameters may be copied."""
    token = _copies_run.set(True)
    try:
        yield
    finally:
        _copies_run.reset(token)


def is_split(tensor: Tensor) -> bool:
    """Whether a tensor is the bf16 half of a split master: a parameter, which has a class of its own."""
    return type(tensor) is not Tensor and tensor.dtype is torch.bfloat16 and hasattr(tensor, GRAD_OWNER)


class Holder(nn.Module):
    """A module that may hold split parameters: `remainders` has the remainder of each, by parameter name."""

    if TYPE_CHECKING:  # the class behind a converted module has attributes that are unknown here
        _parameters: dict[str, Any]

        def __getattr__(self, name: str) -> Any: ...

    @property
    def remainders(self) -> dict[str, Tensor]:
        """The remainders. Neither parameters nor buffers: `state_dict` and `to` ignore them."""
        return self.__dict__.get("halfstep_remainders", {})

    def add_remainder(self, name: str, remainder: Tensor) -> None:
        """Registers the remainder of a parameter of this module."""
        self.__dict__.setdefault("halfstep_remainders", {})[name] = remainder

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, remainder in [*self.remainders.items()]:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.dtype != torch.bfloat16:  # inside run.edit() the copy is whole
                del self.remainders[name]
            elif parameter.__dict__.get(REMAINDER) is remainder:
                continue  # a shallow copy shares the parameter, whose gradient may be on its way
            elif hasattr(parameter, GRAD_OWNER) or _copies_run.get():
                make_split(parameter, remainder, name)
            else:
                raise HalfstepError(
                    f"copy.deepcopy would copy the bf16 half of a split master (`{name}` of a "
                    f"{type(self).__name__}): averages and other arithmetic on the copy would be rounded to bf16",
                    hint="for averages, prepare(..., ema=0.999) and run.ema; inside `with run.edit():` a copy has "
                    "whole fp32 masters; copy.deepcopy(run) copies everything; or hold masters whole, with "
                    "`param=fp32`",
                )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name in self.remainders:
                parameter = self._parameters.get(name)
                if parameter is None:
                    raise HalfstepError(
                        f"`{prefix}{name}`, half of a split master, is not a parameter of its layer any more",
                        hint="parametrize, prune or replace it before prepare(), or after run.unprepare()",
                    )
                if is_split(parameter):
                    check_write(parameter, prefix + name)
                    with torch.inference_mode(False), torch.no_grad():  # tensors of inference count no writes
                        joined = destination[prefix + name] = join(parameter, getattr(parameter, REMAINDER))
                    _watch(parameter, joined, joined=True)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        names = [name for name in self.remainders if prefix + name in state_dict]
        if names and local_metadata.get("assign_to_params_buffers", False):
            raise HalfstepError(
                f"load_state_dict(assign=True) would replace `{prefix}{names[0]}`, the half of a split master",
                hint="leave `assign` out: the numbers are copied, and split",
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        for name in names:
            given, hi = state_dict[prefix + name], self._parameters[name].detach()
            # Inside run.edit() it is the master; torch has reported what does not fit.
            if hi.dtype == torch.bfloat16 and given.shape == hi.shape:
                new_hi, new_lo = split(given.to(hi.device, torch.float32))
                hi.copy_(new_hi)
                self.remainders[name].copy_(new_lo)
                note_write(self._parameters[name])


def operand_of(weight: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Returns a weight's values (if `whole`, of a split one the master) and the tensor its gradient is for."""
    owner = getattr(weight, GRAD_OWNER, None)
    if owner is None or weight.dtype != torch.bfloat16:
        return weight.detach(), weight
    if not weight.requires_grad:
        owner = weight.detach()
    if not whole:
        return weight.detach(), owner
    return join(weight, getattr(weight, REMAINDER)), owner


def widened(weight: Tensor, whole: bool) -> Tensor:
    """Returns a split weight as a differentiable fp32 tensor with an fp32 gradient."""
    values, owner = operand_of(weight, whole)
    return through(values.float(), owner) if transforming() else _WithOwner.apply(values, owner)  # type: ignore[no-any-return]


def through(values: Tensor, owner: Tensor, grad: Format = FP32) -> Tensor:
    """Returns values that are no function of `owner` to autograd; their gradient, rounded to `grad`, is for it."""
    return _Through.apply(values, owner, grad)  # type: ignore[no-any-return]


class _WithOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Tensor) -> Tensor:
        wide = values.float()
        return wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


class _Through(torch.autograd.Function):
    """As _WithOwner, in the form that torch.func, forward mode and a second derivative need, which is slower."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, owner: Tensor, grad: Format) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.grad = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:
        return None, g if ctx.grad == FP32 else through(carried(g.detach(), ctx.grad), g), None

    @staticmethod
    def jvp(ctx: Any, values: Any, owner: Any, grad: Any) -> Any:
        return owner.float()
