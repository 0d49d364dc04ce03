import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from halfstep.core.choice import Support
from halfstep.core.devices import Device
from halfstep.core.errors import FormatError, HalfstepError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format, parse
from halfstep.core.rounding import decode
from halfstep.mlx import dtypes
from halfstep.mlx.dtypes import DTYPES, answer, as_device, describe, dtype_of, format_of, pin_matmuls, supported

M1 = Device("apple", "Apple M1", architecture="m1")
M3 = Device("apple", "Apple M3 Max", architecture="m3")
H100 = Device("nvidia", "H100", capability=(9, 0))
N1 = Device("cpu", "Neoverse-N1", architecture="aarch64", features=frozenset({"asimdhp"}))


@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_a_dtype_has_the_codes_of_its_format(fmt):
    dtype = dtype_of(fmt)
    assert format_of(dtype) == fmt
    assert mx.finfo(dtype).max == fmt.max
    if fmt.bits == 16:
        codes = np.arange(2**16, dtype=np.uint16)
        found = np.array(mx.array(codes).view(dtype).astype(mx.float32))
        assert np.array_equal(found, decode(codes, fmt), equal_nan=True)


def test_formats_without_a_dtype_say_why():
    with pytest.raises(FormatError, match="tf32 has no MLX dtype: it is a way to multiply fp32") as caught:
        dtype_of(TF32)
    assert "float32" in caught.value.hint
    with pytest.raises(FormatError, match="e4m3 has no MLX dtype: MLX has dtypes for fp32, bf16, fp16"):
        dtype_of(E4M3)
    for dtype in (mx.int32, mx.bool_, mx.float64):
        with pytest.raises(FormatError, match=r"is not a format.*mlx.core.bfloat16"):
            format_of(dtype)


@pytest.mark.parametrize(
    ("fmt", "device", "expected"),
    [
        (BF16, M1, Support(False, "m1 converts bf16 in software; bf16 needs m3; `emulate=true` runs it emulated")),
        (BF16, M3, Support(True, "m3; bf16 needs m3")),
        (FP16, M1, Support(True, "Apple M1; every Apple GPU from the M1 on multiplies fp16")),
        (BF16, H100, Support(True, "compute capability 9.0; bf16 needs 8.0")),
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


def test_tf32_is_not_offered():
    found = answer(TF32, H100)
    assert found == Support(False, "MLX offers no tf32 matmul; `emulate=true` runs it emulated")


@pytest.mark.parametrize("fmt", [E4M3, TF32, Format.parse("e3m4ieee")], ids=str)
def test_what_a_device_refuses_is_emulated(fmt):
    assert not supported(fmt, "cpu")
    emulated = supported(fmt, "cpu", emulate=True)
    assert emulated
    assert emulated.reason.startswith("emulated")


def test_fp32_runs_everywhere():
    for device in (M1, M3, H100, N1):
        assert answer(FP32, device)


# --- descriptions ----------------------------------------------------------------------------------------


def test_devices_have_two_names():
    assert as_device("cpu").type == mx.cpu
    assert as_device(mx.Device(mx.cpu)).type == mx.cpu
    assert describe("cpu").kind == "cpu"
    with pytest.raises(HalfstepError, match="`cuda` is no MLX device") as caught:
        as_device("cuda")
    assert caught.value.hint == "it is `cpu` or `gpu`"


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


def test_asking_about_the_cpu_starts_no_gpu():
    code = (
        "import mlx.core as mx\n"
        "def refuse(*a, **k): raise RuntimeError('the GPU was asked')\n"
        "mx.metal.is_available = mx.cuda.is_available = mx.device_info = refuse\n"
        "from halfstep.mlx import cast, dtypes\n"
        "from halfstep.core.formats import BF16\n"
        "dtypes.describe('cpu'); dtypes.supported(BF16, 'cpu')\n"
        "mx.set_default_device(mx.cpu)\n"
        "cast.quantize(mx.ones(3), BF16, overflow='inf')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
