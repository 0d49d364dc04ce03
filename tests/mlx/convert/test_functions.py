"""Functions that a model's own code calls follow the policy."""

import mlx.core as mx
import pytest
from mlx import nn, optimizers
from mlx.core import softmax as imported_by_name

from halfstep.core.errors import PolicyError
from halfstep.mlx import prepare

pytestmark = pytest.mark.usefixtures("uncompiled")
ATTEND = {"scale": 0.3}
ROPE = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 300}
TARGETS = mx.array([[0, 1, 2]])
# By role: what a model may write, of x with the shape (1, 3, 8).
FUNCTIONS = {
    "softmax": {
        "mx.softmax": lambda x: mx.softmax(x, axis=-1),
        "by name": lambda x: imported_by_name(x, axis=-1),
        "logsumexp": lambda x: mx.logsumexp(x, axis=-1),
        "method": lambda x: x.logsumexp(-1),
        "nn.softmax": lambda x: nn.softmax(x),
        "log_softmax": lambda x: nn.log_softmax(x),
        "attention": lambda x: mx.fast.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], **ATTEND),
        "by keyword": lambda x: mx.fast.scaled_dot_product_attention(**dict.fromkeys("qkv", x[:, None]), **ATTEND),
    },
    "norm": {
        "rms_norm": lambda x: mx.fast.rms_norm(x, None, 1e-5),
        "layer_norm": lambda x: mx.fast.layer_norm(x, None, None, 1e-5),
    },
    "rope": {"rope": lambda x: mx.fast.rope(x, 8, **ROPE)},
    "loss": {
        "cross_entropy": lambda x: nn.losses.cross_entropy(x, TARGETS),
        "mse_loss": lambda x: nn.losses.mse_loss(x, mx.zeros_like(x)),
    },
}
ALL = [(role, name) for role, functions in FUNCTIONS.items() for name in functions]


class Calls(nn.Module):
    """Code between layers, which holds nothing itself."""

    def __init__(self, function):
        super().__init__()
        self.function, self.given, self.returned = function, [], []

    def __call__(self, x):
        y = self.function(x)
        self.given[:], self.returned[:] = [x], [y]
        return x + y.sum().astype(x.dtype)


def prepared(function, policy):
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Calls(function), nn.Linear(8, 2))
    return prepare(model, optimizers.SGD(0.1), policy), model.layers[1]


X = mx.random.normal((1, 3, 8), key=mx.random.key(0)) * 3


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,emulate=true"])
@pytest.mark.parametrize(("role", "name"), ALL, ids=[name for _, name in ALL])
def test_a_function_is_an_island_in_a_prepared_model_and_mlxs_own_elsewhere(role, name, policy):
    function = FUNCTIONS[role][name]
    run, calls = prepared(function, policy)
    run.model(X)
    (x,), (y,) = calls.given, calls.returned
    expected = function(x.astype(mx.float32))
    narrow = mx.float16 if policy.startswith("fp16") else mx.bfloat16
    if role != "loss":
        expected = expected.astype(narrow)
    assert y.dtype == (mx.float32 if role == "loss" or "emulate" in policy else narrow)
    assert mx.array_equal(y, expected.astype(y.dtype))
    assert function(X.astype(mx.bfloat16)).dtype == mx.bfloat16


def test_it_makes_a_difference_is_differentiated_and_reaches_loss_functions():
    run, calls = prepared(lambda x: mx.softmax(x * 4, axis=-1), "bf16-mixed")
    seen = []

    def loss_fn(model, x):
        narrow = model.layers[0](x.astype(mx.bfloat16))  # a part of the model, whose result is not widened
        seen.append(nn.losses.cross_entropy(narrow, TARGETS).dtype)
        return model(x).square().mean()

    run.step(loss_fn, [X])
    assert seen == [mx.float32]
    scores = mx.random.normal((4, 64), key=mx.random.key(1)).astype(mx.bfloat16) * 8
    wide, plain = mx.logsumexp(scores.astype(mx.float32), axis=-1), mx.logsumexp(scores, axis=-1)
    run, calls = prepared(lambda x: mx.logsumexp(scores, axis=-1), "bf16-mixed")
    run.model(X)
    assert mx.array_equal(calls.returned[0], wide.astype(mx.bfloat16))
    assert plain.dtype == mx.bfloat16


def test_a_role_may_be_narrow_fp32_stays_and_rules_reach_the_code_of_a_module():
    run, calls = prepared(lambda x: mx.softmax(x, axis=-1), "bf16-mixed; layers.1: softmax=bf16")
    run.model(X)
    (x,), (y,) = calls.given, calls.returned
    assert mx.array_equal(y, mx.softmax(x.astype(mx.float32), axis=-1).astype(mx.bfloat16))
    run, calls = prepared(lambda x: mx.softmax(x.astype(mx.float32), axis=-1), "bf16-mixed")
    run.model(X)
    assert calls.returned[0].dtype == mx.float32
    run, calls = prepared(FUNCTIONS["softmax"]["attention"], "bf16-mixed,softmax=bf16")
    with pytest.raises(PolicyError, match=r"softmax=bf16 does not reach mx\.fast\.scaled_dot_product_attention"):
        run.model(X)


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed", "fp16-mixed,emulate=true"])
@pytest.mark.parametrize("lowest", [mx.finfo(mx.float32).min, -1e9, -mx.inf])
def test_a_mask_of_finite_numbers_stays_finite_and_an_infinite_one_infinite(policy, lowest):
    """In fp16 -1e9 is an infinity, in bf16 fp32's lowest number: a row that is masked throughout would be NaN."""
    mask = mx.array([[0, lowest, lowest], [lowest] * 3, [0, 0, 0]])

    def attend(x):
        return mx.fast.scaled_dot_product_attention(*[x[:, None]] * 3, mask=mask, **ATTEND)

    run, calls = prepared(attend, policy)
    run.model(X)
    (x,), (y,) = calls.given, calls.returned
    expected = attend(x.astype(mx.float32)).astype(mx.float16 if policy.startswith("fp16") else mx.bfloat16)
    assert mx.array_equal(y, expected.astype(y.dtype), equal_nan=True)
    assert mx.isnan(y[0, 0, 1]).any().item() == (lowest == -mx.inf)
