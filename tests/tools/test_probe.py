"""The probe over fake backends, and once over the real torch."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest

from halfstep.config.load import load
from halfstep.core.arrays.measure import decide, resolve_policy
from halfstep.core.choice import ROUNDS, Choice, Support, Timing
from halfstep.core.devices import Device, native
from halfstep.core.errors import HalfstepError, how_to_install
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32
from halfstep.core.policy import PRESETS, Policy
from halfstep.tools import probe

FORMATS = (FP32, TF32, BF16, FP16, E4M3, E5M2)
BLOCK = "training steps of a block"
SMALL, LARGE = (64, 64, 256), (256, 256, 1024)
N1 = Device("cpu", "Neoverse-N1", architecture="aarch64", features=frozenset({"asimdhp"}))


class Fake:
    """A backend on a CPU without bf16 instructions: 287 times slower than fp32, affordable only when small."""

    FORMATS = FORMATS

    def __init__(self, slower=287.0):
        self.slower, self.budgets, self.asked, self.block_seconds = slower, [], [], {}

    def version(self):
        return "9.9"

    def devices(self):
        return ["cpu", "toaster"]

    def describe(self, device):
        return N1

    def supported(self, fmt, device):
        return Support(True, "slow") if fmt in (BF16, FP16) else native(fmt, N1)

    def measure_block(self, device, formats, model, tokens, *, budget):
        self.budgets.append(budget)
        self.asked.append((device, tuple(formats)))
        self.blocks = (model, tokens)
        return [
            Timing(FP32, SMALL, (1e-3,) * ROUNDS),
            Timing(FP32, LARGE, (5e-2,)),
            Timing(BF16, SMALL, (self.slower * 1e-3,) * ROUNDS),
            Timing(FP16, SMALL, (1.0,)),
            *(Timing(fmt, (8, 8, 8), (second,) * ROUNDS, BLOCK) for fmt, second in self.block_seconds.items()),
        ]

    def measure(self, device, formats, *, budget):
        raise AssertionError("no other format is supported here")


TINY = load("tiny")


@pytest.fixture
def played(monkeypatch):
    backend = Fake()
    monkeypatch.setattr(probe, "find_spec", lambda name: SimpleNamespace() if name == "torch" else None)
    monkeypatch.setattr(probe, "import_module", {"halfstep.torch.measure": backend}.__getitem__)
    return backend


def test_a_slow_bf16_makes_the_choice_fp32_with_the_measured_ratio_and_a_fast_one_is_chosen(played):
    result = probe.run(["torch"], 2.0).backends[0].devices[0]
    assert result.choice.preset == "fp32"
    reason = "bf16 matmuls are at least 287x slower than fp32 (287 ms against 1 ms at 64x64x256)"
    assert reason in result.choice.reason
    assert result.description == N1
    assert dict(result.support)[E4M3].reason == "no CPU multiplies e4m3"
    assert played.asked == [("cpu", (FP32, BF16, FP16))]
    played.slower = 0.25
    assert probe.run(["torch"]).backends[0].devices[0].choice.preset == "bf16-mixed"
    assert probe.choose_policy("torch", None, TINY).preset == "bf16-mixed"
    assert played.blocks == (TINY.model, TINY.training.batch * TINY.model.context)


def test_each_format_is_compared_at_the_largest_shape_it_shares_with_fp32(played):
    result = probe.run(["torch"]).backends[0].devices[0]
    assert [(str(g.format), g.shape) for g in result.gains()] == [(f, SMALL) for f in ("bf16", "fp16")]
    assert [g.ratio for g in result.gains()] == [pytest.approx(1 / 287), 1e-3]
    assert probe.DeviceResult("cpu", N1, (), (), (), result.choice).gains() == []


@pytest.mark.parametrize(("block", "preset"), [(2.0, "fp32"), (0.5, "bf16-mixed")])
def test_probe_prepare_and_train_give_one_answer_also_where_matmuls_say_another(block, preset, played):
    """As on a CPU whose bf16 matmuls are faster and whose blocks, with all that is around a matmul, are not."""
    played.slower, played.block_seconds = 0.5 if block > 1 else 2.0, {FP32: 1.0, BF16: block}
    pytest.importorskip("torch")  # so that none is loaded, which is said too
    said = []
    probed = probe.run(["torch"], config=TINY, say=said.append).backends[0].devices[0]
    policy, choice = probe.resolve(dataclasses.replace(TINY, policy="auto,norm=bf16"), "cpu", say=said.append)
    assert probed.choice == choice == probe.choose_policy("torch", None, TINY)
    assert resolve_policy("auto", lambda: decide(played, "cpu", TINY.model, 64))[1] == choice
    assert choice.preset == preset
    assert str(policy) == f"{preset},norm=bf16"
    assert len(set(played.budgets)) == len(set(played.asked)) == 1
    assert [(g.work, g.ratio) for g in probed.gains() if g.format == BF16][-1] == (BLOCK, 1 / block)
    assert all("timing fp32, bf16, fp16 in matmuls, and a block" in words for words in said)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("policy", "blocks", "warned"),
    [
        ("fp32", {}, []),
        ("bf16-mixed", {}, ["bf16 matmuls are at least 287x slower than fp32"]),
        ("bf16-mixed", {FP32: 1.0, BF16: 0.5}, []),  # slower matmuls in faster blocks: `auto` would choose it
        ("bf16-mixed", {FP32: 1.0, BF16: 1.05}, []),  # no difference to a run
        ("bf16-mixed", {FP32: 1.0, BF16: 2.0}, ["bf16 training steps of a block are 2x slower than fp32"]),
        ("bf16-mixed,emulate=true", {}, []),
        ("fp32; lm_head: compute=bf16", {}, ["bf16 matmuls"]),
        ("fp32,eval=bf16", {}, ["bf16 matmuls"]),
        ("fp16-mixed", {}, ["fp16 matmuls"]),
    ],
)
@pytest.mark.parametrize("ceiling", ["true", "false"])
def test_a_named_policy_that_is_slower_is_a_warning_by_what_auto_times(played, policy, blocks, warned, ceiling):
    played.block_seconds, said = blocks, []
    config = load("tiny", [f"training.measure_ceiling={ceiling}"])
    warnings = probe.slow_formats(config, Policy.parse(policy), None, said.append)
    assert len(warnings) == len(warned)
    assert all(words in text for words, text in zip(warned, warnings, strict=True))
    assert all(text.endswith("; it runs as asked") for text in warnings)
    assert len(said) == len(played.budgets) <= 1


def test_what_is_timed_is_said_as_it_is_timed(played):
    pytest.importorskip("torch")
    said = []
    probe.run(["torch"], config=TINY, say=said.append)
    assert "in matmuls, and a block of the model at up to 1024 tokens" in said[0]
    played.describe = lambda device: Device("cuda", "H200", capability=(9, 0))
    probe.run(["torch"], config=TINY, say=said.append)
    assert "in matmuls up to 16384x768x3072" in said[1]
    probe.run(["torch"], config=load("qwen3"), say=said.append)
    assert "in matmuls up to 16384x1024x3072" in said[2]
    assert probe._describe_timing(TINY, "torch", "cpu") == said[1].partition(": ")[2]


def test_backends_that_are_not_there_are_reported_unless_they_were_named(played):
    result = probe.run(budget=2.0)
    assert [backend.name for backend in result.backends] == ["torch", "jax", "mlx"]
    torch, jax, mlx = result.backends
    assert (torch.version, torch.other_devices) == ("9.9", ("toaster",))
    assert (mlx.missing, mlx.install) == ("mlx is not installed", how_to_install("mlx"))
    assert (jax.missing, played.budgets) == ("jax is not installed", [2.0])
    with pytest.raises(HalfstepError, match="mlx is not installed") as caught:
        probe.run(["mlx"])
    assert caught.value.hint == how_to_install("mlx")
    with pytest.raises(HalfstepError, match="mlx is not installed"):
        probe.choose_policy("mlx", None, TINY)
    with pytest.raises(HalfstepError, match="unknown backend `torhc`") as caught:
        probe.run(["torhc"])
    assert caught.value.hint == "did you mean `torch`?"


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf"), 1e6])
def test_an_impossible_budget_is_refused(budget, played):
    for call in (lambda: probe.run(["torch"], budget), lambda: probe.choose_policy("torch", None, TINY, budget)):
        with pytest.raises(HalfstepError, match="time budget"):
            call()


def test_the_data_is_json_and_the_choice_is_made_on_the_device_that_is_named(played):
    data = json.loads(json.dumps(probe.run(budget=1.0).to_dict(), allow_nan=False))
    torch, _, mlx = data["backends"]
    assert mlx == {"name": "mlx", "missing": "mlx is not installed", "install": how_to_install("mlx")}
    device = torch["devices"][0]
    assert (device["name"], device["architecture"], device["features"]) == ("Neoverse-N1", "aarch64", ["asimdhp"])
    assert device["support"]["tf32"] == {"ok": False, "reason": "no CPU multiplies tf32"}
    assert len(device["timings"]) == 4
    assert device["compared_with_fp32"][0]["ratio"] == pytest.approx(1 / 287)
    assert device["timings"][1]["flops_per_second"] == pytest.approx(2 * 256 * 256 * 1024 / 5e-2)
    assert device["choice"]["preset"] == "fp32"
    choice = probe.choose_policy("torch", "toaster", TINY, 0.5)
    assert isinstance(choice, Choice)
    assert played.asked[1:] == [("toaster", (FP32, BF16, FP16))]
    assert played.budgets[1:] == [0.5]
    probe.run(["torch"], device="toaster")
    assert played.asked[-1][0] == "toaster"


def test_the_real_torch():
    pytest.importorskip("torch")
    begun = time.perf_counter()
    result = probe.run(["torch"], 0.5, device="cpu").backends[0].devices[0]
    assert time.perf_counter() - begun < 5  # imports and a busy machine included
    assert dict(result.support).keys() == set(FORMATS)
    assert result.choice.preset in PRESETS
    assert result.timings[0].format == FP32
    # The choice follows what was timed: on hardware without bf16 instructions fp32, with the ratio.
    gains = {gain.format: gain for gain in result.choice.gains}
    if BF16 in gains and gains[BF16].ratio < 1:
        assert result.choice.preset != "bf16-mixed"
        assert "x slower than fp32" in result.choice.reason
    if BF16 in gains and gains[BF16].pays:
        assert result.choice.preset != "fp32"
    choice = probe.choose_policy("torch", "cpu", TINY, 1.0)
    assert choice.preset in PRESETS
    assert any(gain.work == "training steps of a block" for gain in choice.gains) or choice.preset == "fp32"
