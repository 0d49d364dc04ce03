import warnings

import mlx.core as mx
import pytest
from mlx import nn, optimizers

from halfstep.core.choice import Support
from halfstep.core.devices import Device
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, TF32, parse
from halfstep.core.policy import Policy
from halfstep.core.refusal import slow_formats
from halfstep.mlx import run as step
from halfstep.mlx.numerics import dtypes
from halfstep.mlx.numerics.dtypes import answer, as_device, describe, pin_matmuls, supported

M1 = Device("apple", "Apple M1", architecture="m1")
M3 = Device("apple", "Apple M3 Max", architecture="m3")
SLOWER = "it runs anyway, perhaps slower than fp32, and fp16 may be faster"
H100 = Device("nvidia", "H100", capability=(9, 0))
N1 = Device("cpu", "Neoverse-N1", architecture="aarch64", features=frozenset({"asimdhp"}))


@pytest.mark.parametrize(
    ("fmt", "device", "expected"),
    [
        (BF16, M1, Support(True, f"m1 converts bf16 in software; bf16 needs m3; {SLOWER}")),
        (BF16, M3, Support(True, "m3; bf16 needs m3")),
        (FP16, M1, Support(True, "Apple M1; every Apple GPU from the M1 on multiplies fp16")),
        (BF16, H100, Support(True, "compute capability 9.0; bf16 needs 8.0")),
        (TF32, H100, Support(False, "MLX offers no tf32 matmul; `emulate=true` runs it emulated")),
    ],
)
def test_the_hardware_decides_on_a_gpu(fmt, device, expected):
    assert answer(fmt, device) == expected


def test_every_cpu_runs_it_and_says_how():
    fast = Device("cpu", "Zen 4", architecture="x86_64", features=frozenset({"avx512_bf16"}))
    for device in (N1, fast):
        assert answer(BF16, device) == Support(
            True, "MLX multiplies bf16 on every CPU, widened to fp32; only timing it says if it pays"
        )
        assert answer(FP16, device)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, parse("e4m3fnuz"), parse("e3m4ieee")], ids=str)
def test_fp8_is_never_native_whatever_the_hardware_can(fmt):
    for device in (M3, H100, N1):
        found = answer(fmt, device)
        assert not found
        assert "MLX has no fp8 type" in found.reason
        assert found.reason.endswith("`emulate=true` runs it emulated")


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there():
    for ask in (as_device, describe, lambda name: supported(BF16, name), pin_matmuls):
        with pytest.raises(HalfstepError, match="finds no `gpu` device") as caught:
            ask("gpu")
        assert "`cpu` is always there" in caught.value.hint


@pytest.mark.parametrize(("name", "generation"), [("Apple M3 Max", "m3"), ("Apple M1", "m1"), ("VMware", "")])
def test_an_apple_gpu_by_its_generation(name, generation, monkeypatch):
    monkeypatch.setattr(dtypes.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(dtypes, "sysctl", lambda key: name)
    assert describe("gpu") == Device("apple", name, architecture=generation)
    assert not supported(E4M3, "gpu")


def test_an_nvidia_gpu_by_its_capability(monkeypatch):
    info = {"device_name": "H100", "compute_capability_major": 9, "compute_capability_minor": 0}
    monkeypatch.setattr(dtypes.mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(dtypes.mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dtypes.mx, "device_info", lambda device: info)
    assert describe("gpu") == H100


def test_fp32_matmuls_on_a_gpu_are_fp32_or_refused(monkeypatch):
    monkeypatch.setattr(dtypes.mx.metal, "is_available", lambda: True)
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    pin_matmuls("cpu")
    assert "MLX_ENABLE_TF32" not in dtypes.os.environ  # no CPU has TF32
    pin_matmuls("gpu")
    assert dtypes.os.environ["MLX_ENABLE_TF32"] == "0"
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    with pytest.raises(HalfstepError, match=r"MLX_ENABLE_TF32 is `1`.*TF32") as caught:
        pin_matmuls("gpu")
    assert "MLX_ENABLE_TF32=0" in caught.value.hint
    monkeypatch.delenv("MLX_ENABLE_TF32")


def test_bf16_runs_on_an_m1_with_a_warning_and_on_an_m3_without(monkeypatch):
    def prepared(device):
        monkeypatch.setattr(dtypes, "describe", lambda _: device)
        monkeypatch.setattr(step, "describe", lambda _: device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step.prepare(nn.Linear(2, 2), optimizers.SGD(0.1), "bf16-mixed")
        return [str(warning.message) for warning in caught]

    assert prepared(M1) == [f"bf16 on Apple M1: m1 converts bf16 in software; bf16 needs m3; {SLOWER}"]
    assert prepared(M3) == []
    assert slow_formats(Policy.parse("fp16-mixed; **: compute=bf16,grad=bf16"), M1)
    assert not slow_formats(Policy.parse("bf16-mixed,emulate=true"), M1)
