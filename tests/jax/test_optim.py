"""AdamW by its equations, Muon against its reference in numpy, and what decays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep.jax
from halfstep.config.groups import NEWTON_SCHULZ
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP16, FP32
from halfstep.jax import init, make_step
from halfstep.jax.numerics.cast import quantize
from halfstep.jax.optim.optimizers import adamw, decay_mask, muon, orthogonalize
from tests.jax.draws import normal


def train(optimizer, params, steps):
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    for step in range(steps):
        grads = {name: normal(*p.shape, seed=10 * step + i) for i, (name, p) in enumerate(params.items())}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(p) for name, p in params.items()}, state


def test_adamw_is_its_equations():
    rate, betas, eps, decay = 1e-2, (0.9, 0.95), 1e-8, 0.1
    given = {"a.weight": normal(6, 4), "b": normal(5, seed=1)}
    found, _ = train(adamw(rate, betas, eps, decay), jax.tree.map(jnp.asarray, given), 20)
    for place, (name, start) in enumerate(given.items()):
        w, m, v = start.astype(np.float64), 0.0, 0.0
        for step in range(20):
            g = normal(*w.shape, seed=10 * step + place).astype(np.float64)
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
            ahead = m / (1 - betas[0] ** (step + 1)) / (np.sqrt(v / (1 - betas[1] ** (step + 1))) + eps)
            w = w - rate * (ahead + (decay * w if name == "a.weight" else 0))
        # 20 updates of at most 2.3 rates each (|m| <= 2.3 sqrt(v) at these betas), each off by some 20 roundings,
        # and as many sums near |w|
        bound = 20 * (2.3 * rate * 20 + np.abs(start).max() + 1) * 2.0**-24
        assert np.abs(found[name] - w).max() <= bound


def test_matrices_decay_and_the_rest_does_not():
    matrix, vector = jnp.zeros((2, 2)), jnp.zeros(2)
    flat = {"up.weight": matrix, "up.bias": vector, "norm.weight": vector, "residual_mix": matrix}
    found = decay_mask({**flat, "deep": {"weight": matrix}})
    assert [name for name, value in found.items() if value is True] == ["up.weight"]
    assert found["deep"]["weight"] is True


# Each Newton-Schulz step can stretch an error by its slope, at most a = 3.4445, and adds some 40 roundings.
STRETCHED = sum(3.4445**power for power in range(6))
ROUNDED = 40 * 2.0**-24 * STRETCHED


def reference(matrix, held):
    """Five Newton-Schulz steps in numpy, with `held` where a format would store."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = held(x / (np.linalg.norm(x) + 1e-7))
    for _ in range(5):
        product = held(x @ x.T)
        x = held(a * x + held(b * product + c * held(product @ product)) @ x)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonalize_is_its_reference_and_pushes_singular_values_towards_one(shape):
    drawn = np.stack([normal(*shape, seed=seed) for seed in range(3)])
    out = np.asarray(orthogonalize(jnp.asarray(drawn), FP32), np.float64)
    for index in range(3):
        exact = reference(drawn[index].astype(np.float64), lambda x: x)
        assert np.abs(out[index] - exact).max() <= ROUNDED
        values = np.linalg.svd(out[index], compute_uv=False)
        # Jordan et al.'s coefficients leave singular values between about 0.7 and 1.2, unless they began near 0.
        assert values.max() < 1.3
        assert np.median(values) > 0.6


@pytest.mark.prove
@pytest.mark.parametrize("fmt", [BF16, FP16])
def test_the_iteration_is_in_its_format_natively_and_emulated(fmt):
    dtype = jnp.bfloat16 if fmt == BF16 else jnp.float16
    drawn = normal(1, 8, 8)
    native = orthogonalize(jnp.asarray(drawn), fmt)
    emulated = np.asarray(orthogonalize(jnp.asarray(drawn), fmt, emulate=True))
    assert native.dtype == dtype
    assert np.array_equal(emulated, emulated.astype(dtype).astype(np.float32))
    exact = reference(drawn[0].astype(np.float64), lambda x: x)
    for found in (np.asarray(native, np.float64), emulated):
        error = np.abs(found[0] - exact).max()
        # three roundings to the format in each step, of numbers up to about 4
        assert 0 < error <= 3 * 4 * 2.0 ** -(fmt.mantissa_bits + 1) * STRETCHED


@pytest.mark.prove
def test_muon_is_the_same_one_by_one_and_in_batches():
    params = {str(i): jnp.asarray(normal(4, 8, seed=i)) for i in range(3)} | {"tall": jnp.asarray(normal(8, 4))}
    grads = {name: jnp.asarray(normal(*p.shape, seed=9 + i)) for i, (name, p) in enumerate(params.items())}
    optimizer = muon(0.02)
    together, _ = optimizer.update(grads, optimizer.init(params), params)
    for name in params:
        one = {name: params[name]}
        alone, _ = optimizer.update({name: grads[name]}, optimizer.init(one), one)
        assert np.abs(np.asarray(alone[name] - together[name])).max() <= 0.02 * ROUNDED
        rows, columns = params[name].shape
        # Nesterov from rest: g + 0.95 g, whose length does not matter
        exact = reference(np.asarray(grads[name], np.float64), lambda x: x) * max(1, rows / columns) ** 0.5
        assert np.abs(np.asarray(together[name]) + 0.02 * exact).max() <= 2 * 0.02 * ROUNDED


def test_muon_takes_matrices_and_looks_ahead_along_its_momentum():
    with pytest.raises(HalfstepError, match="`gain` has 1 dimensions"):
        muon().init({"gain": jnp.ones(4)})
    optimizer, params = muon(1.0, momentum=0.5), {"w": jnp.asarray(normal(4, 4))}
    first, second = (jnp.asarray(normal(4, 4, seed=seed)) for seed in (5, 6))
    _, state = optimizer.update({"w": first}, optimizer.init(params), params)
    updates, _ = optimizer.update({"w": second}, state, params)
    # momentum 0.5 first + second; Nesterov adds half of it to the gradient once more
    ahead = np.asarray(second, np.float64) + 0.5 * (0.5 * np.asarray(first, np.float64) + np.asarray(second))
    assert np.abs(np.asarray(updates["w"]) + reference(ahead, lambda x: x)).max() <= 2 * ROUNDED


@pytest.mark.prove
@pytest.mark.parametrize(("policy", "own"), [("fp32", None), ("bf16-mixed,emulate=true", None), ("fp32", "bf16")])
def test_muon_is_torchs_in_the_format_of_the_policy_or_its_own(policy, own):
    torch = pytest.importorskip("torch")
    from halfstep.torch import Muon, prepare

    net = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False))
    net[0].weight.data = torch.from_numpy(normal(8, 4))
    run = prepare(net, Muon(net.parameters(), lr=0.02, weight_decay=0.1, iteration=own), policy)
    optimizer = halfstep.jax.muon(0.02, weight_decay=0.1, iteration=own)
    state = init({"net": {"weight": jnp.asarray(normal(8, 4))}}, optimizer, policy)
    step = make_step(lambda params, g: jnp.sum(params["net"]["weight"].astype(jnp.float32) * g), optimizer)
    for number in range(3):
        g = normal(8, 4, seed=5 + number)
        g = np.array(g if policy == "fp32" else quantize(jnp.asarray(g), BF16, overflow="inf"))
        run.step(lambda g: (net[0].weight * g).sum(), [torch.from_numpy(g)])
        state, _ = step(state, g)
    found, expected = np.asarray(state.params["net"]["weight"]), net[0].weight.detach().numpy()
    # Three updates, each off by the sums of Newton-Schulz; in bf16 a sum may fall to the other side of a rounding.
    unit = ROUNDED if policy == "fp32" and own is None else 3 * 4 * 2.0**-8 * STRETCHED
    assert np.abs(found - expected).max() <= 3 * 0.02 * 2**0.5 * unit
    assert np.abs(found - normal(8, 4)).max() > 0.02
