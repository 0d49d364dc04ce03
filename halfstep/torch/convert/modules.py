"""Modules of `torch.nn` that cast: the classes that `apply` puts in front of a module's own class.

`apply` changes `module.__class__` to a class made of two: one of this file in front of the module's own.
Parameters, buffers, hooks and children stay, and `isinstance` holds. There are six kinds of class:

    Convolution, Embedding, ...      each for one class of torch.nn; layers like those of layers.py
                                     and norms; attention is in attention.py
    Island                           a softmax, a loss: torch's own forward, in the format of a role
    Leaf                             any other module that holds parameters: its own forward, in fp32
    Code                             third-party modules without any: their own forward, in the function mode
    Neutral                          a relu, a dropout: torch's own forward, past the function mode
    Root                             the model itself, for what it returns

No kernel of torch sums the weight gradients of a convolution or a recurrent layer into fp32: they are rounded to
compute once, after the sum, then widened. Everywhere else a weight gradient is fp32 from the sum on.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.torch.convert.attention import MultiheadAttention
from halfstep.torch.convert.functions.entry import map_tensors, tensors_of
from halfstep.torch.convert.functions.mode import PolicyMode, run_in_mode
from halfstep.torch.convert.functions.narrow_logits import keep_narrow, to_fp32
from halfstep.torch.layers import CastedLinear, Layer, Matmul, embedding, layer_norm, linear, rms_norm
from halfstep.torch.numerics.lowering import (
    bypass_mode,
    check_autocast,
    exit_island,
    island,
    island_parameter,
    round_to_compute,
    to_compute,
    with_weight_grad_format,
)
from halfstep.torch.numerics.recompute import recompute_in_backward
from halfstep.torch.numerics.record import ModuleRecord

_KERNEL = "no kernel sums a gradient of halves into fp32"


class TransposedLinear(Matmul):
    """The `Conv1D` of Hugging Face's GPT-2: a linear layer that holds its matrix transposed."""

    shown = "{p.operand.format} operands{emulated}"
    split_name = "weight"

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        return linear(x, self.weight, self.bias, self.casts, transposed=True, history=self.halfstep.history)

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
        return round_to_compute(self._conv_forward(to_compute(x, self.casts), *_operands(self)), self.casts)


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
        x = to_compute(x, self.casts)
        y = convolve(x, weight, bias, self.stride, self.padding, padding, self.groups, self.dilation)
        return round_to_compute(y, self.casts)


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
        table = with_weight_grad_format(self.weight, self.casts)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(table.dtype)
        norm = (self.max_norm, self.norm_type, self.scale_grad_by_freq)
        rest = (per_sample_weights, self.include_last_offset, self.padding_idx)
        return to_compute(F.embedding_bag(index, table, offsets, *norm, self.mode, self.sparse, *rest), self.casts)


class Recurrent(Layer):
    """`nn.RNN`, `nn.LSTM`, `nn.GRU`: weights, inputs and states in compute around torch's kernel."""

    shown = "{p.compute} operands"
    whole_reason = _KERNEL
    _flat_weights: list[Tensor]

    @bypass_mode
    def forward(self, x: Any, hx: Any = None) -> Any:
        """Returns the outputs, and the last state."""
        casts, held = self.casts, list(self._flat_weights)
        self._flat_weights = [to_compute(with_weight_grad_format(w, casts), casts) for w in held]
        try:
            with warnings.catch_warnings():
                # They are packed at each call, as under autocast; flatten_parameters would not help.
                warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
                y = super().forward(*map_tensors(lambda t: to_compute(t, casts), (x, hx)))
                return map_tensors(lambda t: to_compute(t, casts), y)
        finally:
            self._flat_weights = held


class Normalization(Layer):
    """What norms share."""

    shown = "{p.norm} inside, {p.compute} out"
    whole_reason = "gains and biases are never split"


class LayerNorm(Normalization):
    """`nn.LayerNorm` as an island."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        casts, eps, dims = self.casts, self.eps, len(self.normalized_shape)
        if self.halfstep.recomputed:
            return recompute_in_backward(
                lambda x, g, b: layer_norm(x, g, b, casts, eps, dims=dims), x, self.weight, self.bias
            )
        return layer_norm(x, self.weight, self.bias, casts, eps, dims=dims)


class RMSNorm(Normalization):
    """`nn.RMSNorm` as an island."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        casts, eps, dims = self.casts, self.eps, len(self.normalized_shape)
        if self.halfstep.recomputed:
            return recompute_in_backward(lambda x, g: rms_norm(x, g, casts, eps, dims=dims), x, self.weight)
        return rms_norm(x, self.weight, casts, eps, dims=dims)


class GroupNorm(Normalization):
    """`nn.GroupNorm` as an island."""

    @bypass_mode
    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        y = F.group_norm(island(x, "norm", self.casts), self.num_groups, *_gains(self), self.eps)
        return exit_island(y, "norm", self.casts)


class BatchNorm(Normalization):
    """`nn.BatchNorm1d`, `2d`, `3d` as an island; running statistics are fp32."""

    @bypass_mode
    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input; in training, moves the running statistics towards those of the batch."""
        self._check_input_dim(x)
        tracked = self.training and self.track_running_stats
        factor = 0.0 if self.momentum is None else self.momentum
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        of_batch = self.training or self.running_mean is None
        mean, variance = (self.running_mean, self.running_var) if tracked or not self.training else (None, None)
        gain, bias = _wide_gains(self)
        # On a GPU the kernel is fp32 inside, so that no fp32 copy of the input is made, nor kept for backward.
        direct = x.is_cuda and self.casts.fp32_norm and x.dtype is self.casts.compute
        x = x if direct else island(x, "norm", self.casts)
        y = F.batch_norm(x, mean, variance, gain, bias, of_batch, factor, self.eps)
        return y if direct else exit_island(y, "norm", self.casts)


class InstanceNorm(Normalization):
    """`nn.InstanceNorm1d`, `2d`, `3d` as an island; running statistics are fp32."""

    @bypass_mode
    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        return exit_island(super().forward(island(x, "norm", self.casts)), "norm", self.casts)

    def _apply_instance_norm(self, x: Tensor) -> Tensor:
        of_instance = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        gain, bias = _wide_gains(self)
        return F.instance_norm(x, self.running_mean, self.running_var, gain, bias, of_instance, momentum, self.eps)


def _gains(module: Any) -> tuple[Any, Any]:
    return island_parameter(module.weight, "norm", module.casts), island_parameter(
        module.bias, "norm", module.casts
    )


def _wide_gains(module: Any) -> tuple[Any, Any]:
    """Returns them in fp32: torch wants the dtype of the running statistics."""
    held = module.weight, module.bias
    if module.casts.fp32_norm and all(p is not None and p.dtype is torch.float32 for p in held):  # as in most
        return held
    gain, bias = _gains(module)
    return None if gain is None else gain.float(), None if bias is None else bias.float()


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
# Modules that call a function which torch writes in Python, and of which no table has an entry.
NEUTRAL = frozenset(
    (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)
)
# Modules that run torch's own forward, in the format of a role.
ISLANDS: dict[type, str] = {
    **dict.fromkeys((nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax), "softmax"),
    **dict.fromkeys((nn.SyncBatchNorm, nn.LocalResponseNorm), "norm"),
    **{getattr(nn, name): "loss" for name in _LOSSES.split()},
}


class Island(nn.Module):
    """Torch's own forward in the format of a role; a norm or a softmax returns compute, a loss the loss format."""

    halfstep: ModuleRecord

    @bypass_mode
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output."""
        casts, role = self.halfstep.casts, self.halfstep.role
        # fp32 with numbers of the role's format: class weights and running statistics are fp32.
        args, kwargs = map_tensors(lambda x: island(x, role, casts).float(), (args, kwargs))
        out = island if role == "loss" else exit_island
        return map_tensors(lambda y: out(y, role, casts), super().forward(*args, **kwargs))

    def extra_repr(self) -> str:
        """Adds the formats inside and out."""
        precision, role = self.halfstep.casts.precision, self.halfstep.role
        inside = getattr(precision, role)
        formats = f"{inside} inside, {inside if role == 'loss' else precision.compute} out"
        return ", ".join(filter(None, [super().extra_repr(), formats]))


class Leaf(nn.Module):
    """A third-party forward, in the dtype of its parameters; results are in compute, except scalars (a loss)."""

    halfstep: ModuleRecord

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output."""
        record = self.halfstep
        if record.widen:
            args, kwargs = map_tensors(lambda x: to_fp32(x).to(torch.float32), (args, kwargs))
        y = run_in_mode(record.mode, super().forward, args, kwargs)
        return map_tensors(lambda y: to_compute(y, record.casts) if y.dim() else y, y)

    def extra_repr(self) -> str:
        """Adds the format of its output."""
        form = f"as written, {self.halfstep.casts.precision.compute} out"
        return ", ".join(filter(None, [super().extra_repr(), form]))


class Experts(Leaf):
    """The matrices of a mixture's experts in one module: products in compute, inputs as they come."""


class Recipe(Leaf):
    """A layer of another package with a recipe of its own for narrow operands: nothing in it is reached."""


class Code(nn.Module):
    """A third-party forward between modules: the policy covers the functions that it calls."""

    halfstep: ModuleRecord

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output."""
        return run_in_mode(self.halfstep.mode, super().forward, args, kwargs)


class Neutral(nn.Module):
    """Torch's own forward past the function mode: no role covers its function, and torch would ask in Python."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the module's output."""
        forward = super().forward
        if torch.compiler.is_compiling() or type(x) is not Tensor or torch._C._len_torch_function_stack() != 1:
            return forward(x)  # type: ignore[no-any-return]
        if not isinstance(torch._C._get_function_stack_at(0), PolicyMode):  # but somebody else's, who may want it
            return forward(x)  # type: ignore[no-any-return]
        with torch._C.DisableTorchFunction():
            return forward(x)  # type: ignore[no-any-return]


class Root(nn.Module):
    """The model itself: it returns the loss format, but scalars as they are: a narrow loss must not look wide.

    If one of them is its loss, the rest stays in compute until something is computed with it (narrow_logits.py).
    """

    halfstep: ModuleRecord

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output."""
        check_autocast()
        record = self.halfstep
        y, casts = run_in_mode(record.model_mode, super().forward, args, kwargs), record.model_casts
        if casts.loss is torch.float32 and not casts.emulate and _has_loss(y):
            return map_tensors(lambda y: keep_narrow(to_fp32(y)), y)
        return map_tensors(lambda y: island(to_fp32(y), "loss", casts) if y.dim() else y, y)


def _has_loss(y: Any) -> bool:
    tensors = list(tensors_of(y))
    return len(tensors) > 1 and any(not t.dim() and t.is_floating_point() for t in tensors)


def _operands(module: Any) -> tuple[Tensor, Tensor | None]:
    casts, bias = module.casts, module.bias
    weight = to_compute(with_weight_grad_format(module.weight, casts), casts)
    return weight, None if bias is None else to_compute(with_weight_grad_format(bias, casts), casts)
