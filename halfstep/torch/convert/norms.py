"""Norms of `torch.nn` as islands: fp32 inside, backward too, compute out; running statistics are fp32."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from halfstep.torch.layers import Layer, layer_norm, rms_norm
from halfstep.torch.lowering import bypass_mode, island, leave, own
from halfstep.torch.recompute import again


class Normalization(Layer):
    """What norms share."""

    shown = "{p.norm} inside, {p.compute} out"
    whole_reason = "gains and biases are never split"


class LayerNorm(Normalization):
    """`nn.LayerNorm` as an island."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        casts, eps, dims = self.casts, self.eps, len(self.normalized_shape)
        if self.halfstep_recomputed:
            return again(lambda x, g, b: layer_norm(x, g, b, casts, eps, dims=dims), x, self.weight, self.bias)
        return layer_norm(x, self.weight, self.bias, casts, eps, dims=dims)


class RMSNorm(Normalization):
    """`nn.RMSNorm` as an island."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        casts, eps, dims = self.casts, self.eps, len(self.normalized_shape)
        if self.halfstep_recomputed:
            return again(lambda x, g: rms_norm(x, g, casts, eps, dims=dims), x, self.weight)
        return rms_norm(x, self.weight, casts, eps, dims=dims)


class GroupNorm(Normalization):
    """`nn.GroupNorm` as an island."""

    @bypass_mode
    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        y = F.group_norm(island(x, "norm", self.casts), self.num_groups, *_gains(self), self.eps)
        return leave(y, "norm", self.casts)


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
        x, (gain, bias) = island(x, "norm", self.casts), _wide_gains(self)
        return leave(F.batch_norm(x, mean, variance, gain, bias, of_batch, factor, self.eps), "norm", self.casts)


class InstanceNorm(Normalization):
    """`nn.InstanceNorm1d`, `2d`, `3d` as an island; running statistics are fp32."""

    @bypass_mode
    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input."""
        return leave(super().forward(island(x, "norm", self.casts)), "norm", self.casts)

    def _apply_instance_norm(self, x: Tensor) -> Tensor:
        of_instance = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        gain, bias = _wide_gains(self)
        return F.instance_norm(x, self.running_mean, self.running_var, gain, bias, of_instance, momentum, self.eps)


def _gains(module: Any) -> tuple[Any, Any]:
    return own(module.weight, "norm", module.casts), own(module.bias, "norm", module.casts)


def _wide_gains(module: Any) -> tuple[Any, Any]:
    """Returns them in fp32: torch wants the dtype of the running statistics."""
    gain, bias = _gains(module)
    return None if gain is None else gain.float(), None if bias is None else bias.float()
