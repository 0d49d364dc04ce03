"""Halves: a parameter that is the bf16 half of a split master, as a layer meets it.

`parameter.data` is the nearest bf16, and a matmul in bf16 multiplies by it as it is. Two things hang on it:

    remainder    what the half leaves out, int16. A layer that computes in anything but bf16 joins both.
    stand-in     an fp32 leaf of the parameter's shape without memory of its own (one zero, expanded). Autograd
                 takes its gradient in the half's place, and it is handed over to `parameter.grad`.

**Why a stand-in?** A weight gradient that is summed in fp32 must arrive in fp32. `parameter.grad_dtype = float32`
says so to eager autograd, but torch.compile differentiates copies of its inputs that lack it: there the gradient
is rounded to bf16, then widened, and only its dtype looks right (torch 2.13). The gradient of an fp32 leaf is
never narrowed, compiled or not.

Hooks on the parameter (`register_hook`, `register_post_accumulate_grad_hook`) are run when its gradient is handed
over. `torch.autograd.grad` must be given what has a gradient: parameters that are halves have none in the graph.

**Whoever writes to a half** in place (`nn.init`, a clamp, a mask) means what he wrote: the remainder of what was
there before is dropped. torch counts such writes; through `parameter.data` it does not, and there the remainder
stays, at most half a unit in the last place of bf16. Where the half is zero, a remainder below zero is no part of
any number, and `join` takes it for none.

While `parameter.grad` is there and wider than the parameter, dynamo compiles nothing that uses the parameter
("dtype mismatch between tensor and its gradient"). So whoever sums gradients over micro-batches takes it away
after each backward pass, lest a batch of another length run uncompiled.

A state dict has the whole of a split master, in fp32, and one that is loaded is split: saving and loading again
changes nothing. `copy.deepcopy` of a parameter drops everything that hangs on it; a `Holder` hangs it on again.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.torch.cast import join, split

REMAINDER, STAND_IN, WRITES = "halfstep_remainder", "halfstep_stand_in", "halfstep_writes"


def make_half(parameter: nn.Parameter, remainder: Tensor) -> None:
    """Makes a bf16 parameter the half of a master whose other half is `remainder`, which is updated in place."""
    stand_in = torch.zeros((), device=parameter.device).expand(parameter.shape).requires_grad_()
    whose = weakref.ref(parameter)

    def hand_over(stand_in: Tensor) -> None:
        owner, grad = whose(), stand_in.grad
        stand_in.grad = None
        if owner is not None and grad is not None:
            _give(owner, grad)

    stand_in.register_post_accumulate_grad_hook(hand_over)
    parameter.grad_dtype = torch.float32
    setattr(parameter, REMAINDER, remainder)
    setattr(parameter, STAND_IN, stand_in)
    note_write(parameter)


def _give(owner: Tensor, grad: Tensor) -> None:
    """What autograd does with the gradient of a leaf: hooks, the sum, hooks."""
    for hook in (owner._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    if grad.stride() != owner.stride():  # laid out as the parameter is: fused optimizers go through memory
        grad = torch.empty_like(owner.detach(), dtype=grad.dtype).copy_(grad)
    owner.grad = grad if owner.grad is None else owner.grad.add_(grad)
    for hook in (getattr(owner, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(owner)


def make_whole(parameter: nn.Parameter) -> None:
    """Takes from a parameter what made it a half; its data stay."""
    for name in (REMAINDER, STAND_IN, WRITES):
        parameter.__dict__.pop(name, None)
    parameter.grad_dtype = None  # whatever the parameter will be: what it was by default cannot be put back


def note_write(parameter: Tensor) -> None:
    """Says that what was just written to a half was written with its remainder."""
    if is_half(parameter):
        setattr(parameter, WRITES, parameter._version)


def settle(parameter: Tensor) -> None:
    """Drops the remainder of a half that somebody wrote to."""
    if getattr(parameter, WRITES, None) not in (None, parameter._version):
        getattr(parameter, REMAINDER).zero_()
        note_write(parameter)


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor is the bf16 half of a split master."""
    return tensor.dtype == torch.bfloat16 and hasattr(tensor, STAND_IN)


class Holder(nn.Module):
    """A module that may hold halves: `halves` has the remainder of each, by the parameter's name in the module."""

    if TYPE_CHECKING:  # the module that a layer stands in front of has attributes of its own
        _parameters: dict[str, Any]

        def __getattr__(self, name: str) -> Any: ...

    @property
    def halves(self) -> dict[str, Tensor]:
        """The remainders. Neither parameters nor buffers: no state dict has them, and `to` does not touch them."""
        return self.__dict__.get("halfstep_halves", {})

    def add_half(self, name: str, remainder: Tensor) -> None:
        """Says that a parameter of this module, which has been made a half, is one."""
        self.__dict__.setdefault("halfstep_halves", {})[name] = remainder

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, remainder in self.halves.items():
            make_half(self._parameters[name], remainder)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name in self.halves:
                half = self._parameters[name]
                if half is not None and is_half(half):
                    settle(half)
                    destination[prefix + name] = join(half, getattr(half, REMAINDER))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        halves = [name for name in self.halves if prefix + name in state_dict]
        if halves and local_metadata.get("assign_to_params_buffers", False):
            raise HalfstepError(
                f"load_state_dict(assign=True) would replace `{prefix}{halves[0]}`, the half of a split master",
                hint="leave `assign` out: the numbers are copied, and split",
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        for name in halves:
            given, half = state_dict[prefix + name], self._parameters[name].detach()
            if given.shape == half.shape:  # torch has noted what does not fit
                hi, lo = split(given.to(half.device, torch.float32))
                half.copy_(hi)
                self.halves[name].copy_(lo)
                note_write(self._parameters[name])


def used(weight: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """The numbers of a weight, without a gradient, and the tensor that its gradient belongs to.

    `whole`: more than the bf16 half is needed.
    """
    if not is_half(weight):
        return weight.detach(), weight
    if whole and not torch.compiler.is_compiling():
        settle(weight)
    numbers = join(weight, getattr(weight, REMAINDER)) if whole else weight.detach()
    return numbers, getattr(weight, STAND_IN) if weight.requires_grad else weight.detach()


def widened(half: Tensor, whole: bool) -> Tensor:
    """A half as an fp32 tensor that is differentiable, its gradient fp32."""
    numbers, owner = used(half, whole)
    return _Standing.apply(numbers.float(), owner)  # type: ignore[no-any-return]


class _Standing(torch.autograd.Function):
    """The numbers of one tensor, the gradient of another."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, owner: Tensor) -> Tensor:
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g
