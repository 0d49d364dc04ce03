"""Any function under a policy: what stays wide, what is cast and rebuilt, what is refused and with which words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from halfstep.core.errors import PolicyError, PolicyReachError
from halfstep.core.policy import Policy
from halfstep.jax import casts_for, linear, rms_norm
from halfstep.jax.convert.apply import Leaves, apply
from halfstep.jax.convert.interpret import cast_inside
from halfstep.jax.layers import COMPILER_OPTIONS
from tests.jax.draws import normal


def on_grid(x, dtype=jnp.bfloat16):
    """Whether every number is one of the dtype."""
    x = np.asarray(x, np.float32)
    return np.array_equal(x, x.astype(dtype).astype(np.float32))


def assert_summed_in_fp32(found, x, t, factor=1.0):
    """x^T t of bf16 operands: exact products, one for each row, summed in fp32."""
    x, t = (a.astype(jnp.bfloat16).astype(np.float64) for a in (x, t))
    bound = factor * (len(x) * 2.0**-24 * np.abs(x).T @ np.abs(t))
    assert (np.abs(found - factor * (x.T @ t)) <= bound).all()


def interpreted(fn, policy, *, cast_batch=True):
    """fn(params, batch) under a policy, as a function of fp32 masters by name."""

    def call(masters, params, batch):
        applied = apply(params, Policy.parse(policy))
        return cast_inside(fn, applied, masters, (batch,), cast_batch=cast_batch)[0]

    return call


def gradients(fn, params, batch, policy):
    """The gradient of a function's (scalar) result with respect to every trained leaf, by name."""
    masters = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in Leaves(params).trained.items()}
    call = interpreted(lambda p, b: fn(p, b).astype(jnp.float32), policy)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.grad(lambda m, b: call(m, params, b)), compiler_options=COMPILER_OPTIONS)(
            masters, batch
        )
    return {name: np.asarray(g) for name, g in found.items()}


def shape_of(fn, params, batch, policy="bf16-mixed", **options):
    """Traces alone: what is refused is refused here."""
    masters = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in Leaves(params).trained.items()}
    return jax.eval_shape(lambda m: interpreted(fn, policy, **options)(m, params, batch), masters)


PRODUCTS = {
    "matmul": lambda w, x: x @ w,
    "weight first": lambda w, x: (w.T @ x.T).T,
    "einsum": lambda w, x: jnp.einsum("bi,io->bo", x, w),
    "vmap": lambda w, x: jax.vmap(lambda row: w.T @ row)(x),
    "concatenated": lambda w, x: x @ jnp.concatenate([w[:, :3], w[:, 3:]], axis=1),
    "arithmetic": lambda w, x: x @ (0.5 * w.reshape(4, 2, 6) + 0.5 * w.reshape(4, 2, 6)).reshape(8, 6),
    "remat": lambda w, x: jax.checkpoint(lambda w, x: x @ w)(w, x),
    "jit": lambda w, x: jax.jit(lambda w, x: x @ w)(w, x),
    "cond": lambda w, x: lax.cond(x.sum() > -1e9, lambda w: x @ w, lambda w: x @ -w, w),
    "scan": lambda w, x: lax.scan(lambda c, row: (c, row @ w), 0, x)[1],
    "preferred": lambda w, x: jnp.dot(x, w, preferred_element_type=jnp.float32),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_weight_gradient_is_a_sum_in_fp32_that_nothing_rounds(product):
    x, t = normal(32, 8, seed=1), normal(32, 6, seed=2)

    def loss(params, batch):
        return (PRODUCTS[product](params["w"], batch["x"]) * batch["t"]).astype(jnp.float32).sum()

    found = gradients(loss, {"w": normal(8, 6)}, {"x": x, "t": t}, "bf16-mixed")["w"]
    assert_summed_in_fp32(found, x, t)
    assert not on_grid(found)


@jax.custom_jvp
def doubled(w):
    """Its rule says so, its derivative does not."""
    return w * 1.0


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2.0 * tangents[0]))
MASK = np.tril(np.ones((8, 6), np.float32))
ONES = np.ones((8, 6), np.float32)
OF_ONE = {  # a function of a weight and constants, and the factor it puts on the gradient
    "clip": (lambda w: jnp.clip(w, -9, 9), ONES),
    "clamp": (lambda w: lax.clamp(jnp.asarray(-9, w.dtype), w, jnp.asarray(9, w.dtype)), ONES),
    "tril": (jnp.tril, MASK),
    "where": (lambda w: jnp.where(MASK > 0, w, 0.0), MASK),
    "masked": (lambda w: w * jnp.tril(jnp.ones((8, 6), w.dtype)), MASK),
    "masked by a constant": (lambda w: w * jnp.asarray(MASK, w.dtype), MASK),
    "masked by its own sign": (lambda w: w * jnp.where(w > -9.0, 1.0, 0.5).astype(w.dtype), ONES),
    "pad": (lambda w: jnp.pad(w, ((0, 0), (0, 2)))[:, :6], ONES),
    "concatenate": (lambda w: jnp.concatenate([w, jnp.zeros((8, 2), w.dtype)], axis=1)[:, :6], ONES),
    "set": (lambda w: w.at[0].set(0.0), ONES * (np.arange(8) > 0)[:, None]),
    "add": (lambda w: w.at[np.array([0, 2])].add(1.0), ONES),
    "update": (
        lambda w: lax.dynamic_update_slice(w, jnp.zeros((1, 6), w.dtype), (0, 0)),
        ONES * (np.arange(8) > 0)[:, None],
    ),
    "relu": (lambda w: jax.nn.relu(w + 9.0), ONES),
    "relu at zero": (lambda w: jax.nn.relu(0.0 * w) + w, ONES),
    "custom_jvp": (doubled, 2 * ONES),
    "tile": (lambda w: jnp.tile(w, (1, 2))[:, :6], ONES),
    "stack": (lambda w: jnp.stack([w, w])[1], ONES),
    "device_put": (jax.device_put, ONES),
    "barrier": (lambda w: lax.optimization_barrier((w, jnp.zeros(3)))[0], ONES),
    "cond": (lambda w: lax.cond(jnp.sum(w) > -1e9, lambda w: w, lambda w: jnp.zeros_like(w), w), ONES),
    "remat": (jax.checkpoint(lambda w: w * 1.0), ONES),
    "map": (lambda w: lax.map(lambda row: row * 1.0, w), ONES),
    "widened loop": (
        lambda w: lax.fori_loop(0, 3, lambda _, w: w * 0.5, w.astype(jnp.float32)).astype(w.dtype),
        ONES / 8,
    ),
    "widened": (lambda w: jnp.sort(w.astype(jnp.float32)).astype(w.dtype), None),
}


@pytest.mark.parametrize("made", OF_ONE)
def test_a_function_of_one_weight_and_constants_is_made_on_its_master(made):
    x, t = normal(32, 8, seed=1), normal(32, 6, seed=2)
    fn, factor = OF_ONE[made]

    def loss(params, batch):
        return ((batch["x"] @ fn(params["w"])) * batch["t"]).astype(jnp.float32).sum()

    found = gradients(loss, {"w": normal(8, 6)}, {"x": x, "t": t}, "bf16-mixed")["w"]
    assert not on_grid(found)
    if factor is not None:
        assert_summed_in_fp32(found, x, t, factor)


@pytest.mark.parametrize(
    "made",
    [lambda e: e.at[0].set(0.0), lambda e: jnp.clip(e, -2, 2), jax.checkpoint(lambda e: e * 1.0)],
    ids=["set", "clip", "remat"],
)
def test_rows_of_what_is_made_of_an_embedding_have_sums_in_fp32(made):
    """4096 ones in bf16 stop at 256."""

    def loss(params, batch):
        return made(params["embed"])[batch].astype(jnp.float32).sum()

    found = gradients(loss, {"embed": np.zeros((3, 2), np.float32)}, np.ones(4096, np.int32), "bf16-mixed")
    assert found["embed"].tolist() == [[0, 0], [4096, 4096], [0, 0]]


def test_narrow_operands_reach_what_is_made_of_a_weight():
    """Clipped at a number that nothing reaches, a layer is the layer."""

    def through(made):
        return interpreted(lambda p, x: x @ p["a"]["w"] @ made(p["b"]["w"]), "fp8-mixed,emulate=true")

    masters = {name: jnp.asarray(leaf) for name, leaf in Leaves(PARAMS).trained.items()}
    plain, clipped = (
        np.asarray(through(made)(masters, PARAMS, normal(4, 8)))
        for made in (lambda w: w, lambda w: jnp.clip(w, -9.0, 9.0))
    )
    assert np.array_equal(plain, clipped)


NO_WEIGHTS = {
    "sorted": lambda p, x: x @ jnp.sort(p["a"]["w"]),
    "sorted, then moved and scaled": lambda p, x: x @ (2.0 * jnp.sort(p["a"]["w"]).T + p["b"]["w"]),
    "sorted, in a jit": lambda p, x: x @ jax.jit(jnp.sort)(p["a"]["w"]),
    "sorted, in a cond": lambda p, x: x @ lax.cond(x.sum() > 0, jnp.sort, lambda w: w, p["a"]["w"]),
    "sorted, row by row": lambda p, x: x @ lax.map(jnp.sort, p["a"]["w"]),
    "sorted, and looked up": lambda p, x: jnp.sort(p["a"]["w"])[jnp.argmax(x, 1)],
    "summed": lambda p, x: (
        x @ lax.scan(lambda c, row: (c + row, c), jnp.zeros_like(p["b"]["gain"]), p["a"]["w"])[1]
    ),
    "narrow in a wide loop": lambda p, x: (
        x
        @ lax.fori_loop(
            0, 3, lambda _, w: (w.astype(x.dtype) * 0.5).astype(w.dtype), p["a"]["w"].astype(jnp.float32)
        ).astype(x.dtype)
    ),
    "carried": lambda p, x: x @ lax.fori_loop(0, 3, lambda _, w: w * 0.5, p["a"]["w"]),
}


@pytest.mark.parametrize("case", NO_WEIGHTS)
def test_what_another_primitive_computes_from_a_weight_is_not_a_weight(case):
    said = r"at .*test_interpret.py:\d+.* takes what `(sort|scan|cond)` at .* computed from `a.w`, but "
    with pytest.raises(PolicyError, match=said + "fp32 weight gradients would not reach it"):
        shape_of(NO_WEIGHTS[case], PARAMS, normal(4, 8))
    with pytest.raises(PolicyError, match=said + "emulated casts"):
        shape_of(NO_WEIGHTS[case], PARAMS, normal(4, 8), "bf16-mixed,emulate=true")
    shape_of(NO_WEIGHTS[case], PARAMS, normal(4, 8), "bf16-mixed; a: compute=fp32; b: compute=fp32")


ACTIVATIONS = {
    "gain and bias": lambda p, x: (x * p["b"]["gain"] + jnp.sort(p["b"]["gain"])) @ p["a"]["w"],
    "a table": lambda p, x: (x + jnp.sort(p["b"]["w"])[:4]) @ p["a"]["w"],
    "named": lambda p, x: x @ checkpoint_name(jnp.sort(p["b"]["w"]), "activation") @ p["a"]["w"],
    "looked up": lambda p, x: jnp.sort(jnp.tanh(p["b"]["w"][jnp.argmax(x, 1)])) @ p["a"]["w"],
    "looked up next to a table": lambda p, x: (p["b"]["w"][jnp.argmax(x, 1)] + p["a"]["w"][:4]) @ p["a"]["w"],
    "sorted, and selected by the batch": lambda p, x: (
        jnp.where(x > 0, jnp.sort(p["b"]["w"])[:4], 0.0) @ p["a"]["w"]
    ),
    "layers over constants": lambda p, x: lax.scan(
        lambda h, w: (jnp.tanh(h @ w), None), jnp.ones((4, 8), x.dtype), p["a"]["w"][None]
    )[0],
    "selected by the batch": lambda p, x: jnp.where(x > 0, p["b"]["gain"], 0.0) @ p["a"]["w"],
    "of constants": lambda p, x: jnp.tanh(jnp.ones((4, 8), x.dtype) @ p["b"]["w"]) @ p["a"]["w"],
    "recurrent": lambda p, x: lax.scan(
        lambda h, token: (jnp.tanh(h @ p["a"]["w"] + p["b"]["w"][token]), None), p["b"]["w"][:1], jnp.argmax(x, 1)
    )[0],
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_what_meets_an_activation_is_one(case):
    shape_of(ACTIVATIONS[case], PARAMS, normal(4, 8))


def test_what_is_traced_and_closed_over_is_no_constant():
    def run(masters, x):
        return interpreted(lambda p, _: (x * p["b"]["gain"]) @ p["a"]["w"], "bf16-mixed")(masters, PARAMS, 0)

    assert jax.eval_shape(run, Leaves(PARAMS).trained, jnp.ones((4, 8), jnp.bfloat16)).shape == (4, 8)


STACKS = {  # activation, weight, result
    "experts": ("ebtd", "edf", "ebtf"),
    "two axes": ("abtd", "dab", "tab"),
    "transposed": ("btde", "fed", "tfbe"),
}


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("case", STACKS)
def test_stacks_of_weights_are_multiplied_on_any_backend(case, weight_first):
    """XLA on a CPU has no product of bf16 stacks with an fp32 sum unless their axes are in its order."""
    of_x, of_w, of_y = STACKS[case]
    sizes = dict(zip("abdeft", (2, 3, 5, 2, 6, 4), strict=True))
    x, w, t = (normal(*map(sizes.get, axes), seed=seed) for seed, axes in enumerate((of_x, of_w, of_y)))

    def loss(params, batch):
        pair = [(of_x, batch["x"]), (of_w, params["w"])][:: -1 if weight_first else 1]
        y = jnp.einsum(f"{pair[0][0]},{pair[1][0]}->{of_y}", pair[0][1], pair[1][1])
        return (y * batch["t"]).astype(jnp.float32).sum()

    found = gradients(loss, {"w": w}, {"x": x, "t": t}, "bf16-mixed")["w"]
    halves = [a.astype(jnp.bfloat16).astype(np.float64) for a in (t, x)]
    exact, size = (np.einsum(f"{of_y},{of_x}->{of_w}", *(f(a) for a in halves)) for f in (np.asarray, np.abs))
    # exact products, at most 12 of them summed in fp32
    assert (np.abs(found - exact) <= 12 * 2.0**-24 * size).all()
    assert not on_grid(found)


def test_gradients_of_biases_and_of_embeddings_are_summed_in_fp32():
    """A sum of 1001 ones in bf16 stops at 256, and 1001 itself is not a bf16 number."""

    def loss(params, batch):
        x = jnp.tanh(params["embed"]["weight"][batch]) * 0.0 + 1.0
        x = (x + params["bias"]) * params["scale"] + params["embed"]["weight"][batch]
        return x.astype(jnp.float32).sum()

    params = {"embed": {"weight": normal(4, 2)}, "bias": np.zeros(2, np.float32), "scale": np.float32(1)}
    found = gradients(loss, params, np.zeros(1001, np.int32), "bf16-mixed")
    assert found["bias"].tolist() == [1001, 1001]
    assert found["scale"] == 2002
    assert found["embed.weight"].tolist() == [[1001, 1001], [0, 0], [0, 0], [0, 0]]


def test_a_scan_over_stacked_layers_is_the_loop_over_them():
    params = {"layers": {"w": 0.3 * normal(3, 8, 8), "b": normal(3, 8)}, "head": {"w": normal(8, 4)}}
    x = normal(5, 8, seed=1)

    def layer(h, p):
        return h + jnp.tanh(h @ p["w"] + p["b"]), None

    def scanned(params, x):
        return (lax.scan(layer, x, params["layers"])[0] @ params["head"]["w"]).astype(jnp.float32).sum()

    def looped(params, x):
        for index in range(3):
            x, _ = layer(x, {name: stacked[index] for name, stacked in params["layers"].items()})
        return (x @ params["head"]["w"]).astype(jnp.float32).sum()

    one, other = (gradients(fn, params, x, "bf16-mixed") for fn in (scanned, looped))
    for name in one:
        assert not on_grid(one[name])
        # a few roundings of activations to bf16, which XLA places by itself
        assert np.abs(one[name] - other[name]).max() <= 2.0**-5 * np.abs(other[name]).max()


def test_a_rule_reaches_a_layer_of_any_function():
    """The operands of one layer are rounded to e4m3, those of another not at all."""
    params = {"up": {"w": normal(8, 8)}, "down": {"w": normal(8, 8, seed=3)}}
    masters = {f"{name}.w": jnp.asarray(layer["w"]) for name, layer in params.items()}
    x = normal(4, 8, seed=1).astype(jnp.bfloat16).astype(np.float32)

    def run(policy):
        outputs = interpreted(lambda p, x: (x @ p["up"]["w"], x @ p["down"]["w"]), policy)
        return [np.asarray(y) for y in outputs(masters, params, x)]

    base = run("bf16-mixed,emulate=true")
    narrow = run("bf16-mixed,emulate=true; up: compute=e4m3")
    wide = run("bf16-mixed; down: compute=fp32")
    assert not np.array_equal(base[0], narrow[0])
    assert np.array_equal(base[1], narrow[1])
    assert wide[0].dtype == jnp.bfloat16
    assert wide[1].dtype == np.float32
    bound = 8 * 2.0**-24 * np.abs(x) @ np.abs(params["down"]["w"])
    assert (np.abs(wide[1] - x.astype(np.float64) @ params["down"]["w"]) <= bound).all()


def test_the_stream_may_be_wide_behind_a_layer_that_a_rule_made_so():
    def fn(params, x):
        return jnp.tanh(x @ params["a"]["w"]) @ params["b"]["w"]

    assert shape_of(fn, PARAMS, normal(4, 8), "bf16-mixed; a: compute=fp32").dtype == jnp.float32
    assert shape_of(fn, PARAMS, normal(4, 8)).dtype == jnp.bfloat16


def test_a_sum_that_is_asked_for_in_fp32_is_not_rounded_first():
    w, x = normal(8, 8), normal(4, 8, seed=1)
    call = interpreted(lambda p, x: jnp.dot(x, p["w"], preferred_element_type=jnp.float32), "bf16-mixed")
    assert_summed_in_fp32(np.asarray(call({"w": jnp.asarray(w)}, {"w": w}, x)), x.T, w)


PARAMS = {"a": {"w": normal(8, 8)}, "b": {"w": normal(8, 8), "gain": normal(8)}}


@jax.custom_vjp
def opaque(x, w):
    return x @ w


opaque.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

REFUSED = {
    "promoted among activations": (
        lambda p, x: jnp.einsum("bi,ci->bc", (x @ p["a"]["w"]).astype(jnp.float32), x),
        r"`dot_general` multiplies float32\[4, 8\] at .*computes in bfloat16.*converted to float32 at .*:\d+",
    ),
    "asked for before a layer": (
        lambda p, x: x.astype(jnp.float32) @ p["a"]["w"],
        r"`dot_general` multiplies float32\[4, 8\] by `a.w` at .*test_interpret.py:\d+",
    ),
    "an island inside a loop": (
        lambda p, x: lax.while_loop(lambda c: c.sum() > 1e9, jnp.exp, x),
        r"`exp` of bfloat16\[4, 8\] at .*softmax=fp32",
    ),
    "inside a loop": (
        lambda p, x: lax.while_loop(lambda c: c.sum() > 1e9, lambda c: c @ p["a"]["w"], x),
        "`a.w` enters `while` at .*fp32 weight gradients would not reach it",
    ),
    "narrow into a custom_vjp": (
        lambda p, x: opaque(x, p["a"]["w"]),
        "`a.w` enters `custom_vjp_call` at .* as bfloat16, and its gradient would be bfloat16",
    ),
    "multiplied in a custom_vjp": (
        lambda p, x: opaque(x.astype(jnp.float32), p["a"]["w"].astype(jnp.float32)),
        "`a.w` enters `custom_vjp_call` at .*, which multiplies and cannot be opened",
    ),
    "of two parameters": (lambda p, x: x @ (p["a"]["w"] @ p["b"]["w"]), "multiplies `a.w` by another parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_function_does_against_the_policy_is_refused_by_name(case):
    fn, said = REFUSED[case]
    with pytest.raises(PolicyError, match=said):
        shape_of(fn, PARAMS, normal(4, 8))
    shape_of(fn, PARAMS, normal(4, 8), "fp32")  # nothing narrow, nothing lost


def test_what_the_remedies_say_is_accepted():
    def remedied(p, x):
        queries = checkpoint_name(p["a"]["w"], "activation")
        y = jax.nn.softmax((x @ p["a"]["w"]).astype(jnp.float32)).astype(x.dtype)
        y = y / jnp.sqrt(jnp.asarray(8, y.dtype))  # the root of a number is not a norm
        return (2.0 * y @ p["b"]["w"]).sum() + (queries @ p["b"]["w"]).sum()

    shape_of(remedied, PARAMS, normal(4, 8))


def test_layers_of_halfstep_mix_with_other_code():
    """They take a parameter in fp32, which is the master itself, and give it back a gradient in fp32."""
    casts = casts_for("bf16-mixed")

    def loss(p, x):
        x = rms_norm(x @ p["a"]["w"], p["b"]["gain"], casts)
        return linear(x, p["b"]["w"].astype(jnp.float32), None, casts).astype(jnp.float32).sum()

    for name, found in gradients(loss, PARAMS, normal(4, 8), "bf16-mixed").items():
        assert not on_grid(found), name
    with pytest.raises(PolicyError, match=r"`b\.w` enters `custom_vjp_call` at .* as bfloat16"):
        shape_of(lambda p, x: linear(x, p["b"]["w"], None, casts), PARAMS, normal(4, 8))


@pytest.mark.parametrize(
    "activation", [jax.nn.gelu, jax.nn.relu, jax.nn.silu, jnp.tanh, jax.nn.sigmoid, jax.nn.elu, jax.lax.erf]
)
def test_activations_run_in_compute(activation):
    assert shape_of(lambda p, x: activation(x @ p["a"]["w"]), PARAMS, normal(4, 8)).dtype == jnp.bfloat16


def test_an_operation_without_a_result_runs(capsys):
    def fn(p, x):
        jax.debug.print("{}", y := x @ p["a"]["w"])
        return y

    assert interpreted(fn, "bf16-mixed")(Leaves(PARAMS).trained, PARAMS, normal(4, 8)).dtype == jnp.bfloat16
    jax.effects_barrier()
    assert capsys.readouterr().out.startswith("[[")


def test_attention_of_jax_is_no_narrow_softmax():
    def fn(p, x):
        q = (x @ p["a"]["w"]).reshape(1, 4, 2, 4)
        return jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="xla")

    assert shape_of(fn, PARAMS, normal(4, 8)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("policy", "algorithm"), [("bf16-mixed", "BF16_BF16_F32"), ("fp16-mixed", "F16_F16_F32")])
def test_an_algorithm_that_sums_in_fp32_runs_where_it_has_no_name(policy, algorithm):
    """jax.nn.dot_product_attention asks for them; XLA's CPU backend refuses fp16's."""

    def fn(p, x):
        h = x @ p["w"]
        return jnp.einsum("ij,kj->ik", h, h, precision=algorithm, preferred_element_type=jnp.float32).sum()

    x, w = (np.random.default_rng(seed).integers(-2, 3, (4, 4)).astype(np.float32) for seed in range(2))
    found = gradients(fn, {"w": w}, x, policy)["w"]
    assert np.array_equal(found, 2 * x.T @ np.tile((x @ w).sum(0), (4, 1)))  # whole numbers: all is exact


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("bf16-mixed; b: norm=bf16", "islands have no names"),
        ("bf16-mixed,emulate=true; b: compute=e4m3", "names no matmul"),
        ("compute=tf32,emulate=true", "has no dtype that a function could see"),
    ],
)
def test_rules_that_reach_nothing_in_a_function_are_refused(policy, said):
    with pytest.raises(PolicyError, match=said):
        shape_of(lambda p, x: x @ p["a"]["w"] * p["b"]["gain"], PARAMS, normal(4, 8), policy)


def test_a_parameter_beside_a_wide_value_is_the_master_itself():
    """An island that widens its gain gets all 24 bits of it, not 8 in an fp32 array."""
    gain = normal(8)
    call = interpreted(lambda p, x: x.astype(jnp.float32) * p["gain"].astype(jnp.float32), "bf16-mixed")
    found = call({"gain": jnp.asarray(gain)}, {"gain": gain}, np.ones((2, 8), np.float32))
    assert np.array_equal(found, np.stack([gain, gain]))


def test_emulated_every_result_is_rounded_where_natively_it_would_be_stored():
    """x + 2^-9 is x in bf16 when |x| >= 1."""
    params, x = {"w": np.eye(8, dtype=np.float32)}, 1 + np.arange(8, dtype=np.float32) / 128
    call = interpreted(lambda p, x: ((x @ p["w"] + 2.0**-9) - x) * 2.0**9, "bf16-mixed,emulate=true")
    assert np.array_equal(jax.jit(lambda m: call(m, params, x))({"w": jnp.eye(8)}), np.zeros(8))


def test_emulated_gradients_are_rounded_to_the_format_of_gradients():
    def loss(params, x):
        return (jnp.tanh(x @ params["a"]["w"]) @ params["b"]["w"] * params["b"]["gain"]).astype(jnp.float32).sum()

    x = normal(4, 8, seed=1)
    found = {p: gradients(loss, PARAMS, x, p) for p in ("bf16-true,emulate=true", "bf16-mixed,emulate=true")}
    for name in found["bf16-mixed,emulate=true"]:
        assert on_grid(found["bf16-true,emulate=true"][name])
        assert not on_grid(found["bf16-mixed,emulate=true"][name])


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,emulate=true"])
def test_a_convolution_is_three_with_a_wide_weight_gradient(policy):
    kernel, x, t = normal(3, 2, 4), normal(2, 9, 2, seed=1), normal(2, 7, 4, seed=2)

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))

    def loss(params, batch):
        return (conv(batch["x"], params["conv"]["kernel"]) * batch["t"]).astype(jnp.float32).sum()

    found = gradients(loss, {"conv": {"kernel": kernel}}, {"x": x, "t": t}, policy)["conv.kernel"]
    halves = [a.astype(jnp.bfloat16).astype(np.float64) for a in (x, t)]
    windows = np.stack([halves[0][:, i : i + 7] for i in range(3)])  # 3, 2, 7, 2
    exact = np.einsum("kbti,bto->kio", windows, halves[1])
    bound = 14 * 2.0**-24 * np.einsum("kbti,bto->kio", np.abs(windows), np.abs(halves[1]))
    assert (np.abs(found - exact) <= bound).all()
    assert not on_grid(found)


def test_a_convolution_takes_no_narrow_operands():
    params, policy = {"conv": {"kernel": normal(4, 2, 3)}}, "bf16-mixed,emulate=true; conv: compute=e4m3"
    with pytest.raises(PolicyError, match=r"`conv_general_dilated` at .* `conv.kernel` with e4m3 operands"):
        shape_of(lambda p, x: lax.conv(x, p["conv"]["kernel"], (1,), "VALID"), params, normal(1, 2, 9), policy)


def test_a_batch_is_cast_unless_turned_off_and_integers_never_are():
    def fn(params, batch):
        return batch["x"], batch["n"], batch["x"] @ params["a"]["w"]

    batch = {"x": normal(4, 8), "n": np.int32(3)}
    assert [y.dtype for y in shape_of(fn, PARAMS, batch)] == [jnp.bfloat16, jnp.int32, jnp.bfloat16]
    with pytest.raises(PolicyReachError, match="bfloat16"):
        shape_of(fn, PARAMS, batch, cast_batch=False)


def test_fp32_matmuls_are_pinned_to_fp32():
    call = interpreted(lambda p, x: jnp.dot(x, p["a"]["w"]) @ jnp.dot(x, p["b"]["w"]).T, "fp32")
    text = str(jax.make_jaxpr(lambda m: call(m, PARAMS, normal(4, 8)))(Leaves(PARAMS).trained))
    assert text.count("Precision.HIGHEST, Precision.HIGHEST") == 3


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "fp16-mixed,emulate=true"])
def test_a_mask_in_the_batch_stays_finite(policy):
    """In fp16 -1e9 is an infinity, in bf16 fp32's lowest number: a row that is masked throughout would be NaN."""

    def attend(params, batch):
        return jax.nn.softmax((batch["x"] @ params["w"] + batch["mask"]).astype(jnp.float32))

    params, lowest = {"w": jnp.eye(3)}, np.finfo(np.float32).min
    mask = np.float32([[lowest] * 3, [-1e9] * 3, [-np.inf] * 3, [np.inf, 0, 0]])
    y = interpreted(attend, policy)(params, params, {"x": normal(4, 3), "mask": mask})
    assert np.isfinite(y).all(-1).tolist() == [True, True, False, False]
