"""Formats and MLX dtypes, descriptions of MLX devices, and what MLX can compute where.

`supported` answers for a *compute* format, one that matmul operands have. On a GPU the hardware decides
(core.devices), except that bf16 runs on an M1 or M2 too, where MLX converts every operand: yes, with a warning. On
a CPU MLX multiplies bf16 and fp16 by widening blocks of the operands to fp32, so the answer is yes, with that
reason. MLX has no fp8 type, only a conversion to bytes that turns NaN into 448; so fp8 is never native here,
whatever the hardware can do, nor is tf32.

"fp32" is fp32, but on a GPU not by default: unless the environment has MLX_ENABLE_TF32=0 before the first matmul,
MLX multiplies fp32 arrays in TF32 wherever the hardware can (NVIDIA from Ampere on, Apple's M5).
"""

import os
from typing import Any

import mlx.core as mx

from halfstep.core.choice import Support
from halfstep.core.devices import EMULATED, Device, computes
from halfstep.core.errors import DeviceError, PolicyConflictError
from halfstep.core.formats import BF16, FP16, FP32, Format
from halfstep.core.host import apple_generation, describe_cpu, sysctl
from halfstep.core.refusal import no_dtype, no_format
from halfstep.core.roles import is_narrow

DTYPES: dict[Format, mx.Dtype] = {FP32: mx.float32, BF16: mx.bfloat16, FP16: mx.float16}
_FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}
_KINDS = {"cpu": mx.cpu, "gpu": mx.gpu}
_TF32 = "MLX_ENABLE_TF32"


def dtype_of(fmt: Format) -> mx.Dtype:
    """Returns the MLX dtype that holds the format."""
    if fmt not in DTYPES:
        raise no_dtype(fmt, "MLX", "arrays", DTYPES)
    return DTYPES[fmt]


def format_of(dtype: mx.Dtype) -> Format:
    """Returns the format of an MLX dtype."""
    if dtype not in _FORMATS:
        raise no_format(dtype, "arrays", _FORMATS)
    return _FORMATS[dtype]


def is_floating(x: Any) -> bool:
    """Whether a value is an array of floating numbers."""
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)


def kind_of(device: mx.Device) -> str:
    """Returns `cpu` or `gpu`."""
    return str(device.type).rpartition(".")[2]


def describe(device: mx.Device | str) -> Device:
    """Describes an MLX device. Asking about the CPU starts no other device."""
    device = as_device(device)
    if device.type == mx.cpu:
        return describe_cpu()
    if mx.metal.is_available():
        name = sysctl("machdep.cpu.brand_string") or "Apple GPU"
        return Device("apple", name, architecture=apple_generation(name))
    info = mx.device_info(device)
    capability = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
    return Device("nvidia", str(info["device_name"]), capability=capability)


def supported(fmt: Format, device: mx.Device | str) -> Support:
    """Returns whether MLX computes in the format on the device, and why (not)."""
    return answer(fmt, describe(device))


def answer(fmt: Format, device: Device) -> Support:
    """`supported` for a device that is described rather than present."""
    if is_narrow(fmt):
        return Support(False, f"MLX has no fp8 type, and so none for {fmt}; {EMULATED}")
    if fmt not in DTYPES:
        return Support(False, f"MLX offers no {fmt} matmul; {EMULATED}")
    if device.kind == "cpu" and fmt != FP32:
        return Support(True, f"MLX multiplies {fmt} on every CPU, widened to fp32; only timing it says if it pays")
    return computes(fmt, device, "MLX", slow="")


def as_device(device: mx.Device | str) -> mx.Device:
    """Returns an MLX device by its name, `cpu` or `gpu`; any other name or a missing device is an error."""
    if isinstance(device, str):
        if device not in _KINDS:
            raise DeviceError(f"`{device}` is not an MLX device", hint="it is `cpu` or `gpu`")
        device = mx.Device(_KINDS[device])
    if device.type == mx.gpu and not (mx.metal.is_available() or mx.cuda.is_available()):
        raise DeviceError(
            f"mlx {version()} finds no `gpu` device here",
            hint="`cpu` is always there; a GPU needs Apple silicon, or Linux with `pip install 'mlx[cuda]'`",
        )
    return device


def version() -> str:
    """Returns the version of MLX."""
    return str(mx.__version__)  # type: ignore[attr-defined]


def pin_matmuls(device: mx.Device | str) -> None:
    """Makes fp32 matmuls fp32. Call it before the first one: MLX reads the environment once."""
    if as_device(device).type == mx.cpu:
        return
    if os.environ.setdefault(_TF32, "0") != "0":
        raise PolicyConflictError(
            f"{_TF32} is `{os.environ[_TF32]}`: MLX would multiply fp32 arrays in TF32",
            hint=f"unset it, or set {_TF32}=0",
        )
