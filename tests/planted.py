"""Hazards to plant in a model of eight layers, one at a time, on every backend; the model without any is silent.

The model is a stack of eight blocks with residuals, `blocks.0` to `blocks.7`. Each has a norm (`norm`, fp32
inside), a matrix up (`up`), a nonlinearity, a matrix down (`down`), and a mixture of two experts (`experts`) by
the logits of a `router` in fp32. Weights are fp32 masters, compute is bf16, the optimizer is AdamW at 1e-3 with
decay 0.1. In the two that are about fp16, compute is fp16 with a dynamic loss scale.
"""

from typing import NamedTuple


class Planted(NamedTuple):
    """What is planted where, and what must be found; other rules may see the same tensors, and no others."""

    what: str
    rule: str
    layer: str
    also: tuple[str, ...] = ()
    compute: str = "bf16"


PLANTED = {
    "overflow": Planted(
        "a bias of blocks.2.up is 1e5: what it returns is beyond fp16",
        "HS409",
        "blocks.2.up",
        ("HS503",),
        compute="fp16",
    ),
    "underflow": Planted(
        "what blocks.3.down returns is multiplied by 1e-9: its gradients are 0 in fp16",
        "HS410",
        "blocks.3.down",
        ("HS410",),
        compute="fp16",
    ),
    "norm": Planted("blocks.1.norm takes its mean square and its root in bf16", "HS401", "blocks.1.norm"),
    "no master": Planted(
        "the matrices of blocks.4 are stored in bf16, in their own group at 1e-5",
        "HS101",
        "blocks.4",
        ("HS104", "HS102"),
    ),
    "adapter": Planted(
        "blocks.5.up has bf16 LoRA matrices at 1e-5 over a frozen base: A stays as it began",
        "HS103",
        "blocks.5.up.lora_A",
        ("HS101", "HS102", "HS104"),
    ),
    "router": Planted("blocks.6.router computes its logits in bf16", "HS403", "blocks.6.router"),
    "decay": Planted(
        "blocks.7.down is stored in bf16, at 1e-3 with decay 0.1: 1e-4 of a weight is below half an ulp",
        "HS102",
        "blocks.7.down",
        ("HS101", "HS104"),
    ),
}
