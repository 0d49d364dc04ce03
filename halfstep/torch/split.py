"""Split masters in a model: a parameter that holds the bf16 half of an fp32 master.

`parameter.data` is the nearest bf16, which a bf16 matmul uses directly. Two attributes complete it:

    remainder     what the bf16 leaves out, int16. A layer that computes in anything but bf16 joins the two.
    grad_owner    an fp32 leaf of the parameter's shape that takes no memory (one zero, expanded). Autograd
                  computes its gradient instead of the parameter's, and a hook moves that to `parameter.grad`.

**Why a grad_owner?** A weight gradient that is summed in fp32 must arrive in fp32. `parameter.grad_dtype =
float32` is enough for eager autograd, but torch.compile differentiates copies of its inputs that lack it: there
the gradient is rounded to bf16, then widened (torch 2.13). Hooks on the parameter run when the gradient is moved.
`torch.autograd.grad` does not work with split parameters: they are not in the graph, their grad_owner is.

**In-place writes** to a split parameter (`nn.init`, a clamp, a mask) replace the whole number, so the old
remainder is dropped. torch counts such writes, but not those through `parameter.data`: there the remainder stays,
at most half a unit in the last place of bf16.

While `parameter.grad` is wider than the parameter, dynamo compiles nothing that uses it ("dtype mismatch between
tensor and its gradient"). So code that sums over micro-batches must take `parameter.grad` away each time.

A state dict contains the joined fp32 master, and loading splits it again. `copy.deepcopy` of a parameter drops its
attributes; a `Holder` restores them.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.torch.cast import join, split

REMAINDER, GRAD_OWNER, WRITES = "halfstep_remainder", "halfstep_grad_owner", "halfstep_writes"


def make_split(parameter: nn.Parameter, remainder: Tensor) -> None:
    """Makes a bf16 parameter the upper half of a master; `remainder`, the lower half, is updated in place."""
    owner = torch.zeros((), device=parameter.device).expand(parameter.shape).requires_grad_()
    weak = weakref.ref(parameter)

    def move(owner: Tensor) -> None:
        parameter, grad = weak(), owner.grad
        owner.grad = None
        if parameter is not None and grad is not None:
            _accumulate(parameter, grad)

    owner.register_post_accumulate_grad_hook(move)
    parameter.grad_dtype = torch.float32
    setattr(parameter, REMAINDER, remainder)
    setattr(parameter, GRAD_OWNER, owner)
    note_write(parameter)


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Does what autograd does with the gradient of a leaf: runs hooks, adds, runs hooks."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    if grad.stride() != parameter.stride():  # fused optimizers walk through memory: the layouts must agree
        grad = torch.empty_like(parameter.detach(), dtype=grad.dtype).copy_(grad)
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


def make_whole(parameter: nn.Parameter) -> None:
    """Removes from a parameter what `make_split` added; its data stay."""
    for name in (REMAINDER, GRAD_OWNER, WRITES):
        parameter.__dict__.pop(name, None)
    parameter.grad_dtype = None  # any dtype: the default that it had before cannot be set again


def note_write(parameter: Tensor) -> None:
    """Records that the last write to a split parameter also wrote its remainder."""
    if is_split(parameter):
        setattr(parameter, WRITES, parameter._version)


def drop_stale_remainder(parameter: Tensor) -> None:
    """Zeroes the remainder of a split parameter if something else wrote to the parameter."""
    if getattr(parameter, WRITES, None) not in (None, parameter._version):
        getattr(parameter, REMAINDER).zero_()
        note_write(parameter)


def is_split(tensor: Tensor) -> bool:
    """Whether a tensor is the bf16 half of a split master."""
    return tensor.dtype == torch.bfloat16 and hasattr(tensor, GRAD_OWNER)


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
        for name, remainder in self.remainders.items():
            make_split(self._parameters[name], remainder)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name in self.remainders:
                parameter = self._parameters[name]
                if parameter is not None and is_split(parameter):
                    drop_stale_remainder(parameter)
                    destination[prefix + name] = join(parameter, getattr(parameter, REMAINDER))

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
            if given.shape == hi.shape:  # torch has reported what does not fit
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
    if not torch.compiler.is_compiling():
        drop_stale_remainder(weight)
    return join(weight, getattr(weight, REMAINDER)), owner


def widened(weight: Tensor, whole: bool) -> Tensor:
    """Returns a split weight as a differentiable fp32 tensor with an fp32 gradient."""
    return _WithOwner.apply(*operand_of(weight, whole))  # type: ignore[no-any-return]


class _WithOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Tensor) -> Tensor:
        wide = values.float()
        return wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g
