"""fp32 arrays that meet the activations of a model follow the policy, and those of a loss function do not."""

import mlx.core as mx
import pytest
from mlx import nn, optimizers

from halfstep.core.errors import PolicyError
from halfstep.mlx import prepare

TABLE = mx.random.normal((3, 4), key=mx.random.key(1))
SQUARE = mx.random.normal((4, 4), key=mx.random.key(2))
MASK = mx.array([[True, False, True, True]] * 3)


def in_place(x):
    x += TABLE
    return x


# What the code of a model may write, of activations x with the shape (2, 3, 4).
WIDE = {
    "+": lambda x: x + TABLE,
    "+=": in_place,
    "+, reversed": lambda x: TABLE + x,
    "-": lambda x: x - TABLE,
    "*": lambda x: x * TABLE,
    "/": lambda x: TABLE / x,
    "one number": lambda x: x * mx.array(0.3),
    "mx.add": lambda x: mx.add(x, TABLE),
    "mx.where": lambda x: mx.where(MASK, x, TABLE),
    "mx.maximum": lambda x: mx.maximum(x, TABLE),
    "mx.concatenate": lambda x: mx.concatenate([x, mx.broadcast_to(TABLE, x.shape)], axis=-1),
}
PRODUCTS = {
    "@": lambda x: x @ SQUARE,
    "mx.matmul": lambda x: mx.matmul(x, SQUARE),
    "from the left": lambda x: (SQUARE.T @ x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "mx.einsum": lambda x: mx.einsum("btk,kn->btn", x, SQUARE),
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.function, self.seen = nn.Linear(4, 4), function, []

    def __call__(self, x):
        x = self.first(x)
        y = self.function(x)
        self.seen[:] = [x, y]
        return x


def called(function, policy):
    mx.random.seed(0)
    model = Calls(function)
    prepare(model, optimizers.SGD(0.1), policy).model(mx.ones((2, 3, 4)))
    return model.seen


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("function", WIDE.values(), ids=[*WIDE])
def test_arithmetic_with_an_fp32_array_is_fp32_inside_and_compute_out(function, policy):
    x, y = called(function, policy)
    narrow = mx.float16 if policy.startswith("fp16") else mx.bfloat16
    assert x.dtype == y.dtype == narrow
    assert mx.array_equal(y, function(x.astype(mx.float32)).astype(narrow))
    assert function(mx.ones((2, 3, 4), narrow)).dtype == mx.float32  # outside of a model, MLX's own


@pytest.mark.parametrize("function", PRODUCTS.values(), ids=[*PRODUCTS])
def test_a_product_with_an_fp32_array_is_in_compute(function):
    x, y = called(function, "bf16-mixed")
    rounded = SQUARE.astype(mx.bfloat16).astype(mx.float32)
    wide, bound = x.astype(mx.float32) @ rounded, mx.abs(x.astype(mx.float32)) @ mx.abs(rounded)
    assert y.dtype == mx.bfloat16
    # Operands are exact, the sum of four products is fp32, and the result is rounded once.
    assert (mx.abs(y.astype(mx.float32) - wide) <= bound * (2.0**-9 + 2.0**-21)).all()


def test_what_the_code_widens_itself_stays_wide_and_a_layer_that_is_given_it_refuses():
    _, y = called(lambda x: x.astype(mx.float32) * TABLE, "bf16-mixed")
    assert y.dtype == mx.float32
    _, y = called(lambda x: x * TABLE, "bf16-mixed; **: compute=fp32,grad=fp32")
    assert y.dtype == mx.float32

    class Widens(Calls):
        def __call__(self, x):
            return self.first(self.first(x).astype(mx.float32))

    with pytest.raises(PolicyError, match="`first` got a float32 activation where the stream is bfloat16"):
        prepare(Widens(None), optimizers.SGD(0.1), "bf16-mixed").model(mx.ones((2, 3, 4)))


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("lowest", [mx.finfo(mx.float32).min, -1e9, -mx.inf])
def test_a_mask_that_is_added_by_hand_stays_finite(policy, lowest):
    mask = mx.array([0.0, lowest, lowest, 0.0])
    _, y = called(lambda x: mx.softmax(x + mask, axis=-1), policy)
    assert mx.isfinite(y).all()
    _, y = called(lambda x: x + mask, policy)
    assert mx.isinf(y[..., 1]).all().item() == (lowest == -mx.inf)


class Tied(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.table, self.by_hand = nn.Embedding(5, 4), by_hand

    def __call__(self, tokens):
        x = self.table(tokens)
        return x @ self.table.weight.T if self.by_hand else self.table.as_linear(x)


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,param=fp32:split"])
def test_a_tied_head_by_hand_is_the_casted_matmul_bit_for_bit(policy):
    found = []
    for by_hand in (False, True):
        mx.random.seed(0)
        run = prepare(Tied(by_hand), optimizers.SGD(0.1), policy)
        loss, grads = run.value_and_grad(lambda model, x: mx.square(model(x)).mean())(mx.array([[1, 2, 3]]))
        found.append((loss, grads.arrays["table.weight"]))
    assert found[0][1].dtype == mx.float32
    assert all(mx.array_equal(one, two) for one, two in zip(*found, strict=True))


def test_a_loss_function_computes_with_targets_as_they_are():
    """Outside of the model there is no stream: its outputs are fp32, and bf16 targets do not narrow them."""
    seen = []

    def loss_fn(model, batch):
        x, target = batch
        off = model(x) - target
        seen.append(off.dtype)
        return mx.square(off).mean()

    batch = mx.ones((2, 4)), mx.ones((2, 4), mx.bfloat16)
    prepare(nn.Linear(4, 4), optimizers.SGD(0.1), "bf16-mixed").step(loss_fn, [batch])
    assert seen == [mx.float32]


def test_what_is_computed_again_in_the_backward_pass_is_the_same():
    """mx.checkpoint calls Python again when the forward pass is over."""
    seen = []

    class Again(nn.Module):
        def __init__(self, checkpoint):
            super().__init__()
            self.first, self.checkpoint = nn.Linear(4, 4), checkpoint

        def __call__(self, x):
            def attend(x):
                y = mx.softmax(x * 8, axis=-1) * TABLE
                seen.append(y.dtype)
                return y

            return (mx.checkpoint(attend) if self.checkpoint else attend)(self.first(x))

    found = []
    for checkpoint in (False, True):
        mx.random.seed(0)
        run = prepare(Again(checkpoint), optimizers.SGD(0.1), "bf16-mixed")
        grads = run.value_and_grad(lambda model, x: mx.square(model(x)).mean())(mx.ones((2, 3, 4)))[1]
        found.append(grads.arrays["first.weight"])
    assert set(seen) == {mx.bfloat16}
    assert len(seen) == 3
    assert mx.array_equal(*found)
