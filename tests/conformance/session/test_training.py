"""Opening a session and training in it: the same on every backend, from the same weights and tokens.

A step takes seconds to compile on JAX, so some of it is a sample in the fast suite and all of it in `make prove`.
"""

from functools import cache

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import FP32
from halfstep.core.policy import Policy
from halfstep.training.session import open_session
from tests.conformance.session.sessions import RECIPE, SMALL, as_bf16, masters, prove, session
from tests.token_batches import batch

U32 = 2.0**-24
SERIES = 72  # results one after another in two blocks, forward and backward, each with its rounding


def batches(config, steps):
    rng = np.random.default_rng(4)
    shape = (config.training.micro_batches, config.training.batch, config.model.context + 1)
    return [(rng.integers(0, 8, shape) * 8).astype(np.int32) for _ in range(steps)]


def trained(backend, policy, optimizer, steps):
    config = load("tiny", [*RECIPE, "optimizer.rate=0.003", f"optimizer.name={optimizer}"])
    session = backend.open(config, policy, lambda applied, xp: 1.0 / (1.0 + 0.1 * applied))
    first = {n: record for n, record in session.state().items() if n.startswith(("model.", "remainder."))}
    losses = [session.read(session.step(batch))["loss"] for batch in batches(config, steps)]
    return first, np.array(losses), session


trained_once = cache(trained)  # what several backends are compared with


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("fp32", "muon"),
        pytest.param("bf16-mixed", "adamw", marks=prove),
        pytest.param("fp32", "adamw", marks=prove),
        pytest.param("fp16-mixed", "muon", marks=prove),
    ],
)
def test_twenty_steps_of_training(slow_backend, torch_backend, policy, optimizer):
    """The same weights to begin with, bit for bit, and then the same losses at every step.

    In half precision to one rounding of the format: the logits of a loss are not known any better. In fp32
    to one rounding for each of a series of results, though the weights are those of twenty steps.
    """
    first, losses, session = trained(slow_backend, policy, optimizer, 20)
    expected_first, expected, _ = trained_once(torch_backend, policy, optimizer, 20)
    assert first == expected_first
    fmt = Policy.parse(policy).compute.format
    bound = SERIES * U32 if fmt == FP32 else 2.0 ** -(fmt.mantissa_bits + 1)
    assert (np.abs(losses - expected) <= bound * expected).all(), (losses - expected) / expected
    assert losses[-1] < losses[0] - 0.5
    assert session.applied() == 20


SHRUNK = {
    "speedrun": ["model.heads=2", "model.zero_init=false", "model.zero_head=false"],
    "golf": ["model.layers=3", "model.heads=4", "model.kv_heads=2", "model.mlp_width=64", "model.zero_init=false"],
}


@pytest.mark.parametrize("recipe", ["speedrun", pytest.param("golf", marks=prove)])
def test_ten_steps_of_a_recipe_with_rates_of_its_own(slow_backend, torch_backend, recipe):
    """Each group at its rate, Muon's momentum on its way up: the same losses, bounded as above.

    Rates are for a model as small as this: at those of the recipe its loss is chaos after a few steps. And nothing
    starts at zero: the first gradients behind it are of the size of Adam's epsilon, where rounding decides.
    """
    rates = [f"optimizer.{kind}_rate={rate}" for kind, rate in RECIPE_RATES[recipe].items()]
    given = [*RECIPE, *SHRUNK[recipe], *rates, "optimizer.muon_momentum_warmup=8", "training.steps=10"]

    def losses(name):
        config = load(recipe, [*given, f"backend={name}"])
        session = open_session(config, Policy.parse("fp32"), "cpu")
        return np.array([session.read(session.step(batch))["loss"] for batch in batches(config, 10)])

    found, expected = losses(slow_backend.name), losses(torch_backend.name)
    assert (np.abs(found - expected) <= SERIES * U32 * expected).all(), (found - expected) / expected
    assert found[-1] < found[0] - 0.1


RECIPE_RATES = {
    "speedrun": {"embedding": 0.03, "head": 0.01, "scalar": 0.002, "muon": 0.002},
    "golf": {"embedding": 0.005, "scalar": 0.004, "muon": 0.004},
}


def test_stochastic_rounding_takes_the_same_words_everywhere(slow_backend, torch_backend):
    """After one step most weights are rounded from the same number by the same word: other words would make half
    of them differ."""
    left, right = (
        masters(trained(b, "bf16-true,param=bf16:stochastic", "adamw", 1)[2].state())["blocks.0.mlp.up.weight"]
        for b in (slow_backend, torch_backend)
    )
    assert (left == right).mean() > 0.95


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("policy", ["compute=tf32,emulate=true", "compute=e6m9ieee,scale=dynamic,emulate=true"])
def test_any_format_runs_emulated_under_every_optimizer(slow_backend, policy, optimizer):
    s = session(slow_backend, policy, f"optimizer.name={optimizer}")
    result, _ = slow_backend.fingerprint(s, batch(0, s))
    assert isinstance(result, str) or np.isfinite(result["loss"])  # JAX traces it


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("bf16-true", "adamw"),
        ("bf16-true,param=bf16:stochastic,emulate=true", "muon"),
        pytest.param("bf16-true", "muon", marks=prove),
        pytest.param("bf16-true,emulate=true", "adamw", marks=prove),
        pytest.param("bf16-true,emulate=true", "muon", marks=prove),
    ],
)
def test_masters_stay_in_their_format_after_every_update(slow_backend, policy, optimizer):
    s = session(slow_backend, policy, f"optimizer.name={optimizer}")
    for step in range(2):
        before = masters(s.state())
        s.step(batch(step, s))
        after = masters(s.state())
        assert any(not np.array_equal(before[name], after[name]) for name in after)
        assert all(np.array_equal(master, as_bf16(master)) for master in after.values())


def test_it_says_what_and_where_it_is(backend):
    s = open_session(load("tiny", [*SMALL, f"backend={backend.name}"]), Policy.parse("fp32"), "cpu")
    assert isinstance(s, backend.session.Session)
    assert s.description.kind == "cpu"
    assert s.memory() > 2**20
    with pytest.raises(HalfstepError, match="`nothing` is"):
        backend.session.Session(s.config, s.policy, "nothing")
