"""The ceiling of a run: the best matmul in the compute format, or the reason why there is none."""

import dataclasses

import pytest

from halfstep.config.load import load
from halfstep.core.choice import Support, Timing
from halfstep.core.devices import Device
from halfstep.core.formats import BF16, FP32
from halfstep.core.policy import Policy
from halfstep.tools import probe
from halfstep.training.telemetry.ceiling import Ceiling
from halfstep.training.telemetry.events import Events


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
    Timing(FP32, (8192, 8192, 8192), (1e-9,)),  # is timed for comparison, and is not the run's format
    Timing(BF16, (4096, 4096, 4096), (2e-4,)),
    Timing(BF16, (8192, 8192, 8192), (1e-3, 2e-3, 9.0)),
]
BEST = 2 * 4096**3 / 2e-4


@pytest.fixture
def ask(monkeypatch):
    def asked(backend, policy="bf16-mixed", *overrides, known=None):
        monkeypatch.setattr(probe, "_need", lambda name: backend)
        return probe.measure_ceiling(load("tiny", overrides), Policy.parse(policy), None, known)

    return asked


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp8-mixed", "bf16-mixed; lm_head: compute=fp32"])
def test_it_is_the_best_matmul_of_the_compute_format(ask, policy):
    backend = Backend(timings=TIMINGS)
    assert ask(backend, policy) == Ceiling(BEST, "bf16 matmuls at 4096x4096x4096, timed on GPU of a test")
    assert backend.asked == [("here", [BF16], probe.BUDGET, probe.CEILING)]


def test_a_cpu_is_asked_for_less(ask):
    backend = Backend("cpu", TIMINGS)
    ask(backend)
    assert backend.asked == [("here", [BF16], probe.CPU_BUDGET, probe.CPU_CEILING)]
    assert probe.CPU_BUDGET <= 0.3
    assert probe.BUDGET < 2


@pytest.mark.parametrize(
    ("backend", "policy", "overrides", "said"),
    [
        (Backend(timings=TIMINGS), "bf16-mixed", ["training.measure_ceiling=false"], "measure_ceiling is false"),
        (Backend(timings=TIMINGS), "bf16-mixed,emulate=true", [], "bf16 is emulated"),
        (Backend(timings=TIMINGS[:1]), "bf16-mixed", [], "no matmul in bf16 could be timed within 1.5 s"),
        (Backend(supported=False), "bf16-mixed", [], "bf16 is not supported: it has no such units"),
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


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_backends_measure_it(backend):
    pytest.importorskip(backend)
    found = probe.measure_ceiling(load("tiny", [f"backend={backend}"]), Policy.parse("fp32"), "cpu")
    assert 1e6 < found.flops < 1e15  # a loaded machine may get no further than a tiny matmul
    assert found.basis.startswith("fp32 matmuls at ")
