"""What is done with a function of torch that a model's own code calls (reach.py), family by family.

    softmax, log_softmax, logsumexp    in the softmax format, compute out
    layer_norm, rms_norm, normalize... in the norm format, compute out
    cross_entropy, mse_loss, ...       in the loss format, inside and out
    scaled_dot_product_attention       queries, keys and values in compute, a mask that stays finite
    linear                             in compute, with an fp32 weight gradient
    matmul, einsum, bmm, addmm, ...    with a parameter among the operands, the same (products.py); operands of
                                       several dtypes: all in compute
    conv1d, bilinear, ...              the same, but the weight gradient leaves the kernel in compute
    embedding                          rows of the master, in compute
    x + p, x * p, cat, where, ...      with a parameter p: in fp32, then in compute; p does not promote the stream

What is left as it is: a product of fp32 tensors none of which is a parameter (angles of rotary positions), one of
parameters alone (fp32: it is cast where it meets an activation), an island that is handed fp32 already, anything
else. `run.reach(loss_fn, batch)` lists each function of a pass, with how it ran and why (record.py).

A function is told by `Entry.alone` why it is left, or run by `Entry.run`; modes are off in both.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.core.errors import PolicyError
from halfstep.core.formats import FP32
from halfstep.torch import products
from halfstep.torch.halves import is_half, widened
from halfstep.torch.layers import additive, embedding, enter, island, leave, linear, rounded, weighted_attention

if TYPE_CHECKING:
    from halfstep.torch.reach import Reach

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)
# Why a function is left as it is.
GIVEN_FP32 = "it is given fp32"
IN_COMPUTE = "it is in compute already"
NO_PARAMETER = "fp32 operands, none of which is a parameter"
PARAMETERS = "parameters alone, in fp32"
IN_LEAF = "inside a leaf, which is fp32"
NO_GRADIENT = "emulated: nothing says that its fp32 operands are activations"
OTHER_DTYPE = "an operand is neither fp32, bf16 nor fp16"
OUT = "it writes to a tensor that is given"
NOTHING_MET = "no parameter meets an activation"
NOT_COMPILED = "torch compiles grouped matmuls of bf16 alone"


class Entry(NamedTuple):
    """What is done with a function."""

    alone: Callable[["Reach", Any, Any], str]  # why it is left as it is; empty where it is reached
    run: Callable[["Reach", Any, Any, Any], Any]
    told: str  # how it runs where it is reached


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def tensors_of(*trees: Any) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists too."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, list | tuple):
            yield from tensors_of(*tree)
        elif isinstance(tree, dict):
            yield from tensors_of(*tree.values())


# --- islands


def _island(role: str) -> Entry:
    def alone(mode: "Reach", args: Any, kwargs: Any) -> str:
        if getattr(mode.casts.precision, role) != FP32:
            return IN_LEAF if mode.wide else ""
        if mode.casts.emulate:
            return IN_LEAF if mode.wide else ""
        return "" if any(t.dtype in NARROW for t in tensors_of(args, kwargs)) else GIVEN_FP32

    def run(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Any:
        casts = mode.casts
        given = next(tensors_of(args, kwargs))
        asked = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
        if casts.emulate and role != "loss":  # what came here would have been narrow
            args, kwargs = _replaced(given, enter(given, casts), args, kwargs)
        args, kwargs = _mapped(lambda t: island(t, role, casts).float(), (args, kwargs))
        y = func(*args, **kwargs)
        if role == "loss":
            return island(y, role, casts)
        if casts.emulate or (asked is None and given.dtype in NARROW):
            return leave(y, role, casts)
        return island(y, role, casts).to(asked or given.dtype)

    out = "inside and out" if role == "loss" else "inside, compute out"
    return Entry(alone, run, f"the {role} format {out}")


def _replaced(old: Tensor, new: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    found = [new if a is old else a for a in args]
    return found, {key: new if value is old else value for key, value in kwargs.items()}


def _attention_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    given = [*args, *kwargs.values()]
    dtypes = [t.dtype for t in given if isinstance(t, Tensor)]
    if mode.wide and torch.float32 in dtypes:
        return IN_LEAF
    if mode.casts.emulate or not mode.casts.fused_softmax:
        return ""
    return IN_COMPUTE if all(d is mode.casts.compute or d is torch.bool for d in dtypes) else ""


def _attend(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Tensor:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    casts = mode.casts
    q, k, v = (enter(given.pop(name), casts) for name in names[:3])
    given["attn_mask"] = additive(given.get("attn_mask"), casts.compute)
    if casts.fused_softmax:
        return rounded(func(q, k, v, **given), casts)
    if q.dim() not in (3, 4):
        raise PolicyError(
            f"softmax={casts.precision.softmax} does not reach attention of {q.dim()} dimensions",
            hint="write `softmax=fp32`, which the fused kernel has",
        )
    flat = q.dim() == 3
    q, k, v = (t.unsqueeze(1) if flat else t for t in (q, k, v))
    options = {"causal": given.get("is_causal", False), "mask": given["attn_mask"], "scale": given.get("scale")}
    y = weighted_attention(q, k, v, casts, dropout=given.get("dropout_p", 0.0), **options)[0]
    return y.squeeze(1) if flat else y


# --- products


def _product_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    return OUT if kwargs.get("out") is not None else _why_alone(mode, [*tensors_of(args, kwargs)])


def _kernel_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    """The same of a kernel that rounds the gradients of weights: a leaf keeps it in fp32."""
    return IN_LEAF if mode.wide else _product_alone(mode, args, kwargs)


def _linear_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    """The same of (x, weight, bias): what is handed over as a weight is one, unless a leaf is as written."""
    x, weight, *bias = tensors_of(args, kwargs)
    why = _why_alone(mode, [x, weight], bias)
    return "" if why in (NO_PARAMETER, NO_GRADIENT) and not mode.wide else why


def _added_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    """The same of (c, a, b), for c + a b."""
    c, *pair = tensors_of(args, kwargs)
    return OUT if kwargs.get("out") is not None else _why_alone(mode, pair, [c])


def _why_alone(mode: "Reach", operands: list[Tensor], added: Sequence[Tensor] = ()) -> str:
    """Why a product of these, to which others are added, is left as it is."""
    casts = mode.casts
    if any(t.dtype is not operands[0].dtype for t in added):
        return ""
    if any(t.dtype not in FLOATS for t in operands):
        return OTHER_DTYPE
    if all(t.dtype is casts.compute for t in operands) and not casts.emulate:
        if any(is_half(t) for t in operands):
            return ""
        return IN_COMPUTE
    if any(t.dtype in NARROW for t in operands):
        return ""
    weights = [is_weight(t) for t in operands]
    if all(weights):
        return PARAMETERS
    if any(weights):
        return ""
    if not casts.emulate:
        return NO_PARAMETER
    if mode.wide:
        return IN_LEAF
    return "" if any(t.requires_grad for t in operands) else NO_GRADIENT


def _operands(mode: "Reach", *given: Tensor) -> tuple[list[Tensor], products.Two]:
    """Two operands, halves widened, and which of them has an fp32 gradient that is not to be rounded."""
    found = [_whole(t) for t in given]
    mixed = not mode.casts.emulate and any(t.dtype in NARROW for t in found)
    one, two = (
        t.dtype is torch.float32 and (o is not t or is_weight(o) or (mixed and o.requires_grad))
        for t, o in zip(found, given, strict=True)
    )
    return found, (one, two)


def _whole(tensor: Tensor) -> Tensor:
    """A half of a split master as an fp32 tensor with an fp32 gradient; any other as it is."""
    return widened(tensor, whole=True) if is_half(tensor) else tensor


def _cast_all(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Any:
    """The function of operands in compute."""
    casts = mode.casts
    args, kwargs = _mapped(lambda t: enter(_whole(t), casts), (args, kwargs))
    return _given(mode, rounded(func(*args, **kwargs), casts))


def _given(mode: "Reach", y: Tensor) -> Tensor:
    """A result in compute, in the dtype that a leaf goes on with."""
    return y.float() if mode.wide else y


def _linear(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Tensor:
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if weight.dim() == 1:
        return _given(mode, linear(x, weight.unsqueeze(0), bias, mode.casts).squeeze(-1))
    return _given(mode, linear(x, weight, bias, mode.casts))


def _matmul(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Tensor:
    (a, b), weights = _operands(mode, *tensors_of(args, kwargs))
    if not any(weights):
        return _cast_all(mode, func, args, kwargs)
    if func in REVERSED:
        a, b, weights = b, a, (weights[1], weights[0])
    return _given(mode, products.product(a, b, weights, mode.casts))


def _added_matmul(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Tensor:
    """beta c + alpha a b."""
    options = dict(kwargs)
    beta, alpha = options.pop("beta", 1), options.pop("alpha", 1)
    c, *pair = tensors_of(args, options)
    (a, b), weights = _operands(mode, *pair)
    casts = mode.casts
    if not any(weights):
        return _cast_all(mode, func, args, kwargs)
    if weights[1] and b.dim() == 2 and c.dim() == 1 and alpha == beta == 1:
        return _given(mode, linear(a, b, c, casts, transposed=True))
    y = products.product(a, b, weights, casts).float() * alpha
    return _given(mode, enter(y if beta == 0 else y + _whole(c).float() * beta, casts))


def _einsum(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Tensor:
    equation, *given = args
    given = [*tensors_of(given)]
    if len(given) == 2 and isinstance(equation, str):
        (a, b), weights = _operands(mode, *given)
        y = products.einsum(equation, a, b, weights, mode.casts) if any(weights) else None
        if y is not None:
            return _given(mode, y)
    return _cast_all(mode, func, args, kwargs)


def _grouped_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    if torch.compiler.is_compiling() and mode.casts.compute is not torch.bfloat16:
        return NOT_COMPILED
    return _why_alone(mode, [*args[:2]])


def _grouped(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Tensor:
    (x, w), offsets = args[:2], (args[2] if len(args) > 2 else kwargs.get("offs"))
    others = [*args[3:], *(value for key, value in kwargs.items() if key != "offs")]
    if offsets is None or (x.dim(), w.dim()) != (2, 3) or any(value is not None for value in others):
        return _cast_all(mode, func, args, kwargs)
    return _given(mode, products.grouped(x, _whole(w), offsets, mode.casts))


def _widened_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    dtypes = {t.dtype for t in tensors_of(args, kwargs) if t.dtype in FLOATS}
    return "" if torch.float32 in dtypes and len(dtypes) > 1 else IN_COMPUTE


def _widen_all(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Any:
    """A function of many products, none of which can be told apart: in fp32."""
    args, kwargs = _mapped(lambda t: _whole(t).float(), (args, kwargs))
    return _mapped(lambda y: enter(y, mode.casts), func(*args, **kwargs))


# --- a parameter that meets an activation


def _rows_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    table = next(t for t in tensors_of(args, kwargs) if t.is_floating_point())
    if mode.wide:
        return IN_LEAF
    return "" if is_half(table) or (table.dtype is torch.float32 and is_weight(table)) else NO_PARAMETER


def _rows(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Tensor:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return embedding(given.pop("input"), given.pop("weight"), mode.casts, **given)


def _two_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    if mode.wide:
        return IN_LEAF
    a, b = args if len(args) == 2 else [*args, *(kwargs[k] for k in ("input", "other") if k in kwargs), None][:2]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype is b.dtype and not mode.casts.emulate
        if same and not (mode.halves and (is_half(a) or is_half(b))):
            return NOTHING_MET
        return _meeting(mode, [a, b])
    return "" if mode.halves and (_is_half(a) or _is_half(b)) else NOTHING_MET


def _many_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    if mode.wide:
        return IN_LEAF
    return OUT if kwargs.get("out") is not None else _meeting(mode, [*tensors_of(args, kwargs)])


def _meeting(mode: "Reach", tensors: list[Tensor]) -> str:
    """Why tensors that meet in arithmetic are left alone."""
    floats = [t for t in tensors if t.dtype in FLOATS]
    if mode.halves and any(is_half(t) for t in floats):
        return ""
    others = [t for t in floats if not (t.dtype is torch.float32 and is_weight(t))]
    promoted = others if mode.casts.emulate else [t for t in others if t.dtype in NARROW]
    promoting = any(t.dim() for t in floats if t.dtype is torch.float32)
    return "" if promoted and promoting and len(others) < len(floats) else NOTHING_MET


def _meet(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Any:
    floats = [t for t in tensors_of(args, kwargs) if t.dtype in FLOATS]
    alone = all(is_weight(t) for t in floats)
    args, kwargs = _mapped(lambda t: _whole(t), (args, kwargs))
    y = func(*args, **kwargs)
    return y if alone else enter(y, mode.casts)


def _view_alone(mode: "Reach", args: Any, kwargs: Any) -> str:
    return "" if any(_is_half(t) for t in (*args, kwargs.get("input"))) else NOTHING_MET


def _view(mode: "Reach", func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _mapped(lambda t: _whole(t), (args, kwargs))
    return func(*args, **kwargs)


def _is_half(given: Any) -> bool:
    return isinstance(given, Tensor) and is_half(given)


def _mapped(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Arguments with their tensors of fp32, bf16 and fp16 changed."""
    if isinstance(tree, Tensor):
        return fn(tree) if tree.dtype in FLOATS else tree
    if isinstance(tree, dict):
        return {key: _mapped(fn, value) for key, value in tree.items()}
    return type(tree)([_mapped(fn, value) for value in tree]) if type(tree) in (list, tuple) else tree


# --- the table


def _named(names: str, *places: Any) -> list[Any]:
    """The functions of these names, wherever torch has them: `F.softmax`, `torch.softmax`, `Tensor.softmax`."""
    return [getattr(place, name) for name in names.split() for place in places if hasattr(place, name)]


_LOSSES = (
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "poisson_nll_loss binary_cross_entropy_with_logits gaussian_nll_loss ctc_loss soft_margin_loss "
    "hinge_embedding_loss cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "triplet_margin_loss multilabel_soft_margin_loss"
)
_NORMS = "layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize"
_SOFTMAX = "softmax log_softmax softmin gumbel_softmax logsumexp"
_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
_SUMS = "tensordot inner dot vdot outer addbmm addmv addr chain_matmul bilinear"
_TWO = "add sub subtract mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__"
_VIEWS = (
    "__getitem__ t transpose swapaxes movedim permute view view_as reshape narrow select unsqueeze squeeze expand "
    "expand_as flatten unflatten chunk split unbind index_select float double half bfloat16 to type_as contiguous "
    "clone sum mean norm exp abs square pow tanh sigmoid repeat tile masked_fill roll flip diagonal"
)
_CASTS = "operands in compute"
_METHODS = (torch, Tensor)
REVERSED = {Tensor.__rmatmul__}

TABLE: dict[Any, Entry] = {
    **dict.fromkeys(_named(_SOFTMAX, F, torch.special, *_METHODS), _island("softmax")),
    **dict.fromkeys(_named(_NORMS, F, torch), _island("norm")),
    **dict.fromkeys(_named(_LOSSES, F, torch), _island("loss")),
    F.scaled_dot_product_attention: Entry(_attention_alone, _attend, "queries, keys and values in compute"),
    F.linear: Entry(_linear_alone, _linear, f"{_CASTS}, an fp32 weight gradient"),
    **dict.fromkeys(
        _named("matmul __matmul__ __rmatmul__ mm bmm mv", torch.linalg, *_METHODS),
        Entry(_product_alone, _matmul, _CASTS),
    ),
    **dict.fromkeys(_named("addmm baddbmm", *_METHODS), Entry(_added_alone, _added_matmul, _CASTS)),
    torch.einsum: Entry(_product_alone, _einsum, _CASTS),
    **dict.fromkeys(_named("grouped_mm _grouped_mm", F, torch), Entry(_grouped_alone, _grouped, _CASTS)),
    **dict.fromkeys(_named(_SUMS, F, *_METHODS), Entry(_kernel_alone, _cast_all, _CASTS)),
    **dict.fromkeys(
        _named(_CONVOLUTIONS, F, torch),
        Entry(_kernel_alone, _cast_all, f"{_CASTS}, weight gradients too, then fp32"),
    ),
    F.multi_head_attention_forward: Entry(_widened_alone, _widen_all, "fp32 throughout, compute out"),
    F.embedding: Entry(_rows_alone, _rows, "rows of the master, in compute"),
    **dict.fromkeys(_named(_TWO, *_METHODS), Entry(_two_alone, _meet, "fp32 inside, compute out")),
    **dict.fromkeys(
        _named("cat concat concatenate stack hstack vstack where lerp addcmul", *_METHODS),
        Entry(_many_alone, _meet, "fp32 inside, compute out"),
    ),
}
# Of models with split masters: what is made of a half is made of the whole, and has an fp32 gradient.
VIEWS: dict[Any, Entry] = {
    **dict.fromkeys(
        [*_named(_VIEWS, *_METHODS), *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))],
        Entry(_view_alone, _view, "of the whole master"),
    ),
}


# What loses in narrow formats and no role has, as hand-written norms are made of it.
SENSITIVE = frozenset(_named("mean sum var std norm rsqrt exp log cumsum prod", *_METHODS))


def meets(entry: Entry) -> bool:
    """Whether an entry is for arithmetic of activations."""
    return entry.run is _meet


def learn() -> None:
    """Adds Hugging Face's grouped_mm, which they call where torch's does not compile, if it is there."""
    op = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if op is not None:
        TABLE.setdefault(op, Entry(_grouped_alone, _grouped, _CASTS))
