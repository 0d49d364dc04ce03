"""What a layer multiplies of a split master, and who receives its gradient.

`parameter.data` is the nearest bf16, which a bf16 matmul uses directly. A `SplitMaster` completes it:

    remainder     what the bf16 leaves out, int16. A layer that computes in anything but bf16 joins the two.
    grad_owner    an fp32 leaf of the parameter's shape that takes no memory (one zero, expanded). Autograd
                  computes its gradient instead of the parameter's; `parameter.grad` fetches it when it is read.

**Why a grad_owner?** A weight gradient that is summed in fp32 must arrive in fp32. `parameter.grad_dtype =
float32` is enough for eager autograd, but torch.compile differentiates copies of its inputs that lack it: there
the gradient is rounded to bf16, then widened (torch 2.13). A hook on the parameter makes the gradient move there
at once; a hook of ours for each matrix would take a large part of a small backward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep.core.formats import FP32, Format
from halfstep.torch.numerics.cast import carried, join
from halfstep.torch.numerics.provenance import transforming

SPLIT = "halfstep_split"
# For our own code: `detach` of a half marks what it hands out to others (parameter.py).
values_of: Any = torch._C.TensorBase.detach


@dataclass(eq=False)
class SplitMaster:
    """What completes the bf16 half of a master, in the parameter's attribute `halfstep_split`."""

    remainder: Tensor
    grad_owner: Tensor
    guard: RemovableHandle  # the hook that refuses a use outside of the layer (parameter.py)
    noted: Any = None  # the writes that are known (writes.py)


def is_split(tensor: Tensor) -> bool:
    """Whether a tensor is the bf16 half of a split master: a parameter, which has a class of its own."""
    return type(tensor) is not Tensor and tensor.dtype is torch.bfloat16 and hasattr(tensor, SPLIT)


def grad_owner_of(parameter: Tensor) -> Tensor:
    """Returns the tensor whose gradient autograd computes instead of a parameter's: itself, if it is whole."""
    half = getattr(parameter, SPLIT, None)
    return parameter if half is None else half.grad_owner


def operand_of(weight: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Returns a weight's values (if `whole`, of a split one the master) and the tensor its gradient is for."""
    values, half = values_of(weight), getattr(weight, SPLIT, None)
    if half is None or weight.dtype != torch.bfloat16:
        return values, weight
    owner = half.grad_owner if weight.requires_grad else values
    return join(values, half.remainder) if whole else values, owner


def widen_parameter(weight: Tensor, whole: bool) -> Tensor:
    """Returns a split weight as a differentiable fp32 tensor with an fp32 gradient."""
    values, owner = operand_of(weight, whole)
    return route_gradient(values.float(), owner) if transforming() else _WithOwner.apply(values, owner)  # type: ignore[no-any-return]


def route_gradient(values: Tensor, owner: Tensor, grad: Format = FP32) -> Tensor:
    """Returns values that are no function of `owner` to autograd; their gradient, rounded to `grad`, is for it."""
    return _RouteGradient.apply(values, owner, grad)  # type: ignore[no-any-return]


class _WithOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Tensor) -> Tensor:
        wide = values.float()
        return wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


class _RouteGradient(torch.autograd.Function):
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
        return None, g if ctx.grad == FP32 else route_gradient(carried(g.detach(), ctx.grad), g), None

    @staticmethod
    def jvp(ctx: Any, values: Any, owner: Any, grad: Any) -> Any:
        return owner.float()
