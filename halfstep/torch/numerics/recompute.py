"""Results that are cheap to compute, and not kept for the backward pass: norms and activation functions.

A matmul keeps its input for its weight gradient. Where that input came out of `recompute_in_backward`, the
backward pass computes it once more from the function's own inputs, which are kept anyway: the residual stream, or
what a matmul returned. The same kernels run on the same numbers, so in eager mode no bit of a gradient changes,
except behind an fp32 norm that torch writes in several operations: the stream's gradient is the same sum in
another order.

**In eager mode** the function's node in autograd's graph stands for the result: `drop_recomputable` makes torch
keep that node instead of the tensor, and the node computes the result for the first user that needs it. The
node's own backward pass, which comes after theirs, uses the same computation and frees it.

**Compiled**, the operations are marked for torch's partitioner, as those of a checkpointed block are. The mark is
in the graph of this model: no setting of the process changes, and other models are compiled as before.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from halfstep.torch.numerics.provenance import recording, transforming


def recompute_in_backward(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Returns function(*inputs), which must be a new tensor; the backward pass keeps the inputs alone.

    Nothing may be random in the function, and every tensor that gets a gradient must be among the inputs.
    """
    if not torch.is_grad_enabled() or transforming():
        return function(*inputs)
    if torch.compiler.is_compiling():
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    RecomputeInBackward.used = True
    with drop_recomputable(*inputs):
        return RecomputeInBackward.apply(function, *inputs)  # type: ignore[no-any-return]


class RecomputeInBackward(torch.autograd.Function):
    """A function that is computed once more in the backward pass, when its result or its gradient is needed."""

    used = False  # ever, in this process: only then a layer asks where its input is from

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        ctx.function, ctx.computed = function, None
        ctx.places = [i for i, given in enumerate(inputs) if isinstance(given, Tensor)]
        ctx.others = [None if isinstance(given, Tensor) else given for given in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if recording():  # of inputs that are part of the graph: gradients can be differentiated again
            inputs = _inputs_of_node(ctx)
            y = ctx.function(*inputs)
        else:
            inputs, y = _compute_once(ctx)
        ctx.computed = None
        needed = [i for i in ctx.places if ctx.needs_input_grad[1 + i]]
        wanted = [inputs[i] for i in needed]
        grads = dict(zip(needed, torch.autograd.grad(y, wanted, g, create_graph=recording()), strict=True))
        return None, *(grads.get(i) for i in range(len(ctx.others)))


NODE: type = RecomputeInBackward._backward_cls  # type: ignore[attr-defined]


def _inputs_of_node(ctx: Any) -> list[Any]:
    inputs = list(ctx.others)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        inputs[place] = tensor
    return inputs


def _compute_once(ctx: Any) -> tuple[list[Any], Tensor]:
    """Computes the result from copies of the inputs that stand alone, once for all of its users."""
    if ctx.computed is None:
        inputs = _inputs_of_node(ctx)
        for place in ctx.places:
            inputs[place] = inputs[place].detach().requires_grad_(ctx.needs_input_grad[1 + place])
        with torch.enable_grad():
            ctx.computed = inputs, ctx.function(*inputs)
    return ctx.computed  # type: ignore[no-any-return]


def drop_recomputable(*tensors: Any) -> AbstractContextManager[Any]:
    """Inside, operations that save one of these tensors keep its node instead, if it can be computed again."""
    if torch.compiler.is_compiling():
        return nullcontext()
    nodes = {
        t.data_ptr(): (t.grad_fn, t._version, t.shape, t.stride(), t.dtype)
        for t in tensors
        if isinstance(t, Tensor) and type(t.grad_fn) is NODE
    }
    if not nodes:
        return nullcontext()

    def pack(tensor: Tensor) -> Any:
        node, *form = nodes.get(tensor.data_ptr(), (None,))
        same = form == [tensor._version, tensor.shape, tensor.stride(), tensor.dtype]
        return node if node is not None and same else tensor

    return saved_tensors_hooks(pack, _unpack)


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else _compute_once(kept)[1].detach()
