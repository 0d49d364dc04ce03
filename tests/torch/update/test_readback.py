"""Numbers and device time of a step: sent with it, so that reading asks nothing of a device that runs the next."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.core.scaling import DynamicScale, NoScale, StaticScale
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from halfstep.torch.session import Session
from halfstep.torch.update.readback import NAMES, UNREAD, HostWatch, Readback, ScaleWatch

SMALL = ["model.width=32", "model.heads=2", "model.layers=1", "model.context=16", "training.batch=2"]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def result(loss=0.0):
    values = {"loss": loss, "skipped": False, "scale": 65536.0, "grad_norm": 2.0, "stuck": False}
    return SimpleNamespace(**{name: torch.tensor(value) for name, value in values.items()})


def sent(readback, count):
    results = [result(float(n)) for n in range(count)]
    for one in results:
        readback.send(one)
    return results


class Launches(TorchDispatchMode):
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
    readback = Readback(torch.device("cpu"))
    results = [*sent(readback, 3), result(3.0)]
    # The second is read after it was passed over, the last was never sent.
    assert [readback.read(results[n])["loss"] for n in (0, 2, 1)] == [0.0, 2.0, 1.0]
    expected = {"loss": 3.0, "skipped": 0.0, "scale": 65536.0, "grad_norm": 2.0, "stuck": 0.0}
    assert readback.read(results[3]) == expected
    readback = Readback(torch.device("cpu"))
    results = sent(readback, 3 * UNREAD)
    assert (len(readback._queue), readback.read(results[0])["loss"]) == (UNREAD, 0.0)


def test_a_cpu_has_no_device_time_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", None)
    readback, one = Readback(torch.device("cpu")), result()
    readback.send(one, readback.start())
    readback.read(one)
    assert readback.device_time(one) is None
    assert readback.untimed == "torch times no steps on cpu"


class Event:
    device_clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        self.arrive = lambda: None

    def record(self, stream):
        self.stamp = Event.device_clock

    def synchronize(self):
        self.arrive()

    def elapsed_time(self, other):
        return other.stamp - self.stamp


@pytest.fixture
def readback(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "device_clock", 0.0)
    return Readback(torch.device("cuda"))


def launch(readback, *, idle=0.0, busy=1000.0):
    Event.device_clock += idle
    start, one = readback.start(), result()
    Event.device_clock += busy
    readback.send(one, start)
    return one


def test_numbers_are_not_read_before_they_have_arrived(readback):
    one = launch(readback)
    ((_, copy, _, end),) = readback._queue
    late = copy.clone()
    late[0] = 1.0
    end.arrive = lambda: copy.copy_(late)
    assert readback.read(one)["loss"] == 1.0


def test_a_step_has_its_own_device_time_and_the_idle_time_before_it(readback):
    first, second = launch(readback), launch(readback, idle=250.0, busy=500.0)
    assert readback.device_time(first) is None  # not read yet
    readback.read(first)
    assert readback.device_time(first) == (1.0, None)
    readback.read(second)
    assert readback.device_time(first) is None
    readback.read(launch(readback))
    third = launch(readback, idle=100.0)
    readback.read(third)
    assert readback.device_time(third) == (1.0, 1.85)  # since the step that was timed last
    assert readback.device_time(third) is None
    results = [launch(readback) for _ in range(UNREAD + 1)]
    readback.read(results[0])
    assert readback.device_time(results[0]) is None


def test_the_watch_of_the_scale_reads_what_is_done_and_waits_for_nothing(monkeypatch):
    """On a device: one copy at a time, every few updates, read when its event says so; then one warning."""
    copies = []

    class Copy:
        def __init__(self, scale):
            self.scale, self.ready = scale, False
            copies.append(self)

        def read(self):
            return self.scale.numpy()

    monkeypatch.setattr("halfstep.torch.update.readback.Unread", Copy)
    watch = ScaleWatch(DynamicScale(), torch.device("cuda"))
    scales = [torch.tensor(2.0 ** (16 - n)) for n in range(10)]
    for scale in scales[:6]:
        watch.look(scale)
    assert len(copies) == 1  # still on its way
    copies[0].ready = True
    for scale in scales[6:9]:
        watch.look(scale)
    assert len(copies) == 2  # of the updates 0 and 8
    copies[1].ready = True
    with pytest.warns(UserWarning, match="the loss scale is 256 and falling"):
        watch.look(scales[9])
    for law in (NoScale(), StaticScale()):
        ScaleWatch(law, torch.device("cuda")).look(None)
    loaded = ScaleWatch(DynamicScale(), torch.device("cpu"))
    loaded.look(torch.tensor(65536.0))
    loaded.forget()  # another state was loaded
    loaded.look(torch.tensor(512.0))


@pytest.mark.parametrize("waits", [8, 6, 5])
def test_a_run_whose_gpu_waits_for_the_host_is_told_of_cuda_graphs(monkeypatch, waits):
    """Which it is, is asked in eight updates, of an event behind the backward passes."""
    answers = iter([True] * waits + [False] * (8 - waits))

    class Mark:
        recorded = 0

        def record(self, stream):
            Mark.recorded += 1

        def query(self):
            return next(answers)

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("halfstep.torch.update.graph.has_graphs", lambda device: True)
    model = torch.nn.Linear(4, 4)
    run = prepare(model, AdamW(model.parameters()), "bf16-mixed")
    run.host_watch = HostWatch(torch.device("cuda"))
    for _ in range(11):
        run.step(lambda x: model(x).sum(), [torch.ones(2, 4)])
    assert "the host is the limit" not in run.summary()
    for _ in range(9):
        run.step(lambda x: model(x).sum(), [torch.ones(2, 4)])
    assert Mark.recorded == 8
    line = f"  the host is the limit: the GPU waited for it in {waits} of 8 updates; faster: graph=True"
    assert (line in run.summary().splitlines()) == (waits > 5)
    stock = prepare(model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    stock.host_watch = run.host_watch
    assert ("faster: torch.compile, as a step cannot be a CUDA graph: SGD" in stock.summary()) == (waits > 5)


@CUDA
@pytest.mark.parametrize("busy", [0, int(1e8)])
def test_a_gpu_that_waits_for_the_host_is_told_from_one_that_is_busy(busy):
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8))).cuda()
    run = prepare(model, AdamW(model.parameters()), "bf16-mixed")
    batch = torch.ones(2, 16, device="cuda")

    def loss(x):
        torch.cuda._sleep(busy)
        return model(x).float().sum()

    run.step(loss, [batch])
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(11):
            run.step(loss, [batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ("graph=True" in run.summary()) == (not busy)


@CUDA
def test_the_watch_of_the_scale_needs_no_sync():
    model = torch.nn.Linear(8, 8).cuda()
    run = prepare(model, AdamW(model.parameters()), "fp16-mixed,scale=dynamic:init=4096")
    batch = torch.full((2, 8), 6e4, device="cuda")

    def ten_steps():
        for _ in range(10):
            try:
                torch.cuda.set_sync_debug_mode("error")
                run.step(lambda b: model(b).float().square().sum(), [batch])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()

    run.step(lambda b: model(b).float().square().sum(), [batch])
    with pytest.warns(UserWarning, match="and falling"):
        ten_steps()


@CUDA
def test_reading_a_step_does_not_wait_for_the_next(session):
    for _ in range(3):
        session.read(session.step(tokens()))
    made = session.step(tokens())
    torch.cuda._sleep(int(2e9))  # about a second: the step after
    begun = time.perf_counter()
    session.read(made)
    waited = time.perf_counter() - begun
    torch.cuda.synchronize()
    assert waited < 0.25 * (time.perf_counter() - begun)


@CUDA
def test_device_times_need_no_sync():
    config = load("tiny", ["model.layers=2", "model.width=64", "model.context=64"])
    session = Session(config, Policy.parse("bf16-mixed"), "cuda")
    given = torch.randint(0, 256, (1, 16, 65)).int().numpy()
    session.read(session.step(given))
    times = []
    try:
        torch.cuda.set_sync_debug_mode("error")
        results = [session.step(given) for _ in range(3)]
        for one in results:
            torch.cuda.set_sync_debug_mode("default")
            session.read(one)
            torch.cuda.set_sync_debug_mode("error")
            times.append(session.device_time(one))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert session.untimed == ""
    assert all(busy > 0 for busy, _ in times)
    assert all(idle >= 0 for _, idle in times[1:])
