"""Losses inside models of transformers, where a compiler would hide them from the function mode.

`nn.CrossEntropyLoss()` that is built inside a forward is a function for dynamo: it puts `F.cross_entropy` straight
into its graph, past every mode, and the loss of bf16 logits is bf16. A subclass is traced like any other code. So
the modules of transformers get one, which is the same loss, under the name by which their code knows it.

A model whose name does not say what its loss is (`GPT2LMHeadModel`) has the one for causal language models, and a
warning of it, through which no compiler can go. `default_loss` is that loss.
"""

import sys
from typing import Any

from torch import nn

_NAME = "CrossEntropyLoss"


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's, whose `F.cross_entropy` a function mode sees in compiled code too."""


def reach_losses(model: nn.Module) -> None:
    """Gives the modules of transformers that a model's classes are from a loss that dynamo traces, once."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    for name in names:
        module = sys.modules.get(name)
        if name.startswith("transformers.") and getattr(module, _NAME, None) is nn.CrossEntropyLoss:
            setattr(module, _NAME, CrossEntropyLoss)


def default_loss(module: nn.Module) -> Any:
    """Returns what transformers takes if it does not know the loss of one of its models; None if it does."""
    losses = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
    asks = isinstance(getattr(type(module), "loss_function", None), property) and hasattr(module, "loss_type")
    if not asks or hasattr(module, "_loss_function") or module.loss_type in losses:
        return None
    return losses.get("ForCausalLM")
