"""AdamW and Muon against their equations in fp64, and as optimizers of MLX."""

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP16
from halfstep.mlx.optim.optimizers import AdamW, Muon, orthogonalize

ULP = 2.0**-24


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def away_from_zero(*shape, seed=0):
    """Gradients between 0.5 and 1.5 with random signs: nothing cancels beyond the bound below."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def reference_adamw(w, grads, rate, betas, eps, decay):
    """The equations of the module's docstring, in fp64."""
    w, m, v = w.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(grads, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g.astype(np.float64) ** 2
        w = w * (1 - rate * decay)
        w = w - rate * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return w


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_adamw_follows_its_equations(betas):
    w, grads = draw(6, 4), [away_from_zero(6, 4, seed=s) for s in range(20)]
    optimizer = AdamW(0.01, betas, 1e-8, 0.1)
    held = {"w": mx.array(w)}
    for g in grads:
        held = optimizer.apply_gradients({"w": mx.array(g)}, held)
    exact = reference_adamw(w, grads, 0.01, betas, 1e-8, 0.1)
    # Each step: at most 32 roundings of an update of about the rate, and 4 of the weight.
    bound = 20 * ULP * (32 * 0.01 * 2 + 4 * np.abs(w).max())
    assert np.abs(np.array(held["w"]) - exact).max() <= bound


def test_the_first_bias_correction_does_not_cancel():
    """1 - 0.999 in fp32 is off by 1.3e-5, and a first step of MLX's own AdamW with it by half of that."""
    g = mx.array(away_from_zero(64))
    ours, theirs = AdamW(1.0, (0.9, 0.999)), mlx.optimizers.AdamW(1.0, [0.9, 0.999], 1e-8, 0.0, True)
    # The first update is the gradient's sign.
    made = [o.apply_gradients({"w": g}, {"w": mx.zeros(64)})["w"] for o in (ours, theirs)]
    off = [float(mx.abs(w + mx.sign(g)).max()) for w in made]
    assert off[0] <= 16 * ULP
    assert off[1] > 16 * ULP


@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, mx.bfloat16), (FP16, mx.float16)])
def test_the_iteration_runs_in_its_format_and_emulated_holds_the_same_numbers(fmt, dtype):
    drawn = mx.array(draw(2, 4, 8))
    native, emulated = orthogonalize(drawn, fmt), orthogonalize(drawn, fmt, emulate=True)
    assert native.dtype == dtype
    assert emulated.dtype == mx.float32
    assert mx.array_equal(emulated, emulated.astype(dtype).astype(mx.float32))
    # a x + B x is one sum rounded once when emulated, and rounded thrice natively: an ulp or two a step
    bound = sum(3.4445**s for s in range(6)) * 4 * 2.0 ** -(fmt.mantissa_bits + 1)
    assert float(mx.abs(native.astype(mx.float32) - emulated).max()) <= bound


def test_muon_takes_matrices_only_and_is_the_same_one_by_one_and_in_batches():
    with pytest.raises(HalfstepError, match="matrices"):
        Muon().init({"gain": mx.zeros(4)})
    weights = {str(i): mx.array(draw(4, 8, seed=i)) for i in range(3)}
    grads = {str(i): mx.array(draw(4, 8, seed=9 + i)) for i in range(3)}
    together = Muon().apply_gradients(grads, weights)
    for key in weights:
        alone = Muon().apply_gradients({key: grads[key]}, {key: weights[key]})
        assert mx.array_equal(together[key], alone[key])


def test_a_tree_of_lists_and_modules_comes_back_as_it_was():
    tree = {"layers": [{"weight": mx.array(draw(4, 4))}, {"weight": mx.array(draw(2, 4))}]}
    optimizer = Muon()
    out = optimizer.apply_gradients(tree, tree)
    assert [layer["weight"].shape for layer in out["layers"]] == [(4, 4), (2, 4)]
    assert optimizer.state["layers"][1]["weight"]["momentum"].shape == (2, 4)
    assert optimizer.step.item() == 1


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_rates_follow_the_state_and_schedules(kind):
    w, g = {"w": mx.array(draw(4, 4))}, {"w": mx.array(draw(4, 4, seed=1))}
    half = kind(0.2)
    half.learning_rate = mx.array(0.1)
    scheduled = kind(lambda step: 0.1 + 0.1 * step)
    full = kind(0.1)
    first = [optimizer.apply_gradients(g, w)["w"] for optimizer in (half, scheduled, full)]
    assert mx.array_equal(first[0], first[2])
    assert mx.array_equal(first[1], first[2])
    scheduled.apply_gradients(g, w)
    assert scheduled.learning_rate.item() == pytest.approx(0.2)
