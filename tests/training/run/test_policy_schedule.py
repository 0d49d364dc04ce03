"""Policies that change during a run: what is kept and recorded, and runs that are killed around the change."""

import os
import signal

import pytest

from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.core.policy import Policy
from halfstep.report.page import render
from halfstep.training import paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.loop import Loop
from halfstep.training.run.resume import open_run
from halfstep.training.run.trained import open_trained
from halfstep.training.telemetry.events import read_events
from tests.processes import SERVER
from tests.training.runs import (
    events_of,
    final_state,
    interrupt_at,
    interrupt_when,
    resume,
    roll_back_at,
    starter,
)

FP8, BF16, FP16 = (f"{name}-mixed,emulate=true" for name in ("fp8", "bf16", "fp16"))
SCHEDULE = f'schedule=[{{from=0.5,policy="{BF16}"}}]'
start = starter("training.steps=6", "training.save_every=2", SCHEDULE)


def begin(text, out, *settings, **options):
    return start(text, out, *settings, policy=FP8, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("plain")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"document {i} is about {i * i} and {i * 7}" for i in range(400)))
    assert begin(text, folder / "run", "monitor.every=2").run().finished
    return text, folder / "run"


def test_the_policy_changes_after_its_step_and_is_recorded(plain):
    _, out = plain
    assert [(e["step"], e["policy"]) for e in events_of(out, "policy")] == [(3, BF16)]
    manifests = {s: checkpoint.read_manifest(out / paths.CHECKPOINTS / f"step-{s:06d}") for s in (4, 6)}
    assert {s: m["policy"] for s, m in manifests.items()} == {4: BF16, 6: BF16}
    assert manifests[4]["schedule"] == [{"from": 0, "policy": FP8}, {"from": 3, "policy": BF16}]
    assert manifests[4]["changes"] == []
    (begun,) = events_of(out, "start")
    assert (begun["policy"], begun["schedule"]) == (FP8, manifests[4]["schedule"])
    # The monitor's records end at the change, and its formats are those of the policy that runs.
    before, after = (e["layers"] for e in events_of(out, "monitor"))
    assert before != after
    assert [(e["since"], e["step"]) for e in events_of(out, "layers")] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert open_trained(out, "cpu").policy == Policy.parse(BF16)


@pytest.mark.parametrize(
    "step", [pytest.param(2, marks=pytest.mark.prove), 3, pytest.param(5, marks=pytest.mark.prove)]
)
def test_a_run_that_is_cut_off_around_the_change_ends_with_the_same_bits(plain, out, step):
    text, expected = plain
    interrupt_at(begin(text, out, f"training.save_every={1 if step == 3 else 2}"), step)
    loop = resume(out)
    assert loop.session.policy == Policy.parse(FP8 if step < 4 else BF16)
    assert [each for each in loop.warnings if not each.startswith("measured")] == []
    interrupt_at(loop, 5)  # once more, on the other side of it
    assert resume(out).run().finished
    assert final_state(out)[0] == final_state(expected)[0]
    assert final_state(out)[1]["changes"] == []


def test_a_rollback_across_the_change_takes_the_old_policy_up_again(plain, out):
    text, _ = plain
    loop = begin(text, out, "monitor.every=2")
    roll_back_at(loop, 5, good=2)
    assert loop.run().finished
    assert [(e["step"], e["policy"]) for e in events_of(out, "policy")] == [(3, BF16), (2, FP8), (3, BF16)]
    page = render(read_events(out / paths.EVENTS), "run")
    assert f"<code>{FP8}</code> up to step 3, then <code>{BF16}</code>" in page


@pytest.mark.prove
def test_a_rollback_that_is_cut_off_ends_with_the_same_bits(plain, tmp_path):
    text, _ = plain
    back, cut = tmp_path / "back", tmp_path / "cut"
    for out in (back, cut):
        loop = begin(text, out)
        roll_back_at(loop, 4, good=2)
        if out == cut:
            interrupt_when(loop, lambda loop: loop.tally.step == 5 and loop.health.shift)
            loop = resume(out)
        assert loop.run().finished
    assert final_state(cut)[0] == final_state(back)[0]


@pytest.mark.prove
def test_a_schedule_is_edited_where_a_run_resumes(plain, out):
    text, _ = plain
    interrupt_at(begin(text, out), 5)
    with pytest.raises(ConfigError, match="would change nothing: after step 4 the policy is that of the schedule"):
        change(out, f"policy={FP16}")
    loop = change(out, f'schedule=[{{from=5,policy="{FP16}"}}]')
    assert loop.session.policy == Policy.parse(FP8)
    assert f"from step 4 on the policy is `{FP8}` (it was `{BF16}`)" in loop.warnings[0]
    edited = f'schedule is [{{from = 5, policy = "{FP16}"}}] (it was [{{from = 0.5, policy = "{BF16}"}}])'
    assert edited in loop.warnings[1]
    assert loop.run().finished
    assert list(final_state(out)[1]["changes"][0]["settings"]) == ["schedule"]
    page = render(read_events(out / paths.EVENTS), "run")
    names = [f"<code>{name}</code> up to step" for name in (FP8, BF16, FP8)]
    assert f"{names[0]} 3, then {names[1]} 4, then {names[2]} 5, then <code>{FP16}</code>" in page


@pytest.mark.prove
def test_more_steps_move_a_change_that_is_a_share_of_them(plain, out):
    text, _ = plain
    interrupt_at(begin(text, out), 5)
    loop = change(out, "training.steps=10")
    assert [after for after, _ in loop.schedule.phases] == [0, 5]
    assert loop.session.policy == Policy.parse(FP8)
    loop.lock.release()


@pytest.mark.parametrize(
    ("policy", "later", "message"),
    [
        (
            FP8,
            "bf16-true,emulate=true",
            "after step 3, would round .*: param of `.*` is fp32 before and bf16 after",
        ),
        (BF16, f"{BF16},moments=bf16", "moments of `.*` is fp32 before and bf16 after"),
        (FP8, "fp32,compute=tf32", r"schedule\[0\].policy: tf32 cannot run on cpu"),
        (FP8, f"{BF16}; blocks.7.*: compute=fp32", "`blocks.7.*: compute=fp32` matches none"),
    ],
)
def test_a_later_policy_that_cannot_run_is_refused_before_the_first_step(text, out, policy, later, message):
    with pytest.raises(HalfstepError, match=message):
        starter(f'schedule=[{{from=0.5,policy="{later}"}}]', "training.steps=6")(text, out, policy=policy)
    assert not out.exists()


@pytest.mark.prove
def test_masters_may_become_wider(text, out):
    narrow = "bf16-true,emulate=true"
    loop = starter("training.steps=4", f'schedule=[{{from=2,policy="{BF16}"}}]')(text, out, policy=narrow)
    assert loop.run().finished


# A call, how many steps were launched then, and whether the process dies after it or before.
MOMENTS = [("_build", 3, True), ("change_policy", 3, True), ("step", 3, True), ("save", 4, False)]


def die_around_the_change(text, out, name, launched, after):
    """Begins or resumes a run, and dies by SIGKILL."""
    loop = resume(out) if out.exists() else begin(text, out, "training.save_every=1")
    owner = loop.checkpointer if name == "save" else loop.session
    call = getattr(owner, name)

    def dying(*given, **named):
        result = call(*given, **named) if after or loop.tally.launched != launched else None
        if loop.tally.launched == launched:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)
    loop.run()


@pytest.mark.prove
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no SIGKILL")
def test_kills_around_the_change_end_with_the_same_bits(plain, out):
    text, expected = plain
    for moment in MOMENTS:
        child = SERVER.Process(target=die_around_the_change, args=(text, out, *moment))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, moment
    assert resume(out).run().finished
    assert final_state(out)[0] == final_state(expected)[0]
    assert len(events_of(out, "policy")) == 3  # those that were announced before a kill, and the last


def change(out, *settings):
    opened = open_run(out, overrides=settings)
    return Loop(opened.config, Policy.parse(opened.config.policy), out, device="cpu", opened=opened)
