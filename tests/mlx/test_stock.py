"""Models as people write them run under every policy, with gradients near those of fp32."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import optimizers

from halfstep.mlx import prepare
from tests.mlx.stock import MODELS

pytestmark = pytest.mark.usefixtures("uncompiled")
# How far a gradient may be off, relative to its norm: the roundings in a row on the longest path through these
# models, half of them forward, times the unit of the format. Only operands of matmuls are fp8, in 8 of them.
POLICIES = {
    "bf16-mixed": 64 * 2.0**-9,
    "fp16-mixed,scale=static:value=1024": 64 * 2.0**-12,
    "fp8-mixed,emulate=true": 16 * 2.0**-4,
}
PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text("utf-8").split("## More on MLX")[1]


def differentiated(name, policy):
    build, loss_fn, batch = MODELS[name]
    mx.random.seed(0)
    loss, grads = prepare(build(), optimizers.SGD(0.1), policy).value_and_grad(loss_fn)(batch)
    return loss.item(), {n: g / grads.scale for n, g in grads.arrays.items()}


CASES = [
    pytest.param(name, policy, marks=[] if policy == "bf16-mixed" else pytest.mark.prove, id=f"{name}-{policy}")
    for name in MODELS
    for policy in POLICIES
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_a_stock_model_runs_unchanged(name, policy):
    (loss, grads), (exact, wide) = differentiated(name, policy), differentiated(name, "fp32")
    bound = POLICIES[policy]
    assert abs(loss - exact) <= bound / 2 * exact
    assert loss != exact
    least = max(mx.linalg.norm(g).item() for g in wide.values()) * bound  # one that is zero, such as a key's bias
    for parameter, g in grads.items():
        assert g.dtype == mx.float32
        off, norm = (mx.linalg.norm(each).item() for each in (g - wide[parameter], wide[parameter]))
        assert off <= bound * max(norm, least), parameter


def test_the_page_lists_them():
    rows = re.findall(r"^\| ([^|]+) \| (?:[^|]+) \| runs \| runs \| runs \|$", PAGE, flags=re.M)
    assert rows == [*MODELS]
