"""The race over fake workers, and once over real ones."""

import json
import os
import sys
import time

import numpy as np
import pytest

from benchmarks.race import race
from benchmarks.race.contract import CEILING, WARM_STEPS, Setting
from benchmarks.race.workers import FailedError, MissingError, Worker
from halfstep.core.errors import HalfstepError, how_to_install

# Answers like a worker of the race, with invented times; records when it was asked. Light, to start fast.
FAKE = """
import json, os, sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(os.environ["HALFSTEP_WORKER_PIPE"]))
arm, diary, plays = json.loads(sys.argv[1])["arm"], sys.argv[2], json.loads(sys.argv[3])
play, turn = plays.get(arm, {}), 0
def send(**answer): pipe.send_bytes(json.dumps(answer).encode())
if "missing" in play: send(missing=play["missing"], hint="pip install it"); sys.exit()
if "dies" in play: sys.stderr.write("one\\ntwo\\nthree\\nfour\\n"); sys.exit(7)
time.sleep(play.get("slow", 0))
send(device="a toaster", kind="cuda", versions={"torch": "9.9"}, compiled=True)
while True:
    try: request = json.loads(pipe.recv_bytes())
    except EOFError: break
    with open(diary, "a") as file: file.write(f"{arm} {request['do']} {request.get('steps')}\\n")
    if request["do"] == "finish": send(held_out=2.5, summary="done", syncs=1, kernels=["flash"]); continue
    if arm == "ceiling": send(flops=4e14); continue
    if turn and play.get("fails_at") == turn: send(failed="OutOfMemoryError: too much", hint=None); sys.exit(1)
    if turn: time.sleep(play.get("sleeps", 0))
    seconds = play.get("seconds", [1.0])
    send(seconds=seconds[(turn - 1) % len(seconds)], losses=[float(turn)] * (request["steps"] + 1),
         memory=play.get("memory", 1000) + turn)
    turn += 1
"""

SMALL = {"layers": 2, "width": 64, "context": 16, "batch": 2, "vocabulary": 256}


@pytest.fixture
def played(monkeypatch, tmp_path, text):
    script, diary = tmp_path / "fake.py", tmp_path / "diary"
    script.write_text(FAKE)

    def go(arms, plays=None, **options):
        given = [str(diary), json.dumps(plays or {})]
        monkeypatch.setattr(
            race, "command", lambda setting: [sys.executable, "-S", str(script), json.dumps(vars(setting)), *given]
        )
        diary.write_text("")
        result = race.run(arms, source=str(text), **SMALL | options)
        return result, [tuple(line.split()) for line in diary.read_text().splitlines()]

    return go


def test_arms_take_turns_and_the_order_turns_each_round(played):
    _, asked = played(["fp32", "autocast", "casted"], rounds=3, steps=2)
    warmed = sorted(entry for entry in asked if entry[2] == str(WARM_STEPS - 1))
    assert warmed == [(arm, "train", "3") for arm in ("autocast", "casted", "fp32")]
    turns = [arm for arm, what, steps in asked if (what, steps) == ("train", "2")]
    order = [CEILING, "fp32", "autocast", "casted"]
    assert turns == [*order, *order[::-1], *order]
    assert [arm for arm, what, _ in asked if what == "finish"] == order[1:]


def test_medians_spreads_ratios_and_shares(played):
    plays = {"autocast": {"seconds": [4.0, 2.0, 3.0], "memory": 2000}, "halfstep": {"seconds": [1.0, 1.5, 1.5]}}
    result, _ = played(["halfstep", "autocast"], plays, rounds=3, micro_batches=2)
    usual, ours = result.arm("autocast"), result.arm("halfstep")
    assert (usual.typical, usual.spread) == (3.0, pytest.approx(2 / 3))
    assert (ours.typical, ours.memory, usual.memory) == (1.5, 1003, 2003)  # the largest peak of the rounds
    assert result.baseline is usual
    assert result.raced == [ours, usual]
    assert result.speed(ours) == 2 * 2 * 16 / 1.5
    weights = 12 * 2 * 64**2 + 256 * 64
    assert result.share(ours) == pytest.approx((6 * weights + 12 * 2 * 64 * 16) * result.speed(ours) / 4e14)
    assert ours.losses == (0.0,) * 4 + tuple(float(turn) for turn in (1, 2, 3) for _ in range(11))
    assert (ours.held_out, ours.syncs, ours.kernels, ours.summary) == (2.5, 1, ("flash",), "done")
    data = {arm["name"]: arm for arm in json.loads(json.dumps(result.to_dict(), allow_nan=False))["arms"]}
    assert data["halfstep"]["times_baseline"] == 2.0
    assert data["halfstep"]["memory_of_baseline"] == 1003 / 2003
    assert data["halfstep"]["tokens_per_second"] == result.speed(ours)


def test_an_arm_that_fails_or_is_missing_leaves_with_its_reason_and_the_others_continue(played):
    plays = {"casted": {"fails_at": 2}, "fp32": {"dies": True}}
    result, _ = played(["casted", "fp32", "autocast"], plays, rounds=3)
    arms = {arm.name: arm for arm in result.arms}
    assert arms["casted"].failed == "OutOfMemoryError: too much"
    assert not arms["casted"].raced
    assert arms["fp32"].failed == "it stopped with code 7: two | three | four"
    assert len(arms["autocast"].seconds) == 3
    assert (result.rounds, result.stopped) == (3, "")
    assert result.baseline is arms["autocast"]
    result, _ = played(["fp32"], {"fp32": {"fails_at": 1}}, rounds=3)
    assert result.stopped == "after 1 of 3 rounds: no arm is left"
    assert (result.raced, result.baseline) == ([], None)
    assert result.to_dict()["arms"][0]["failed"]
    said = []
    plays = {"accelerate": {"missing": "accelerate is not installed"}}
    result, _ = played(["accelerate", "autocast"], plays, rounds=1, log=said.append)
    accelerate, autocast = result.arms
    assert (accelerate.missing, accelerate.hint) == ("accelerate is not installed", "pip install it")
    assert not accelerate.raced
    assert autocast.raced
    assert "accelerate: accelerate is not installed (hint: pip install it)" in said


@pytest.mark.prove
def test_the_time_limit_ends_the_race_after_a_whole_round(played, monkeypatch):
    monkeypatch.setattr(race, "FINISH_SECONDS", 0.1)
    begun = time.monotonic()
    plays = {name: {"sleeps": 0.3} for name in ("fp32", "autocast")}
    result, _ = played(["fp32", "autocast"], plays, rounds=1000, seconds=6.0)
    assert time.monotonic() - begun < 60  # 1000 rounds take ten minutes
    assert result.stopped == f"after {result.rounds} of 1000 rounds: the time is up"
    assert 1 <= result.rounds < 12
    assert {len(arm.seconds) for arm in result.arms} == {result.rounds}
    assert all(arm.held_out == 2.5 for arm in result.arms)


@pytest.mark.prove
def test_an_arm_that_is_not_ready_in_time_is_ended_and_the_others_race(played, monkeypatch):
    monkeypatch.setattr(race, "FINISH_SECONDS", 0.1)
    monkeypatch.setattr(race, "READY_SHARE", 0.5)
    begun = time.monotonic()
    result, _ = played(["fp32", "autocast"], {"fp32": {"slow": 60}}, rounds=1, seconds=6.0)
    assert time.monotonic() - begun < 20
    fp32, autocast = result.arms
    assert fp32.failed.startswith("no answer within ")
    assert autocast.raced
    assert autocast.held_out == 2.5


def test_every_arm_reads_the_same_tokens_and_the_held_out_text_is_none_of_them(played, text, tmp_path):
    setting = Setting(CEILING, "cpu", 1, 32, 1, 256, 16, 2, 3, None, 0, "", "")
    going = race.Race([], setting, tmp_path, rounds=2, steps=5, deadline=None, log=print)
    assert "bytes to train on" in going._write_data(str(text))
    tokens, held_out = np.load(going.setting.tokens), np.load(going.setting.held_out)
    assert (tokens.shape, held_out.shape[1]) == ((WARM_STEPS + 2 * 6, 3, 2, 17), 17)
    # Documents are whole on one side; a line that names its own number is on one side only.
    learned = b"".join(bytes(window.astype(np.uint8)) for window in tokens.reshape(-1, 17))
    lines = bytes(held_out[:, :-1].astype(np.uint8).ravel()).split(b"\n")
    names = [line for line in lines if line.startswith(b"def f") and line.endswith(b":")]
    assert len(names) > 3
    assert not [name for name in names if name in learned]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arms": ["autocsat"]}, "unknown arm `autocsat`; arms are fp32, tf32, "),
        ({"rounds": 0}, "`rounds` is 0; it must be 1 or more"),
        ({"steps": -1}, "`steps` is -1"),
        ({"micro_batches": 0}, "`micro-batches` is 0"),
        ({"at_once": 0}, "`at-once` is 0"),
        ({"width": 200}, "the width is 200; it must be a multiple of 64, or below 128"),
        ({"seconds": 0.0}, "the limit is 0 seconds"),
        ({"seconds": float("nan")}, "the limit is nan seconds"),
        ({"vocabulary": 100}, "the vocabulary is 100"),
        ({"vocabulary": 70000}, "the vocabulary is 70000"),
    ],
)
def test_what_cannot_be_raced_is_refused(options, said):
    with pytest.raises(HalfstepError, match=said):
        race.run(**options)


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(race, "find_spec", lambda name: None)
    with pytest.raises(HalfstepError, match="torch is not installed") as caught:
        race.run()
    assert caught.value.hint == how_to_install("torch")


def worker(tmp_path, code):
    begin = "import sys, time\nfrom benchmarks.race.workers import *\ndef start():\n    "
    return Worker([sys.executable, "-c", f"{begin}{code}\nsys.exit(serve(start))"], tmp_path / "log", os.environ)


def test_a_worker_that_is_gone_hangs_or_prints(tmp_path, monkeypatch):
    loud = worker(tmp_path, "print('hello from a library'); return {'a': 1}, lambda request: request")
    assert (loud.hear(10), loud.ask({"b": 2}, 10)) == ({"a": 1}, {"b": 2})
    loud.close()
    assert "hello from a library" in (tmp_path / "log").read_text()
    gone = worker(tmp_path, "return {}, lambda request: sys.exit(3)")
    assert gone.hear(10) == {}
    for _ in range(2):
        with pytest.raises(FailedError, match="it stopped with code 3"):
            gone.ask({"do": "train"}, 10)
    gone.close()
    monkeypatch.setattr("benchmarks.race.workers.PATIENCE", 0.1)
    hanging = worker(tmp_path, "time.sleep(60)")
    with pytest.raises(FailedError, match="no answer within 0 s"):
        hanging.hear(0.05)
    hanging.close()
    assert hanging._process.returncode == -9


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        ("MissingError('no such package', hint='get it')", MissingError, "no such package"),
        ("HalfstepError('too wide', hint='get it')", FailedError, "too wide"),
        ("RuntimeError('out of memory.\\nTried to allocate\\nmuch')", FailedError, "RuntimeError: out of memory."),
        ("EOFError()", FailedError, "EOFError: no message"),
    ],
)
def test_an_error_of_a_worker_is_one_line(tmp_path, raised, kind, message):
    failing = worker(tmp_path, f"raise {raised}")
    with pytest.raises(kind) as caught:
        failing.hear(10)
    assert caught.value.message == message
    assert caught.value.hint == ("get it" if "hint" in raised else None)
    failing.close()


@pytest.mark.prove
def test_real_workers(text):
    pytest.importorskip("torch")
    result = race.run(["fp32", "autocast"], source=str(text), device="cpu", rounds=2, steps=2, **SMALL)
    assert (result.device, result.kind, result.rounds) == ("CPU", "cpu", 2)
    fp32, autocast = result.arms
    assert (fp32.failed, autocast.failed) == ("", "")
    assert fp32.losses[0] == pytest.approx(np.log(256), rel=0.05)
    # The same weights and batches: what differs is bf16, which has 8 bits.
    assert fp32.losses == pytest.approx(autocast.losses, rel=2**-8)
    assert fp32.losses != autocast.losses
    assert fp32.losses[-1] < fp32.losses[0]
    assert fp32.held_out == pytest.approx(autocast.held_out, rel=2**-8)
    assert all(seconds > 0 for arm in result.arms for seconds in arm.seconds)
    assert len(result.ceiling) == 2
    assert fp32.memory is None
