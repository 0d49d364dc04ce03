"""Any mlx.nn model under a policy: what is converted, what is refused, what is left alone, and the way back."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import BF16, FP32
from halfstep.core.policy import Policy
from halfstep.mlx import CastedLinear, prepare
from halfstep.mlx.convert.apply import apply, set_precision
from halfstep.mlx.convert.places import walk
from halfstep.mlx.layers import Layer
from halfstep.mlx.optim.optimizers import AdamW


def draw(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def bf16(x):
    return x.astype(mx.bfloat16)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.gain = mx.ones((width,))

    def __call__(self, x):
        return x + self.gain * self.down(nn.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding that is also the head, blocks in a list, and a parameter of its own."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = [Block(width) for _ in range(2)]
        self.final = nn.LayerNorm(width)
        self.temperature = mx.ones(())

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.as_linear(self.final(x)) * self.temperature


def net(dtype=mx.float32):
    mx.random.seed(0)
    model = Net()
    model.set_dtype(dtype)
    return model


TOKENS = mx.array(np.random.default_rng(0).integers(0, 16, (2, 6)))


def cross_entropy(model, tokens):
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def prepared(policy, model=None, rate=0.01, **options):
    return prepare(model or net(), AdamW(rate), policy, **options)


POLICIES = [
    "fp32",
    "bf16-mixed",
    "bf16-mixed,param=fp32:split",
    "bf16-true,param=bf16:stochastic",
    "fp16-mixed,scale=dynamic:init=1024",
    "fp8-mixed,emulate=true",
]


@pytest.mark.parametrize(
    "policy", [*POLICIES[:3], *(pytest.param(policy, marks=pytest.mark.prove) for policy in POLICIES[3:])]
)
def test_any_model_learns_and_is_restored(policy):
    model = net()
    names = [name for name, _ in tree_flatten(model.parameters())]
    classes = [type(module) for _, module in walk(model)]
    text = str(model)
    run = prepared(policy, model)
    losses = [run.step(cross_entropy, [TOKENS]).loss.item() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.5
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    assert run.unprepare() is model
    assert [type(module) for _, module in walk(model)] == classes
    assert str(model) == text
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.float32}
    assert model(TOKENS).dtype == mx.float32


def test_unprepare_restores_the_masters_exactly():
    run = prepared("bf16-mixed")
    run.step(cross_entropy, [TOKENS])
    held = {name: place.array for name, place in run.conversion.places.items()}
    for name, array in tree_flatten(run.unprepare().parameters()):
        assert mx.array_equal(array, held[name])
        assert not mx.array_equal(array, bf16(array).astype(mx.float32)) or array.ndim == 0


def test_attributes_that_modules_had_before_are_restored():
    model = net()
    model.name, model.blocks[0].up.name = "my net", "up"
    run = prepared("bf16-mixed", model)
    assert model.name == "my net"
    run.unprepare()
    assert (model.name, model.blocks[0].up.name) == ("my net", "up")
    assert not hasattr(model.blocks[0].up, "casts")


def test_printing_the_model_shows_the_formats():
    text = str(prepared("bf16-mixed; blocks.1.up: compute=fp32").model)
    assert "(up): Linear(input_dims=8, output_dims=16, bias=True, bf16 operands)" in text
    assert "(up): Linear(input_dims=8, output_dims=16, bias=True, fp32 operands)" in text
    assert "(norm): RMSNorm(8, eps=1e-05, fp32 inside, bf16 out)" in text
    assert "e4m3 operands emulated" in str(prepared("fp8-mixed,emulate=true").model)


def test_the_summary_says_what_was_done_and_why():
    model = net(mx.bfloat16)
    model.embed.freeze()
    text = prepared("bf16-mixed", model, clip_norm=1.0).summary()
    assert "4 Linear (blocks.0.up, ...): multiplies in bf16, weight gradients in fp32" in text
    assert "2 RMSNorm (blocks.0.norm, ...): is an island: fp32 inside, bf16 out" in text
    assert "2 Block (blocks.0, ...): runs unchanged, as halfstep does not know it" in text
    assert "their gradients rounded to bf16 before they are widened" in text
    assert "13 parameters: 13 held in fp32" in text
    assert "13 of them came narrower and were widened" in text
    assert "1 more (embed.weight, ...) are not trained" in text
    assert "clipped to 1" in text
    assert "not compiled" in text
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3))
    assert "e4m3 is for matmuls" in prepared("fp8-mixed,emulate=true", model).summary()


def test_a_converted_model_computes_what_the_policy_says():
    """fp32 islands, bf16 operands with fp32 sums, results rounded once: the same as written out by hand."""
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False))
    first, norm, last = model.layers
    w, b, v = first.weight, first.bias, last.weight
    norm.weight, norm.bias = draw(6, seed=1), draw(6, seed=2)
    gain, shift, x = norm.weight, norm.bias, draw(5, 8, seed=3)
    out = prepared("bf16-mixed", model).model(x)
    hidden = bf16(bf16(x) @ bf16(w).T) + bf16(b)
    hidden = bf16(mx.fast.layer_norm(hidden.astype(mx.float32), gain, shift, 1e-5))
    expected = hidden @ bf16(v).T
    assert out.dtype == mx.float32  # the loss sees fp32
    assert mx.array_equal(out, expected.astype(mx.float32))


def test_gradients_of_matmuls_and_embeddings_are_fp32_from_the_sum_on():
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 3, bias=False))
    run = prepared("bf16-mixed", model)
    tokens = mx.array(np.random.default_rng(1).integers(0, 4, (64,)))
    grads = run.value_and_grad(lambda m, t: mx.square(m(t)).sum())(tokens)[1].arrays
    for name in ("layers.0.weight", "layers.1.weight"):
        assert grads[name].dtype == mx.float32
        assert not mx.array_equal(grads[name], bf16(grads[name]).astype(mx.float32))


def test_a_tied_head_multiplies_in_compute_and_its_gradient_is_fp32():
    model = nn.Sequential(nn.Embedding(6, 8))
    (table,) = model.layers
    run = prepared("bf16-mixed", model)
    x = bf16(draw(5, 8, seed=1))
    assert table.as_linear(x).dtype == mx.bfloat16
    assert mx.array_equal(table.as_linear(x), x @ bf16(table.weight).T)
    grads = run.value_and_grad(lambda m, x: m.layers[0].as_linear(x).astype(mx.float32).sum())(x)[1].arrays
    expected = mx.broadcast_to(x.astype(mx.float32).sum(axis=0), (6, 8))
    assert mx.allclose(grads["layers.0.weight"], expected, rtol=0, atol=5 * 2.0**-24 * mx.abs(x).sum().item())
    with pytest.raises(PolicyError, match="got a float32"):
        table.as_linear(x.astype(mx.float32))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.GroupNorm(2, 8), (3, 5, 8)),
        (nn.InstanceNorm(8, affine=True), (3, 5, 8)),
        (nn.BatchNorm(8), (6, 8)),
        (nn.RMSNorm(8), (6, 8)),
        (nn.LayerNorm(8, affine=False), (6, 8)),
        (nn.Softmax(), (6, 8)),
        (nn.LogSoftmax(), (6, 8)),
        (nn.RoPE(8), (2, 3, 40, 8)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_islands_are_fp32_inside_and_compute_out(module, shape):
    x = bf16(draw(*shape) * 3)
    expected = bf16(module(x.astype(mx.float32)))
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), module)
    prepared("bf16-mixed", model)
    out = module(x)
    assert out.dtype == mx.bfloat16
    assert mx.array_equal(out, expected)


def test_an_island_may_be_narrower_but_not_that_of_attention():
    x = bf16(draw(6, 8) * 3)
    found = []
    for policy in ("bf16-mixed", "bf16-mixed,softmax=bf16"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Softmax())
        prepared(policy, model)
        found.append(model.layers[1](x))
    assert not mx.array_equal(*found)
    with pytest.raises(PolicyError, match=r"softmax=bf16 does not reach `layers\.0`"):
        prepared("bf16-mixed,softmax=bf16", nn.Sequential(nn.MultiHeadAttention(8, 2)))


def test_attention_has_fp32_scores_and_softmax_where_mlx_rounds_them():
    mx.random.seed(0)
    model = nn.MultiHeadAttention(16, 2)
    x = bf16(draw(1, 12, 16) * 4)
    mask = nn.MultiHeadAttention.create_additive_causal_mask(12)  # fp32, as everybody makes it
    wide = [layer.weight for layer in (model.query_proj, model.key_proj, model.value_proj)]
    prepared("bf16-mixed; out_proj: compute=fp32", model)
    model.out_proj.weight = mx.eye(16)  # and fp32, so that the result of attention shows unchanged
    out = np.array(model(x, x, x, mask).astype(mx.float32), np.float64)[0]

    q, k, v = (np.array((x @ bf16(w).T).astype(mx.float32), np.float64).reshape(12, 2, 8) for w in wide)
    scores = np.einsum("qhk,shk->hqs", q, k) / 8**0.5 + np.array(mask, np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    exact = np.einsum("hqs,shk->qhk", weights, v).reshape(12, 16)
    # one rounding to bf16 of what is exact but for fp32's own rounding of scores up to 64 or so
    bound = np.abs(exact) * BF16.epsilon / 2 + np.abs(v).max() * 2.0**-14
    assert (np.abs(out - exact) <= bound).all()
    heads = [bf16(mx.array(t.astype(np.float32))).transpose(1, 0, 2)[None] for t in (q, k, v)]
    stock = mx.fast.scaled_dot_product_attention(*heads, scale=8**-0.5, mask=bf16(mask))
    stock = np.array(stock[0].transpose(1, 0, 2).reshape(12, 16).astype(mx.float32))
    assert not (np.abs(stock - exact) <= bound).all()


class Doubled(nn.Linear):
    """A subclass with a meaning of its own."""

    def __call__(self, x):
        return 2 * super().__call__(x)


FOREIGN = [
    (nn.Conv1d(8, 8, 3, padding=1), (2, 6, 8)),
    (nn.GRU(8, 8), (2, 6, 8)),
    (nn.PReLU(), (2, 8)),
    (Doubled(8, 8), (2, 8)),
]


@pytest.mark.parametrize(("module", "shape"), FOREIGN, ids=lambda value: type(value).__name__)
def test_other_modules_run_as_they_are_on_arrays_that_are_cast(module, shape):
    x = bf16(draw(*shape))
    held = dict(module.parameters())
    module.set_dtype(mx.bfloat16)
    expected = module(x)
    module.update(held)
    model = nn.Sequential(nn.Linear(8, 8), module)
    run = prepared("bf16-mixed", model)
    out = module(x)
    assert out.dtype == mx.bfloat16
    assert mx.array_equal(out, expected)
    assert f"1 {type(module).__name__} (layers.1): runs unchanged" in run.summary()
    result = run.step(lambda m, x: mx.square(m(x)).mean(), [x.astype(mx.float32)])
    assert not result.skipped.item()
    for name, array in module.parameters().items():
        assert array.dtype == mx.float32
        assert not mx.array_equal(array, held[name])


def test_arrays_in_lists_and_of_the_model_itself_are_cast_and_ruled():
    class Gains(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)
            self.gains = [mx.ones(4), mx.ones(4)]
            self.last = mx.ones(4)

        def __call__(self, x):
            x = self.layer(x)
            assert x.dtype == mx.bfloat16
            for gain in (*self.gains, self.last):
                x = x * gain
            assert x.dtype == mx.bfloat16
            return x

    run = prepared("bf16-mixed; last: param=bf16", Gains())
    run.step(lambda m, x: m(x).sum(), [draw(2, 4)])
    assert run.model.gains[1].dtype == mx.float32
    assert run.model.last.dtype == mx.bfloat16
    assert not mx.array_equal(run.model.gains[0], mx.ones(4))
    with pytest.raises(PolicyError, match="matches none"):
        prepared("bf16-mixed; lost: param=bf16", Gains())


def test_frozen_parameters_integers_and_private_arrays_are_left_alone():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)
            self.order = mx.array([3, 2, 1, 0])
            self._table = mx.ones(4)

        def __call__(self, x):
            return self.base(x)[..., self.order] + self.adapter(x) * self._table.astype(x.dtype)

    model = Adapted()
    model.base.set_dtype(mx.float16)
    model.base.freeze()
    before = model.base.weight
    run = prepared("bf16-mixed", model)
    grads = run.value_and_grad(lambda m, x: m(x).sum())(draw(2, 4))[1].arrays
    assert grads.keys() == {"adapter.weight", "adapter.bias"}
    run.step(lambda m, x: m(x).sum(), [draw(2, 4)])
    assert model.base.weight.dtype == mx.float16
    assert mx.array_equal(model.base.weight, before)
    assert model.order.tolist() == [3, 2, 1, 0]
    assert (model.order.dtype, model._table.dtype) == (mx.int32, mx.float32)
    assert "model._table" not in run.state_dict()


def test_a_module_that_is_held_twice_is_trained_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = self.first

        def __call__(self, x):
            return self.second(self.first(x))

    mx.random.seed(0)
    run = prepared("fp32", Twice())
    assert list(run.conversion.masters) == ["first.weight"]
    x, w = draw(3, 4), run.model.first.weight
    grad = run.value_and_grad(lambda m, x: mx.square(m(x)).sum())(x)[1].arrays["first.weight"]
    expected = mx.grad(lambda w: mx.square(x @ w.T @ w.T).sum())(w)
    assert mx.allclose(grad, expected, rtol=1e-5, atol=0)
    run.step(lambda m, x: mx.square(m(x)).sum(), [x])
    assert run.model.first is run.model.second


def test_halfsteps_own_layers_are_given_their_precision():
    model = nn.Sequential(CastedLinear(4, 4), nn.Linear(4, 2))
    model.layers[0].weight = draw(4, 4)
    run = prepared("bf16-mixed; layers.0: compute=fp32", model)
    assert model.layers[0].precision.compute == FP32
    assert isinstance(model.layers[1], Layer)
    run.unprepare()
    assert "in the format of its input" in repr(model.layers[0])
    assert type(model.layers[1]) is nn.Linear


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = lambda: factor  # an array, hidden from MLX

    def __call__(self, x):
        return self.second(self.first(x) * self.factor())


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.LayerNorm(4)],
    ids=lambda m: type(m).__name__,
)
def test_activations_that_the_code_widened_are_refused_by_every_kind_of_module(module):
    class Widened(Scaled):
        def __call__(self, x):
            return self.second(self.first(x).astype(mx.float32))

    model = Widened(None)
    model.second = module
    with pytest.raises(PolicyError, match="`second` got a float32 activation where the stream is bfloat16"):
        prepared("bf16-mixed", model).step(lambda m, x: m(x).sum(), [draw(2, 3, 4)])


def test_inputs_are_cast_where_the_model_is_called_and_targets_are_not():
    seen = {}

    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def __call__(self, x, extra):
            seen["inputs"] = (x.dtype, extra["shift"].dtype, extra["index"].dtype)
            return {"y": self.layer(x) + extra["shift"]}

    def loss(model, batch):
        x, y = batch
        out = model(x, {"shift": mx.zeros(1), "index": mx.array([1])})["y"]
        seen["loss"] = (out.dtype, y.dtype)
        return mx.square(out - y).mean()

    prepared("bf16-mixed", Regression()).step(loss, [(draw(3, 4), draw(3, 1))])
    assert seen == {"inputs": (mx.bfloat16, mx.bfloat16, mx.int32), "loss": (mx.float32, mx.float32)}
    with pytest.raises(PolicyError, match="`layer` got a float32"):
        prepared("bf16-mixed", Regression(), cast_inputs=False).step(loss, [(draw(3, 4), draw(3, 1))])


REFUSED = [
    ("bf16-mixed,emulate=true; blocks.*.norm: compute=e4m3", "names no matmul"),
    ("bf16-mixed,emulate=true; blocks.0: compute=e4m3", "names no matmul"),
    ("bf16-mixed,emulate=true; embed: compute=e4m3", "names no matmul"),
    ("bf16-mixed; blocks.2.up: compute=fp32", "matches none"),
    ("bf16-mixed; blocks.*.up: grad=fp32", "activation's own format"),
    ("bf16-mixed,buffers=bf16", "buffers=bf16"),
]


@pytest.mark.parametrize(("policy", "said"), REFUSED)
def test_what_cannot_run_is_refused_before_anything_is_changed(policy, said):
    model = net()
    text = str(model)
    with pytest.raises(HalfstepError, match=said):
        prepared(policy, model)
    assert str(model) == text
    assert type(model) is Net


def test_a_model_is_prepared_once():
    model = net()
    run = prepared("bf16-mixed", model)
    with pytest.raises(HalfstepError, match="has a policy already"):
        prepared("fp32", model)
    run.unprepare()
    prepared("fp32", model)


def test_what_no_format_holds_is_refused():
    model = nn.Linear(4, 4)
    model.weight = model.weight.astype(mx.complex64)
    with pytest.raises(HalfstepError, match="`weight` is complex64"):
        prepared("bf16-mixed", model)
    model.freeze()
    with pytest.raises(HalfstepError, match="no parameters to train"):
        prepared("bf16-mixed", model)


def test_rules_match_modules_by_their_dotted_names_with_indices():
    model, rules = net(), "blocks.1.*: compute=fp32; blocks.0.down: compute=e4m3,grad=e5m2"
    apply(model, Policy.parse(f"bf16-mixed,emulate=true; {rules}"))
    found = {name: module.precision for name, module in walk(model) if isinstance(module, Layer)}
    assert found["blocks.1.up"].compute == found["blocks.1.up"].operand.format == FP32
    assert (found["blocks.0.down"].compute, str(found["blocks.0.down"].operand.format)) == (BF16, "e4m3")
    assert found["blocks.0.up"].operand.format == BF16


def test_precision_can_change_leaves_parameters_alone_and_is_copied():
    model = net()
    prepared("bf16-mixed", model)
    narrow, held = model(TOKENS), model.blocks[0].up.weight
    set_precision(model, Policy())
    wide = model(TOKENS)
    assert model.blocks[0].up.weight is held
    assert model.blocks[0].halfstep.casts.precision.compute == FP32
    assert not mx.array_equal(narrow, wide)
    assert mx.allclose(narrow, wide, rtol=0.1, atol=0.1)
    set_precision(model, Policy.parse("bf16-mixed"))
    assert mx.array_equal(model(TOKENS), narrow)
    twin = copy.deepcopy(model)
    assert mx.array_equal(twin(TOKENS), model(TOKENS))
    assert twin.blocks[0].up is not model.blocks[0].up


def test_stock_optimizers_of_mlx_train_it():
    for optimizer in (optimizers.SGD(0.02, momentum=0.9), optimizers.Lion(0.01), optimizers.Adafactor()):
        run = prepare(net(), optimizer, "bf16-mixed,param=fp32:split")
        losses = [run.step(cross_entropy, [TOKENS]).loss.item() for _ in range(10)]
        assert losses[-1] < losses[0], type(optimizer).__name__


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "fp16-mixed,emulate=true"])
def test_a_mask_that_a_model_is_given_stays_finite(policy):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(3, 3)

        def __call__(self, x, mask):
            return mx.softmax(self.scores(x) + mask, axis=-1)

    run = prepared(policy, Masked())
    mask = mx.array([[mx.finfo(mx.float32).min] * 3, [-1e9] * 3, [-mx.inf] * 3, [mx.inf, 0, 0]])
    y = run.model(draw(4, 3), mask)
    assert mx.isfinite(y).all(axis=-1).tolist() == [True, True, False, False]
