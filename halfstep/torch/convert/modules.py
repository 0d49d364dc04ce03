"""Modules of `torch.nn` that cast: the classes that `apply` puts in front of a module's own class.

`apply` changes `module.__class__` to a class made of two: one of this file in front of the module's own.
Parameters, buffers, hooks and children stay, and `isinstance` holds. There are five kinds of class:

    Convolution, Embedding, ...      each for one class of torch.nn; layers like those of layers.py
                                     (norms are in norms.py, attention is in attention.py)
    Island                           a softmax, a loss: torch's own forward, in the format of a role
    Leaf                             any other module that holds parameters: its own forward, in fp32
    Code                             others' modules that hold none: their own forward, with the function mode on
    Root                             the model itself, for what it returns

No kernel of torch sums the weight gradients of a convolution or a recurrent layer into fp32: they are rounded to
compute once, after the sum, then widened. Everywhere else a weight gradient is fp32 from the sum on.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.torch.convert.attention import MultiheadAttention
from halfstep.torch.convert.norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from halfstep.torch.functions.entry import mapped, tensors_of
from halfstep.torch.functions.mode import PolicyMode, within
from halfstep.torch.functions.output import keep_narrow
from halfstep.torch.functions.widened import wide_of
from halfstep.torch.layers import CastedLinear, Layer, Matmul, embedding, linear
from halfstep.torch.lowering import Casts, bypass_mode, check_autocast, enter, island, leave, owned, rounded

_KERNEL = "no kernel sums a gradient of halves into fp32"


class TransposedLinear(Matmul):
    """The `Conv1D` of Hugging Face's GPT-2: a linear layer that holds its matrix transposed."""

    shown = "{p.operand.format} operands{emulated}"
    split_name = "weight"

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        weight, history, watched = self.weight, self.halfstep_history, bool(self._forward_hooks)
        return linear(x, weight, self.bias, self.casts, transposed=True, history=history, watched=watched)

    def matrix_sizes(self) -> list[tuple[int, int]]:
        """Returns (inputs, outputs) of the matrix."""
        return [(self.weight.shape[0], self.weight.shape[1])]


class Convolution(Layer):
    """`nn.Conv1d`, `2d`, `3d`: operands and result in compute."""

    shown = "{p.compute} operands"
    whole_reason = _KERNEL

    @bypass_mode
    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        return rounded(self._conv_forward(enter(x, self.casts), *_operands(self)), self.casts)


class Transposed(Convolution):
    """`nn.ConvTranspose1d`, `2d`, `3d`: operands and result in compute."""

    @bypass_mode
    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Returns the layer's output, of the given size."""
        dims = len(self.kernel_size)
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        sizes = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        padding = self._output_padding(x, output_size, *sizes)
        weight, bias = _operands(self)
        x = enter(x, self.casts)
        y = convolve(x, weight, bias, self.stride, self.padding, padding, self.groups, self.dilation)
        return rounded(y, self.casts)


class Embedding(Layer):
    """`nn.Embedding`: rows of the master, cast to compute."""

    shown = "{p.compute} out"
    split_name = "weight"

    def forward(self, index: Tensor) -> Tensor:
        """Returns the rows of the index."""
        options = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return embedding(index, self.weight, self.casts, *options)

    @classmethod
    def whole_because(cls, module: Any, name: str) -> str:
        """Returns why a table cannot be split: it is renormalized in place, or has sparse gradients."""
        if module.max_norm is not None:
            return "max_norm renormalizes the rows of the master in place"
        return "its gradient is sparse" if module.sparse else super().whole_because(module, name)


class EmbeddingBag(Embedding):
    """`nn.EmbeddingBag`: rows of the master, summed in the dtype it is held in, then cast to compute."""

    whole_reason = "bags are summed in the dtype of the table"

    @bypass_mode
    def forward(
        self, index: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Returns the sum, mean or maximum of each bag."""
        table = owned(self.weight, self.casts)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(table.dtype)
        norm = (self.max_norm, self.norm_type, self.scale_grad_by_freq)
        rest = (per_sample_weights, self.include_last_offset, self.padding_idx)
        return enter(F.embedding_bag(index, table, offsets, *norm, self.mode, self.sparse, *rest), self.casts)


class Recurrent(Layer):
    """`nn.RNN`, `nn.LSTM`, `nn.GRU`: weights, inputs and states in compute around torch's kernel."""

    shown = "{p.compute} operands"
    whole_reason = _KERNEL
    _flat_weights: list[Tensor]

    @bypass_mode
    def forward(self, x: Any, hx: Any = None) -> Any:
        """Returns the outputs, and the last state."""
        casts, held = self.casts, list(self._flat_weights)
        self._flat_weights = [enter(owned(w, casts), casts) for w in held]
        try:
            with warnings.catch_warnings():
                # They are packed at each call, as under autocast; flatten_parameters would not help.
                warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
                y = super().forward(*mapped(lambda t: enter(t, casts), (x, hx)))
                return mapped(lambda t: enter(t, casts), y)
        finally:
            self._flat_weights = held


# The class that goes in front of a class of torch.nn.
KINDS: dict[type, type] = {
    nn.Linear: CastedLinear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Transposed),
    nn.Embedding: Embedding,
    nn.EmbeddingBag: EmbeddingBag,
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.GroupNorm: GroupNorm,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNorm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), InstanceNorm),
    nn.MultiheadAttention: MultiheadAttention,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), Recurrent),
}
# The same for classes of other packages, by name: they need not be installed.
NAMED: dict[str, type] = {"transformers.pytorch_utils.Conv1D": TransposedLinear}
_LOSSES = (
    "BCELoss BCEWithLogitsLoss CosineEmbeddingLoss CrossEntropyLoss CTCLoss GaussianNLLLoss HingeEmbeddingLoss "
    "HuberLoss KLDivLoss L1Loss MarginRankingLoss MSELoss MultiLabelMarginLoss MultiLabelSoftMarginLoss "
    "MultiMarginLoss NLLLoss PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss "
    "TripletMarginWithDistanceLoss"
)
# Modules that run torch's own forward, in the format of a role.
ISLANDS: dict[type, str] = {
    **dict.fromkeys((nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax), "softmax"),
    **dict.fromkeys((nn.SyncBatchNorm, nn.LocalResponseNorm), "norm"),
    **{getattr(nn, name): "loss" for name in _LOSSES.split()},
}


@dataclass(frozen=True)
class Setting:
    """What `Island`, `Leaf`, `Code` and `Root` know about the module they are in front of."""

    casts: Casts
    role: str  # of an island; empty elsewhere
    widen: bool  # a leaf with fp32 parameters, which many torch functions refuse to combine with anything narrower
    mode: PolicyMode | None = None  # for the functions that its own code calls

    def __deepcopy__(self, _: Any) -> "Setting":
        return self


class Island(nn.Module):
    """Torch's own forward in the format of a role; a norm or a softmax returns compute, a loss the loss format."""

    halfstep: Setting

    @bypass_mode
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output."""
        casts, role = self.halfstep.casts, self.halfstep.role
        # fp32 with numbers of the role's format: class weights and running statistics are fp32.
        args, kwargs = mapped(lambda x: island(x, role, casts).float(), (args, kwargs))
        out = island if role == "loss" else leave
        return mapped(lambda y: out(y, role, casts), super().forward(*args, **kwargs))

    def extra_repr(self) -> str:
        """Adds the formats inside and out."""
        precision, role = self.halfstep.casts.precision, self.halfstep.role
        inside = getattr(precision, role)
        formats = f"{inside} inside, {inside if role == 'loss' else precision.compute} out"
        return ", ".join(filter(None, [super().extra_repr(), formats]))


class Leaf(nn.Module):
    """Somebody's own forward, in the dtype of its parameters; results are in compute, but for scalars (a loss)."""

    halfstep: Setting

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output."""
        setting = self.halfstep
        if setting.widen:
            args, kwargs = mapped(lambda x: wide_of(x).to(torch.float32), (args, kwargs))
        y = within(setting.mode, super().forward, args, kwargs)
        return mapped(lambda y: enter(y, setting.casts) if y.dim() else y, y)

    def extra_repr(self) -> str:
        """Adds the format of its output."""
        form = f"as written, {self.halfstep.casts.precision.compute} out"
        return ", ".join(filter(None, [super().extra_repr(), form]))


class Experts(Leaf):
    """The matrices of a mixture's experts in one module: products in compute, inputs as they come."""


class Recipe(Leaf):
    """A layer of another package with a recipe of its own for narrow operands: nothing in it is reached."""


class Code(nn.Module):
    """Somebody's own forward, between modules: the functions it calls are reached."""

    halfstep: Setting

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output."""
        return within(self.halfstep.mode, super().forward, args, kwargs)


class Root(nn.Module):
    """The model itself: it returns the loss format, but scalars as they are: a narrow loss must not look wide.

    If one of them is its loss, the rest stays in compute until somebody computes with it (functions/output.py).
    """

    halfstep_model: Setting

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output."""
        check_autocast()
        setting = self.halfstep_model
        y, casts = within(setting.mode, super().forward, args, kwargs), setting.casts
        if casts.loss is torch.float32 and not casts.emulate and _has_loss(y):
            return mapped(lambda y: keep_narrow(wide_of(y)), y)
        return mapped(lambda y: island(wide_of(y), "loss", casts) if y.dim() else y, y)


def _has_loss(y: Any) -> bool:
    tensors = list(tensors_of(y))
    return len(tensors) > 1 and any(not t.dim() and t.is_floating_point() for t in tensors)


def _operands(module: Any) -> tuple[Tensor, Tensor | None]:
    casts, bias = module.casts, module.bias
    weight = enter(owned(module.weight, casts), casts)
    return weight, None if bias is None else enter(owned(bias, casts), casts)
