"""What torch says of a device. What every backend answers alike is in tests/conformance/test_dtypes.py."""

import pytest
import torch

from halfstep.core import host
from halfstep.core.choice import Support
from halfstep.core.devices import Device
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import E4M3, E5M2
from halfstep.torch.numerics import dtypes
from halfstep.torch.numerics.dtypes import describe, supported


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
        dtypes._try_product.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", real)
    supported(fmt, "cpu")
    before = dtypes._try_product.cache_info().misses
    supported(fmt, "cpu")
    assert dtypes._try_product.cache_info().misses == before


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


def test_a_device_of_which_nothing_is_known_is_refused():
    with pytest.raises(HalfstepError, match="knows nothing about the torch device `meta`"):
        describe("meta")
