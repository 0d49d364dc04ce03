"""What hardware multiplies natively, device by device.

A format is native if the matrix unit (or, on a CPU, the dot product) has instructions that multiply numbers of
this format and sum the products in fp32, as the `matmul` role asks. Other formats run by other means: a T4 claims
bf16 and converts every operand to fp32 first; a TPU makes an fp32 product of several bf16 products; a CPU whose
fp16 instructions also sum in fp16 must convert. Whether a native format pays is measured (core.choice).

Sources: NVIDIA's CUDA C++ Programming Guide; AMD's manuals of CDNA 1 to 4 and of RDNA 3 and 4, and ROCm's table of
data types; Intel's oneAPI optimization guide (XMX) and the sycl_ext_oneapi_matrix tables; Intel's and Arm's
manuals for CPU flags, under the names Linux gives them; Google Cloud's TPU pages; for Apple, whose manuals are
silent, Metal's feature set and published measurements (bf16 is converted in software before the M3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfstep.core.choice import Support
from halfstep.core.errors import one_of
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format, parse

EMULATED = "`emulate=true` runs it emulated"
Kind = Literal["nvidia", "amd", "intel", "apple", "tpu", "cpu"]

E4M3FNUZ, E5M2FNUZ = parse("e4m3fnuz"), parse("e5m2fnuz")
# The formats that some matrix unit multiplies, without the block scales of the MX formats.
MULTIPLIED = (FP32, TF32, BF16, FP16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)

_CPU_FLAGS: dict[Format, tuple[str, ...]] = {
    BF16: ("amx_bf16", "avx512_bf16", "bf16", "svebf16"),
    FP16: ("amx_fp16", "asimdfhm"),
}
# fp16 arithmetic whose sums are fp16 too does not count, and the reason says so.
_FP16_SUMS = ("avx512_fp16", "asimdhp")
CPU_FEATURES = frozenset({*_CPU_FLAGS[BF16], *_CPU_FLAGS[FP16], *_FP16_SUMS, "i8mm"})
"""The CPU flags, as Linux names them, that a `Device` holds."""


@dataclass(frozen=True)
class Device:
    """A piece of hardware, as far as precision is concerned. NVIDIA's must have a compute capability."""

    kind: Kind
    name: str
    capability: tuple[int, int] | None = None  # NVIDIA's compute capability
    architecture: str = ""  # AMD gfx90a; TPU v5e; Intel xe-hpc or arc; Apple m1; CPU x86_64 or aarch64
    features: frozenset[str] = frozenset()  # CPU flags, as in CPU_FEATURES

    def __str__(self) -> str:
        if self.capability is not None:
            return f"{self.name} (compute capability {_with_dots(self.capability)})"
        return f"{self.name} ({self.architecture})" if self.architecture else self.name


def native(fmt: Format, device: Device) -> Support:
    """Returns whether the hardware multiplies matrices of this format, and why (not)."""
    if fmt not in MULTIPLIED:
        return Support(False, f"no matrix unit multiplies {fmt}; it can only be emulated")
    return _RULES[device.kind](fmt, device)


def computes(fmt: Format, device: Device, framework: str, slow: str) -> Support:
    """Returns whether a framework computes in the format; `slow` is a caveat for CPUs without instructions."""
    support = native(fmt, device)
    if device.kind == "cpu" and fmt in (BF16, FP16):
        return Support(True, support.reason + ("" if support else f"; {slow}"))
    if warning := caveat(fmt, device):
        return Support(True, warning)
    if support and fmt == TF32 and device.kind != "nvidia":
        support = Support(False, f"{framework} offers tf32 on NVIDIA only, though {support.reason}")
    return support if support else Support(False, f"{support.reason}; {EMULATED}")


def caveat(fmt: Format, device: Device) -> str:
    """Returns what to warn of: bf16 runs on every Apple GPU, on some of them in software. Empty if nothing."""
    support = native(fmt, device)
    if support or device.kind != "apple" or fmt != BF16:
        return ""
    return f"{support.reason}; it runs anyway, perhaps slower than fp32, and fp16 may be faster"


def _nvidia(fmt: Format, device: Device) -> Support:
    assert device.capability is not None
    has = f"compute capability {_with_dots(device.capability)}"
    if fmt == FP32:
        return Support(True, f"{has}; every NVIDIA GPU multiplies fp32")
    if fmt in (E4M3FNUZ, E5M2FNUZ):
        return Support(
            False,
            f"{has}; NVIDIA multiplies {str(fmt).removesuffix('fnuz')}, which is a different format from {fmt}",
        )
    needed = {FP16: (7, 0), BF16: (8, 0), TF32: (8, 0), E4M3: (8, 9), E5M2: (8, 9)}[fmt]
    return Support(device.capability >= needed, f"{has}; {fmt} needs {_with_dots(needed)}")


# By the beginning of the name.
_AMD: dict[str, tuple[Format, ...]] = {
    "gfx908": (BF16, FP16),
    "gfx90a": (BF16, FP16),
    "gfx94": (BF16, FP16, TF32, E4M3FNUZ, E5M2FNUZ),  # TF32 is xf32 in AMD's names
    "gfx950": (BF16, FP16, E4M3, E5M2),
    "gfx11": (BF16, FP16),
    "gfx12": (BF16, FP16, E4M3, E5M2),
}


def _amd(fmt: Format, device: Device) -> Support:
    if fmt == FP32:
        return Support(True, f"{device.architecture or device.name}; every AMD GPU multiplies fp32")
    if not device.architecture:
        return _unknown_hardware(fmt, device, "gfx name")
    for prefix, formats in _AMD.items():
        if device.architecture.startswith(prefix):
            return _support_from_list(fmt, device.architecture, formats)
    return Support(False, f"{device.architecture} has no known matrix instructions")


_INTEL: dict[str, tuple[Format, ...]] = {
    "xe-hpc": (TF32, BF16, FP16),  # Data Center GPU Max
    "xe2": (TF32, BF16, FP16),  # Arc B, Lunar Lake
    "arc": (BF16, FP16),  # Arc A: Xe-HPG
    "xe-lpg": (),  # no XMX units
}


def _intel(fmt: Format, device: Device) -> Support:
    if fmt == FP32:
        return Support(True, f"{device.architecture or device.name}; every Intel GPU multiplies fp32")
    if device.architecture not in _INTEL:
        return _unknown_hardware(fmt, device, "architecture")
    if not _INTEL[device.architecture]:
        return Support(False, f"{device.architecture} has no matrix units")
    return _support_from_list(fmt, device.architecture, _INTEL[device.architecture])


def _apple(fmt: Format, device: Device) -> Support:
    if fmt in (FP32, FP16):
        return Support(True, f"{device.name}; every Apple GPU from the M1 on multiplies {fmt}")
    if fmt != BF16:
        return Support(False, f"no Apple GPU multiplies {fmt}")
    generation = device.architecture.removeprefix("m").split("-")[0]
    if not generation.isdecimal():
        return _unknown_hardware(fmt, device, "generation")
    if int(generation) >= 3:
        return Support(True, f"{device.architecture}; bf16 needs m3")
    return Support(False, f"{device.architecture} converts bf16 in software; bf16 needs m3")


def _tpu(fmt: Format, device: Device) -> Support:
    if fmt == BF16:
        return Support(True, "the matrix unit of every TPU since v2 multiplies bf16")
    if fmt == FP32:
        return Support(False, "a TPU's matrix unit makes an fp32 product of several bf16 products")
    if fmt in (E4M3, E5M2):
        if not device.architecture:
            return _unknown_hardware(fmt, device, "version")
        version = device.architecture.removeprefix("v")[:1]
        ok = version.isdecimal() and int(version) >= 7
        return Support(ok, f"TPU {device.architecture}; {fmt} needs v7")
    return Support(False, f"no TPU multiplies {fmt}")


def _cpu(fmt: Format, device: Device) -> Support:
    if fmt == FP32:
        return Support(True, "every CPU multiplies fp32")
    if fmt not in _CPU_FLAGS:
        return Support(False, f"no CPU multiplies {fmt}")
    flags = [flag for flag in _CPU_FLAGS[fmt] if flag in device.features]
    if flags:
        return Support(True, f"the CPU has {flags[0]}, which multiplies {fmt} and sums in fp32")
    needed = one_of(_CPU_FLAGS[fmt])
    sums_in_fp16 = [flag for flag in _FP16_SUMS if fmt == FP16 and flag in device.features]
    if sums_in_fp16:
        return Support(False, f"the CPU's {sums_in_fp16[0]} sums in fp16; fp16 with fp32 sums needs {needed}")
    return Support(False, f"the CPU lacks {needed}")


_RULES: dict[Kind, Callable[[Format, Device], Support]] = {
    "nvidia": _nvidia,
    "amd": _amd,
    "intel": _intel,
    "apple": _apple,
    "tpu": _tpu,
    "cpu": _cpu,
}


def _support_from_list(fmt: Format, where: str, formats: tuple[Format, ...]) -> Support:
    names = ", ".join(str(other) for other in (FP32, *formats))
    return Support(fmt in formats, f"the matrix units of {where} multiply {names}")


def _unknown_hardware(fmt: Format, device: Device, what: str) -> Support:
    given = f" (`{device.architecture}`)" if device.architecture else ""
    return Support(False, f"the {what} of {device.name}{given} is not known, and so whether it multiplies {fmt}")


def _with_dots(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
