"""Formats and dtypes, and what a device can compute: what every backend answers alike."""

import subprocess
import sys

import numpy as np
import pytest

from halfstep.core import host
from halfstep.core.choice import Support
from halfstep.core.devices import Device
from halfstep.core.errors import FormatError, HalfstepError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, parse
from halfstep.core.rounding import decode

T4 = Device("nvidia", "T4", capability=(7, 5))
H100 = Device("nvidia", "H100", capability=(9, 0))
MI300 = Device("amd", "MI300X", architecture="gfx942")
N1 = Device("cpu", "Neoverse-N1", architecture="aarch64", features=frozenset({"asimdhp"}))
ZEN4 = Device("cpu", "Zen 4", architecture="x86_64", features=frozenset({"avx512_bf16"}))
EMULATED = "`emulate=true` runs it emulated"


def test_a_dtype_has_the_codes_of_its_format(backend):
    for fmt, dtype in backend.dtypes.DTYPES.items():
        assert backend.dtypes.dtype_of(fmt) == dtype
        assert backend.dtypes.format_of(dtype) == fmt
        assert backend.xp.finfo(dtype).max == fmt.max
        if fmt.bits <= 16:
            codes = np.arange(2**fmt.bits, dtype=f"u{fmt.bits // 8}")
            wide = decode(codes, fmt)
            if backend.name == "jax":
                found = backend.jax.lax.bitcast_convert_type(codes, dtype)
            else:
                signed = codes.view(f"i{fmt.bits // 8}") if backend.name == "torch" else codes
                found = backend.array(signed).view(dtype)
            np.testing.assert_array_equal(backend.numpy(found), wide)


def test_formats_without_a_dtype_say_why(backend):
    with pytest.raises(FormatError, match=r"tf32 has no \w+ dtype: it is a way to multiply fp32") as caught:
        backend.dtypes.dtype_of(TF32)
    assert "float32" in caught.value.hint
    with pytest.raises(FormatError, match=r"e3m4ieee has no (\w+) dtype: \1 has dtypes for fp32, bf16, fp16"):
        backend.dtypes.dtype_of(parse("e3m4ieee"))
    xp = backend.xp
    for dtype in (xp.int32, getattr(xp, "bool_", None) or xp.bool, getattr(xp, "float64", np.float64)):
        with pytest.raises(FormatError, match=r"is not a format.*bfloat16"):
            backend.dtypes.format_of(dtype)


@pytest.mark.parametrize(
    ("fmt", "device", "expected"),
    [
        (BF16, T4, Support(False, f"compute capability 7.5; bf16 needs 8.0; {EMULATED}")),
        (FP16, T4, Support(True, "compute capability 7.5; fp16 needs 7.0")),
    ],
)
def test_the_hardware_decides(backend, fmt, device, expected):
    assert backend.dtypes.answer(fmt, device) == expected


@pytest.mark.parametrize(
    ("fmt", "device", "expected"),
    [
        (E4M3, H100, Support(True, "compute capability 9.0; e4m3 needs 8.9")),
        (TF32, H100, Support(True, "compute capability 9.0; tf32 needs 8.0")),
        (BF16, ZEN4, Support(True, "the CPU has avx512_bf16, which multiplies bf16 and sums in fp32")),
    ],
)
def test_the_hardware_decides_where_a_framework_has_the_type(fp8_backend, fmt, device, expected):
    assert fp8_backend.dtypes.answer(fmt, device) == expected


def test_tf32_and_fp8_are_offered_where_a_framework_has_them(backend):
    answer = backend.dtypes.answer
    assert not answer(TF32, MI300)
    assert EMULATED in answer(E4M3, MI300).reason
    assert bool(answer(parse("e4m3fnuz"), MI300)) == (backend.name != "mlx")
    if backend.name != "mlx":
        assert "on NVIDIA only" in answer(TF32, MI300).reason


def test_every_cpu_runs_half_precision_and_fp32_runs_everywhere(backend):
    for fmt in (BF16, FP16):
        support = backend.dtypes.answer(fmt, N1)
        assert support
        assert any(word in support.reason for word in ("slower", "gain nothing", "if it pays"))
    assert all(backend.dtypes.answer(FP32, device) for device in (T4, H100, MI300, N1))


def test_what_a_cpu_refuses_names_the_switch_that_runs_it(backend):
    fp8 = [] if backend.name == "torch" else [E4M3, E5M2]  # torch decides by a small product
    for fmt in (TF32, parse("e3m4ieee"), *fp8):
        support = backend.dtypes.supported(fmt, "cpu")
        assert not support
        assert support.reason.endswith(EMULATED)


def test_the_cpu_by_its_flags(backend, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\n")
    monkeypatch.setattr(host, "_CPUINFO", path)
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    assert backend.dtypes.describe("cpu") == Device("cpu", "A Xeon", None, "x86_64", frozenset({"avx512_bf16"}))


def test_a_device_that_is_not_there_or_has_no_such_name(backend):
    name = "gpu" if backend.name == "mlx" else "cuda"
    if name in backend.measure.devices():
        pytest.skip("there is a GPU here")
    with pytest.raises(HalfstepError, match=f"finds no `{name}` device") as caught:
        backend.dtypes.describe(name)
    assert caught.value.hint
    with pytest.raises(HalfstepError, match=r"`nothing` is (no|not a|not an) (torch|JAX|MLX) device") as caught:
        backend.dtypes.describe("nothing")
    assert caught.value.hint


ASKED = {
    "torch": "import torch\ntorch.cuda.is_available = torch.cuda._lazy_init = torch.cuda.device_count = refuse\n",
    "jax": "import jax\njax.devices = jax.local_devices = refuse\n",
    "mlx": "import mlx.core as mx\nmx.metal.is_available = mx.cuda.is_available = mx.device_info = refuse\n",
}
CAST = {
    "torch": "cast.quantize(torch.ones(3), BF16, overflow='inf')\n"
    "assert not {'torch._dynamo', 'torch._inductor', 'triton'} & set(sys.modules)\n",
    "jax": "",
    "mlx": "mx.set_default_device(mx.cpu)\ncast.quantize(mx.ones(3), BF16, overflow='inf')\n",
}


@pytest.mark.prove
def test_asking_about_the_cpu_starts_no_gpu_and_loads_no_compiler(backend):
    code = (
        "import sys\n"
        "def refuse(*a, **k): raise RuntimeError('a device was asked for')\n"
        f"{ASKED[backend.name]}"
        f"from halfstep.{backend.name}.numerics import cast, dtypes\n"
        "from halfstep.core.formats import BF16\n"
        "dtypes.describe('cpu'); dtypes.supported(BF16, 'cpu')\n"
        f"{CAST[backend.name]}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
