"""How much arithmetic a token costs in training.

    FLOPs per token = 6 x parameters in matmuls + 12 x layers x attention width x context

A matmul costs 2 FLOPs per parameter and token forward and 4 backward; attention multiplies each query with
`context` keys and as many values, as if it were not causal, so that numbers compare with those of others. The
embedding counts only as the head, tied or not. Softmax, norms, the optimizer and what `recompute_blocks` computes
twice are left out.
"""

import math

from halfstep.config.model import ModelConfig, is_matmul, parameter_shapes


def matmul_parameters(model: ModelConfig) -> int:
    """Counts the parameters that multiply activations, including the head's, tied or not."""
    shapes = {"lm_head.weight": (model.vocabulary, model.width)} | parameter_shapes(model)
    return sum(math.prod(shape) for name, shape in shapes.items() if is_matmul(name))


def flops_per_token(model: ModelConfig) -> int:
    """Returns the floating-point operations of forward and backward per token."""
    attended = model.layers * model.heads * model.size_of_head * model.context
    return 6 * matmul_parameters(model) + 12 * attended
