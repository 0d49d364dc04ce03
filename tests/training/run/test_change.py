"""Settings that are changed at a resume: the precision, how long to train, rates; and those that may not be."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.config.run import RunConfig
from halfstep.config.schema import rows
from halfstep.core.errors import ConfigError, PolicyChangeError, ResumeError, RunFolderError
from halfstep.core.policy import Policy
from halfstep.report.page import render
from halfstep.training import paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.loop import Loop
from halfstep.training.paths import CONFIG
from halfstep.training.run import settings
from halfstep.training.run.resume import open_run
from halfstep.training.telemetry.events import read_events
from tests.training.runs import events_of, final_state, full, interrupt_at, resume, roll_back_at, starter

start = starter("training.steps=12", "training.save_every=4")
FP16 = "fp16-mixed,emulate=true"


def change(out, *settings):
    """Resumes a run with settings that were named, as `halfstep train --resume --set` does."""
    opened = open_run(out, overrides=settings)
    return Loop(opened.config, Policy.parse(opened.config.policy), out, device="cpu", opened=opened)


def policies(out):
    return [event["policy"] for event in events_of(out, "start")]


def test_every_setting_is_free_changeable_or_has_a_reason():
    keys = {row.key for row in rows(RunConfig)}
    assert keys >= settings.FREE | settings.CHANGEABLE | set(settings.PIECES)
    assert not settings.FREE & settings.CHANGEABLE
    for key in keys - settings.FREE - settings.CHANGEABLE:
        assert settings._reason(key)
    documented = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    assert all(f"`{key}`" in documented for key in settings.FREE | settings.CHANGEABLE | set(settings.PIECES))


def test_the_precision_changes_at_a_resume_and_is_recorded(text, out):
    interrupt_at(start(text, out), 9)
    before, _ = final_state(out)
    loop = change(out, f"policy={FP16}")
    state = loop.session.state()
    assert all(
        bytes(state[name].data) == value[2] for name, value in before.items() if not name.startswith("scale.")
    )
    assert np.frombuffer(state["scale.scale"].data, "<f4") == 65536
    (warning,) = loop.warnings
    assert f"from step 8 on the policy is `{FP16}` (it was `fp32`)" in warning
    assert "kept bit for bit, and the loss scale starts at 65536" in warning
    assert loop.run().finished
    changes = [{"step": 8, "settings": {"policy": ["fp32", FP16]}}]
    manifest = final_state(out)[1]
    assert (manifest["policy"], manifest["changes"]) == (FP16, changes)
    assert events_of(out, "start")[-1]["changes"] == changes
    page = render(read_events(out / paths.EVENTS), "run")
    rows = page.partition('<section aria-labelledby="incidents">')[2].partition("</section>")[0]
    assert rows.count(f"<code>{FP16}</code>") == 1  # as the warning says it
    assert f"<code>fp32</code> up to step 8, then <code>{FP16}</code>" in page
    # Later it continues in the new precision, and its record too.
    loop = change(out, "training.steps=14")
    assert str(loop.policy) == FP16
    assert loop.run().finished
    assert [change["step"] for change in final_state(out)[1]["changes"]] == [8, 12]


def test_a_kill_after_the_change_resumes_in_the_new_precision_with_the_same_bits(text, tmp_path):
    plain, out = tmp_path / "plain", tmp_path / "run"
    for each in (plain, out):
        interrupt_at(start(text, each), 9)
    assert change(plain, f"policy={FP16}").run().finished
    interrupt_at(change(out, f"policy={FP16}"), 8)  # before the first update
    interrupt_at(resume(out), 11)  # after some, none of them saved
    assert checkpoint.latest(out / paths.CHECKPOINTS).name == "step-000008"
    assert resume(out).run().finished
    assert final_state(out)[0] == final_state(plain)[0]
    assert final_state(out)[1]["changes"] == final_state(plain)[1]["changes"]
    assert policies(out) == ["fp32", FP16, FP16, FP16]


def test_a_kill_before_the_change_is_written_leaves_the_old_precision(text, out, monkeypatch):
    interrupt_at(start(text, out), 9)
    before = (out / paths.CONFIG).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("halfstep.training.run.folder.write_whole", full)
        with pytest.raises(RunFolderError):
            change(out, f"policy={FP16}")
    assert (out / paths.CONFIG).read_bytes() == before
    loop = resume(out)
    assert (str(loop.policy), loop.warnings) == ("fp32", [])
    loop.lock.release()


def test_a_rollback_to_a_checkpoint_of_the_old_precision(text, out):
    interrupt_at(start(text, out), 9)
    loop = change(out, f"policy={FP16}")
    roll_back_at(loop, 10, good=4)
    assert loop.run().finished
    assert final_state(out)[1]["changes"] == [{"step": 4, "settings": {"policy": ["fp32", FP16]}}]


def test_a_precision_that_would_round_the_masters_is_refused_and_changes_nothing(text, out):
    interrupt_at(start(text, out), 9)
    before = (out / paths.CONFIG).read_bytes()
    with pytest.raises(PolicyChangeError, match=r"would round .*: `model\..*` would be held in bf16"):
        change(out, "policy=bf16-true,emulate=true")
    assert (out / paths.CONFIG).read_bytes() == before
    assert resume(out).run().finished


def test_a_finished_run_trains_further(text, out):
    assert start(text, out).run().finished
    loop = change(out, "training.steps=20", "optimizer.muon_rate=0.01")
    (warning,) = loop.warnings
    assert "from step 12 on training.steps is 20 (it was 12), optimizer.muon_rate is 0.01 (it was 0.02)" in warning
    assert "the schedule of 20 steps: 0.8 of its peak in the next update, after 0.167 in the last" in warning
    outcome = loop.run()
    assert (outcome.finished, outcome.step) == (True, 20)
    rates = {event["step"]: event["learning_rate"] for event in events_of(out, "step")}
    assert rates[13] == pytest.approx(0.008)
    assert rates[20] == pytest.approx(0.001)
    assert [event["step"] for event in events_of(out, "end")] == [12, 20]
    with pytest.raises(ResumeError, match="has finished, at step 20: policy would change nothing"):
        change(out, f"policy={FP16}")
    loop = resume(out)
    assert loop.config.training.steps == 20
    assert loop.run().finished


def test_a_text_of_ones_own_must_be_the_same_when_a_run_resumes(text, tmp_path):
    plain, out, valid = tmp_path / "plain", tmp_path / "run", tmp_path / "valid.txt"
    content = "\n\n".join(f"held out {i} of {i * i}" for i in range(100))
    valid.write_text(content)
    start(text, plain, f"data.validation={valid}").run()
    interrupt_at(start(text, out, f"data.validation={valid}"), 9)
    valid.write_text(content.replace("99", "98"))
    with pytest.raises(ResumeError):
        resume(out)
    valid.unlink()
    (tmp_path / "moved.txt").write_text(content)
    assert change(out, f"data.validation={tmp_path / 'moved.txt'}").run().finished
    assert final_state(out)[0] == final_state(plain)[0]
    with pytest.raises(ResumeError, match=r"data.validation was .* is now 0.1; it cannot change, because text"):
        change(out, "data.validation=0.1")


REFUSED = {
    "training.steps=4": "has made 8 steps, and training.steps is 4",
    "seed=1": "seed was 0 and is now 1; it cannot change, because the order of the data follows from it",
    "optimizer.betas=[0.8,0.9]": "because the moments in the checkpoint were gathered with it",
}


def test_what_may_not_change_is_refused_with_the_reason(text, out):
    interrupt_at(start(text, out, "optimizer.name=adamw"), 9)
    for setting, said in REFUSED.items():
        with pytest.raises(ResumeError) as caught:
            change(out, setting)
        assert said in str(caught.value)
    resume(out).lock.release()


@pytest.mark.parametrize("setting", ["scalar_rate", "embedding_rate"])
def test_every_rate_is_free_and_a_rate_of_0_is_shown_as_what_it_means(text, out, setting):
    interrupt_at(start(text, out, "optimizer.name=adamw"), 9)
    loop = change(out, f"optimizer.{setting}=0.01")
    (warning,) = loop.warnings
    assert f"optimizer.{setting} is 0.01 (it was `optimizer.rate`)" in warning
    loop.lock.release()


def test_the_backend_changes_at_a_resume_and_is_recorded(text, out):
    """To MLX and back: what was learned comes over bit for bit, and the record says what did not."""
    interrupt_at(start(text, out, policy=FP16), 9)
    before, manifest = final_state(out)
    assert "random states" in manifest["other backends"]["anew"]
    loop = change(out, "backend=mlx", f"policy={FP16}")
    state = loop.session.state()
    assert all(bytes(state[name].data) == value[2] for name, value in before.items())
    (warning,) = loop.warnings[:1]
    assert "from step 8 on mlx computes (it was torch): masters, moments, averages and the position" in warning
    assert "kept bit for bit, and so is the loss scale; random states start anew" in warning
    assert not any("None" in line for line in loop.warnings)
    interrupt_at(loop, 10)
    assert load(str(out / CONFIG)).backend == "mlx"
    loop = resume(out)  # the checkpoint is still one of torch
    assert loop.run().finished
    manifest = final_state(out)[1]
    assert manifest["changes"] == [{"step": 8, "settings": {"backend": ["torch", "mlx"]}}]
    assert {"mlx"} == manifest["versions"].keys() & {"torch", "jax", "mlx"}
    assert change(out, "backend=torch", "training.steps=14").run().finished
    assert final_state(out)[1]["step"] == 14


def test_moments_that_another_backend_has_no_optimizer_for_are_refused_with_the_way_out(text, out):
    interrupt_at(start(text, out), 9)
    saved = checkpoint.latest(out / paths.CHECKPOINTS)
    arrays, manifest = checkpoint.load(saved)
    arrays["optimizer.0.embed.weight.momentum_buffer"] = arrays["model.embed.weight"]
    meta = {key: value for key, value in manifest.items() if key not in checkpoint.OWN_KEYS}
    shutil.rmtree(saved)
    checkpoint.save(saved.parent, manifest["step"], arrays, meta)
    said = r"saved on torch and holds `optimizer\.0\.embed\.weight\.momentum_buffer`"
    with pytest.raises(ConfigError, match=said):
        change(out, "backend=mlx")


def test_a_recipe_that_says_something_else_changes_nothing(text, out):
    """One command for every restart must not undo what was changed, or change what was set at the start."""
    interrupt_at(start(text, out), 9)
    for setting in ("training.steps=20", f"policy={FP16}", "optimizer.rate=1.0"):
        with pytest.raises(ResumeError):
            start(text, out, setting, resume=True)
