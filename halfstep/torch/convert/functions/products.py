"""Products that a model's own code writes as functions, with a weight among the operands.

As in matmul.py, activations have gradients in `grad` and weights in `grad_weight`, straight from the fp32 sum;
every product is in compute:

    x W, W x, W of two dimensions      a linear layer
    batches of W                       one matmul per batch, forward and backward
    einsum of two                      its letters are sorted into batch, rows, sum and columns: one of the above
    grouped_mm                         rows of x, sorted by expert, each group times its own matrix

The gradient of grouped matrices is summed in fp32 on a CPU. On a GPU torch's kernel rounds it once, after the sum.

`weights` says which of the operands are weights. A split master arrives here widened.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.torch.convert.functions.entry import (
    Entry,
    Scope,
    Skip,
    is_weight,
    join_if_split,
    map_tensors,
    tensors_of,
)
from halfstep.torch.layers import linear
from halfstep.torch.numerics.cast import carried
from halfstep.torch.numerics.dtypes import FLOATS, NARROW
from halfstep.torch.numerics.lowering import Casts, round_to_compute, to_compute
from halfstep.torch.numerics.matmul import (
    batches_in_steps,
    cast_parameter,
    differentiable_gradients,
    first_derivative_only,
    matmul,
    owners_of,
    refuse_transforms,
    save_operands,
)
from halfstep.torch.numerics.provenance import recording, transforming
from halfstep.torch.numerics.split.operand import is_split

Two = tuple[bool, bool]


def product(a: Tensor, b: Tensor, weights: Two, casts: Casts) -> Tensor:
    """Returns torch.matmul(a, b) of operands of any dimensions, at least one of which is a weight."""
    if weights[1] and b.dim() <= 2:
        return linear(a, b, None, casts, transposed=True) if b.dim() == 2 else _vector_product(a, b, casts)
    if weights[0] and a.dim() <= 2:
        if a.dim() == 1:
            return _vector_product(b.mT, a, casts)
        return linear(b, a, None, casts) if b.dim() == 1 else linear(b.mT, a, None, casts).mT
    left, right = (a.unsqueeze(0) if a.dim() == 1 else a), (b.unsqueeze(1) if b.dim() == 1 else b)
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = left.expand(*batch, -1, -1), right.expand(*batch, -1, -1)
    y = batched_product(left.flatten(0, -3), right.flatten(0, -3), weights, casts)
    y = y.view(*batch, *y.shape[-2:])
    y = y.squeeze(-2) if a.dim() == 1 else y
    return y.squeeze(-1) if b.dim() == 1 else y


def batched_product(a: Tensor, b: Tensor, weights: Two, casts: Casts) -> Tensor:
    """Returns torch.bmm(a, b), of activations in any dtype and of weights in fp32."""
    if casts.plain:
        return torch.bmm(a.float(), b.float())
    a, b = (t if weight else to_compute(t, casts) for t, weight in zip((a, b), weights, strict=True))
    if transforming():
        return batches_in_steps(a, b, weights, casts)
    return _Batched.apply(a, b, weights, casts)  # type: ignore[no-any-return]


def grouped_product(x: Tensor, w: Tensor, offsets: Tensor, casts: Casts) -> Tensor:
    """Returns F.grouped_mm(x, w, offs=offsets): rows up to offsets[0] times w[0], and so on."""
    if casts.plain:
        return torch._grouped_mm(x.float(), w.float(), offs=offsets)
    refuse_transforms(*_GROUPED_ONCE)
    return _Grouped.apply(to_compute(x, casts), w, offsets, casts)  # type: ignore[no-any-return]


def einsum(equation: str, a: Tensor, b: Tensor, weights: Two, casts: Casts) -> Tensor | None:
    """Returns torch.einsum(equation, a, b), or None if it is not a matmul: repeated or lone letters, or dots."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if "->" not in equation:
        out = "".join(sorted(c for c in {*left, *right} if inputs.count(c) == 1))
    letters = (left, right, out)
    sums = [c for c in left if c in right and c not in out]
    once = all(len(set(part)) == len(part) for part in letters) and {*left, *right} == {*out, *sums}
    if not once or "." in equation:
        return None
    batch = [c for c in left if c in right and c in out]
    rows, columns = [c for c in left if c not in right], [c for c in right if c not in left]
    size = dict(zip(left + right, (*a.shape, *b.shape), strict=True))
    a = a.permute([left.index(c) for c in (*batch, *rows, *sums)])
    b = b.permute([right.index(c) for c in (*batch, *sums, *columns)])
    nb, nr, ns, nc = (torch.Size([size[c] for c in part]).numel() for part in (batch, rows, sums, columns))
    if batch:
        y = batched_product(a.reshape(nb, nr, ns), b.reshape(nb, ns, nc), weights, casts)
    else:
        y = product(a.reshape(nr, ns), b.reshape(ns, nc), weights, casts)
    order = [*batch, *rows, *columns]
    return y.reshape([size[c] for c in order]).permute([order.index(c) for c in out])


class _Batched(torch.autograd.Function):
    """a b of batches; the gradient of a weight is in its own format from the sum on."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weights: Two, casts: Casts) -> Tensor:
        owners = [a if weights[0] else None, b if weights[1] else None]
        a, b = (cast_parameter(t, casts) if weight else t for t, weight in zip((a, b), weights, strict=True))
        save_operands(ctx, (a, b), owners)
        ctx.weights, ctx.casts = weights, casts
        return _emulate(matmul(a, b, casts.compute), casts, casts.precision.compute)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors[:2]
        casts = ctx.casts
        if recording():
            pairs = zip((a, b), owners_of(ctx), strict=True)
            inputs = dict(enumerate(t if owner is None else owner for t, owner in pairs))
            return differentiable_gradients(
                lambda a, b: batches_in_steps(a, b, ctx.weights, casts), inputs, ctx, g
            )
        g = _emulate(g, casts, casts.precision.grad)
        grad_a = _gradient(g, b.mT, ctx.weights[0], casts) if ctx.needs_input_grad[0] else None
        grad_b = _gradient(a.mT, g, ctx.weights[1], casts) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None


_GROUPED_ONCE = (
    "a grouped matmul of experts",
    "choose another implementation of the experts (Hugging Face: experts_implementation='eager'), or give the "
    "experts fp32 with a rule",
)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor, casts: Casts) -> Tensor:
        w = cast_parameter(w, casts)
        ctx.save_for_backward(x, w, offsets)
        ctx.casts = casts
        return _emulate(torch._grouped_mm(x, w, offs=offsets), casts, casts.precision.compute)

    @staticmethod
    @first_derivative_only(*_GROUPED_ONCE)
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offsets = ctx.saved_tensors
        casts, precision = ctx.casts, ctx.casts.precision
        g = _emulate(g, casts, precision.grad).contiguous()  # the kernel takes no expanded tensor
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _emulate(torch._grouped_mm(g, w.mT, offs=offsets), casts, precision.grad)
        if ctx.needs_input_grad[1]:
            narrow = x.is_cuda or torch.compiler.is_compiling()  # compiled code is bf16, on a CPU too
            rows, columns = (x, g) if narrow else (x.float(), g.float())
            grad_w = torch._grouped_mm(rows.mT, columns, offs=offsets).to(casts.grad_weight)
            grad_w = _emulate(grad_w, casts, precision.grad_weight)
        return grad_x, grad_w, None, None


def _gradient(a: Tensor, b: Tensor, weight: bool, casts: Casts) -> Tensor:
    name = "grad_weight" if weight else "grad"
    return _emulate(matmul(a, b, getattr(casts, name)), casts, getattr(casts.precision, name))


def _vector_product(x: Tensor, vector: Tensor, casts: Casts) -> Tensor:
    return linear(x, vector.unsqueeze(0), None, casts).squeeze(-1)


def _emulate(x: Tensor, casts: Casts, fmt: Any) -> Tensor:
    return carried(x, fmt) if casts.emulate else x


# --- how a model writes them, and why some run unchanged


def _skip_product(scope: Scope, args: Any, kwargs: Any) -> str:
    return Skip.OUT if kwargs.get("out") is not None else _skip_reason(scope, [*tensors_of(args, kwargs)])


def _skip_kernel(scope: Scope, args: Any, kwargs: Any) -> str:
    """For a kernel that rounds the gradients of weights: a leaf keeps it in fp32."""
    return Skip.IN_LEAF if scope.leaf else _skip_product(scope, args, kwargs)


def _skip_linear(scope: Scope, args: Any, kwargs: Any) -> str:
    """For (x, weight, bias): what is passed as a weight counts as one, except in a leaf."""
    x, weight, *bias = tensors_of(args, kwargs)
    why = _skip_reason(scope, [x, weight], bias)
    return "" if why in (Skip.NO_PARAMETER, Skip.NO_GRADIENT) and not scope.leaf else why


def _skip_added(scope: Scope, args: Any, kwargs: Any) -> str:
    c, *pair = tensors_of(args, kwargs)
    return Skip.OUT if kwargs.get("out") is not None else _skip_reason(scope, pair, [c])


def _skip_reason(scope: Scope, operands: list[Tensor], added: Sequence[Tensor] = ()) -> str:
    casts = scope.casts
    if any(t.dtype is not operands[0].dtype for t in added):
        return ""
    if any(t.dtype not in FLOATS for t in operands):
        return Skip.OTHER_DTYPE
    if all(t.dtype is casts.compute for t in operands) and not casts.emulate:
        return "" if any(is_split(t) for t in operands) else Skip.IN_COMPUTE
    if any(t.dtype in NARROW for t in operands):
        return ""
    weights = [is_weight(t) for t in operands]
    if all(weights):
        return Skip.PARAMETERS
    if any(weights):
        return ""
    if not casts.emulate:
        return Skip.NO_PARAMETER
    if scope.leaf:
        return Skip.IN_LEAF
    return "" if any(t.requires_grad for t in operands) else Skip.NO_GRADIENT


def _operands(scope: Scope, *given: Tensor) -> tuple[list[Tensor], Two]:
    """Returns two operands, split ones widened, and whether the gradient of each must stay fp32."""
    wide = [join_if_split(t) for t in given]
    mixed = not scope.casts.emulate and any(t.dtype in NARROW for t in wide)
    one, two = (
        t.dtype is torch.float32 and (o is not t or is_weight(o) or (mixed and o.requires_grad))
        for t, o in zip(wide, given, strict=True)
    )
    return wide, (one, two)


def _cast_all(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    casts = scope.casts
    args, kwargs = map_tensors(lambda t: to_compute(join_if_split(t), casts), (args, kwargs))
    return _result(scope, round_to_compute(func(*args, **kwargs), casts))


def _result(scope: Scope, y: Tensor) -> Tensor:
    return y.float() if scope.leaf else y


def _linear(scope: Scope, func: Any, args: Any, kwargs: Any) -> Tensor:
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if weight.dim() == 1:
        return _result(scope, linear(x, weight.unsqueeze(0), bias, scope.casts).squeeze(-1))
    return _result(scope, linear(x, weight, bias, scope.casts, lean=scope.lean))


def _matmul(scope: Scope, func: Any, args: Any, kwargs: Any) -> Tensor:
    (a, b), weights = _operands(scope, *tensors_of(args, kwargs))
    if not any(weights):
        return _cast_all(scope, func, args, kwargs)
    if func is Tensor.__rmatmul__:
        a, b, weights = b, a, (weights[1], weights[0])
    return _result(scope, product(a, b, weights, scope.casts))


def _added_matmul(scope: Scope, func: Any, args: Any, kwargs: Any) -> Tensor:
    options = dict(kwargs)
    beta, alpha = options.pop("beta", 1), options.pop("alpha", 1)
    c, *pair = tensors_of(args, options)
    (a, b), weights = _operands(scope, *pair)
    casts = scope.casts
    if not any(weights):
        return _cast_all(scope, func, args, kwargs)
    if weights[1] and b.dim() == 2 and c.dim() == 1 and alpha == beta == 1:
        return _result(scope, linear(a, b, c, casts, transposed=True))
    y = product(a, b, weights, casts).float() * alpha
    return _result(scope, to_compute(y if beta == 0 else y + join_if_split(c).float() * beta, casts))


def _einsum(scope: Scope, func: Any, args: Any, kwargs: Any) -> Tensor:
    equation, *given = args
    given = [*tensors_of(given)]
    if len(given) == 2 and isinstance(equation, str):
        (a, b), weights = _operands(scope, *given)
        y = einsum(equation, a, b, weights, scope.casts) if any(weights) else None
        if y is not None:
            return _result(scope, y)
    return _cast_all(scope, func, args, kwargs)


def _skip_grouped(scope: Scope, args: Any, kwargs: Any) -> str:
    if torch.compiler.is_compiling() and scope.casts.compute is not torch.bfloat16:
        return Skip.NOT_COMPILED
    return _skip_reason(scope, [*args[:2]])


def _grouped(scope: Scope, func: Any, args: Any, kwargs: Any) -> Tensor:
    (x, w), offsets = args[:2], (args[2] if len(args) > 2 else kwargs.get("offs"))
    others = [*args[3:], *(value for key, value in kwargs.items() if key != "offs")]
    if offsets is None or (x.dim(), w.dim()) != (2, 3) or any(value is not None for value in others):
        return _cast_all(scope, func, args, kwargs)
    return _result(scope, grouped_product(x, join_if_split(w), offsets, scope.casts))


def _skip_widened(scope: Scope, args: Any, kwargs: Any) -> str:
    dtypes = {t.dtype for t in tensors_of(args, kwargs) if t.dtype in FLOATS}
    return "" if torch.float32 in dtypes and len(dtypes) > 1 else Skip.IN_COMPUTE


def _widen_all(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of many products, which cannot be distinguished, in fp32."""
    args, kwargs = map_tensors(lambda t: join_if_split(t).float(), (args, kwargs))
    return map_tensors(lambda y: to_compute(y, scope.casts), func(*args, **kwargs))


_CASTS = "operands in compute"
LINEAR = Entry(_skip_linear, _linear, f"{_CASTS}, an fp32 weight gradient")
MATMUL = Entry(_skip_product, _matmul, _CASTS)
ADDED = Entry(_skip_added, _added_matmul, _CASTS)
EINSUM = Entry(_skip_product, _einsum, _CASTS)
GROUPED = Entry(_skip_grouped, _grouped, _CASTS)
KERNEL = Entry(_skip_kernel, _cast_all, f"{_CASTS}, weight gradients too, then fp32")
WIDENED = Entry(_skip_widened, _widen_all, "fp32 throughout, compute out")
