"""The functions that a model's own code calls: reached by the policy, or run unchanged with the reason.

Operands are numbers of the compute format, so that casting them changes nothing and most results are equal bit for
bit. If the order of a sum is open, the bound is that of fp32 sums.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpt2 import GPT2
from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply, set_precision
from halfstep.torch.convert.functions import entry as entries
from halfstep.torch.convert.functions import mode
from halfstep.torch.convert.functions import table as functions
from halfstep.torch.layers import CastedLinear, casts_for, softmax
from halfstep.torch.numerics.cast import carried
from halfstep.torch.run import prepare
from tests.refusals import refuses
from tests.torch.nets import U32, Net, draw, mixed, same


class Free(nn.Module):
    def __init__(self, fn, part=None):
        super().__init__()
        self.fn = fn
        self.part = nn.Linear(8, 8) if part is None else part

    def forward(self, *args, **kwargs):
        return self.fn(self, *args, **kwargs)


def within(fn, policy, part=None):
    net = Net(Free(fn, part))
    net.applied = apply(net, Policy.parse(policy))
    return net.layer


def both(fn, x, policy, dtype, g=None):
    """Value and gradient of a function of one tensor, under the policy and in fp32."""
    results = []
    for run, given in ((within(lambda m, x: fn(x), policy), x.to(dtype)), (fn, x)):
        given = given.clone().requires_grad_()
        y = run(given)
        y.backward((draw(*y.shape, seed=9) if g is None else g).to(y.dtype))
        results.append((y.detach(), given.grad))
    return results


SOFTMAX = {
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1),
}
NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, (8,), torch.full((8,), 1.5), torch.ones(8)),
    "torch.layer_norm": lambda x: torch.layer_norm(x, (8,), torch.full((8,), 1.5)),
    "rms_norm": lambda x: F.rms_norm(x, (8,), torch.full((8,), 1.5)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "normalize": lambda x: F.normalize(x, dim=-1),
}


@mixed
@pytest.mark.parametrize("fn", {**SOFTMAX, **NORMS}.values(), ids={**SOFTMAX, **NORMS})
def test_a_function_that_is_an_island_is_fp32_inside_and_compute_out(fn, policy, fmt, dtype):
    x = carried(draw(4, 8) * 10, fmt)
    g = carried(fn(draw(4, 8, seed=9)), fmt)
    (y, x_grad), (theirs, their_grad) = both(fn, x, policy, dtype, g)
    assert y.dtype == x_grad.dtype == dtype
    assert torch.equal(y.float(), carried(theirs, fmt))  # one rounding, at the end
    assert torch.equal(x_grad.float(), carried(their_grad, fmt))


LOSSES = {
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3, 7])),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones(4, 8)),
    "kl_div": lambda x: F.kl_div(x, torch.full((4, 8), 0.125), reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 8)),
    "a module that is made on the spot": lambda x: nn.CrossEntropyLoss()(x, torch.tensor([1, 0, 3, 7])),
}


@mixed
@pytest.mark.parametrize("fn", LOSSES.values(), ids=LOSSES)
def test_a_function_that_is_a_loss_is_fp32_inside_and_out(fn, policy, fmt, dtype):
    x = carried(draw(4, 8), fmt)
    (y, x_grad), (theirs, their_grad) = both(fn, x, policy, dtype, torch.ones(()))
    assert y.dtype == torch.float32
    assert torch.equal(y, theirs)
    if dtype != torch.float32:
        assert torch.equal(x_grad, their_grad.to(dtype))


def test_an_island_returns_fp32_where_it_gets_it_or_is_asked_and_computes_as_asked():
    code = within(lambda m, x: (F.softmax(x.float(), -1), F.softmax(x, -1, dtype=torch.float32)), "bf16-mixed")
    x = draw(4, 8).bfloat16()
    for y in code(x):
        assert y.dtype == torch.float32
        assert torch.equal(y, F.softmax(x.float(), -1))
    x = draw(4, 8) * 10
    for policy in ("fp32,softmax=bf16", "fp32,softmax=bf16,emulate=true"):
        y = within(lambda m, x: F.softmax(x, -1), policy)(x)
        assert y.dtype == torch.float32
        assert not torch.equal(y, F.softmax(x, -1))
        assert torch.equal(y, carried(y, BF16))
    y = within(lambda m, x: F.layer_norm(x, (8,)), "fp32,norm=bf16")(x)
    assert not torch.equal(y, F.layer_norm(x, (8,)))


@mixed
def test_attention_has_its_operands_in_compute_whatever_they_come_in(policy, fmt, dtype):
    q, k, v = (carried(draw(2, 2, 5, 4, seed=s), fmt) for s in range(3))
    code = within(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), policy)
    y = code(q, k.to(dtype), v.to(dtype))
    assert y.dtype == dtype
    theirs = F.scaled_dot_product_attention(*(t.to(dtype) for t in (q, k, v)), is_causal=True)
    assert torch.equal(y, theirs if dtype != torch.float32 else carried(theirs, fmt))


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_a_mask_of_the_smallest_fp32_number_stays_finite(policy):
    """Hazard: -3.4e38 is -inf in bf16 and fp16, and a row that is masked whole becomes NaN."""
    mask = torch.zeros(1, 1, 3, 3)
    mask[..., 0, :] = torch.finfo(torch.float32).min
    code = within(lambda m, q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), policy)
    y = code(draw(1, 1, 3, 4), mask)
    assert torch.isfinite(y).all()
    assert y[..., 0, :].abs().max() > 0.1  # a row of -inf would be zeros, or NaN: the kernel's choice


def test_a_softmax_that_is_asked_for_in_bf16_reaches_attention():
    q = draw(2, 3, 4, seed=3)
    wide = F.scaled_dot_product_attention(q, q, q, scale=0.25)
    for x in (q, q.unsqueeze(1)):
        y = within(lambda m, q: F.scaled_dot_product_attention(q, q, q, scale=0.25), "fp32,softmax=bf16")(x)
        y = y.reshape(wide.shape)
        assert not torch.equal(y, wide)
        # probabilities up to 1 that are off by u, and their sum of three
        assert ((y - wide).abs() <= 8 * BF16.epsilon * q.abs().max()).all()
    with pytest.raises(PolicyError, match="does not reach attention of 5 dimensions"):
        within(lambda m, q: F.scaled_dot_product_attention(q, q, q), "fp32,softmax=bf16")(q[None, None])


# how a model writes x W^T with a parameter of (8, 6), x of (3, 5, 8) or (5, 8)
PRODUCTS = {
    "F.linear": lambda x, w: F.linear(x, w.t()),
    "matmul": lambda x, w: torch.matmul(x, w),
    "@": lambda x, w: x @ w,
    "the other way": lambda x, w: (w.t() @ x.mT).mT,
    "einsum": lambda x, w: torch.einsum("btd,de->bte", x, w),
    "einsum, weight first": lambda x, w: torch.einsum("de,btd->bte", w, x),
    "einsum, implicit": lambda x, w: torch.einsum("dz,btd", w, x),
    "mm": lambda x, w: torch.mm(x.flatten(0, 1), w).unflatten(0, x.shape[:2]),
    "addmm": lambda x, w: torch.addmm(torch.zeros(6), x.flatten(0, 1), w).unflatten(0, x.shape[:2]),
    "bmm": lambda x, w: torch.bmm(x, w.expand(3, 8, 6)),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(3, 5, 6), x, w.expand(3, 8, 6), beta=0),
    "mv": lambda x, w: torch.stack([torch.mv(x.flatten(0, 1), w[:, i]) for i in range(6)], -1).view(3, 5, 6),
    "mapped to the dtype of the weight": lambda x, w: x.to(w.dtype) @ w,
}


@mixed
@pytest.mark.parametrize("fn", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_with_a_parameter_is_in_compute_with_an_fp32_weight_gradient(fn, policy, fmt, dtype):
    x, g = carried(draw(3, 5, 8), fmt), carried(draw(3, 5, 6, seed=1), fmt)
    w = carried(draw(8, 6, seed=2), fmt)
    part = nn.Linear(8, 6)
    part.weight.data = w.clone()
    code = within(lambda m, x: fn(x, m.part.weight), policy, part)
    given = x.clone().to(dtype).requires_grad_()
    y = code(given)
    assert y.dtype == dtype
    y.backward(g.to(dtype))
    wide = [t.double().requires_grad_() for t in (x, w)]
    exact = wide[0] @ wide[1]
    exact.backward(g.double())
    size = x.abs().double() @ w.abs().double()
    assert ((y.double() - exact).abs() <= fmt.epsilon / 2 * exact.abs() + 16 * U32 * size).all()
    grad = code.part.weight.grad
    assert grad.dtype == torch.float32
    magnitude = x.abs().double().flatten(0, 1).t() @ g.abs().double().flatten(0, 1)
    assert ((grad.double() - wide[1].grad).abs() <= 16 * U32 * magnitude).all()  # not rounded to the format
    assert not torch.equal(grad, carried(grad, fmt))
    backed = g.abs().double() @ w.abs().double().t()
    assert ((given.grad.double() - wide[0].grad).abs() <= 2 * fmt.epsilon * backed).all()


# how a model looks at a parameter of (8, 8) that may be split, x of (3, 5, 8)
VIEWS = {
    **{name: lambda x, w, fn=fn: fn(x, w.t()[:, :6]) for name, fn in [*PRODUCTS.items()][:6]},
    "T": lambda x, w: x @ w.T,
    "rows": lambda x, w: F.linear(x, w[:3]),
    "columns": lambda x, w: x @ w.mT[:, 1:],
    "float": lambda x, w: x @ w.float().t(),
}


@pytest.mark.parametrize(("policy", "narrow"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
@pytest.mark.parametrize("fn", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_split_master_is_a_view_of_the_whole(fn, policy, narrow):
    results = []
    for masters in (",param=fp32:split", ""):
        part = nn.Linear(8, 8)
        part.weight.data = draw(8, 8)
        y = within(lambda m, x: fn(x, m.part.weight), policy + masters, part)(draw(3, 5, 8, seed=1).to(narrow))
        y.backward(draw(*y.shape, seed=2).to(y.dtype))
        results.append((y, part.weight.grad))
        assert part.weight.dtype == (torch.bfloat16 if masters else torch.float32)
        assert part.weight.grad.dtype == torch.float32
    assert same(*results)
    assert not torch.equal(results[0][1], carried(results[0][1], BF16))


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-mixed"])
def test_code_that_casts_to_the_dtype_of_a_split_parameter_keeps_its_input(policy):
    """T5 casts to `self.wo.weight.dtype`, which is bf16 where masters are split, whatever compute is."""
    code = within(lambda m, x: x.to(m.part.weight.dtype), f"{policy},param=fp32:split")
    x = draw(4, 8).to(code.part.casts.compute)
    assert code.part.weight.dtype == torch.bfloat16
    assert torch.equal(code(x), x)


def test_products_of_mixed_dtypes_are_in_compute_and_those_of_fp32_activations_or_parameters_are_not():
    code = within(lambda m, a, b: (a @ b, torch.einsum("ij,jk->ik", a, b), torch.tensordot(a, b, 1)), "bf16-mixed")
    a, b = draw(4, 8), draw(8, 3, seed=1)
    for x, y in ((a, b.bfloat16()), (a.bfloat16(), b), (a.half(), b.bfloat16())):
        for out in code(x, y):
            assert out.dtype == torch.bfloat16
            assert torch.equal(out, x.bfloat16() @ y.bfloat16())
    # Angles of rotary positions: bf16 has no 4095.
    positions, frequencies = torch.arange(4090, 4096.0)[:, None], 1.0 / 10.0 ** torch.arange(4.0)[None]
    for policy in ("bf16-mixed", "bf16-mixed,emulate=true"):
        angles = within(lambda m, a, b: a @ b, policy)(positions, frequencies)
        assert angles.dtype == torch.float32
        assert torch.equal(angles, positions @ frequencies)
    code = within(lambda m, x: (m.part.weight @ m.part.weight, F.linear(x, m.part.weight)), "bf16-mixed")
    product, y = code(draw(2, 8))
    assert product.dtype == torch.float32
    assert torch.equal(product, code.part.weight @ code.part.weight)
    assert y.dtype == torch.bfloat16


def test_gathered_weights_have_fp32_gradients_and_kernels_that_round_them_say_so():
    """Rows of experts that are gathered by an index are no views, and still have fp32 gradients."""
    stacked = nn.Linear(8, 8)
    index = torch.tensor([1, 0])
    experts = lambda m, x: torch.bmm(m.part.weight.view(2, 4, 8)[index], x.unsqueeze(-1))  # noqa: E731
    code = within(experts, "bf16-mixed", stacked)
    y = code(draw(2, 8).bfloat16())
    assert y.dtype == torch.bfloat16
    y.backward(draw(2, 4, 1, seed=1).bfloat16())
    assert not torch.equal(code.part.weight.grad, carried(code.part.weight.grad, BF16))
    conv = nn.Conv1d(8, 4, 3)
    code = within(lambda m, x: F.conv1d(x, m.part.weight, m.part.bias), "bf16-mixed", conv)
    x = draw(2, 8, 5).bfloat16()
    y = code(x)
    assert torch.equal(y, F.conv1d(x, conv.weight.bfloat16(), conv.bias.bfloat16()))
    y.float().sum().backward()
    assert code.part.weight.grad.dtype == torch.float32
    assert "weight gradients too" in functions.TABLE[F.conv1d].description


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,emulate=true"])
def test_grouped_matmuls_have_fp32_weight_gradients(policy):
    part = nn.Linear(8, 3 * 8, bias=False)
    offsets = torch.tensor([4, 4, 10], dtype=torch.int32)

    def grouped(m, x):
        return F.grouped_mm(x.to(m.part.weight.dtype), m.part.weight.view(3, 8, 8), offs=offsets)

    x, g = carried(draw(10, 8), BF16), carried(draw(10, 8, seed=1), BF16)
    part.weight.data = carried(part.weight.data, BF16)
    code = within(grouped, policy, part)
    y = code(x)
    y.backward(g.to(y.dtype))
    w = part.weight.detach().view(3, 8, 8).double().requires_grad_()
    exact = torch.cat([x[:4].double() @ w[0], x[4:].double() @ w[2]])
    exact.backward(g.double())
    size = torch.cat([x[:4].abs() @ w[0].abs().float(), x[4:].abs() @ w[2].abs().float()])
    assert ((y - exact).abs() <= BF16.epsilon / 2 * exact.abs() + 16 * U32 * size).all()
    grad = code.part.weight.grad.view(3, 8, 8)
    assert grad.dtype == torch.float32
    assert ((grad - w.grad).abs() <= 16 * U32 * 10 * float(x.abs().max() * g.abs().max())).all()
    assert not torch.equal(grad, carried(grad, BF16))


MEETINGS = {
    "x + p": lambda x, p: x + p,
    "p + x": lambda x, p: p + x,
    "x * p": lambda x, p: torch.mul(x, other=p),
    "x - p": lambda x, p: torch.sub(input=x, other=p),
    "cat": lambda x, p: torch.cat([x, p]),
    "where": lambda x, p: torch.where(x > 0, x, p),
}


@pytest.mark.parametrize("held", ["", ",param=fp32:split"])
@pytest.mark.parametrize("fn", MEETINGS.values(), ids=MEETINGS)
def test_a_parameter_does_not_promote_what_it_meets(fn, held):
    """Hazard: fp32 gains promote the stream, and everything after it."""
    part = nn.Linear(8, 8)
    part.weight.data = draw(8, 8)
    code = within(lambda m, x: fn(x, m.part.weight), f"bf16-mixed{held}", part)
    x = draw(8, 8, seed=1).bfloat16()
    y = code(x)
    assert torch.equal(y, fn(x.float(), draw(8, 8)).bfloat16())
    y.backward(draw(*y.shape, seed=2).bfloat16())
    grad = code.part.weight.grad
    assert grad.dtype == torch.float32
    wide = draw(8, 8).requires_grad_()
    fn(x.float(), wide).backward(draw(*y.shape, seed=2).bfloat16().float())
    assert torch.equal(grad, wide.grad)


def test_rows_that_a_function_looks_up_are_in_compute_and_the_models_own_parameter_does_not_promote():
    table = nn.Embedding(6, 8)
    index = torch.tensor([0, 3, 3])
    for held in ("", ",param=fp32:split"):
        code = within(lambda m, i: F.embedding(i, m.part.weight), f"bf16-mixed{held}", copy.deepcopy(table))
        y = code(index)
        assert torch.equal(y, table(index).bfloat16())
        y.float().sum().backward()
        assert code.part.weight.grad.dtype == torch.float32

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.positions = nn.Linear(8, 8), nn.Parameter(draw(3, 8))

        def forward(self, x):
            self.seen = self.part(x) + self.positions
            return self.seen

    model = Model()
    apply(model, Policy.parse("bf16-mixed"))
    assert model(draw(3, 8)).dtype == torch.float32  # what a model returns is in the loss format
    assert model.seen.dtype == torch.bfloat16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        p = F.softmax(q @ k.mT / 8**0.5, dim=-1)
        self.seen.append(p)
        return x + self.out(p @ v)


class Stack(nn.Module):
    def __init__(self, again=None):
        super().__init__()
        self.first, self.second, self.again = Block(), Block(), again

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if self.again is None else checkpoint(self.second, x, use_reentrant=self.again)


def stack(policy="bf16-mixed", again=None):
    torch.manual_seed(0)
    model = Stack(again)
    apply(model, Policy.parse(policy))
    return model


@pytest.mark.parametrize("again", [False, True])
def test_what_is_computed_again_in_a_backward_pass_is_reached(again):
    grads = []
    for way in (None, again):
        model = stack(again=way)
        model(draw(4, 8).requires_grad_()).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        assert {p.dtype for p in model.second.seen} == {torch.bfloat16}
    assert same(*grads)
    assert torch._C._len_torch_function_stack() == 0


def test_a_part_of_the_model_is_reached_by_itself_and_no_mode_is_left_behind():
    model = Net(Net(Free(lambda m, x: x @ m.part.weight)))
    apply(model, Policy.parse("bf16-mixed"))
    x = draw(4, 8).bfloat16()
    assert model.layer(x).dtype == model.layer.layer(x).dtype == torch.bfloat16
    assert torch._C._len_torch_function_stack() == 0
    code = within(lambda m, x: F.softmax(x, -1) @ draw(3, 3), "bf16-mixed")
    with pytest.raises(RuntimeError):
        code(draw(2, 8).bfloat16())
    assert torch._C._len_torch_function_stack() == 0
    model = stack("fp32")
    entered = []
    model.second.register_forward_hook(lambda *_: entered.append(torch._C._len_torch_function_stack()))
    model(draw(4, 8))
    assert entered == [0]


@pytest.mark.parametrize("kind", [nn.Linear, CastedLinear])
def test_layers_of_ours_are_not_reached(kind):
    """They cast by themselves: fp32 if a rule says so, bf16 if another asks for it."""
    part = nn.Sequential(kind(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    policy = "bf16-mixed; layer.part.0: compute=fp32; layer.part.1: norm=bf16"
    code = within(lambda m, x: (m.part[0](x), m.part[1](x), softmax(x, casts_for("fp32"))), policy, part)
    x = draw(4, 8)
    y, normed, probabilities = code(x)
    assert y.dtype == probabilities.dtype == torch.float32
    assert same((y, probabilities, normed), (part[0](x), F.softmax(x, -1), F.layer_norm(x.bfloat16(), (8,))))


def test_the_mode_is_not_asked_about_a_relu_and_modes_of_others_are(monkeypatch):
    layers = [nn.Conv2d(2, 2, 3), nn.ReLU(inplace=True), nn.Dropout(), nn.MaxPool2d(2), nn.Tanh()]
    net = Net(nn.Sequential(*layers))
    run = prepare(net, "bf16-mixed")
    asked = []
    handle = mode.PolicyMode.__torch_function__
    monkeypatch.setattr(
        mode.PolicyMode,
        "__torch_function__",
        lambda self, func, *rest: (asked.append(func), handle(self, func, *rest))[1],
    )

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **kwargs or {})

    x = draw(1, 2, 6, 6)
    torch.manual_seed(0)
    y = net(x)
    assert asked == [torch.tanh]
    with Seen():
        torch.manual_seed(0)
        assert torch.equal(net(x), y)
    assert {F.relu, F.dropout, torch.tanh} <= {*asked}
    run.unprepare()
    assert [type(layer) for layer in layers] == [nn.Conv2d, nn.ReLU, nn.Dropout, nn.MaxPool2d, nn.Tanh]


def test_rules_and_evaluation_reach_functions_in_their_own_format():
    model = stack("bf16-mixed; first: compute=fp32")
    model(draw(4, 8))
    assert [block.seen[0].dtype for block in (model.first, model.second)] == [torch.float32, torch.bfloat16]
    model = stack("fp32; first: softmax=bf16")
    model(draw(4, 8))
    narrow = [torch.equal(block.seen[0], carried(block.seen[0], BF16)) for block in (model.first, model.second)]
    assert narrow == [True, False]
    model = stack("fp8-mixed,emulate=true")
    set_precision(model, Policy.parse("fp32"))
    x = draw(4, 8)
    model(x)
    q, k, _ = F.linear(x, model.first.qkv.weight, model.first.qkv.bias).chunk(3, -1)
    assert torch.equal(model.first.seen[0], F.softmax(q @ k.mT / 8**0.5, dim=-1))


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(draw(8, 8)), nn.Parameter(draw(8))

    def forward(self, x):
        self.given = x.dtype
        out = torch.zeros(x.shape[0], 8, dtype=self.gain.dtype)
        out.index_add_(0, torch.arange(x.shape[0]), F.linear(x, self.weight))  # refuses two dtypes
        return out * self.gain


def test_a_leaf_multiplies_in_compute_and_tensors_of_another_class_run_as_that_says():
    net = Net(Projection())
    apply(net, Policy.parse("bf16-mixed"))
    x = carried(draw(4, 8, seed=1), BF16)
    y = net.layer(x.bfloat16())
    assert net.layer.given == torch.float32
    product = (x @ carried(net.layer.weight.detach(), BF16).t()).bfloat16().float()
    assert torch.equal(y, (product * net.layer.gain).detach().bfloat16())
    y.backward(draw(4, 8, seed=2).bfloat16())
    assert not torch.equal(net.layer.weight.grad, carried(net.layer.weight.grad, BF16))
    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    code = within(lambda m, x: F.softmax(x, -1), "bf16-mixed")
    code(draw(2, 8).as_subclass(Logged))
    assert F.softmax in seen


@pytest.mark.prove
@pytest.mark.parametrize("held", ["", ",param=fp32:split"])
def test_compiled_whole_it_is_what_it_is_eagerly(held):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.block, self.leaf, self.head = Block(), Projection(), nn.Linear(8, 8, bias=False)
            self.positions = nn.Parameter(draw(4, 8))

        def forward(self, x, targets):
            x = self.leaf(self.block(x + self.positions))
            x = torch.einsum("td,ed->te", F.layer_norm(x, (8,)), self.block.out.weight) @ self.head.weight
            return F.cross_entropy(self.head(x), targets)

    model = Model()
    apply(model, Policy.parse(f"bf16-mixed{held}"))
    x, targets = draw(4, 8, seed=3), torch.tensor([0, 3, 7, 1])
    eager = model(x, targets)
    eager.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x, targets)
    compiled.backward()
    assert torch.equal(compiled, eager)
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        # the order of sums is open
        assert ((p.grad - grads[name]).abs() <= 64 * U32 * grads[name].abs().max()).all(), name


def test_methods_that_torch_writes_in_python_are_compiled_in_fp32_and_in_compute():
    """dynamo did not find Tensor.__rsub__ in the table of functions, nor could it follow Tensor.unflatten."""

    def forward(m, x):
        y = m.part(x)
        return sum((1 - z).unflatten(-1, (2, 4)).float().norm() for z in (y, x))

    model = Free(forward)
    apply(model, Policy.parse("bf16-mixed"))
    x = draw(4, 8).abs()
    eager = model(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), eager)


def test_a_compiled_part_is_reached_and_a_loss_that_compiled_code_keeps_narrow_is_refused():
    """torch.compile replaces a CrossEntropyLoss that a forward makes by a call that no mode sees."""

    model = Free(lambda m, x, targets: nn.CrossEntropyLoss()(m.part(x), targets))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    batch = draw(4, 8), torch.tensor([0, 1, 2, 3])
    run.step(lambda b: model(*b), [batch])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with refuses(PolicyError, r"the loss came out in torch\.bfloat16", "compiled forward"):
        run.step(lambda b: compiled(*b), [batch])
    model = stack()
    x = draw(4, 8)
    eager = model(x)
    torch._dynamo.reset()
    model.second.seen = model.first.seen = []
    model.second.compile(fullgraph=True, backend="eager")
    assert torch.equal(model(x), eager)


def reached(fn, policy="bf16-mixed", x=None):
    model = Free(fn)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    return run, run.coverage(lambda b: model(b).float().sum(), draw(4, 8) if x is None else x)


def test_each_function_is_listed_with_how_it_ran_and_those_of_the_table_are_torchs():
    def forward(m, x):
        y = m.part(x)
        scores = F.linear(y, m.part.weight) @ y.mT
        angles = torch.ones(4, 2) @ torch.ones(2, 1)
        return F.softmax(scores, -1).mean(0) * angles

    _, found = reached(forward)
    rows = {(row.function.rpartition(".")[2], row.how): row for row in found.rows}
    assert rows["softmax", "covered"].why == "the softmax format inside, compute out"
    assert rows["linear", "covered"].module == "the model"
    assert rows["matmul", "unchanged"].why in (entries.Skip.IN_COMPUTE, entries.Skip.NO_PARAMETER)
    assert {row.why for row in found.uncovered} == {
        entries.Skip.NO_PARAMETER,
        "computed in bfloat16, no role reaches it",
        "an fp32 tensor that is not a parameter makes it fp32",
    }
    assert "softmax (the model): covered, the softmax format inside, compute out" in str(found)
    assert len(functions.TABLE) > 100  # a name that torch no longer has would drop out silently
    assert len({entry.description for entry in functions.TABLE.values()}) >= 8
    for name in ("softmax", "layer_norm", "rms_norm", "cross_entropy", "linear", "scaled_dot_product_attention"):
        assert getattr(F, name) in functions.TABLE
    for name in ("matmul", "bmm", "baddbmm", "einsum", "addmm", "softmax", "cat"):
        assert getattr(torch, name) in functions.TABLE
    assert torch._grouped_mm in functions.TABLE


def test_a_recording_changes_nothing_and_the_summary_has_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    buffers, random = [b.clone() for b in model.buffers()], torch.get_rng_state()
    run.coverage(lambda x: model(x).sum(), draw(8, 4))
    assert torch.equal(torch.get_rng_state(), random)
    assert same(buffers, model.buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not mode.WATCHERS
    run, _ = reached(lambda m, x: F.softmax(m.part(x), -1))
    assert "1 calls covered, 0 unchanged" in run.summary()
    assert "torch.nn.functional.softmax (the model): covered" in run.summary()
    model = nn.Sequential(nn.Linear(4, 4))
    fresh = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    assert "run.coverage(loss_fn, batch)" in fresh.summary()
    fresh.unprepare()
    with pytest.raises(HalfstepError, match="the run has ended"):
        fresh.coverage(lambda x: model(x).sum(), draw(2, 4))


@pytest.mark.prove
def test_blocks_that_are_compiled_one_by_one_share_a_graph():
    """What a block returns must look to the next as the first block's input did."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = GPT2(layers=3, width=16, heads=2, vocabulary=32, context=8)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    tokens = torch.arange(16).view(2, 8)
    loss = model(tokens, tokens)
    for block in model.h:
        block.compile(backend=counter, fullgraph=True)
    compiled = model(tokens, tokens)
    compiled.backward()
    assert counter.frame_count == 1
    assert (compiled - loss).abs() <= 2.0**-6 * loss.abs()
