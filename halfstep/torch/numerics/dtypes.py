"""Formats and torch dtypes, torch devices and what is known about them, and what torch can compute where.

`supported` answers for a *compute* format, that of matmul operands. On an accelerator the hardware decides
(core.devices): torch would run bf16 on a T4 by silently converting every operand. On a CPU torch has bf16 and fp16
kernels for every machine, which may be hundreds of times slower than fp32: the answer is yes, with that reason.
8-bit formats are multiplied by `torch._scaled_mm`, whose kernels differ by device, version and pair of formats: a
small product is tried once, and torch's error message is the reason. A CPU widens them, which is good for tests.
"""

from functools import cache

import torch

from halfstep.core.choice import Support
from halfstep.core.devices import EMULATED, Device, computes, native
from halfstep.core.errors import DeviceError
from halfstep.core.formats import BF16, E4M3, FP16, FP32, Format, parse
from halfstep.core.host import apple_generation, describe_cpu, sysctl
from halfstep.core.refusal import no_dtype, no_format
from halfstep.core.roles import is_narrow

DTYPES: dict[Format, torch.dtype] = {
    FP32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    parse("e4m3"): torch.float8_e4m3fn,
    parse("e5m2"): torch.float8_e5m2,
    parse("e4m3fnuz"): torch.float8_e4m3fnuz,
    parse("e5m2fnuz"): torch.float8_e5m2fnuz,
}
NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)  # a policy leaves other tensors alone
_FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}
# By kind of device: whether 8-bit operands with one scale per row have a kernel whose result is fp32. Filled when
# a model is prepared: compiled code can read it but could not try.
ROWS_INTO_FP32: dict[str, bool] = {}
# The hardware that a device stands for: the meta device, while a step is planned for a GPU (planning/stand_in.py).
STANDS_FOR: dict[str, Device] = {}


def dtype_of(fmt: Format) -> torch.dtype:
    """Returns the torch dtype that holds the format."""
    if fmt not in DTYPES:
        raise no_dtype(fmt, "torch", "tensors", DTYPES)
    return DTYPES[fmt]


def format_of(dtype: torch.dtype) -> Format:
    """Returns the format of a torch dtype."""
    if dtype not in _FORMATS:
        raise no_format(dtype, "tensors", _FORMATS)
    return _FORMATS[dtype]


def expected_device(device: torch.device) -> torch.device:
    """Returns where a model on the meta device will be, most likely; `Run.attach` asks again, when it is there."""
    if device.type != "meta" or device.type in STANDS_FOR:
        return device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def describe(device: torch.device | str) -> Device:
    """Returns what is known about a torch device. Asking about the CPU starts no other device."""
    device = as_device(device)
    if device.type in STANDS_FOR:
        return STANDS_FOR[device.type]
    match device.type:
        case "cpu":
            return describe_cpu()
        case "cuda":
            return _describe_cuda(device)
        case "xpu":
            _check_available(device, torch.xpu.is_available())
            name = torch.xpu.get_device_name(device)
            return Device("intel", name, architecture=_intel_architecture(name))
        case "mps":
            _check_available(device, torch.backends.mps.is_available())
            name = sysctl("machdep.cpu.brand_string") or "Apple GPU"
            return Device("apple", name, architecture=apple_generation(name))
        case other:
            raise DeviceError(
                f"halfstep knows nothing about the torch device `{other}`; it runs on cpu, cuda, xpu and mps",
                hint="TPUs run through JAX: `--backend jax`",
            )


def supported(fmt: Format, device: torch.device | str) -> Support:
    """Whether torch computes in the format on the device, and why (not)."""
    device = as_device(device)
    support = answer(fmt, describe(device))
    if device.type in STANDS_FOR:
        return support  # nothing can be tried
    if is_narrow(fmt) and fmt in DTYPES and (support or device.type == "cpu"):
        return _try_narrow(fmt, device, native(fmt, describe(device)))
    return support


def answer(fmt: Format, device: Device) -> Support:
    """Answers like `supported`, for a device that need not be present."""
    return computes(fmt, device, "torch", "torch runs it anyway, perhaps far slower than fp32")


def product_failure(
    left: Format, right: Format, device: torch.device, *, rows: bool = False, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Returns why torch cannot multiply two 8-bit formats, scaled per row or per tensor; empty if it can."""
    if device.type in STANDS_FOR:
        support = computes(left, STANDS_FOR[device.type], "torch", "")
        return "" if support else support.reason
    return _try_product(DTYPES[left], DTYPES[right], device, rows, dtype)


@cache
def _try_product(
    left: torch.dtype, right: torch.dtype, device: torch.device, rows: bool, dtype: torch.dtype
) -> str:
    scale = torch.ones((16, 1) if rows else (), device=device)
    try:
        a, b = (torch.ones(16, 16, device=device).to(narrow) for narrow in (left, right))
        result = float(torch._scaled_mm(a, b.t(), scale, scale.t(), out_dtype=dtype)[0, 0])
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return line.rpartition("please report a bug to PyTorch. ")[2]  # the meaning of a failed assertion
    # A kernel may mistake the codes for those of another format.
    return "" if result == 16.0 else f"sixteen times 1 x 1 is {result:g}"


def _try_narrow(fmt: Format, device: torch.device, hardware: Support) -> Support:
    """Tries an 8-bit format in a product with e4m3: no hardware multiplies two of e5m2."""
    failure = product_failure(fmt, parse("e4m3fnuz") if fmt.specials == "fnuz" else E4M3, device)
    if failure:
        return Support(False, f"{hardware.reason}; torch {torch.__version__} says: {failure}; {EMULATED}")
    slow = "" if hardware else "; torch widens it and multiplies anyway, slower than bf16: good for tests"
    return Support(True, hardware.reason + slow)


def as_device(device: torch.device | str) -> torch.device:
    """Returns the torch device of a name; an unknown name is an error."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise DeviceError(
            f"`{device}` is not a torch device", hint="write `cpu`, `cuda`, `cuda:1`, `xpu` or `mps`"
        ) from None


def _check_available(device: torch.device, present: bool) -> None:
    if not present:
        raise DeviceError(
            f"torch {torch.__version__} finds no `{device.type}` device here",
            hint="`cpu` is always there; an accelerator needs its driver and a torch built for it",
        )


def _describe_cuda(device: torch.device) -> Device:
    _check_available(device, torch.cuda.is_available())
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise DeviceError(
            f"there is no `{device}`; torch sees {torch.cuda.device_count()} CUDA device(s)",
            hint="they are numbered from cuda:0",
        )
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        # Such as gfx90a:sramecc+:xnack-, whose first part names the instructions.
        return Device("amd", properties.name, architecture=properties.gcnArchName.split(":")[0])
    return Device("nvidia", properties.name, capability=(properties.major, properties.minor))


def _intel_architecture(name: str) -> str:
    series = {
        "Data Center GPU Max": "xe-hpc",
        "Arc(TM) B": "xe2",
        "Arc(TM) Pro B": "xe2",
        "Arc(TM) A": "arc",
        "Arc(TM) Pro A": "arc",
        "Data Center GPU Flex": "arc",
    }
    return next((architecture for part, architecture in series.items() if part in name), "")
