"""The islands people build with: torch's names and arguments, fp32 inside."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep import torch as halfstep
from halfstep.core.policy import Policy
from halfstep.torch.apply import apply

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
TARGETS = torch.tensor([0, 4, 2])
GAIN, BIAS = torch.linspace(0.5, 1.5, 5), torch.linspace(-1, 1, 5)
NORM = {"normalized_shape": (5,), "weight": GAIN, "eps": 1e-3}
LOSS = {"target": TARGETS, "label_smoothing": 0.1, "ignore_index": 4}
PAIRS = {
    "softmax": (lambda x: halfstep.softmax(x, 0), lambda x: F.softmax(x, 0)),
    "layer_norm": tuple(partial(of.layer_norm, **NORM, bias=BIAS) for of in (halfstep, F)),
    "rms_norm": tuple(partial(of.rms_norm, **NORM) for of in (halfstep, F)),
    "cross_entropy": tuple(partial(of.cross_entropy, **LOSS) for of in (halfstep, F)),
    "Softmax": (halfstep.Softmax(dim=1), nn.Softmax(dim=1)),
    "LayerNorm": (halfstep.LayerNorm(5, eps=1e-3), nn.LayerNorm(5, eps=1e-3)),
    "RMSNorm": (halfstep.RMSNorm(5, eps=1e-3), nn.RMSNorm(5, eps=1e-3)),
    "CrossEntropyLoss": tuple(
        partial(of.CrossEntropyLoss(reduction="sum", weight=GAIN), target=TARGETS) for of in (halfstep, nn)
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_torchs_in_fp32_and_gives_the_inputs_dtype(name):
    ours, theirs = PAIRS[name]
    narrow, wide = X.clone().requires_grad_(), X.float().requires_grad_()
    found, expected = ours(narrow), theirs(wide)
    is_loss = name.lower().startswith("cross")
    assert found.dtype == (torch.float32 if is_loss else torch.bfloat16)
    assert torch.equal(found, expected if is_loss else expected.bfloat16())
    weights = torch.arange(found.numel()).reshape(found.shape).to(found.dtype)
    (found * weights).sum().backward()
    (expected * weights.float()).sum().backward()
    assert torch.equal(narrow.grad, wide.grad.bfloat16())


def test_a_policy_gives_them_their_role_and_casted_linear_is_made_like_torchs():
    model = nn.Sequential(halfstep.LayerNorm(5), halfstep.RMSNorm(5), halfstep.Softmax(-1))
    applied = apply(model, Policy.parse("bf16-mixed"))
    forms = {change.name: change.form for change in applied.changes}
    assert all("is an island: fp32 inside, bf16 out" in forms[name] for name in "012")
    assert model[0](torch.randn(2, 5)).dtype == torch.bfloat16
    layer = halfstep.CastedLinear(in_features=4, out_features=3)
    assert layer.bias is not None
    assert halfstep.CastedLinear(4, 3, bias=False).bias is None
