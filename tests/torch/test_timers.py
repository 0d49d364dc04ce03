"""Layers that are timed in processes of their own."""

import time
from dataclasses import replace

import pytest
import torch

from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.torch import timers
from halfstep.torch.measure import LayerWork

NARROW = precisions(Policy.parse("bf16-mixed,compute=e4m3:measured,grad=e5m2,emulate=true"), ["up"])["up"]
BOTH = (NARROW.widened(), NARROW)
WORK = LayerWork(32, 16, 16, bias=False, split=True, device=torch.device("cpu"))


class Timer:
    """A process that notes what is asked of it and when; it compiles for a while, and then times for a while."""

    def __init__(self):
        self.messages = []

    def send(self, message):
        self.messages.append(message)
        self.log.append("compile" if message else "time")

    def receive(self):
        answer = self.messages.pop()
        self.log.append("compiled" if answer else "timed")
        if answer is None:
            return [2.0, 1.0]
        return None if answer[1] == WORK else "no memory"

    def end(self):
        self.log.append("ended")


def test_all_compile_before_one_is_timed_and_each_has_ended_before_the_next_is(monkeypatch):
    monkeypatch.setattr(timers, "Timer", Timer)
    monkeypatch.setattr(Timer, "log", [], raising=False)
    monkeypatch.setattr(Timer, "process", type("Process", (), {"kill": None}), raising=False)
    works = [WORK, replace(WORK, inputs=64), WORK]
    assert timers.time_together([(work, BOTH) for work in works]) == [[2.0, 1.0], "no memory", [2.0, 1.0]]
    turns = [each for each in Timer.log if each != "ended"]
    assert turns == ["compile"] * 3 + ["compiled"] * 3 + ["time", "timed", "time", "time", "timed"]
    assert [Timer.log[i + 1] for i, each in enumerate(Timer.log) if each == "timed"] == ["ended"] * 2


@pytest.mark.prove
def test_processes_time_layers_and_say_why_they_cannot():
    timers.start_timers(1)
    elsewhere = replace(WORK, device=torch.device("cuda", 99))
    first, failure, second = timers.time_together([(work, BOTH) for work in (WORK, elsewhere, WORK)])
    assert all(0 < seconds < 60 for seconds in (*first, *second))
    assert len(first) == len(second) == 2
    assert isinstance(failure, str)
    assert failure


def test_a_process_that_ends_is_no_answer(monkeypatch):
    monkeypatch.setattr(timers, "BUDGET", 0.01)
    assert timers.time_together([(WORK, BOTH)]) == ["its process has ended"]


@pytest.mark.parametrize("why", ["on a CPU", "few", "deterministic"])
def test_layers_are_timed_here_where_processes_would_not_pay_or_differ(why, monkeypatch):
    monkeypatch.setattr(timers, "time_together", lambda jobs: [[2.0, 1.0]] * len(jobs))
    work = replace(WORK, device=torch.device("cuda"), compiled=True)
    jobs = [(replace(work, inputs=16 * n), BOTH) for n in (1, 2, 3)]
    assert timers.time_ahead(jobs) == {job: [2.0, 1.0] for job in jobs}
    if why == "on a CPU":
        jobs = [(replace(work, device=torch.device("cpu")), BOTH) for work, _ in jobs]
    elif why == "few":
        jobs = jobs[:2]
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert timers.time_ahead(jobs) == {}


def test_no_kernel_is_launched_while_others_compile():
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launch = CachingAutotuner.run
    with timers._launching_nothing():
        assert CachingAutotuner.run(None, stream=0) is None
    assert CachingAutotuner.run is launch


def test_processes_that_are_not_needed_end():
    timers.start_timers(1)
    (timer,) = timers._started
    begun = time.monotonic()
    timers.time_ahead([])
    assert timer.process.returncode is not None
    assert timers._started == []
    assert time.monotonic() - begun < 30
