import pytest
import torch

from halfstep.core import host
from halfstep.core.choice import Support
from halfstep.core.devices import Device
from halfstep.core.errors import FormatError, HalfstepError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format, parse
from halfstep.core.rounding import decode
from halfstep.torch.numerics import dtypes
from halfstep.torch.numerics.dtypes import DTYPES, answer, describe, dtype_of, format_of, supported
from tests.refusals import refuses

T4 = Device("nvidia", "T4", capability=(7, 5))
H100 = Device("nvidia", "H100", capability=(9, 0))
MI300 = Device("amd", "MI300X", architecture="gfx942")
N1 = Device("cpu", "Neoverse-N1", architecture="aarch64", features=frozenset({"asimdhp"}))


@pytest.mark.parametrize("fmt", DTYPES, ids=str)
def test_a_dtype_has_the_codes_of_its_format(fmt):
    dtype = dtype_of(fmt)
    assert format_of(dtype) == fmt
    assert torch.finfo(dtype).max == fmt.max
    assert torch.finfo(dtype).smallest_normal == fmt.smallest_normal
    if fmt.bits == 8:
        codes = torch.arange(256, dtype=torch.uint8)
        found, expected = codes.view(dtype).float(), torch.from_numpy(decode(codes.numpy(), fmt))
        assert torch.equal(found.nan_to_num(1e9), expected.nan_to_num(1e9))


def test_formats_without_a_dtype_say_why():
    with refuses(FormatError, "tf32 has no torch dtype: it is a way to multiply fp32", "float32"):
        dtype_of(TF32)
    with pytest.raises(FormatError, match="e3m4ieee has no torch dtype: torch has dtypes for fp32, bf16"):
        dtype_of(parse("e3m4ieee"))
    for dtype in (torch.int32, torch.bool, torch.float64):
        with pytest.raises(FormatError, match=f"{dtype} is not a format.*torch.bfloat16"):
            format_of(dtype)


@pytest.mark.parametrize(
    ("fmt", "device", "expected"),
    [
        (BF16, T4, Support(False, "compute capability 7.5; bf16 needs 8.0; `emulate=true` runs it emulated")),
        (FP16, T4, Support(True, "compute capability 7.5; fp16 needs 7.0")),
        (E4M3, H100, Support(True, "compute capability 9.0; e4m3 needs 8.9")),
        (TF32, H100, Support(True, "compute capability 9.0; tf32 needs 8.0")),
    ],
)
def test_the_hardware_decides_on_an_accelerator(fmt, device, expected):
    assert answer(fmt, device) == expected


def test_tf32_is_nvidias_a_cpu_runs_halves_slowly_and_fp32_runs_everywhere():
    found = answer(TF32, MI300)
    assert not found
    assert "on NVIDIA only" in found.reason
    assert answer(parse("e4m3fnuz"), MI300)
    assert "emulate=true" in answer(E4M3, MI300).reason
    for fmt in (BF16, FP16):
        found = answer(fmt, N1)
        assert found
        assert "perhaps far slower than fp32" in found.reason
    fast = Device("cpu", "Zen 4", architecture="x86_64", features=frozenset({"avx512_bf16"}))
    assert answer(BF16, fast) == Support(True, "the CPU has avx512_bf16, which multiplies bf16 and sums in fp32")
    for device in (T4, H100, MI300, N1):
        assert answer(FP32, device)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_an_8_bit_format_is_supported_where_a_small_product_is_right(fmt, monkeypatch):
    dtypes._try_product.cache_clear()
    real = torch._scaled_mm

    def refuse(*given, **rest):
        raise NotImplementedError("no kernel here\nand a long story")

    for product, ok, said in [
        (lambda a, b, *_, **__: torch.full((16, 16), 16.0), True, "slower than bf16: good for tests"),
        (lambda a, b, *_, **__: torch.full((16, 16), 32.0), False, "says: sixteen times 1 x 1 is 32; `emulate"),
        (refuse, False, "says: no kernel here; `emulate=true` runs it emulated"),
    ]:
        monkeypatch.setattr(torch, "_scaled_mm", product)
        found = supported(fmt, "cpu")
        assert found.ok is ok
        assert found.reason.startswith(f"no CPU multiplies {fmt}; torch ")
        assert said in found.reason
        assert supported(fmt, "cpu", emulate=True)
        dtypes._try_product.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", real)
    supported(fmt, "cpu")
    before = dtypes._try_product.cache_info().misses
    supported(fmt, "cpu")
    assert dtypes._try_product.cache_info().misses == before


@pytest.mark.parametrize("fmt", [TF32, Format.parse("e3m4ieee"), Format.parse("e3m2")], ids=str)
def test_what_a_cpu_refuses_names_the_switch_that_runs_it(fmt):
    found = supported(fmt, "cpu")
    assert not found
    assert found.reason.endswith("`emulate=true` runs it emulated")
    emulated = supported(fmt, "cpu", emulate=True)
    assert emulated
    assert emulated.reason.startswith("emulated")


X86 = "processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx512_bf16 amx_bf16\n\nprocessor\t: 1\nflags\t:\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimdhp bf16 i8mm sve\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("text", "machine", "expected"),
    [
        (X86, "x86_64", Device("cpu", "A Xeon", None, "x86_64", frozenset({"avx512_bf16", "amx_bf16"}))),
        (ARM, "aarch64", Device("cpu", "aarch64", None, "aarch64", frozenset({"asimdhp", "bf16", "i8mm"}))),
        (None, "AMD64", Device("cpu", "x86_64", None, "x86_64", frozenset())),
    ],
)
def test_a_cpu_by_its_flags(text, machine, expected, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(host, "_CPUINFO", path)
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    monkeypatch.setattr(host.platform, "processor", lambda: "")
    assert describe("cpu") == expected


class Properties:
    name, major, minor, gcnArchName = "a GPU", 8, 6, "gfx90a:sramecc+:xnack-"


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)


def test_a_gpu_by_its_capability_or_architecture_and_one_that_is_too_old_is_not_asked(one_gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert describe("cuda") == Device("nvidia", "a GPU", capability=(8, 6))
    with pytest.raises(HalfstepError, match=r"no `cuda:1`; torch sees 1"):
        describe("cuda:1")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert describe(torch.device("cuda", 0)) == Device("amd", "a GPU", architecture="gfx90a")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dtypes, "_try_product", None)
    found = supported(E4M3, "cuda")
    assert found == Support(False, "compute capability 8.6; e4m3 needs 8.9; `emulate=true` runs it emulated")
    monkeypatch.setattr(Properties, "minor", 9)
    asked = []
    monkeypatch.setattr(dtypes, "_try_product", lambda *given: asked.append(given) or "")
    assert supported(E5M2, "cuda") == Support(True, "compute capability 8.9; e5m2 needs 8.9")
    assert asked[0][:2] == (torch.float8_e5m2, torch.float8_e4m3fn)  # no hardware multiplies two e5m2


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("Intel(R) Data Center GPU Max 1550", "xe-hpc"),
        ("Intel(R) Arc(TM) A770 Graphics", "arc"),
        ("Intel(R) Arc(TM) B580 Graphics", "xe2"),
        ("Intel(R) Graphics", ""),
    ],
)
def test_an_intel_gpu_by_its_name(name, architecture, monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: name)
    assert describe("xpu") == Device("intel", name, architecture=architecture)


@pytest.mark.parametrize(("name", "generation"), [("Apple M3 Max", "m3"), ("Apple M1", "m1"), ("VMware", "")])
def test_an_apple_gpu_by_its_generation(name, generation, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(dtypes, "sysctl", lambda key: name)
    assert describe("mps") == Device("apple", name, architecture=generation)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there():
    with refuses(HalfstepError, "finds no `cuda` device"):
        describe("cuda")
    with pytest.raises(HalfstepError, match="`gpu` is not a torch device"):
        describe("gpu")
    with pytest.raises(HalfstepError, match="knows nothing about the torch device `meta`"):
        describe("meta")
