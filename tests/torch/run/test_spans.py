"""How long steps were on the device: by events that are asked after the fact, each step's own."""

import pytest
import torch

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch.run.spans import UNREAD, Spans
from halfstep.torch.session import Session

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Event:
    """An event that the device stamps, in milliseconds, when it comes to it."""

    device_clock = 0.0
    pending = False

    def __init__(self, enable_timing):
        assert enable_timing
        self.stamp = None

    def record(self, stream):
        self.stamp = Event.device_clock

    def query(self):
        return not Event.pending

    def elapsed_time(self, other):
        return other.stamp - self.stamp


@pytest.fixture
def spans(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "device_clock", 0.0)
    return Spans(torch.device("cuda"))


def step(spans, name, *, idle=0.0, busy=1000.0):
    def launch():
        Event.device_clock += busy
        return name

    Event.device_clock += idle
    return spans.around(launch)


def test_a_step_read_late_has_its_own_span_and_the_pause_before_it(spans):
    first, second = step(spans, "a"), step(spans, "b", idle=250.0, busy=500.0)
    assert spans.take(first) == (1.0, None)
    assert spans.take(second) == (0.5, 0.25)
    assert spans.take(second) is None


def test_a_step_that_was_given_up_is_passed_over(spans):
    step(spans, "given up")
    assert spans.take(step(spans, "next", busy=2000.0)) == (2.0, None)


def test_a_step_that_is_not_over_is_not_waited_for(spans, monkeypatch):
    result = step(spans, "a")
    monkeypatch.setattr(Event, "pending", True)
    assert spans.take(result) is None


def test_steps_that_nobody_reads_are_forgotten(spans):
    results = [step(spans, str(i)) for i in range(UNREAD + 1)]
    assert len(spans._open) == UNREAD
    assert spans.take(results[-1]) == (1.0, None)


def test_on_a_cpu_there_is_no_span_and_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", None)
    spans = Spans(torch.device("cpu"))
    assert spans.take(spans.around(lambda: "a")) is None
    assert spans.untimed == "torch times no steps on cpu"


@CUDA
def test_on_a_gpu_spans_are_there_and_wait_for_nothing():
    config = load("tiny", ["model.layers=2", "model.width=64", "model.context=64"])
    session = Session(config, Policy.parse("bf16-mixed"), "cuda")
    tokens = torch.randint(0, 256, (1, 16, 65)).int().numpy()
    session.read(session.step(tokens))
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [session.step(tokens) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    times = []
    for result in results:
        session.read(result)
        torch.cuda.set_sync_debug_mode("error")
        try:
            times.append(session.device_time(result))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert session.untimed == ""
    assert all(busy > 0 for busy, _ in times)
    assert all(idle >= 0 for _, idle in times[1:])
