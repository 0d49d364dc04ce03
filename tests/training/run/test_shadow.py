"""Steps of a run beside the same steps in fp32: as often as asked, in the events, and without changing the run."""

from dataclasses import replace

import pytest

from halfstep.config.load import load
from halfstep.core.errors import ConfigError
from halfstep.core.formats import E4M3
from tests.refusals import refuses
from tests.training.runs import events_of, final_state, interrupt_at, starter

start = starter("training.steps=4", "training.save_every=2", "model.context=8", "monitor.sample_every=0")
EVERY, POLICY = "monitor.shadow_every=2", "bf16-mixed,emulate=true"


@pytest.mark.prove
def test_a_run_is_the_same_with_shadows(tmp_path, text):
    plain, shadowed = tmp_path / "plain", tmp_path / "shadowed"
    start(text, plain, policy=POLICY).run()
    interrupt_at(start(text, shadowed, EVERY, policy=POLICY), 3)
    start(text, shadowed, EVERY, policy=POLICY, resume=True).run()
    assert final_state(plain)[0] == final_state(shadowed)[0]
    losses = [{e["step"]: e["loss"] for e in events_of(out, "step")} for out in (plain, shadowed)]
    assert losses[0] == losses[1]
    shadows = events_of(shadowed, "shadow")
    assert [event["step"] for event in shadows] == [2, 4, 4]  # the last one twice: it was interrupted
    assert events_of(plain, "shadow") == []
    for event in shadows:
        # Before the step, with its weights and batch: the loss is that of the step.
        assert event["loss"] == pytest.approx(losses[0][event["step"]], rel=2.0**-20)
        assert event["band"][0] <= event["difference"] <= event["band"][1]
        assert event["causes"] == []
        assert not any(layer["outside"] for layer in event["layers"].values())
        assert event["noise"] == "bf16"
    assert events_of(shadowed, "finding") == []


def test_a_layer_outside_is_found_once_and_watched_closely(tmp_path, text):
    loop = start(text, tmp_path / "run", EVERY, policy="fp32")
    norm = loop.session.model.blocks[0].mlp_norm
    norm.precision = replace(norm.precision, norm=E4M3, emulate=True)
    loop.run()
    found = events_of(tmp_path / "run", "finding")
    assert [(event["rule"], event["where"], event["step"]) for event in found] == [
        ("shadow", ["blocks.0.mlp_norm"], 2)
    ]
    assert "more than noise of fp32" in found[0]["message"]
    assert found[0]["policy_rule"] == '"blocks.0.mlp_norm" = "compute=fp32"'
    assert [event["causes"] for event in events_of(tmp_path / "run", "shadow")] == [["blocks.0.mlp_norm"]] * 2
    assert "gradients differ from fp32 by more than noise" in events_of(tmp_path / "run", "sample")[0]["why"]


@pytest.mark.parametrize("backend", ["jax", "mlx"])
def test_other_backends_refuse_it(backend):
    with refuses(ConfigError, f"monitor.shadow_every = 2, and backend {backend} cannot run a step again", "torch"):
        load("tiny", [EVERY, f"backend={backend}"])
