"""The ceiling of a run: the best matmul in the compute format, or the reason why there is none."""

import dataclasses
import math
import time

import pytest

from halfstep.config.load import load
from halfstep.core.choice import Support, Timing
from halfstep.core.devices import Device
from halfstep.core.formats import BF16, FP32
from halfstep.core.policy import Policy
from halfstep.tools import probe
from halfstep.training.telemetry.events import Events
from halfstep.training.telemetry.meters import Ceiling


class Backend:
    """A backend whose matmuls take given times, and which counts how often it measures."""

    def __init__(self, kind="nvidia", timings=(), supported=True):
        self.kind, self.timings, self.answer = kind, timings, Support(supported, "it has no such units")
        self.asked = []

    def devices(self):
        return ["here"]

    def describe(self, device):
        return Device(self.kind, "GPU of a test", capability=(9, 0) if self.kind == "nvidia" else None)

    def supported(self, fmt, device):
        return self.answer

    def measure(self, device, formats, *, budget, shapes):
        self.asked.append((device, list(formats), budget, shapes))
        return list(self.timings)


TIMINGS = [
    Timing(BF16, (4096, 4096, 4096), (2e-4,)),
    Timing(BF16, (8192, 8192, 8192), (2e-3, 1e-3, 9.0)),  # other work slowed some repeats
]
BEST = 2 * 8192**3 / 1e-3


@pytest.fixture
def ask(monkeypatch):
    def asked(backend, policy="bf16-mixed", *overrides, known=None):
        monkeypatch.setattr(probe, "_need", lambda name: backend)
        return probe.measure_ceiling(load("tiny", overrides), Policy.parse(policy), None, known)

    return asked


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp8-mixed", "bf16-mixed; lm_head: compute=fp32"])
def test_it_is_the_best_matmul_of_the_compute_format(ask, policy):
    backend = Backend(timings=TIMINGS)
    basis = "bf16 matmuls at 8192x8192x8192, timed on GPU of a test"
    assert ask(backend, policy) == Ceiling(BEST, basis)
    assert backend.asked == [("here", [BF16], probe.CEILING_BUDGET, probe.CEILING)]


def test_a_cpu_is_asked_for_less(ask, monkeypatch):
    monkeypatch.setattr(probe, "CPU_CEILING", ((32, 32, 128), (512, 512, 2048)))
    backend = Backend("cpu", TIMINGS)
    ask(backend)
    own = (8 * 128, 128, 512)  # the matmul of `tiny` may suit the CPU better than the others
    (_, formats, budget, shapes) = backend.asked[0]
    assert (formats, budget, set(shapes)) == ([BF16], probe.CEILING_BUDGET, {*probe.CPU_CEILING, own})
    assert list(shapes) == sorted(shapes, key=math.prod)
    ask(backend, "bf16-mixed", "training.batch=4096")
    assert backend.asked[1][3] == probe.CPU_CEILING  # one that is too large is not timed
    assert probe.CEILING_BUDGET < 1


@pytest.mark.parametrize(
    ("backend", "policy", "overrides", "said"),
    [
        (Backend(timings=TIMINGS), "bf16-mixed", ["training.measure_ceiling=false"], "measure_ceiling is false"),
        (Backend(timings=TIMINGS), "bf16-mixed,emulate=true", [], "bf16 is emulated"),
        (Backend(supported=False), "bf16-mixed", [], "bf16 is not supported: it has no such units"),
        # 0.3 GFLOP/s: a launch, of which a run would use 2,000 %
        (
            Backend("cpu", [Timing(FP32, (32, 32, 128), (1e-3,))]),
            "fp32",
            [],
            "no fp32 matmul that is more than its launch",
        ),
    ],
)
def test_a_missing_ceiling_has_a_reason(ask, backend, policy, overrides, said):
    found = ask(backend, policy, *overrides)
    assert found.flops is None
    assert said in found.basis


def test_a_resumed_run_measures_again_only_on_another_device(ask, tmp_path):
    backend, path = Backend(timings=TIMINGS), tmp_path / "events.jsonl"
    with Events(path) as events:
        ceiling = Ceiling(5e14, "then").record()
        events.write("start", policy="bf16-mixed", device={"name": "GPU of a test"}, ceiling=ceiling)
    assert ask(backend, known=path) == Ceiling(5e14, "then")
    assert backend.asked == []
    moved = Backend(timings=TIMINGS)
    moved.describe = lambda device: dataclasses.replace(backend.describe(device), name="another")
    assert ask(moved, known=path).flops == BEST


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.prove)])
def test_backends_measure_it(backend, monkeypatch):
    pytest.importorskip(backend)
    monkeypatch.setattr(probe, "CEILING_BUDGET", 20.0)  # a loaded machine compiles for longer than ours
    found = probe.measure_ceiling(load("tiny", [f"backend={backend}"]), Policy.parse("fp32"), "cpu")
    assert 1e6 < found.flops < 1e15
    assert found.basis.startswith("fp32 matmuls at ")


def test_the_peak_of_a_cpu_is_at_least_what_one_large_matmul_reaches_beside_it():
    """Both are timed in turns, and their best counts: other work slows all of them alike."""
    torch = pytest.importorskip("torch")
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    peaks, rates = [], []
    for _ in range(3):
        peaks.append(probe.measure_ceiling(load("tiny"), Policy.parse("fp32"), "cpu").flops)
        for _ in range(5):
            begun = time.perf_counter()
            torch.mm(a, b)
            rates.append(2 * 1024**3 / (time.perf_counter() - begun))
    assert max(peaks) > 0.5 * max(rates)
