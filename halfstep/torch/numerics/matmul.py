"""The matmuls of a casted layer, forward and backward: what autograd runs instead of its own rules.

Operands here have 16 bits or more; narrower ones, which need scales, are in fp8/linear.py.

Autograd keeps the gradient of an operand in the operand's dtype: a weight that is cast to bf16 for the matmul gets
a gradient that was rounded to bf16 and then widened. Here each gradient is rounded explicitly: that of an
activation to `grad`, that of a weight to `grad_weight`, fp32 as a rule, straight from the fp32 sum.

A weight comes as two tensors, its `values`, which are multiplied, and its `owner`, which gets the gradient; they
differ for a split master (split/).

**torch.func and second derivatives** need functions that torch can take apart. So each product is also written in
torch's own functions (`linear_in_steps` and the like), on numbers of the same formats, summed in fp32: slower, and
used for these alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.errors import UnsupportedTransformError
from halfstep.core.formats import Format
from halfstep.torch.kernels import epilogue
from halfstep.torch.kernels.activations import gelu
from halfstep.torch.numerics.cast import carried
from halfstep.torch.numerics.dtypes import NARROW
from halfstep.torch.numerics.lowering import Casts
from halfstep.torch.numerics.provenance import recording, transforming
from halfstep.torch.numerics.split.operand import route_gradient

# Of a layer's loss: its precision in words if it is narrow, its chunks, amaxes and probe if it is delayed.
OF_LOSS: tuple[Any, ...] = ("", 1, None, None)
Backward = Callable[..., tuple[Tensor | None, ...]]
LARGE = 4096  # outputs, such as a vocabulary's, from which on a slow kernel counts


class Linear(torch.autograd.Function):
    """x W^T + b of an x in compute: the three matmuls of a linear layer, natively, all operands in compute.

    On an NVIDIA GPU a vocabulary of 50,257 is multiplied as 50,264: tensor cores want rows of 16 bytes, and the
    kernels for others are slower, that of an fp32 gradient by two thirds. The zeros change no sum.

    Most layers are this, so nothing is looked up or decided here that need not be (`Casts.direct`). What is
    returned is no view to autograd (`detach`): an activation may write to it in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        owner: Tensor,
        bias: Tensor | None,
        bias_owner: Tensor | None,
        casts: Casts,
    ) -> Tensor:
        ctx.casts, compute = casts, casts.compute
        ctx.transposed = not owner.is_contiguous()  # held as (inputs, outputs)
        w = values if values.dtype is compute else values.to(compute)
        if bias is None:
            outputs, lacking = w.shape[0], tensor_core_padding(w.shape[0], x) if x.is_cuda else 0
            w = F.pad(w, (0, 0, 0, lacking)) if lacking else w
            save_operands(ctx, (x, w), (owner, None))
            y = F.linear(x, w)
            return y[..., :outputs].detach() if lacking else y
        save_operands(ctx, (x, w), (owner, bias_owner))
        b = bias if bias.dtype is compute else bias.to(compute)
        if not x.is_cuda:
            return F.linear(x, w) + b
        # An NVIDIA GPU adds the bias to the fp32 sum: a kernel and a rounding fewer than elsewhere.
        if x.is_contiguous():
            return F.linear(x, w, b)
        return torch.addmm(b, rows_of(x), w.t()).view(*x.shape[:-1], -1).detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and recording():
            return _recorded_linear(ctx, g)
        x, w = ctx.saved_tensors[:2]
        needs = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        outputs = g.shape[-1]
        rows, added = g.reshape(-1, outputs), w.shape[0] - outputs
        if added:
            rows = F.pad(rows, (0, added))
        if needs[0]:
            grad_input = torch.mm(rows, w).view_as(x)  # .view(x.shape) costs more host time
        if needs[2]:
            left, right = rows, x.reshape(-1, w.shape[1])  # as `weight_gradient`, which costs a call
            left, right = (right, left) if ctx.transposed else (left, right)
            grad_weight = matmul(left.t(), right, torch.float32)
            grad_weight = grad_weight.t() if ctx.transposed else grad_weight
            grad_weight = grad_weight[:outputs] if added else grad_weight
        if needs[4]:
            grad_bias = rows.sum(0, dtype=torch.float32)
        return grad_input, None, grad_weight, None, grad_bias, None


class RoundedLinear(torch.autograd.Function):
    """The same with operands and gradients in formats of their own, and emulated."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        owner: Tensor,
        bias: Tensor | None,
        bias_owner: Tensor | None,
        casts: Casts,
    ) -> Tensor:
        ctx.casts, p = casts, casts.precision
        w, b = cast_parameter(values, casts), bias if bias is None else cast_parameter(bias, casts)
        save_operands(ctx, (x, w), (owner, bias_owner))
        left, right = (round_tensor(t, p.operand.format, casts.operand, casts) for t in (rows_of(x), w.t()))
        y = multiply_rounded(left, right, p.compute, casts.compute, casts)
        if b is not None:
            y = carried(y + b, p.compute) if casts.emulate else y + b
        return y.view(*x.shape[:-1], values.shape[0]).detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if recording():
            return _recorded_linear(ctx, g)
        casts, (needs_input, _, needs_weight, _, needs_bias, _) = ctx.casts, ctx.needs_input_grad
        p, (x, w, *_) = casts.precision, ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        rows = carried(rows_of(g), p.grad) if casts.emulate else rows_of(g)
        operand = round_tensor(rows, p.grad_operand.format, casts.grad_operand, casts)
        if needs_input:
            other = round_tensor(w, p.operand.format, casts.operand, casts)
            grad_input = multiply_rounded(operand, other, p.grad, casts.grad, casts).view(x.shape)
        if needs_weight:
            other = round_tensor(rows_of(x), p.operand.format, casts.operand, casts)
            grad_weight = multiply_rounded(operand.t(), other, p.grad_weight, casts.grad_weight, casts)
        if needs_bias:
            grad_bias = round_tensor(rows.sum(0, dtype=torch.float32), p.grad_weight, casts.grad_weight, casts)
        return grad_input, None, grad_weight, None, grad_bias, None


def weight_gradient(g: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Returns g^T x in fp32, laid out as the weight is, which autograd would copy it to otherwise."""
    return matmul(x.t(), g, torch.float32).t() if transposed else matmul(g.t(), x, torch.float32)


def round_tensor(x: Tensor, fmt: Format, dtype: torch.dtype, casts: Casts) -> Tensor:
    """Rounds to a format, natively by its dtype; a cast that changes nothing still costs a call into torch."""
    x = x if x.dtype is dtype else x.to(dtype)
    return carried(x, fmt) if casts.emulate else x


def multiply_rounded(a: Tensor, b: Tensor, fmt: Format, dtype: torch.dtype, casts: Casts) -> Tensor:
    """Returns a b, summed in fp32 and rounded to a format."""
    y = matmul(a, b, dtype)
    return carried(y, fmt) if casts.emulate else y


def tensor_core_padding(outputs: int, x: Tensor) -> int:
    """Returns how many rows a matrix lacks so that its products have rows of 16 bytes, where that matters."""
    return -outputs % 8 if x.is_cuda and outputs >= LARGE else 0


def _recorded_linear(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors[0], ctx.saved_tensors[1][: g.shape[-1]]
    inputs = dict(zip((0, 2, 4), (x, *owners_of(ctx)), strict=True))
    return differentiable_gradients(
        lambda x, owner, bias: linear_in_steps(x, w, owner, bias, ctx.casts), inputs, ctx, g
    )


def apply_linear(*args: Any, of_loss: tuple[Any, ...] = OF_LOSS) -> Tensor:
    """Returns the product; the last argument, a `Casts`, says by which of the two."""
    *given, casts = args
    return linear_in_graph(*given, casts.compute, *of_loss) if casts.direct else RoundedLinear.apply(*args)


DIRECT: dict[torch.dtype, Casts] = {}
"""By the compute format, which is all that dynamo's graph knows of a `Linear` (`layers.casts_of`)."""


def linear_in_graph(*given: Any) -> Tensor:
    """`Linear` as one function for dynamo's graph: to interpret it in every layer takes long.

    What comes after its operands and their format is for its loss, if they are fused (`OF_LOSS`). In a model with
    convolutions inductor lays out what has four dimensions for them, so a layer keeps its rows as a matrix.
    """
    x, *others = given[:5]
    y = Linear.apply(x if x.dim() < 4 else rows_of(x), *others, DIRECT[given[5]])
    return y if x.dim() < 4 else y.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


# In eager mode: what Function.apply adds is for torch.func, whose calls do not come here. The node calls
# `backward` directly: torch's own `apply` would look for it in every backward pass.
eager_linear = super(torch.autograd.Function, Linear).apply
Linear._backward_cls.apply = Linear.backward  # type: ignore[attr-defined]


def is_for_torch(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> bool:
    """Whether torch's own layer does what `Linear` does with an fp32 x."""
    fp32 = weight.dtype is torch.float32 and (bias is None or bias.dtype is torch.float32)
    if not fp32 or not x.is_contiguous():
        return False
    return not (x.is_cuda and bias is None and tensor_core_padding(weight.shape[1 if transposed else 0], x))


def save_operands(ctx: Any, tensors: Sequence[Tensor], owners: Sequence[Tensor | None]) -> None:
    """Saves tensors for a backward pass, and for a second derivative the tensors that gradients are for.

    A parameter, or a view of one, is there anyway, and may be written to before the backward pass: it is referred
    to. One that was computed (a joined master, a parametrization) is saved as any tensor.
    """
    for owner in owners:
        if owner is not None and not owner.is_leaf and owner._base is None:
            ctx.owners = None
            ctx.save_for_backward(*tensors, *owners)
            return
    ctx.owners = owners
    ctx.save_for_backward(*tensors)


def owners_of(ctx: Any) -> Sequence[Tensor | None]:
    """Returns the owners that were given to `save_operands`, after two tensors."""
    return ctx.saved_tensors[2:] if ctx.owners is None else ctx.owners  # type: ignore[no-any-return]


class LinearGeluLinear(torch.autograd.Function):
    """down(gelu(up(x))) of an x in compute, with matmuls that compute the GELU (kernels/epilogue.py).

    Only compiled code runs it: eager code computes a layer before it knows what follows. gelu(h) is kept for the
    gradient of `down`; if `lean`, it is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_owner: Tensor,
        up_bias: Tensor | None,
        up_bias_owner: Tensor | None,
        down: Tensor,
        down_owner: Tensor,
        down_bias: Tensor | None,
        down_bias_owner: Tensor | None,
        lean: bool,
        compute: torch.dtype,
    ) -> Tensor:
        w1, w2 = up.to(compute), down.to(compute)
        b1, b2 = (None if bias is None else bias.to(compute) for bias in (up_bias, down_bias))
        rows = rows_of(x).contiguous()
        ctx.transposed = not up_owner.is_contiguous(), not down_owner.is_contiguous()
        h, act = epilogue.linear_gelu(rows, w1.t(), b1)
        ctx.save_for_backward(rows, w1, w2, h, *(() if lean else (act,)))
        ctx.shape = x.shape
        y = F.linear(act, w2, b2) if x.is_cuda or b2 is None else F.linear(act, w2) + b2
        return y.view(*x.shape[:-1], w2.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, w1, w2, h, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        g = rows_of(g).contiguous()
        dh = epilogue.linear_gelu_grad(h, g, w2)
        grads: list[Tensor | None] = [None] * 11
        if needs[0]:
            grads[0] = torch.mm(dh, w1).view(ctx.shape)
        if needs[2]:
            grads[2] = weight_gradient(dh, rows, ctx.transposed[0])
        if needs[4]:
            grads[4] = dh.sum(0, dtype=torch.float32)
        if needs[6]:
            grads[6] = weight_gradient(g, kept[0] if kept else gelu(h), ctx.transposed[1])
        if needs[8]:
            grads[8] = g.sum(0, dtype=torch.float32)
        return tuple(grads)


def why_not_fused(beside: Tensor, up: Tensor, down: Tensor, casts: Casts) -> str:
    """Returns why two linear layers in compiled code keep their GELU between them; empty if it is fused.

    On the device of a tensor, for matrices of (outputs, inputs).
    """
    if not casts.direct or casts.compute not in NARROW:
        return "its layers are not native, or not in bf16 or fp16 throughout"
    if any(size % 8 for size in (*up.shape, down.shape[0])):
        return "a size of its layers is not a multiple of 8"
    if transforming():
        return "torch.func transforms it"
    return epilogue.device_lacks(beside.device)


class EmbeddingLookup(torch.autograd.Function):
    """Rows of a table, in the dtype it is held in; their gradient is summed in fp32 whatever that is."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, values: Tensor, owner: Tensor, padding: int, by_frequency: bool, casts: Casts
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.arguments = (values.shape[0], padding, by_frequency)
        ctx.casts = casts
        return F.embedding(index, values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(g.float(), index, *ctx.arguments)
        return None, None, carried(grad, ctx.casts.precision.grad_weight), None, None, None


def rows_of(x: Tensor) -> Tensor:
    """Returns an activation as a matrix, one row per token."""
    return x.reshape(-1, x.shape[-1])


def cast_parameter(parameter: Tensor, casts: Casts) -> Tensor:
    """Casts a parameter to the compute format."""
    return round_tensor(parameter, casts.precision.compute, casts.compute, casts)


def matmul(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """Returns a b in `out`, summed in fp32."""
    if out == a.dtype == b.dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype and out == torch.float32:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    # CPUs have no matmul with a wider result. Widened operands make the same exact products and an fp32 sum.
    y = a.float() @ b.float()
    return y if out is torch.float32 else y.to(out)


# --- the same in steps that torch can transform


def linear_in_steps(x: Tensor, values: Tensor, owner: Tensor, bias: Tensor | None, casts: Casts) -> Tensor:
    """`Linear` of an x in the compute format."""
    y = _round_in_steps(F.linear(x.float(), weight_in_steps(values, owner, casts)), casts)
    if bias is None:
        return y
    return _round_in_steps(y.float() + weight_in_steps(bias.detach(), bias, casts), casts)


def batches_in_steps(a: Tensor, b: Tensor, weights: Sequence[bool], casts: Casts) -> Tensor:
    """Batches of products, some operands of which are weights."""
    pairs = zip((a, b), weights, strict=True)
    left, right = (weight_in_steps(t.detach(), t, casts) if weight else t.float() for t, weight in pairs)
    return _round_in_steps(torch.bmm(left, right), casts)


def weight_in_steps(values: Tensor, owner: Tensor, casts: Casts) -> Tensor:
    """Numbers of the compute format in fp32, whose gradient is fp32 as well."""
    return route_gradient(cast_parameter(values, casts).float(), owner, casts.precision.grad_weight)


def differentiable_gradients(
    function: Callable[..., Tensor], inputs: dict[int, Tensor | None], ctx: Any, g: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns gradients that can be differentiated again; `inputs` has those of the function, by place."""
    needed = {place: t for place, t in inputs.items() if t is not None and ctx.needs_input_grad[place]}
    with torch.enable_grad():
        grads = torch.autograd.grad(function(*inputs.values()), [*needed.values()], g, create_graph=True)
    by_place = dict(zip(needed, grads, strict=True))
    return tuple(by_place.get(place) for place in range(len(ctx.needs_input_grad)))


def refuse_transforms(what: str, hint: str) -> None:
    """Refuses torch.func where a product has no form that it can take apart."""
    if transforming():
        raise UnsupportedTransformError(f"torch.func (vmap, grad, jvp, ...) does not reach {what}", hint=hint)


def first_derivative_only(what: str, hint: str) -> Callable[[Backward], Backward]:
    """Decorates a backward whose gradients cannot be differentiated again; trying raises the hint."""

    def decorate(backward: Backward) -> Backward:
        def run(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
            if not recording():
                return backward(ctx, *g)
            with torch.no_grad():
                grads = backward(ctx, *g)
            return tuple(
                t if t is None else _FirstDerivativeOnly.apply(t.requires_grad_(), what, hint) for t in grads
            )

        return run

    return decorate


class _FirstDerivativeOnly(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, what: str, hint: str) -> Tensor:
        ctx.error = UnsupportedTransformError(f"{what} cannot be differentiated twice", hint=hint)
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise ctx.error


def _round_in_steps(y: Tensor, casts: Casts) -> Tensor:
    if casts.emulate:
        return route_gradient(carried(y.detach(), casts.precision.compute), y, casts.precision.grad)
    return y.to(casts.compute)
