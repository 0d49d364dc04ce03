"""`nn.MultiheadAttention` of casted matmuls, with fp32 scores and softmax.

torch's own forward may take a fused kernel for inference, in another precision than training, or a softmax in the
dtype of the operands. Here projections are those of `layers.linear`, and there are two paths that give the same
numbers up to rounding: fused, or in steps for `need_weights`.

Shapes: B batch, L queries, S keys, E width, H heads, K features of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.errors import ArgumentError
from halfstep.torch.layers import Matmul, linear
from halfstep.torch.numerics.attention import attention, weighted_attention
from halfstep.torch.numerics.lowering import bypass_mode, round_to_compute, to_compute, with_weight_grad_format


class MultiheadAttention(Matmul):
    """`nn.MultiheadAttention`; its output projection is a Linear of its own."""

    shown = "{p.operand.format} operands{emulated}, {p.softmax} softmax"
    whole_reason = "queries, keys and values are projected by parts of it"  # whose gradients would be bf16

    @bypass_mode
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what attention gathers from the values, and its weights if `need_weights`."""
        batched = query.dim() == 3
        q_BLE, k_BSE, v_BSE = self._project(query, key, value)
        if not batched:
            q_BLE, k_BSE, v_BSE = q_BLE[None], k_BSE[None], v_BSE[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            q_BLE, k_BSE, v_BSE = (t.transpose(0, 1) for t in (q_BLE, k_BSE, v_BSE))
        k_BSE, v_BSE, more = self._extend(k_BSE, v_BSE)
        # `is_causal` repeats what attn_mask says; if there is no other mask, the fused kernel needs none.
        causal = is_causal and not more and key_padding_mask is None and not need_weights
        if is_causal and attn_mask is None:
            size = (q_BLE.shape[1], k_BSE.shape[1] - more)
            attn_mask = torch.ones(size, dtype=torch.bool, device=q_BLE.device).triu(1)
        heads = (self.num_heads, self.head_dim)
        q, k, v = (t.unflatten(-1, heads).transpose(1, 2) for t in (q_BLE, k_BSE, v_BSE))
        mask = None if causal else _may_attend(attn_mask, key_padding_mask, q, k, more)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            y, weights = weighted_attention(q, k, v, self.casts, causal=False, mask=mask, dropout=dropout)
            weights = round_to_compute(weights.mean(dim=1), self.casts) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            y = attention(q, k, v, self.casts, causal=causal, mask=mask, dropout=dropout)
        out = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return out[0], weights
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias, casts = self.in_proj_bias, self.casts
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = linear(query, self.in_proj_weight, bias, casts).chunk(3, dim=-1)
            return q, k, v
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        inputs = zip((query, key, value), matrices, biases, strict=True)
        q, k, v = (linear(x, matrix, b, casts) for x, matrix, b in inputs)
        return q, k, v

    def _extend(self, k_BSE: Tensor, v_BSE: Tensor) -> tuple[Tensor, Tensor, int]:
        more, batch = 0, k_BSE.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            pairs = ((k_BSE, self.bias_k), (v_BSE, self.bias_v))
            k_BSE, v_BSE = (
                torch.cat(
                    [t, to_compute(with_weight_grad_format(b, self.casts), self.casts).expand(batch, -1, -1)],
                    dim=1,
                )
                for t, b in pairs
            )
            more += 1
        if self.add_zero_attn:
            k_BSE, v_BSE = (F.pad(t, (0, 0, 0, 1)) for t in (k_BSE, v_BSE))
            more += 1
        return k_BSE, v_BSE, more


def _may_attend(given: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, more: int) -> Any:
    """Returns both masks as one, of B or 1, H or 1, L or 1, S: True where a query may attend, or numbers to add.

    In torch.nn a boolean means the opposite: True is where a query must not attend.
    """
    masks = []
    if given is not None:
        masks.append(given.view(q.shape[0], -1, *given.shape[-2:]) if given.dim() == 3 else given[None, None])
    if padding is not None:
        masks.append(padding[:, None, None, :])
    if not masks:
        return None
    for mask in masks:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ArgumentError(
                f"an attention mask is {mask.dtype}; it must be boolean, or floating-point numbers to add"
            )
    masks = [F.pad(mask, (0, more)) for mask in masks]
    if all(mask.dtype == torch.bool for mask in masks):
        return ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
    numbers = [
        torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, float("-inf"))
        if mask.dtype == torch.bool
        else mask.float()
        for mask in masks
    ]
    return numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]
