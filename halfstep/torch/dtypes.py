"""Formats and torch dtypes, torch devices and what is known of them, and what torch can compute where.

`supported` answers for a *compute* format, one that matmul operands have. On an accelerator the hardware
decides (core.devices): torch would run bf16 on a T4 by converting every operand, and say nothing. On a CPU
torch has bf16 and fp16 kernels for every machine; with instructions for them they may pay, without they can
be hundreds of times slower than fp32. Both are the user's to take, so the answer is yes, with that reason.
What cannot run natively can be emulated anywhere, and every refusal names the switch: `emulate=true`.
"""

import platform
import subprocess
from pathlib import Path

import torch

from halfstep.core.choice import Support
from halfstep.core.devices import CPU_FEATURES, Device, native
from halfstep.core.errors import FormatError, HalfstepError
from halfstep.core.formats import BF16, FP16, FP32, TF32, Format, parse

DTYPES: dict[Format, torch.dtype] = {
    FP32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    parse("e4m3"): torch.float8_e4m3fn,
    parse("e5m2"): torch.float8_e5m2,
    parse("e4m3fnuz"): torch.float8_e4m3fnuz,
    parse("e5m2fnuz"): torch.float8_e5m2fnuz,
}
_FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}
_EMULATED = "`emulate=true` runs it emulated"
_CPUINFO = Path("/proc/cpuinfo")


def dtype_of(fmt: Format) -> torch.dtype:
    """The torch dtype that holds the format."""
    if fmt not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        why = "it is a way to multiply fp32 tensors" if fmt == TF32 else f"torch has those of {names}"
        raise FormatError(
            f"{fmt} has no torch dtype: {why}",
            hint="keep the tensor in torch.float32; cast.quantize rounds it to the format's numbers",
        )
    return DTYPES[fmt]


def format_of(dtype: torch.dtype) -> Format:
    """The format of a torch dtype."""
    if dtype not in _FORMATS:
        names = ", ".join(str(known) for known in _FORMATS)
        raise FormatError(
            f"{dtype} is none of the formats a policy knows; they are {names}",
            hint="integer and boolean tensors are not cast; float64 is wider than any format here",
        )
    return _FORMATS[dtype]


def describe(device: torch.device | str) -> Device:
    """What is known of a torch device. Asking about the CPU starts no other device."""
    device = as_device(device)
    match device.type:
        case "cpu":
            return _describe_cpu()
        case "cuda":
            return _describe_cuda(device)
        case "xpu":
            name = _available(device, torch.xpu.is_available()) and torch.xpu.get_device_name(device)
            return Device("intel", str(name), architecture=_intel_architecture(str(name)))
        case "mps":
            _available(device, torch.backends.mps.is_available())
            name = _sysctl("machdep.cpu.brand_string") or "Apple GPU"
            return Device("apple", name, architecture=_apple_generation(name))
        case other:
            raise HalfstepError(
                f"nothing is known of the torch device `{other}`; halfstep runs on cpu, cuda, xpu and mps",
                hint="TPUs run through JAX: `--backend jax`",
            )


def supported(fmt: Format, device: torch.device | str, *, emulate: bool = False) -> Support:
    """Whether torch computes in the format on the device, and why (not)."""
    if emulate:
        return Support(True, f"emulated: {fmt} numbers in fp32 tensors, multiplied and summed in fp32")
    return answer(fmt, describe(device), on_cpu=as_device(device).type == "cpu")


def answer(fmt: Format, device: Device, *, on_cpu: bool) -> Support:
    """`supported` for a device that is described rather than present."""
    found = native(fmt, device)
    if on_cpu and fmt in (BF16, FP16):
        slow = "" if found else "; torch runs it all the same, perhaps far slower than fp32"
        return Support(True, found.reason + slow)
    if found and fmt == TF32 and device.kind != "nvidia":
        found = Support(False, f"torch offers tf32 on NVIDIA only, though {found.reason}")
    if not found:
        return Support(False, f"{found.reason}; {_EMULATED}")
    return found


def as_device(device: torch.device | str) -> torch.device:
    """A torch device by its name; what is no name of one is an error."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise HalfstepError(
            f"`{device}` is no torch device", hint="as `cpu`, `cuda`, `cuda:1`, `xpu` or `mps`"
        ) from None


def _available(device: torch.device, present: bool) -> bool:
    if not present:
        raise HalfstepError(
            f"torch {torch.__version__} finds no `{device.type}` device here",
            hint="`cpu` is always there; an accelerator needs its driver and a torch built for it",
        )
    return True


def _describe_cuda(device: torch.device) -> Device:
    _available(device, torch.cuda.is_available())
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise HalfstepError(
            f"there is no `{device}`; torch sees {torch.cuda.device_count()} CUDA device(s)",
            hint="they are numbered from cuda:0",
        )
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        # As in gfx90a:sramecc+:xnack-, of which the first part names the instructions.
        return Device("amd", properties.name, architecture=properties.gcnArchName.split(":")[0])
    return Device("nvidia", properties.name, capability=(properties.major, properties.minor))


def _describe_cpu() -> Device:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    fields = _cpuinfo()
    name = fields.get("model name") or _sysctl("machdep.cpu.brand_string") or platform.processor() or machine
    flags = fields.get("flags") or fields.get("Features") or ""
    return Device("cpu", name, architecture=machine, features=CPU_FEATURES & set(flags.split()))


def _cpuinfo() -> dict[str, str]:
    """The fields of the first core, where the system is Linux."""
    if not _CPUINFO.exists():
        return {}
    first = _CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _sysctl(key: str) -> str:
    """A fact of macOS; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _apple_generation(name: str) -> str:
    """`m3` of `Apple M3 Max`."""
    words = [word.lower() for word in name.split()]
    return next((word for word in words if word[0] == "m" and word[1:].isdecimal()), "")


def _intel_architecture(name: str) -> str:
    """The names of core.devices, from what Intel calls its products."""
    series = {
        "Data Center GPU Max": "xe-hpc",
        "Arc(TM) B": "xe2",
        "Arc(TM) Pro B": "xe2",
        "Arc(TM) A": "arc",
        "Arc(TM) Pro A": "arc",
        "Data Center GPU Flex": "arc",
    }
    return next((architecture for part, architecture in series.items() if part in name), "")
