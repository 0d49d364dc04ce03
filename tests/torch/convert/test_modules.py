"""Modules of torch.nn under a policy: formats in and out, forward and backward, against torch's own modules.

Inputs, weights and incoming gradients are numbers of the compute format, so that casting them changes nothing and
only the module rounds. Where torch's own module in that dtype, or in fp32, rounds likewise, the bits must agree.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from halfstep.core.errors import PolicyError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.torch.convert import plan
from halfstep.torch.convert.apply import apply
from halfstep.torch.layers import casts_for
from halfstep.torch.layers import linear as casted_linear
from halfstep.torch.numerics.cast import carried
from tests.refusals import refuses
from tests.torch.nets import Net, draw, exact, mixed, native, same, within


def run(module, x, g, **kwargs):
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x, **kwargs)
    y.backward(carried(g, BF16).to(y.dtype).expand_as(y) if g.dim() == 0 else g.to(y.dtype))
    return y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


@mixed
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_is_the_casted_one(policy, fmt, dtype, bias):
    linear = nn.Linear(16, 8, bias)
    x, g = draw(5, 16).to(dtype), carried(draw(5, 8, seed=1), fmt)
    y, x_grad, grads = run(within(linear, policy), x, g)
    casts = casts_for(policy)
    theirs = run(Called(linear, lambda m, x: casted_linear(x, m.weight, m.bias, casts)), x, g)
    assert y.dtype == x_grad.dtype == dtype
    assert same((y, x_grad, *grads.values()), (*theirs[:2], *theirs[2].values()))
    assert not torch.equal(grads["weight"], carried(grads["weight"], fmt))


class Called(nn.Module):
    def __init__(self, module, fn):
        super().__init__()
        self.module, self.fn = module, fn

    def forward(self, x):
        return self.fn(self.module, x)


@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 3, 16), (2, 0, 3, 16)])
def test_a_linear_takes_every_shape(shape):
    layer = within(nn.Linear(16, 4), "bf16-mixed")
    x = draw(*shape).requires_grad_()
    y = layer(x)
    assert y.shape == (*shape[:-1], 4)
    y.float().sum().backward()
    assert (x.grad.shape, layer.weight.grad.shape) == (x.shape, (4, 16))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "fp32"])
def test_the_format_is_never_derived_from_an_operand(policy, given):
    """Hazard: a layer that casts its weight to its input's dtype runs fp32 silently."""
    dtypes = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "fp32": torch.float32}
    layers = {nn.Linear(4, 4): draw(2, 4), nn.Conv1d(4, 4, 1): draw(2, 4, 4), nn.GRU(4, 4): draw(2, 1, 4)}
    for layer, x in layers.items():
        y = within(layer, policy)(x.to(given))
        assert (y[0] if isinstance(y, tuple) else y).dtype == dtypes[policy]


@pytest.mark.parametrize("held", ["", ",param=fp32:split"])
def test_a_linear_of_hugging_face_holds_its_matrix_the_other_way(held):
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(draw(8, 3)), nn.Parameter(draw(3))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight)

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    linear = nn.Linear(8, 3)
    linear.weight.data, linear.bias.data = draw(8, 3).t().contiguous(), draw(3)
    x, g = draw(5, 8, seed=1), draw(5, 3, seed=2)
    magnitude = 8 * float(x.abs().max() * g.abs().max() * linear.weight.detach().abs().max().clamp(min=1))
    for policy in (f"bf16-mixed{held}", f"fp32{held}"):
        layer = within(Conv1D(), policy)
        ours, theirs = run(layer, x, g), run(within(linear, policy), x, g)
        # The order of sums is open: at most 8 terms in fp32, and where it tips a rounding to bf16, one ulp.
        ulp = BF16.epsilon if policy.startswith("bf16") else 0.0
        for mine, other in zip(ours[:2], theirs[:2], strict=True):
            assert ((mine - other).abs() <= ulp * other.abs() + 8 * 2.0**-23 * magnitude).all()
        assert ((ours[2]["weight"] - theirs[2]["weight"].t()).abs() <= 8 * 2.0**-23 * magnitude).all()
        assert torch.equal(ours[2]["bias"], theirs[2]["bias"])
    assert layer.weight.dtype == (torch.bfloat16 if held else torch.float32)
    assert "fp32 operands" in repr(layer)


SIZE = {"output_size": [10, 10]}
CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9), {}),
    "1d same": (lambda: nn.Conv1d(4, 4, 3, padding="same", padding_mode="circular"), (2, 4, 9), {}),
    "2d grouped, reflected": (
        lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2, padding_mode="reflect"),
        (2, 4, 6, 6),
        {},
    ),
    "2d dilated, no bias": (lambda: nn.Conv2d(4, 6, 3, dilation=2, bias=False), (4, 7, 7), {}),
    "3d replicated": (lambda: nn.Conv3d(2, 2, 2, padding=1, padding_mode="replicate"), (1, 2, 3, 3, 3), {}),
    "1d transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5), {}),
    "2d transposed, to a size": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (2, 4, 5, 5), SIZE),
    "3d transposed": (lambda: nn.ConvTranspose3d(2, 2, 2, dilation=2, bias=False), (1, 2, 3, 3, 3), {}),
}
convolutions = pytest.mark.parametrize(("make", "shape", "kwargs"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)


@native
@convolutions
def test_a_convolution_is_torchs_in_the_compute_dtype(make, shape, kwargs, policy, fmt, dtype):
    conv = exact(make(), fmt)
    x = carried(draw(*shape), fmt)
    g = carried(draw(*conv(x, **kwargs).shape, seed=1), fmt)
    y, x_grad, grads = run(within(conv, policy), x, g, **kwargs)
    theirs = run(copy.deepcopy(conv).to(dtype), x.to(dtype), g, **kwargs)
    assert y.dtype == dtype
    assert same((y, x_grad), (theirs[0], theirs[1].float()))
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, theirs[2][name].float()), name


@convolutions
def test_an_emulated_convolution_rounds_what_hardware_would(make, shape, kwargs):
    conv, x = make(), draw(*shape)
    g = draw(*conv(x, **kwargs).shape, seed=1)
    y, x_grad, grads = run(within(conv, "bf16-mixed,emulate=true"), x, g, **kwargs)
    for p in conv.parameters():
        p.data = carried(p.data, BF16)
    theirs = run(conv, carried(x, BF16), carried(g, BF16), **kwargs)
    assert same((y, x_grad), (carried(t, BF16) for t in theirs[:2]))
    assert all(torch.equal(grads[name], carried(grad, BF16)) for name, grad in theirs[2].items())


@mixed
@pytest.mark.parametrize("options", [{}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"sparse": True}])
@pytest.mark.parametrize("held", ["", ",param=fp32:split"])
def test_an_embedding_casts_rows_and_sums_their_gradients_in_fp32(policy, fmt, dtype, options, held):
    table = nn.Embedding(6, 4, **options)
    index = torch.tensor([[0, 3, 3], [3, 5, 5]])
    g = carried(draw(2, 3, 4, seed=1), fmt)
    layer = within(table, policy + held)
    y = layer(index)
    y.backward(g.to(y.dtype))
    theirs = table(index)
    theirs.backward(g)
    assert y.dtype == dtype
    assert torch.equal(y.float(), carried(theirs.detach(), fmt))
    grad = layer.weight.grad
    assert grad.dtype == torch.float32
    assert grad.is_sparse == table.sparse
    assert torch.equal(grad.to_dense(), table.weight.grad.to_dense())


def test_renormalized_rows_are_those_of_the_master_and_narrow_operands_do_not_reach_a_convolution():
    table, index = nn.Embedding(4, 8, max_norm=1.0), torch.tensor([1, 1, 2])
    layer = within(table, "bf16-mixed,param=fp32:split")
    assert torch.equal(layer(index), table(index).bfloat16())
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, table.weight)
    with pytest.raises(PolicyError, match="max_norm"):
        within(table, "bf16-true")
    net = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(16, 4))
    applied = apply(net, Policy.parse("fp8-mixed,emulate=true"))
    assert (str(net[0].precision.compute), str(net[2].precision.operand.format)) == ("bf16", "e4m3")
    assert "e4m3 is for matmuls" in applied.changes[0].form


@mixed
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_is_summed_in_fp32(policy, fmt, dtype, mode):
    bag = nn.EmbeddingBag(6, 4, mode=mode)
    index, weights = torch.tensor([[0, 3], [3, 5]]), carried(draw(2, 2), fmt) if mode == "sum" else None
    layer, g = within(bag, policy), carried(draw(2, 4, seed=1), fmt)
    y = layer(index, per_sample_weights=None if weights is None else weights.to(dtype))
    y.backward(g.to(y.dtype))
    theirs = bag(index, per_sample_weights=weights)
    theirs.backward(g)
    assert y.dtype == dtype
    assert same((y.float(), layer.weight.grad), (carried(theirs.detach(), fmt), bag.weight.grad))


def untracked(norm):
    norm.track_running_stats = False
    return norm


NORMS = {
    "layer": (lambda: nn.LayerNorm(8), (3, 8)),
    "layer, two dims, no bias": (lambda: nn.LayerNorm((2, 8), bias=False, eps=1e-3), (3, 2, 8)),
    "layer, plain": (lambda: nn.LayerNorm(8, elementwise_affine=False), (3, 8)),
    "rms": (lambda: nn.RMSNorm(8), (3, 8)),
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "group, plain": (lambda: nn.GroupNorm(2, 4, affine=False), (3, 4, 5)),
    "batch 1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "batch 2d, cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (6, 4, 2, 2)),
    "batch 3d, untracked": (lambda: nn.BatchNorm3d(4, track_running_stats=False), (3, 4, 2, 2, 2)),
    "batch 1d, no longer tracked": (
        lambda: (norm := nn.BatchNorm1d(4), setattr(norm, "track_running_stats", False))[0],
        (6, 4),
    ),
    "instance 1d": (lambda: nn.InstanceNorm1d(4), (6, 4, 3)),
    "instance 2d, tracked": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (6, 4, 2, 2)),
    "instance 2d, unbatched": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "instance 3d": (lambda: nn.InstanceNorm3d(4, affine=True), (1, 4, 2, 2, 2)),
    "local response": (lambda: nn.LocalResponseNorm(2), (2, 4, 3)),
    "synchronized": (lambda: nn.SyncBatchNorm(4), (6, 4, 2)),
}
SOFTMAX = {kind.__name__: (partial(kind, dim=0), (5, 4)) for kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin)}
ISLANDS = {**NORMS, **SOFTMAX}


@mixed
@pytest.mark.parametrize(("make", "shape"), ISLANDS.values(), ids=ISLANDS)
def test_a_norm_or_a_softmax_is_fp32_inside_and_compute_out(make, shape, policy, fmt, dtype):
    norm = make()
    with torch.no_grad():
        for index, p in enumerate(norm.parameters()):
            p.copy_(draw(*p.shape, seed=index + 3))
    layer, wide = within(norm, policy), copy.deepcopy(norm)
    x, g = carried(draw(*shape) * 30 + 7, fmt), carried(draw(*shape, seed=1), fmt)
    for _ in range(2):
        y, x_grad, grads = run(layer, x.to(dtype), g)
        theirs = run(wide, x, g)
        assert y.dtype == x_grad.dtype == dtype
        assert torch.equal(y.float(), carried(theirs[0], fmt))  # one rounding, at the end
        if dtype != torch.float32:
            assert torch.equal(x_grad, theirs[1].to(dtype))
        for name, grad in theirs[2].items():
            assert torch.equal(grads[name], grad), name
    assert_same_buffers(layer, wide)
    layer.eval(), wide.eval()
    assert torch.equal(layer(x.to(dtype)).float(), carried(wide(x).detach(), fmt))
    assert_same_buffers(layer, wide)


def assert_same_buffers(layer, wide):
    buffers = dict(layer.named_buffers())
    assert buffers.keys() == dict(wide.named_buffers()).keys()
    for name, buffer in wide.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer), name


def test_statistics_are_widened_and_islands_asked_for_in_bf16_are_another_number():
    net = Net(nn.BatchNorm1d(4).bfloat16())
    applied = apply(net, Policy.parse("bf16-mixed"))
    assert {b.dtype for b in net.buffers()} == {torch.float32, torch.int64}
    assert {"layer.weight", "layer.running_mean", "layer.running_var"} <= set(applied.widened)
    x = draw(4, 4, 6) * 100
    kinds = (nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4), nn.LocalResponseNorm(2))
    for norm in kinds:
        wide, narrow = within(norm, "fp32"), within(norm, "fp32,norm=bf16")
        assert narrow(x).dtype == torch.float32
        assert not torch.equal(narrow(x), wide(x)), norm
    x, wide = draw(3, 4), nn.CrossEntropyLoss(weight=torch.ones(4))
    for extra in ("", ",emulate=true"):
        loss = within(wide, f"bf16-mixed,loss=bf16{extra}")(x, CLASSES)
        assert torch.equal(loss.float(), carried(wide(carried(x, BF16), CLASSES), BF16))


@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS)
def test_a_norm_of_bf16_parameters_still_computes_in_fp32(make, shape):
    norm = exact(make(), BF16)
    if isinstance(norm, nn.SyncBatchNorm):
        with pytest.raises(PolicyError, match=r"SyncBatchNorm.*param=bf16"):
            within(norm, "bf16-true")
        return
    layer, x = within(norm, "bf16-true"), carried(draw(*shape), BF16)
    assert torch.equal(layer(x.bfloat16()), norm(x).detach().bfloat16())


CLASSES = torch.tensor([1, 0, 3])
LOSSES = {
    "cross entropy": (lambda: nn.CrossEntropyLoss(weight=draw(4).abs(), label_smoothing=0.1), CLASSES),
    "nll": (lambda: nn.NLLLoss(ignore_index=0), CLASSES),
    "mse": (lambda: nn.MSELoss(), draw(3, 4, seed=9)),
    "mse, each": (lambda: nn.MSELoss(reduction="none"), draw(3, 4, seed=9)),
    "bce": (lambda: nn.BCEWithLogitsLoss(pos_weight=draw(4).abs()), draw(3, 4, seed=9).sigmoid()),
    "kl": (lambda: nn.KLDivLoss(reduction="batchmean"), draw(3, 4, seed=9).softmax(-1)),
    "huber": (lambda: nn.HuberLoss(), draw(3, 4, seed=9)),
}


@mixed
@pytest.mark.parametrize(("make", "target"), LOSSES.values(), ids=LOSSES)
def test_a_loss_is_fp32_inside_and_out(make, target, policy, fmt, dtype):
    x, numbers = carried(draw(3, 4), fmt), target.is_floating_point()
    target = carried(target, fmt) if numbers else target
    ours, theirs = x.to(dtype).requires_grad_(), x.clone().requires_grad_()
    loss = within(make(), policy)(ours, target.to(dtype) if numbers else target)
    wide = make()(theirs, target)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, wide)
    loss.sum().backward(), wide.sum().backward()
    if dtype != torch.float32:
        assert torch.equal(ours.grad, theirs.grad.to(dtype))


@native
@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}]
)
def test_a_recurrent_kernel_is_torchs_in_the_compute_dtype(make, options, policy, fmt, dtype):
    torch.manual_seed(0)
    cell, x = make(3, 4, **options), draw(5, 2, 3)
    layer, theirs = within(cell, policy), copy.deepcopy(cell).to(dtype)
    ours, hidden = layer(x)
    wide, their_hidden = theirs(x.to(dtype))
    assert torch.equal(ours, wide)
    assert same(*((hidden, their_hidden) if make is nn.LSTM else ((hidden,), (their_hidden,))))
    g = draw(*ours.shape, seed=1).to(dtype)
    ours.backward(g), wide.backward(g)
    for (name, p), q in zip(layer.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, q.grad.float()), name
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))


def test_a_recurrent_layer_takes_packed_sequences_and_is_refused_where_its_kernel_lacks_the_format(monkeypatch):
    torch.manual_seed(0)
    cell, x = nn.LSTM(3, 4), draw(5, 2, 3)
    layer, theirs = within(cell, "bf16-mixed"), copy.deepcopy(cell).bfloat16()
    state = (draw(1, 2, 4), draw(1, 2, 4, seed=1))
    packed = pack_padded_sequence(x, torch.tensor([5, 3]))
    ours, _ = layer(packed, state)
    wide, _ = theirs(packed.to(torch.bfloat16), tuple(s.bfloat16() for s in state))
    assert torch.equal(ours.data, wide.data)
    emulated = within(cell, "bf16-mixed,emulate=true")(x, state)[0]
    assert torch.equal(emulated, carried(emulated, BF16))
    with pytest.raises(RuntimeError):
        layer(draw(5, 2, 7))
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))

    def lacking(kind, dtype, device):
        return "" if dtype == torch.float32 else "not implemented for 'Half'"

    monkeypatch.setattr(plan, "_try_recurrent", lacking)
    with refuses(PolicyError, r"`layer`: torch has no GRU in fp16 on cpu", "layer: compute=fp32"):
        within(nn.GRU(3, 4), "fp16-mixed")
    within(nn.GRU(3, 4), "fp16-mixed; layer: compute=fp32")


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,emulate=true", "fp8-mixed,emulate=true"])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_an_activation_may_write_over_the_output_of_a_layer(policy, shape):
    x, results, module = draw(*shape), [], nn.Linear(8, 5, bias=policy == "bf16-mixed")
    for inplace in (False, True):
        layer = within(module, policy)
        y = nn.functional.relu(layer(x), inplace=inplace)
        y.float().square().sum().backward()
        results.append((y.detach(), layer.weight.grad))
    for plain, written in zip(*results, strict=True):
        assert torch.equal(plain, written)
