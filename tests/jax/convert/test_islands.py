"""Softmax, norms and losses that a function writes itself: found whatever their form, and fp32 inside."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax

from halfstep.core.errors import PolicyError
from halfstep.jax.layers import COMPILER_OPTIONS
from tests.jax.interpreted import interpreted

ROWS, WIDTH = 4, 32
X = (3 * np.random.default_rng(0).standard_normal((ROWS, WIDTH))).astype(jnp.bfloat16).astype(np.float32)
MASK = np.random.default_rng(1).random((ROWS, WIDTH)) < 0.7


def under(fn, policy="bf16-mixed"):
    """fn(x) under a policy: x is the batch, and a parameter that changes nothing makes it a loss function."""
    return lambda x: interpreted(lambda p, x: fn(x), {"w": jnp.ones((2, 2))}, x, policy)


def compiled(fn):
    return jax.jit(fn, compiler_options=COMPILER_OPTIONS)


def handwritten(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def with_reciprocal(x):
    e = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return e * jnp.reciprocal(e.sum(-1, keepdims=True))


def without_maximum(x):
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


def rms(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def by_root(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) / WIDTH + 1e-6)


def layer_norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6)


def by_moments(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) - mean**2 + 1e-6)


SOFTMAX = {
    "jax.nn.softmax": jax.nn.softmax,
    "masked": lambda x: jax.nn.softmax(x, where=MASK),
    "of a mask": lambda x: jax.nn.softmax(jnp.where(MASK, x, -jnp.inf)),
    "exp(x - max) / sum": handwritten,
    "exp(x - max) * (1 / sum)": with_reciprocal,
    "exp(x) / sum": without_maximum,
    "exp(x - logsumexp(x))": lambda x: jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True)),
    "exp(log_softmax(x))": lambda x: jnp.exp(jax.nn.log_softmax(x)),
    "inside jit": jax.jit(handwritten),
    "inside jax.checkpoint": jax.checkpoint(handwritten),
    "inside lax.scan": lambda x: lax.scan(lambda c, row: (c, handwritten(row)), 0, x)[1],
    "inside lax.cond": lambda x: lax.cond(x[0, 0] > -9, handwritten, lambda x: x, x),
    "inside vmap": jax.vmap(handwritten),
}
NORMS = {
    "x * rsqrt(mean(x^2))": rms,
    "x / sqrt(sum(x x) / n)": by_root,
    "centered": layer_norm,
    "mean(x^2) - mean(x)^2": by_moments,
    "jax.nn.standardize": lambda x: jax.nn.standardize(x, epsilon=1e-6),
    "x / jnp.std(x)": lambda x: x / jnp.std(x, -1, keepdims=True),
    "x / jnp.linalg.norm(x)": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "inside jax.checkpoint": jax.checkpoint(rms),
}
TARGETS = np.arange(ROWS, dtype=np.int32)
LOSSES = {
    "optax, integer labels": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, TARGETS).mean(),
    "optax, one-hot labels": lambda x: optax.softmax_cross_entropy(x, jax.nn.one_hot(TARGETS, WIDTH)).mean(),
    "log_softmax": lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x), TARGETS[:, None], -1).mean(),
    "log(softmax)": lambda x: -jnp.log(jax.nn.softmax(x))[np.arange(ROWS), TARGETS].mean(),
    "sigmoid": lambda x: optax.sigmoid_binary_cross_entropy(x, MASK.astype(np.float32)).mean(),
    "softplus": lambda x: jax.nn.softplus(x).mean(),
    "squares": lambda x: jnp.square(x - 1).mean(),
    "huber": lambda x: optax.huber_loss(x, jnp.zeros_like(x)).mean(),
    "widened at the end": lambda x: -jax.nn.log_softmax(x)[:, 0].mean().astype(jnp.float32),
}


def exact(fn, x):
    """The same function in fp32, on the same bf16 numbers: the error of its sums is far below bf16's."""
    return np.asarray(jax.jit(fn)(x), np.float64)


def some(forms, *kept):
    """The forms that every run of the tests tries; `make prove` tries all."""
    return [pytest.param(form, marks=[] if form in kept else pytest.mark.prove) for form in forms]


FORMS = some([*SOFTMAX, *NORMS], "jax.nn.softmax", "exp(x - max) * (1 / sum)", "inside lax.scan", "centered")


@pytest.mark.parametrize("policy", some(["bf16-mixed", "fp16-mixed", "bf16-mixed,emulate=true"], "bf16-mixed"))
@pytest.mark.parametrize("form", FORMS)
def test_an_island_rounds_once_where_it_ends(form, policy):
    """Half a unit in the last place of the format, and what fp32 arithmetic on 32 numbers may add."""
    fn = {**SOFTMAX, **NORMS}[form]
    found, wanted = compiled(under(fn, policy))(X), exact(fn, X)
    unit = 2.0**-11 if policy == "fp16-mixed" else 2.0**-8
    assert found.dtype == {"bf16-mixed": jnp.bfloat16, "fp16-mixed": jnp.float16}.get(policy, jnp.float32)
    error = np.abs(np.asarray(found, np.float64) - wanted)
    smallest = 2.0**-133 if policy == "bf16-mixed" else 2.0**-25
    assert (error <= (unit + 2 * WIDTH * 2.0**-23) * np.abs(wanted) + smallest).all()


@pytest.mark.parametrize("form", some(LOSSES, "optax, integer labels", "softplus", "squares"))
def test_a_loss_is_fp32_inside_and_out(form):
    found, wanted = compiled(under(LOSSES[form]))(X), exact(LOSSES[form], X)
    assert found.dtype == jnp.float32
    assert abs(float(found) - wanted) <= 8 * ROWS * WIDTH * 2.0**-24 * np.abs(X).max()


@pytest.mark.parametrize(
    "form", some(["jax.nn.softmax", "exp(x - max) / sum", "centered", "log_softmax"], "jax.nn.softmax")
)
def test_its_gradient_is_narrowed_once_on_the_way_out(form):
    fn = {**SOFTMAX, **NORMS, **LOSSES}[form]
    weights = np.cos(np.arange(ROWS * WIDTH, dtype=np.float32)).astype(jnp.bfloat16).reshape(ROWS, WIDTH)

    def loss(x):
        y = fn(x)
        return (y.astype(jnp.float32) * weights.astype(np.float32)).sum() if y.ndim else y.astype(jnp.float32)

    found = np.asarray(compiled(jax.grad(lambda x: under(loss)(x)))(X), np.float64)
    wanted = np.asarray(jax.jit(jax.grad(loss))(X), np.float64)
    slack = 4 * WIDTH * 2.0**-24 * np.abs(wanted).max()
    assert (np.abs(found - wanted) <= 2.0**-8 * np.abs(wanted) + slack).all()


def test_a_policy_may_ask_for_a_narrow_island():
    text = str(jax.make_jaxpr(under(jax.nn.softmax, "bf16-mixed,softmax=bf16"))(X))
    assert "bf16[4,32] = exp" in text


def test_what_was_written_in_fp32_is_left_as_it_is():
    """Not one operation more: the function's own conversions are its islands."""

    def own(x):
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True))).astype(x.dtype)

    written = jax.make_jaxpr(own)(X.astype(jnp.bfloat16))
    found = jax.make_jaxpr(under(own))(X.astype(jnp.bfloat16))
    names = [[eqn.primitive.name for eqn in closed.eqns] for closed in (written, found)]
    assert [name for name in names[1] if name != "select_n"][-len(names[0]) :] == names[0]


PARAMS = {"w": jnp.eye(8), "table": jnp.ones((6, 8)), "gain": jnp.ones(8)}
TABLE = np.sin(np.arange(32, dtype=np.float32)).reshape(4, 8)
ANGLES = jnp.outer(jnp.arange(4.0), 100.0 ** -jnp.linspace(0, 1, 4))


def rotated(x):
    one, two = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(ANGLES), jnp.sin(ANGLES)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


PROMOTED = {
    "a table": lambda p, x: (x + TABLE) @ p["w"],
    "a number": lambda p, x: (x * np.float32(2)) @ p["w"],
    "a number beside a parameter": lambda p, x: x @ (p["w"] * np.float32(2)),
    "rotary angles": lambda p, x: rotated(x @ p["w"]) @ rotated(x).T,
    "angles by a matmul": lambda p, x: x * jnp.cos(jnp.einsum("i,j->ij", jnp.arange(4.0), jnp.ones(8))) @ p["w"],
    "one_hot @ table": lambda p, x: jax.nn.one_hot(np.arange(4), 6) @ p["table"] @ p["w"],
    "a lookup that widens": lambda p, x: p["table"].astype(jnp.float32)[np.arange(4)] @ p["w"],
    "noise": lambda p, x: (x + jax.random.normal(jax.random.key(0), x.shape)) @ p["w"],
    "a norm that returns fp32": lambda p, x: (
        linen.LayerNorm(dtype=jnp.float32).apply({"params": {"scale": p["gain"], "bias": p["gain"]}}, x) @ p["w"]
    ),
    "a softmax in fp32": lambda p, x: jax.nn.softmax((x @ x.T).astype(jnp.float32)) @ (x @ p["w"]),
    "a carry in fp32": lambda p, x: lax.scan(lambda c, row: (jnp.tanh(c @ p["w"] + row), None), jnp.zeros(8), x)[
        0
    ],
    "a branch": lambda p, x: lax.cond(x[0, 0] > 9, lambda x: x + TABLE, lambda x: x * TABLE, x) @ p["w"],
    "inside jax.checkpoint": lambda p, x: jax.checkpoint(lambda x: (x + TABLE) @ p["w"])(x + TABLE),
    "the residual after it": lambda p, x: ((x + TABLE) + (x + TABLE) @ p["w"]) @ p["w"],
}


def products(jaxpr):
    """The operand dtypes of every matmul of activations."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.invars[0].aval.ndim > 1 - (eqn.invars[1].aval.ndim > 1):
            yield {str(atom.aval.dtype) for atom in eqn.invars}
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from products(inner)


@pytest.mark.parametrize("policy", some(["bf16-mixed", "fp16-mixed"], "bf16-mixed"))
@pytest.mark.parametrize("case", some(PROMOTED, "rotary angles", "one_hot @ table", "a carry in fp32"))
def test_tables_and_constants_do_not_promote_the_stream(case, policy):
    def call(masters, x):
        with jax.default_matmul_precision("highest"):
            return interpreted(lambda p, x: (jnp.float32(0), PROMOTED[case](p, x)), masters, x, policy)

    x = X[:, :8]
    closed = jax.make_jaxpr(call)(PARAMS, x)
    compute = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}[policy]
    found = [
        operands
        for operands in products(closed.jaxpr)
        if case != "angles by a matmul" or "float32" not in operands
    ]
    assert found
    assert all(operands == {compute} for operands in found), found
    y = np.asarray(jax.jit(call)(PARAMS, x)[1], np.float64)
    assert str(closed.out_avals[1].dtype) == compute
    wanted = np.asarray(PROMOTED[case](PARAMS, jnp.asarray(x)), np.float64)
    assert (np.abs(y - wanted) <= 8 * 2.0**-8 * np.abs(wanted).max()).all()


def test_angles_stay_fp32_where_positions_are_multiplied():
    def far(p, x):
        return jnp.cos(jnp.einsum("i,j->ij", 4096.0 + jnp.arange(4.0), jnp.ones(8) / 3)) * (x @ p["w"])

    y = interpreted(far, PARAMS, np.ones((4, 8), np.float32))
    wanted = np.cos((4096 + np.arange(4.0))[:, None] / np.float32(3))
    assert np.abs(np.asarray(y, np.float64) - wanted).max() <= 2.0**-8 + 4100 * 2.0**-23


LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize("lowest", [np.full((4, 4), LOWEST), LOWEST], ids=["array", "number"])
def test_a_mask_of_the_lowest_fp32_number_stays_finite_where_the_stream_was_promoted(lowest):
    def attend(p, x):
        x = x + TABLE
        return jax.nn.softmax(jnp.where(np.zeros((4, 4), bool), x @ x.T, lowest)) @ x @ p["w"]

    y = interpreted(attend, PARAMS, X[:, :8], "fp16-mixed")
    assert np.isfinite(np.asarray(y, np.float32)).all()


def test_a_number_that_compute_holds_is_added_and_selected_as_it_is():
    """GELU adds one; attention masks with -0.7 of the largest number. Neither can leave the format."""

    def attend(p, x):
        x = jax.nn.gelu(x + TABLE)
        return jax.nn.softmax(jnp.where(np.eye(4, dtype=bool), x @ x.T, -1e38)) @ x @ p["w"]

    loss = partial(interpreted, attend, cast_batch=False)
    traced = jax.make_jaxpr(loss)(PARAMS, jnp.asarray(X[:, :8], jnp.bfloat16))
    assert str(traced).count("name=isinf") == 1  # of the table, whose numbers could be any


def test_what_the_function_asked_for_is_refused_with_its_line():
    def asked(p, x):
        wide = x.astype(jnp.float32)
        return jnp.cumsum(wide, 0) @ p["w"]

    with pytest.raises(PolicyError, match=r"multiplies float32\[4, 8\] by `w`") as caught:
        interpreted(asked, PARAMS, X[:, :8])
    assert "converted to float32 at" in caught.value.hint
    assert "test_islands.py" in caught.value.hint
