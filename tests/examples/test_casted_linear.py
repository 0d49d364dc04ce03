"""examples/casted_linear.py learns with bf16 activations and fp32 weights, and without autocast or a policy."""

import runpy
from pathlib import Path

import torch

from halfstep.torch import CastedLinear

EXAMPLE = Path(__file__).parents[2] / "examples" / "casted_linear.py"


def test_casted_layers_multiply_in_bf16_and_learn_in_fp32():
    example = runpy.run_path(str(EXAMPLE))
    model, outputs, gradients = example["build"](), set(), {}
    casted = {name: m for name, m in model.named_modules() if isinstance(m, CastedLinear)}
    for name, layer in casted.items():
        layer.register_forward_hook(lambda _, args, y: outputs.add((args[0].dtype, y.dtype)))
        layer.weight.register_hook(lambda g, name=name: gradients.update({name: g.clone()}))
    losses = example["train"](model, 12, micro_batches=1)
    assert losses[-1] < losses[0] - 0.3
    assert outputs == {(torch.bfloat16, torch.bfloat16)}
    assert {layer.weight.dtype for layer in casted.values()} == {torch.float32}
    # fp32 from the sum on, not rounded to bf16 and widened
    assert len(gradients) == 9
    assert all((g != g.bfloat16().float()).any() for g in gradients.values())
