"""Formats and JAX dtypes, descriptions of JAX devices, and what JAX can compute where.

`supported` answers for a *compute* format, one that matmul operands have. On an accelerator the hardware decides
(core.devices): XLA would silently run bf16 on a T4 by converting every operand. On a CPU XLA multiplies bf16 and
fp16 on every machine and pays for conversions without instructions, so the answer is yes, with that reason.

TF32 is a way to multiply fp32 arrays, which JAX offers on NVIDIA by name. An fp32 matmul without a stated
precision means TF32 there and bf16 on a TPU, so matmul.py states the precision of every one.
"""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.core.choice import Support
from halfstep.core.devices import Device, computes
from halfstep.core.errors import DeviceError, one_of
from halfstep.core.formats import BF16, FP16, FP32, Format, parse
from halfstep.core.host import describe_cpu
from halfstep.core.refusal import no_dtype, no_format

DType = np.dtype[Any]

DTYPES: dict[Format, DType] = {
    FP32: jnp.dtype(jnp.float32),
    BF16: jnp.dtype(jnp.bfloat16),
    FP16: jnp.dtype(jnp.float16),
    parse("e4m3"): jnp.dtype(jnp.float8_e4m3fn),
    parse("e5m2"): jnp.dtype(jnp.float8_e5m2),
    parse("e4m3fnuz"): jnp.dtype(jnp.float8_e4m3fnuz),
    parse("e5m2fnuz"): jnp.dtype(jnp.float8_e5m2fnuz),
}
_FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}
_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
_NAME = re.compile(r"([a-z]+)(?::(\d+)(?:-(\d+))?)?")


def dtype_of(fmt: Format) -> DType:
    """Returns the JAX dtype that holds the format."""
    if fmt not in DTYPES:
        raise no_dtype(fmt, "JAX", "arrays", DTYPES)
    return DTYPES[fmt]


def format_of(dtype: Any) -> Format:
    """Returns the format of a JAX dtype."""
    dtype = jnp.dtype(dtype)
    if dtype not in _FORMATS:
        raise no_format(dtype, "arrays", _FORMATS)
    return _FORMATS[dtype]


def describe(device: jax.Device | str) -> Device:
    """Describes a JAX device, or several by their name. Asking about the CPU by name starts no device."""
    if device == "cpu":
        return describe_cpu()
    if isinstance(device, str) and len(every := as_devices(device)) > 1:
        one = describe(every[0])
        return replace(one, name=f"{len(every)} x {one.name}")
    device = as_device(device)
    capability = str(getattr(device, "compute_capability", None) or "")
    match device.platform:
        case "cpu":
            return describe_cpu()
        case "tpu":
            return Device("tpu", device.device_kind, architecture=_generation(device.device_kind))
        case "gpu" | "cuda" | "rocm" if capability.startswith("gfx"):
            # For example gfx90a:sramecc+:xnack-, of which the first part names the instructions.
            return Device("amd", device.device_kind, architecture=capability.split(":")[0])
        case "gpu" | "cuda" if capability:
            major, _, minor = capability.partition(".")
            return Device("nvidia", device.device_kind, capability=(int(major), int(minor)))
        case other:
            raise DeviceError(
                f"the JAX device `{device}` is on the unknown platform `{other}`; "
                "halfstep runs on cpu, cuda, rocm and tpu",
                hint="`cpu` is always there",
            )


def supported(fmt: Format, device: jax.Device | str) -> Support:
    """Returns whether JAX computes in the format on the device, and why (not)."""
    return answer(fmt, describe(device))


def answer(fmt: Format, device: Device) -> Support:
    """`supported` for a device that is described rather than present."""
    slow = "XLA converts its operands to fp32 and back, so it may gain nothing"
    return computes(fmt, device, "JAX", slow)


def as_device(device: jax.Device | str) -> jax.Device:
    """Returns a device of this process by its name: `cpu`, `cuda`, `cuda:1`, `gpu`, `tpu` or `rocm`.

    Of several, the first: the others are like it.
    """
    return as_devices(device)[0] if isinstance(device, str) else device


def default_device() -> jax.Device:
    """Returns JAX's default device."""
    config: Any = jax.config
    return as_device(config.jax_default_device or jax.local_devices()[0])


def as_devices(device: str) -> list[jax.Device]:
    """Returns the devices of this process that a name means: one, or several as in `cuda:0-3`."""
    match = _NAME.fullmatch(device)
    if match is None or match[1] not in _PLATFORMS or int(match[3] or match[2] or 0) < int(match[2] or 0):
        raise DeviceError(
            f"`{device}` is not a JAX device", hint=f"use {one_of([*_PLATFORMS, 'cuda:1', 'cuda:0-3'])}"
        )
    platform, first = match[1], int(match[2] or 0)
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:
        raise DeviceError(
            f"JAX {jax.__version__} finds no `{platform}` device here",
            hint="`cpu` is always there; an accelerator needs its driver and a JAX built for it",
        ) from None
    last = int(match[3] or first)
    if last >= len(devices):
        raise DeviceError(
            f"there is no `{platform}:{last}`; JAX sees {len(devices)} `{platform}` device(s)",
            hint=f"they are numbered from {platform}:0"
            + ("; XLA_FLAGS=--xla_force_host_platform_device_count=4 makes four" if platform == "cpu" else ""),
        )
    return devices[first : last + 1]


def _generation(kind: str) -> str:
    """Returns a TPU's generation as core.devices names it, `v5e` for `TPU v5 lite`; empty if unknown."""
    match = re.fullmatch(r"TPU ?v?(\d+) ?(lite|[a-z])?.*", kind, re.IGNORECASE)
    if match is None:
        return ""
    return f"v{match[1]}{'e' if match[2] == 'lite' else (match[2] or '').lower()}"
