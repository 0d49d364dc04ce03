"""How the torch functions that a model's own code calls are handled (mode.py), family by family.

    softmax, log_softmax, logsumexp    in the softmax format, compute out
    layer_norm, rms_norm, normalize... in the norm format, compute out
    cross_entropy, mse_loss, ...       in the loss format, inside and out; cross_entropy of narrow logits without
                                       an fp32 copy of them (plain.py), also of logits.float() (narrow_logits.py)
    scaled_dot_product_attention       queries, keys and values in compute, a mask that stays finite
    linear                             in compute, with an fp32 weight gradient
    matmul, einsum, bmm, addmm, ...    with a parameter among the operands, the same (products.py); operands of
                                       several dtypes: all in compute
    conv1d, bilinear, ...              the same, but the weight gradient leaves the kernel in compute
    embedding                          rows of the master, in compute
    x + p, x * p, cat, where, ...      with a parameter p: in fp32, then in compute; p does not promote the stream
    fft, inv, svd, cdist, ...          in fp32, inside and out: torch has them in no narrower format (FP32_ONLY)
    index_add, scatter, ...            what is added is cast to what it is added to, as torch requires

What runs unchanged: a product of fp32 tensors of which none is a parameter (angles of rotary positions), one of
parameters only, an island that gets fp32 already, everything else (`run.coverage` lists them).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.errors import PolicyReachError
from halfstep.core.formats import FP32
from halfstep.core.torch_functions import KERNELS, LOSSES, NORMS, SOFTMAX, named
from halfstep.torch.convert.functions.entry import (
    Entry,
    Scope,
    Skip,
    is_weight,
    join_if_split,
    map_tensors,
    tensors_of,
)
from halfstep.torch.convert.functions.narrow_logits import is_for_loss, widen
from halfstep.torch.convert.functions.products import ADDED, EINSUM, GROUPED, KERNEL, LINEAR, MATMUL, WIDENED
from halfstep.torch.fp8.linear import layer_grad_bits
from halfstep.torch.layers import embedding
from halfstep.torch.loss.plain import torch_loss
from halfstep.torch.numerics.attention import cast_mask, weighted_attention
from halfstep.torch.numerics.dtypes import FLOATS, NARROW
from halfstep.torch.numerics.lowering import exit_island, island, round_to_compute, to_compute
from halfstep.torch.numerics.split.operand import is_split

# --- islands


def _island(role: str) -> Entry:
    def skip_reason(scope: Scope, args: Any, kwargs: Any) -> str:
        if scope.casts.emulate or getattr(scope.casts.precision, role) != FP32:
            return Skip.IN_LEAF if scope.leaf else ""
        return "" if any(t.dtype in NARROW for t in tensors_of(args, kwargs)) else Skip.GIVEN_FP32

    def run(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
        casts = scope.casts
        given = next(tensors_of(args, kwargs))
        asked = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
        if casts.emulate and role != "loss":  # natively its input would have been narrow
            new = to_compute(given, casts)
            args = [new if a is given else a for a in args]
            kwargs = {key: new if value is given else value for key, value in kwargs.items()}
        kernel = func is F.cross_entropy and not casts.emulate and casts.loss is torch.float32
        if kernel and not torch.compiler.is_compiling():  # compiled code fuses it in its graph
            loss = torch_loss(*args, **kwargs, kept=layer_grad_bits(given))
            if loss is not None:
                return loss
        args, kwargs = map_tensors(lambda t: island(t, role, casts).float(), (args, kwargs))
        y = func(*args, **kwargs)
        if role == "loss":
            return island(y, role, casts)
        if casts.emulate or (asked is None and given.dtype in NARROW):
            return exit_island(y, role, casts)
        return island(y, role, casts).to(asked or given.dtype)

    out = "inside and out" if role == "loss" else "inside, compute out"
    return Entry(skip_reason, run, f"the {role} format {out}")


# What F.scaled_dot_product_attention takes in this order.
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _skip_attention(scope: Scope, args: Any, kwargs: Any) -> str:
    casts, compute = scope.casts, scope.casts.compute
    native = casts.fused_softmax and not casts.emulate
    if native and len(args) == 3 and kwargs.get("attn_mask") is None:  # as most are
        q, k, v = args
        if q.dtype is compute and k.dtype is compute and v.dtype is compute and compute is not torch.float32:
            return Skip.IN_COMPUTE
    dtypes = [t.dtype for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if scope.leaf and torch.float32 in dtypes:
        return Skip.IN_LEAF
    if not native:
        return ""
    return "" if [d for d in dtypes if d is not compute and d is not torch.bool] else Skip.IN_COMPUTE


def _attend(scope: Scope, func: Any, args: Any, kwargs: Any) -> Tensor:
    given = {**dict(zip(ATTENTION, args, strict=False)), **kwargs}
    casts = scope.casts
    q, k, v = (to_compute(given.pop(name), casts) for name in ATTENTION[:3])
    given["attn_mask"] = cast_mask(given.get("attn_mask"), casts.compute)
    if casts.fused_softmax:
        return round_to_compute(func(q, k, v, **given), casts)
    if q.dim() not in (3, 4):
        raise PolicyReachError(
            f"softmax={casts.precision.softmax} does not reach attention of {q.dim()} dimensions",
            hint="write `softmax=fp32`, which the fused kernel supports",
        )
    flat = q.dim() == 3
    q, k, v = (t.unsqueeze(1) if flat else t for t in (q, k, v))
    options = {"causal": given.get("is_causal", False), "mask": given["attn_mask"], "scale": given.get("scale")}
    y = weighted_attention(q, k, v, casts, dropout=given.get("dropout_p", 0.0), **options)[0]
    return y.squeeze(1) if flat else y


def _skip_widen(scope: Scope, args: Any, kwargs: Any) -> str:
    x, casts = args[0], scope.casts
    if scope.has_split and is_split(x):
        return ""
    fp32 = casts.loss is torch.float32 and not casts.emulate
    return "" if x.dtype in NARROW and fp32 and not kwargs and is_for_loss(x) else Skip.NOT_MIXED


def _widen(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    return _view(scope, func, args, kwargs) if is_split(args[0]) else widen(args[0])


# --- a parameter that meets an activation


def _skip_rows(scope: Scope, args: Any, kwargs: Any) -> str:
    table = next(t for t in tensors_of(args, kwargs) if t.is_floating_point())
    if scope.leaf:
        return Skip.IN_LEAF
    return "" if is_split(table) or (table.dtype is torch.float32 and is_weight(table)) else Skip.NO_PARAMETER


def _rows(scope: Scope, func: Any, args: Any, kwargs: Any) -> Tensor:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return embedding(given.pop("input"), given.pop("weight"), scope.casts, **given)


def _skip_two(scope: Scope, args: Any, kwargs: Any) -> str:
    if scope.leaf:
        return Skip.IN_LEAF
    a, b = args if len(args) == 2 else [*args, *(kwargs[k] for k in ("input", "other") if k in kwargs), None][:2]
    if type(a) is Tensor and type(b) is Tensor and a.dtype is b.dtype and not scope.casts.emulate:
        return Skip.NOT_MIXED  # as most sums of a model: no parameter is among them
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _skip_unmixed(scope, [a, b])
    return "" if scope.has_split and (_is_split_tensor(a) or _is_split_tensor(b)) else Skip.NOT_MIXED


def _skip_many(scope: Scope, args: Any, kwargs: Any) -> str:
    if scope.leaf:
        return Skip.IN_LEAF
    return Skip.OUT if kwargs.get("out") is not None else _skip_unmixed(scope, [*tensors_of(args, kwargs)])


def _skip_unmixed(scope: Scope, tensors: list[Tensor]) -> str:
    floats = [t for t in tensors if t.dtype in FLOATS]
    if scope.has_split and any(is_split(t) for t in floats):
        return ""
    if not scope.casts.emulate and len({t.dtype for t in floats}) < 2:
        return Skip.NOT_MIXED
    others = [t for t in floats if not (t.dtype is torch.float32 and is_weight(t))]
    promoted = others if scope.casts.emulate else [t for t in others if t.dtype in NARROW]
    promoting = any(t.dim() for t in floats if t.dtype is torch.float32)
    return "" if promoted and promoting and len(others) < len(floats) else Skip.NOT_MIXED


def _mix(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    floats = [t for t in tensors_of(args, kwargs) if t.dtype in FLOATS]
    y = _view(scope, func, args, kwargs)
    return y if all(is_weight(t) for t in floats) else to_compute(y, scope.casts)


def _mix_widened(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    """As `_mix`, of functions that refuse two dtypes."""
    return to_compute(_in_fp32(scope, func, args, kwargs), scope.casts)


# --- what torch refuses: narrow operands, or operands of two dtypes


def _skip_wide(scope: Scope, args: Any, kwargs: Any) -> str:
    if kwargs.get("out") is not None:
        return Skip.OUT
    return "" if any(t.dtype in NARROW for t in tensors_of(args, kwargs)) else Skip.GIVEN_FP32


def _in_fp32(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = map_tensors(lambda t: join_if_split(t).float(), (args, kwargs))
    return func(*args, **kwargs)


def _skip_alike(scope: Scope, args: Any, kwargs: Any) -> str:
    floats = [t for t in tensors_of(args, kwargs) if t.dtype in FLOATS]
    alike = len({t.dtype for t in floats}) < 2 and not any(map(_is_split_tensor, floats))
    return Skip.NOT_MIXED if alike else ""


def _in_first_dtype(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = map_tensors(join_if_split, (args, kwargs))
    dtype = next(tensors_of(args, kwargs)).dtype
    args, kwargs = map_tensors(lambda t: t.to(dtype), (args, kwargs))
    return func(*args, **kwargs)


def _skip_view(scope: Scope, args: Any, kwargs: Any) -> str:
    for given in args:
        if type(given) is not Tensor and _is_split_tensor(given):
            return ""
    return "" if kwargs and _is_split_tensor(kwargs.get("input")) else Skip.NOT_MIXED


def _view(scope: Scope, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = map_tensors(join_if_split, (args, kwargs))
    return func(*args, **kwargs)


def _skip_dtype(scope: Scope, args: Any, kwargs: Any) -> str:
    narrow = scope.casts.compute is torch.bfloat16 or not is_split(args[0])
    return Skip.NOT_MIXED if narrow else ""


def _is_split_tensor(given: Any) -> bool:
    return isinstance(given, Tensor) and is_split(given)


# --- the table


_TWO = "add sub subtract mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__"
_VIEWS = (
    "__getitem__ t transpose swapaxes movedim permute view view_as reshape narrow select unsqueeze squeeze expand "
    "expand_as flatten unflatten chunk split unbind index_select float double half bfloat16 to type_as contiguous "
    "clone sum mean norm exp abs square pow tanh sigmoid repeat tile masked_fill roll flip diagonal"
)
METHODS = (torch, Tensor)
# As under autocast. Of those that have a narrow kernel on some device, torch computes the others in fp32 too.
FP32_ONLY = [
    *(getattr(torch.fft, f"{a}fft{b}") for a in ("", "i", "r", "ir", "h", "ih") for b in ("", "2", "n")),
    torch.linalg.cond,  # `torch.cond` is another
    *named(
        "avg_pool3d cdist cholesky cholesky_ex cholesky_inverse cholesky_solve complex det eig eigh eigvals "
        "eigvalsh geqrf grid_sample householder_product inv inv_ex inverse istft ldl_factor ldl_solve logdet "
        "lstsq lu lu_factor lu_solve matrix_norm matrix_rank nanquantile orgqr ormqr pdist pinv pinverse polar qr "
        "quantile slogdet solve solve_ex solve_triangular stft svd svdvals tensorinv tensorsolve triangular_solve "
        "view_as_complex",
        F,
        torch.linalg,
        *METHODS,
    ),
]
_INDEXED = (
    "index_add index_copy index_put index_reduce masked_scatter put scatter scatter_add scatter_reduce index_add_ "
    "index_copy_ index_put_ index_reduce_ masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_"
)

TABLE: dict[Any, Entry] = {
    **dict.fromkeys(named(SOFTMAX, F, torch.special, *METHODS), _island("softmax")),
    **dict.fromkeys(named(NORMS, F, torch), _island("norm")),
    **dict.fromkeys(named(LOSSES, F, torch), _island("loss")),
    Tensor.float: Entry(_skip_widen, _widen, "without a copy, until something other than a loss reads it"),
    F.scaled_dot_product_attention: Entry(_skip_attention, _attend, "queries, keys and values in compute"),
    F.linear: LINEAR,
    **dict.fromkeys(named("matmul __matmul__ __rmatmul__ mm bmm mv", torch.linalg, *METHODS), MATMUL),
    **dict.fromkeys(named("addmm baddbmm", *METHODS), ADDED),
    torch.einsum: EINSUM,
    **dict.fromkeys(named("grouped_mm _grouped_mm", F, torch), GROUPED),
    **dict.fromkeys(named(KERNELS, F, *METHODS), KERNEL),
    F.multi_head_attention_forward: WIDENED,
    F.embedding: Entry(_skip_rows, _rows, "rows of the master, in compute"),
    **dict.fromkeys(named(_TWO, *METHODS), Entry(_skip_two, _mix, "fp32 inside, compute out")),
    **dict.fromkeys(
        named("cat concat concatenate stack hstack vstack where addcmul", *METHODS),
        Entry(_skip_many, _mix, "fp32 inside, compute out"),
    ),
    **dict.fromkeys(
        [*named("cross lerp prelu", F, torch.linalg, *METHODS), torch.linalg.vecdot],
        Entry(_skip_many, _mix_widened, "fp32 inside, compute out"),
    ),
    **dict.fromkeys(FP32_ONLY, Entry(_skip_wide, _in_fp32, "fp32 inside and out, as under autocast")),
    **dict.fromkeys(named(_INDEXED, *METHODS), Entry(_skip_alike, _in_first_dtype, "in the dtype of the first")),
}
# In models with split masters: views of a split parameter are views of the joined master, with an fp32 gradient.
VIEWS: dict[Any, Entry] = {
    **dict.fromkeys(
        [*named(_VIEWS, *METHODS), *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))],
        Entry(_skip_view, _view, "of the whole master"),
    ),
    # Code that casts its input to a weight's dtype, such as T5's, means the dtype that the weight computes in.
    Tensor.dtype.__get__: Entry(_skip_dtype, lambda scope, *_: scope.casts.compute, "that of compute"),  # type: ignore[attr-defined]
}


# Functions that lose accuracy in narrow formats and belong to no role, such as the parts of hand-written norms.
SENSITIVE = frozenset(named("mean sum var std norm rsqrt exp log cumsum prod", *METHODS))


def is_arithmetic(entry: Entry) -> bool:
    """Whether an entry is for arithmetic of activations."""
    return entry.run is _mix


def add_hugging_face_operations() -> None:
    """Adds Hugging Face's grouped_mm, which they call where torch's does not compile, if it is installed."""
    op = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if op is not None:
        TABLE.setdefault(op, GROUPED)
