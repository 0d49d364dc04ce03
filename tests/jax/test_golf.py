"""The recipe `golf` with Muon: through the trainer on JAX, and each of Muon's updates against torch's."""

import json

import numpy as np
import pytest

from halfstep.cli.main import run
from halfstep.config.groups import parameter_groups
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.training.schedule import momentum
from halfstep.training.session import open_session
from tests.conformance.decoders import awake_weights
from tests.jax.test_optim import ROUNDED
from tests.token_batches import batch

SMALL = ["model.vocabulary=256", "model.context=16", "model.width=32", "model.layers=3", "model.heads=4"]
SMALL += ["model.kv_heads=2", "model.mlp_width=64", "training.batch=2", "training.micro_batches=2"]
SMALL += ["training.compile=false"]
STEPS = 2


def opened(backend):
    config = load("golf", [*SMALL, f"backend={backend}", f"training.steps={STEPS}", "training.warmdown=0"])
    weights = awake_weights(config.model)
    return open_session(config, Policy.parse("fp32"), "cpu", weights=list(weights.items()))


def numbers(state, prefix, end=""):
    return {
        name.removeprefix(prefix).removesuffix(end): np.frombuffer(bytes(data), np.float32).reshape(shape)
        for name, (_, shape, data) in state.items()
        if name.startswith(prefix) and name.endswith(end)
    }


def test_muon_takes_the_parameters_and_makes_the_updates_of_torch():
    """From the same weights and gradients; what is recovered of a gradient is off by three roundings."""
    torch = pytest.importorskip("torch")
    from halfstep.torch import Muon

    session = opened("jax")
    config = session.config.optimizer
    warming = {"start": config.muon_momentum_start, "end": config.muon_momentum}
    warming |= {"warmup": config.muon_momentum_warmup}
    before, moved = session.state(), set()
    [group] = [group for group in parameter_groups(session.config.model, config) if group.muon]
    for applied in range(STEPS):
        session.step(batch(applied, session))
        after = session.state()
        momenta, earlier = (numbers(state, "optimizer.0.", ".momentum") for state in (after, before))
        weights, found = numbers(before, "model."), numbers(after, "model.")
        assert momenta.keys() == {*group.names}
        now = float(momentum(applied, np, **warming))
        for name, kept in momenta.items():
            p = torch.nn.Parameter(torch.from_numpy(weights[name].copy()))
            theirs = Muon([p], lr=config.muon_rate, momentum=now)
            theirs.step({p: torch.from_numpy(earlier[name].copy())})  # its momentum is then what ours was
            p.data = torch.from_numpy(weights[name].copy())
            theirs.step({p: torch.from_numpy((kept - np.float64(now) * earlier[name]).astype(np.float32))})
            rows, columns = p.shape
            # Newton-Schulz in another order of sums, from a momentum that is off; then the sum with the weight.
            bound = config.muon_rate * max(1.0, rows / columns) ** 0.5 * 2 * ROUNDED
            assert np.abs(found[name] - p.detach().numpy()).max() <= bound + 2.0**-22, name
            if np.abs(found[name] - weights[name]).max() > config.muon_rate / 16:
                moved.add(name)
        before = after
    assert moved == {*group.names}


@pytest.mark.prove
def test_both_backends_hold_the_same_moments_of_golf():
    names = [{name for name in opened(each).state() if name.startswith("optimizer.")} for each in ("jax", "torch")]
    assert names[0] == names[1]
    assert not any("embed" in name or "skip" in name for name in names[0] if name.endswith(".momentum"))


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_the_trainer_trains_golf_on_jax(policy, tmp_path):
    out = tmp_path / "run"
    words = [*SMALL, "training.steps=12", "training.validation_tokens=64", "artifact.limit=1000000"]
    given = [part for each in words for part in ("--set", each)]
    assert run(["train", "golf", "--backend", "jax", "--policy", policy, "--out", str(out), *given]) == 0
    events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step" and not event.get("skipped")]
    assert len(losses) >= 8
    assert losses[-1] < losses[0] - 0.5
