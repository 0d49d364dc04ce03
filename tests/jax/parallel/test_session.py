"""Training a recipe on several devices: the run of one device, whose checkpoints any number resumes."""

import pytest

from tests.jax.parallel import jobs
from tests.training.runs import events_of, final_state

FP32, FP16 = 2.0**-23, 2.0**-11  # the unit of each format that rounds


@pytest.mark.prove
def test_a_session_on_four_devices_is_that_of_one(devices):
    """Losses are sums of so many positive terms in another order, and of weights that may round otherwise."""
    done = devices(jobs.sessions, "fp16-mixed")
    error = 4 * 2 * 8 * FP32
    four, one = done["trained"]
    assert four[0]["loss"] == pytest.approx(one[0]["loss"], rel=error)
    assert four[1]["loss"] == pytest.approx(one[1]["loss"], rel=FP16)
    assert [row["scale"] for row in four] == [row["scale"] for row in one]
    assert done["snapshot"]
    # From here on one device has the state of four.
    four, one = done["resumed"]
    assert four["loss"] == pytest.approx(one["loss"], rel=error)
    for four, one in zip(*done["scores"], strict=True):
        assert four == pytest.approx(one, rel=error)
    assert done["logits"][0] == done["logits"][1]
    assert done["blamed"][0] == done["blamed"][1]
    assert done["blamed"][0].where == "nowhere"  # nothing is wrong with this batch
    assert done["names"][0] == f"4 x {done['names'][1]}"


@pytest.mark.prove
def test_a_run_on_four_devices_is_resumed_on_one(devices, text, tmp_path):
    out = tmp_path / "run"
    settings = [
        f"data.source={text}",
        "training.steps=2",
        "training.validate_every=2",
        "training.validation_tokens=64",
    ]
    sets = [part for setting in [*jobs.SMALL[:4], *jobs.SMALL[5:], *settings] for part in ("--set", setting)]
    start = ["train", "tiny", "--backend", "jax", "--policy", "bf16-mixed", "--out", str(out)]
    assert devices(jobs.command, [*start, "--device", "cpu:0-3", *sets]) == 0
    state, manifest = final_state(out)
    assert manifest["device"].startswith("4 x ")
    more = ["train", "--resume", "--out", str(out), "--set", "training.steps=4", "--set", "monitor.on=false"]
    assert devices(jobs.command, [*more, "--device", "cpu"]) == 0
    assert final_state(out)[0].keys() == state.keys()
    assert [event["step"] for event in events_of(out, "step")][-1] == 4


@pytest.mark.prove
def test_a_batch_that_devices_cannot_share_is_refused(devices):
    message, hint = devices(jobs.open_session, "cpu:0-3", "training.batch=6")
    assert message == "4 devices cannot share a micro-batch of 6 rows equally"
    assert hint == "set training.batch to 4 or 8, or use fewer devices"
    message, hint = devices(jobs.open_session, "cpu:2-4")
    assert message == "there is no `cpu:4`; JAX sees 4 `cpu` device(s)"
    assert "xla_force_host_platform_device_count" in hint
