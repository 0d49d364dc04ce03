"""What a torch function is to an audit, by the function itself: `F.softmax`, `torch.softmax`, `Tensor.softmax`."""

import operator
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.torch.functions.table import KERNELS, LOSSES, METHODS, NORMS, SOFTMAX, named

_PRODUCTS = "linear matmul __matmul__ __rmatmul__ mm bmm mv addmm baddbmm einsum grouped_mm _grouped_mm _scaled_mm"
_ARITHMETIC = (
    "add sub mul div multiply divide true_divide subtract pow square exp cumsum prod __add__ __radd__ __iadd__ "
    "__sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __pow__ add_ mul_ "
    "div_ sub_ addcmul lerp"
)
_STATISTICS = "mean sum var std var_mean std_mean norm vector_norm rsqrt pow square __pow__"
_CASTS = "to half bfloat16 float type type_as double"

# softmax and norm are torch's own: their kernels sum in fp32, on every device, whatever they are given.
KINDS: dict[Any, str] = {
    **dict.fromkeys(named(_STATISTICS, torch.linalg, *METHODS), "arithmetic"),
    **dict.fromkeys(named(_ARITHMETIC, *METHODS), "arithmetic"),
    **dict.fromkeys([operator.add, operator.sub, operator.mul, operator.truediv, operator.pow], "arithmetic"),
    **dict.fromkeys([operator.iadd, operator.isub, operator.imul, operator.itruediv], "arithmetic"),
    **dict.fromkeys(named(_CASTS, torch.Tensor), "cast"),
    **dict.fromkeys(named(SOFTMAX, F, torch.special, *METHODS), "softmax"),
    **dict.fromkeys(named("log_softmax logsumexp", F, torch.special, *METHODS), "logarithm"),
    **dict.fromkeys(named(NORMS, F, torch), "norm"),
    **dict.fromkeys(named(LOSSES, F, torch), "loss"),
    **dict.fromkeys(named(_PRODUCTS, F, torch.linalg, *METHODS), "matmul"),
    **dict.fromkeys(named(KERNELS, F, *METHODS), "matmul"),
    operator.matmul: "matmul",
    F.scaled_dot_product_attention: "attention",
    F.multi_head_attention_forward: "attention",
}
# Parts of norms that somebody wrote by hand, and of softmax.
STATISTICS = frozenset([*named(_STATISTICS, torch.linalg, *METHODS), operator.pow])
SQUARE_ROOT = frozenset(named("rsqrt", *METHODS))
EXP = frozenset(named("exp", *METHODS))
SUM = frozenset(named("sum", *METHODS))
DIVISION = frozenset([*named("div divide true_divide __truediv__ div_ __itruediv__", *METHODS), operator.truediv])
