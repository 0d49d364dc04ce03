"""The islands people build with: torch's names and arguments, fp32 inside."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep import torch as halfstep
from halfstep.core.formats import E4M3
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply
from halfstep.torch.numerics.dtypes import supported

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


def test_a_subclass_with_a_forward_of_its_own_keeps_it():
    class Doubled(halfstep.LayerNorm):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(5, 5), Doubled(5))
    apply(model, Policy.parse("bf16-mixed"))
    assert torch.equal(model[1](X), (2 * F.layer_norm(X.float(), (5,))).bfloat16())


class LossOfHead(nn.Module):
    """A norm, and the loss of a head: of the layer and its logits, of the layer at once, or of its parameters."""

    def __init__(self, form):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.form, self.norm, self.head = form, nn.LayerNorm(16), nn.Linear(16, 48)
        with torch.no_grad():
            self.head.weight.normal_(std=0.5, generator=generator)

    def forward(self, x, target):
        x = self.norm(x)
        if self.form == "in steps":
            return F.cross_entropy(self.head(x), target)
        if self.form == "layer":
            return halfstep.linear_cross_entropy(x, self.head, target)
        with torch.device("cpu") if self.form == "weight, device" else nullcontext():  # another function mode
            return halfstep.linear_cross_entropy(x, self.head.weight, target, self.head.bias)


def loss_and_gradient(form, policy):
    torch.manual_seed(0)
    model, x, target = LossOfHead(form), torch.randn(32, 16), torch.arange(32)
    run = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    loss = model(x, target)
    run.backward(loss)
    return run, loss.detach(), model.head.weight.grad


NARROW_HEAD = pytest.param(
    "bf16-mixed; head: compute=e4m3,grad=e5m2",
    marks=pytest.mark.skipif(not supported(E4M3, "cpu"), reason=supported(E4M3, "cpu").reason),
)


@pytest.mark.parametrize(
    "policy",
    ["fp32", "bf16-mixed", "fp16-mixed", "bf16-mixed,emulate=true", "bf16-mixed,loss=bf16",
     "bf16-mixed; head: compute=fp32", "fp8-mixed,emulate=true", NARROW_HEAD],
)  # fmt: skip
def test_a_linear_layer_with_its_loss_has_the_precision_of_the_layer(policy):
    """To a few fp32 roundings of the sum, and to one unit of the gradient of logits: half of it in each way.

    It is rounded before it is divided by the number of rows in one, and after in the other.
    """
    _, expected, right = loss_and_gradient("in steps", policy)
    _, loss, grad = loss_and_gradient("layer", policy)
    assert (loss - expected).abs() <= 4 * 2.0**-24 * expected
    unit = 2.0**-2 if "e4m3" in policy or "fp8" in policy else 2.0**-8
    assert (grad - right).norm() <= unit * right.norm()


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,emulate=true", "bf16-mixed,loss=bf16"])
@pytest.mark.parametrize("form", ["weight", "weight, device"])
def test_of_a_weight_it_has_the_compute_format_of_the_policy_and_is_listed(form, policy):
    _, expected, _ = loss_and_gradient("in steps", policy)
    run, loss, _ = loss_and_gradient(form, policy)
    assert (loss - expected).abs() <= 4 * 2.0**-24 * expected
    listed = run.coverage(lambda x: run.model(x, torch.arange(32)), torch.randn(32, 16))
    assert "linear_cross_entropy" in str(listed)
