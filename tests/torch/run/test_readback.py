"""A step's numbers: sent with the step, so that reading one asks nothing of a device that runs the next."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch.run.readback import NAMES, UNREAD, Numbers
from halfstep.torch.session import Session

SMALL = ["model.width=32", "model.heads=2", "model.layers=1", "model.context=16", "training.batch=2"]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def result(loss):
    values = {"loss": loss, "skipped": False, "scale": 65536.0, "grad_norm": 2.0, "stuck": False}
    return SimpleNamespace(**{name: torch.tensor(value) for name, value in values.items()})


class Launches(TorchDispatchMode):
    """Counts what is asked of the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def session():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Session(load("tiny", [*SMALL, "training.micro_batches=1"]), Policy.parse("fp32"), device)


def tokens():
    return np.random.default_rng(0).integers(0, 256, (1, 2, 17)).astype(np.int32)


def test_reading_a_step_launches_nothing(session):
    made = session.step(tokens())
    with Launches() as launches:
        read = session.read(made)
    assert launches.found == []
    assert read == {name: float(getattr(made, name)) for name in NAMES}


def test_each_step_has_its_own_numbers_read_late_or_never():
    numbers = Numbers(torch.device("cpu"))
    results = [result(float(n)) for n in range(4)]
    for one in results[:3]:
        numbers.send(one)
    assert numbers.take(results[0])["loss"] == 0.0
    assert numbers.take(results[2])["loss"] == 2.0  # the one before it was given up
    assert numbers.take(results[1])["loss"] == 1.0
    told = {"loss": 3.0, "skipped": 0.0, "scale": 65536.0, "grad_norm": 2.0, "stuck": 0.0}
    assert numbers.take(results[3]) == told


def test_steps_that_nobody_reads_are_forgotten():
    numbers = Numbers(torch.device("cpu"))
    results = [result(float(n)) for n in range(3 * UNREAD)]
    for one in results:
        numbers.send(one)
    assert len(numbers._sent) == UNREAD
    assert numbers.take(results[0])["loss"] == 0.0


class Event:
    """An event of a device, at which a copy has arrived."""

    def record(self, stream):
        self.arrive = None

    def synchronize(self):
        self.arrive()


def test_numbers_are_not_read_before_they_have_arrived(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    numbers, one = Numbers(torch.device("cuda")), result(1.0)
    numbers.send(one)
    ((_, copy, event),) = numbers._sent
    sent = copy.clone()
    copy.zero_()
    event.arrive = lambda: copy.copy_(sent)
    assert numbers.take(one)["loss"] == 1.0


@CUDA
def test_reading_a_step_does_not_wait_for_what_was_launched_after_it(session):
    for _ in range(3):
        session.read(session.step(tokens()))
    made = session.step(tokens())
    torch.cuda._sleep(int(2e9))  # about a second: the step after
    begun = time.perf_counter()
    session.read(made)
    waited = time.perf_counter() - begun
    torch.cuda.synchronize()
    assert waited < 0.25 * (time.perf_counter() - begun)
