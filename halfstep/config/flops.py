"""How much arithmetic a token costs in training, by the model's shape alone.

    FLOPs a token = 6 x parameters in matmuls + 12 x layers x attention width x context

A matmul costs 2 FLOPs a parameter and token forward and 4 backward; attention multiplies each query with
`context` keys and as many values, 4 FLOPs a feature forward and 8 backward. The embedding is looked up and
counts only as the head, tied or not. Softmax, norms and the optimizer are left out, as is what
`recompute_blocks` computes twice: these are the model's FLOPs, of which a faster program needs no fewer.

Attention is counted over the whole context, as if it were not causal. That is the custom, so that numbers compare
with those of others; a kernel that leaves out what the mask hides does about half of it.
"""

import math

from halfstep.config.model import ModelConfig, is_matmul, parameter_shapes


def matmul_parameters(model: ModelConfig) -> int:
    """Numbers that multiply activations, those of the head among them, tied or not."""
    shapes = {"lm_head.weight": (model.vocabulary, model.width)} | parameter_shapes(model)
    return sum(math.prod(shape) for name, shape in shapes.items() if is_matmul(name))


def flops_per_token(model: ModelConfig) -> int:
    """Floating-point operations of forward and backward, a token."""
    attended = model.layers * model.heads * model.size_of_head * model.context
    return 6 * matmul_parameters(model) + 12 * attended
