import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.core import host
from halfstep.core.choice import Support
from halfstep.core.devices import Device
from halfstep.core.errors import FormatError, HalfstepError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format, parse
from halfstep.core.rounding import decode
from halfstep.jax.dtypes import DTYPES, answer, as_device, describe, dtype_of, format_of, supported

T4 = Device("nvidia", "T4", capability=(7, 5))
H100 = Device("nvidia", "H100", capability=(9, 0))
MI300 = Device("amd", "MI300X", architecture="gfx942")
V5E = Device("tpu", "TPU v5 lite", architecture="v5e")
N1 = Device("cpu", "Neoverse-N1", architecture="aarch64", features=frozenset({"asimdhp"}))


@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_a_dtype_has_the_codes_of_its_format(fmt):
    dtype = dtype_of(fmt)
    assert format_of(dtype) == fmt
    assert jnp.finfo(dtype).max == fmt.max
    assert jnp.finfo(dtype).smallest_normal == fmt.smallest_normal
    if fmt.bits == 8:
        codes = np.arange(256, dtype=np.uint8)
        found = np.asarray(jax.lax.bitcast_convert_type(codes, dtype).astype(jnp.float32))
        np.testing.assert_array_equal(found, decode(codes, fmt))


def test_formats_without_a_dtype_say_why():
    with pytest.raises(FormatError, match="tf32 has no JAX dtype: it is a way to multiply fp32") as caught:
        dtype_of(TF32)
    assert "float32" in caught.value.hint
    with pytest.raises(FormatError, match="e3m4ieee has no JAX dtype: JAX has dtypes for fp32, bf16"):
        dtype_of(parse("e3m4ieee"))
    for dtype in (jnp.int32, jnp.bool_, np.float64):
        with pytest.raises(FormatError, match=r"is not a format.*bfloat16"):
            format_of(dtype)


@pytest.mark.parametrize(
    ("fmt", "device", "expected"),
    [
        (BF16, T4, Support(False, "compute capability 7.5; bf16 needs 8.0; `emulate=true` runs it emulated")),
        (FP16, T4, Support(True, "compute capability 7.5; fp16 needs 7.0")),
        (E4M3, H100, Support(True, "compute capability 9.0; e4m3 needs 8.9")),
        (TF32, H100, Support(True, "compute capability 9.0; tf32 needs 8.0")),
        (BF16, V5E, Support(True, "the matrix unit of every TPU since v2 multiplies bf16")),
        (E4M3, V5E, Support(False, "TPU v5e; e4m3 needs v7; `emulate=true` runs it emulated")),
    ],
)
def test_the_hardware_decides_on_an_accelerator(fmt, device, expected):
    assert answer(fmt, device) == expected


def test_jax_has_no_tf32_beyond_nvidia():
    found = answer(TF32, MI300)
    assert not found
    assert "on NVIDIA only" in found.reason
    assert answer(parse("e4m3fnuz"), MI300)
    assert "emulate=true" in answer(E4M3, MI300).reason


def test_a_cpu_without_instructions_runs_it_and_says_that_it_may_gain_nothing():
    for fmt in (BF16, FP16):
        found = answer(fmt, N1)
        assert found
        assert "it may gain nothing" in found.reason
    fast = Device("cpu", "Zen 4", architecture="x86_64", features=frozenset({"avx512_bf16"}))
    assert answer(BF16, fast) == Support(True, "the CPU has avx512_bf16, which multiplies bf16 and sums in fp32")


@pytest.mark.parametrize("fmt", [E4M3, E5M2, TF32, Format.parse("e3m4ieee")], ids=str)
def test_what_a_cpu_refuses_names_the_switch_that_runs_it(fmt):
    found = supported(fmt, "cpu")
    assert not found
    assert found.reason.endswith("`emulate=true` runs it emulated")
    emulated = supported(fmt, "cpu", emulate=True)
    assert emulated
    assert emulated.reason.startswith("emulated")


def test_fp32_runs_everywhere_but_on_a_tpu():
    for device in (T4, H100, MI300, N1):
        assert answer(FP32, device)
    assert "several bf16 products" in answer(FP32, V5E).reason


# --- descriptions ----------------------------------------------------------------------------------------


def test_the_cpu_by_its_flags(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\n")
    monkeypatch.setattr(host, "_CPUINFO", path)
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    expected = Device("cpu", "A Xeon", None, "x86_64", frozenset({"avx512_bf16"}))
    assert describe("cpu") == describe(jax.devices("cpu")[0]) == expected


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "expected"),
    [
        ("gpu", "NVIDIA H200", "9.0", Device("nvidia", "NVIDIA H200", capability=(9, 0))),
        ("gpu", "NVIDIA B200", "10.0", Device("nvidia", "NVIDIA B200", capability=(10, 0))),
        ("gpu", "MI250", "gfx90a:sramecc+:xnack-", Device("amd", "MI250", architecture="gfx90a")),
        ("rocm", "MI300X", "gfx942", Device("amd", "MI300X", architecture="gfx942")),
        ("tpu", "TPU v4", None, Device("tpu", "TPU v4", architecture="v4")),
        ("tpu", "TPU v5 lite", None, Device("tpu", "TPU v5 lite", architecture="v5e")),
        ("tpu", "TPU v5p", None, Device("tpu", "TPU v5p", architecture="v5p")),
        ("tpu", "TPU7x", None, Device("tpu", "TPU7x", architecture="v7x")),
        ("tpu", "another", None, Device("tpu", "another", architecture="")),
    ],
)
def test_a_device_by_what_jax_says_of_it(platform, kind, capability, expected):
    given = SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        given.compute_capability = capability
    assert describe(given) == expected


def test_a_platform_of_others_is_refused():
    with pytest.raises(HalfstepError, match="platform `METAL`") as caught:
        describe(SimpleNamespace(platform="METAL", device_kind="Apple M3"))
    assert caught.value.hint


def test_devices_by_name(monkeypatch):
    assert as_device("cpu") == as_device("cpu:0") == jax.local_devices(backend="cpu")[0]
    assert as_device(jax.devices()[0]) is jax.devices()[0]
    for name in ("metal", "cuda0", "CUDA", "cuda:", "meta", ""):
        with pytest.raises(HalfstepError, match=f"`{name}` is no JAX device") as caught:
            as_device(name)
        assert "`cuda:1`" in caught.value.hint
    monkeypatch.setattr(jax, "local_devices", lambda backend: ["first", "second"])
    assert as_device("cuda:1") == "second"
    with pytest.raises(HalfstepError, match=r"no `cuda:2`; JAX sees 2 `cuda`") as caught:
        as_device("cuda:2")
    assert "cuda:0" in caught.value.hint


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is an accelerator here")
@pytest.mark.parametrize("name", ["cuda", "gpu:1", "rocm", "tpu"])
def test_a_device_that_is_not_there(name):
    with pytest.raises(HalfstepError, match=f"finds no `{name.partition(':')[0]}` device") as caught:
        describe(name)
    assert "`cpu` is always there" in caught.value.hint


def test_describing_the_cpu_starts_no_device():
    code = (
        "import jax\n"
        "def refuse(*a, **k): raise RuntimeError('a device was asked for')\n"
        "jax.devices = jax.local_devices = refuse\n"
        "from halfstep.jax import dtypes\n"
        "from halfstep.core.formats import BF16\n"
        "dtypes.describe('cpu'); dtypes.supported(BF16, 'cpu')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
