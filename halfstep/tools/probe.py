"""Finds what this machine runs natively, how fast, and which precision to train in.

For each backend and device: the hardware, matmul times by format, what is supported and why, and the choice that
core.choice makes. The answer depends on the backend: on one CPU a bf16 matmul took 290 times as long as an fp32
one in torch, and no longer in JAX.

A backend is a module `halfstep.<name>.measure`, imported when needed, with FORMATS to ask about, version(),
devices() (the one to train on first), describe(device), supported(fmt, device), measure(device, formats, *,
budget), a matmul, and measure_block(device, formats, model, tokens, *, budget), a block, which decides a policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfstep.config.run import RunConfig
from halfstep.core.choice import Choice, Shape, Support, Timing, choose, gain
from halfstep.core.devices import Device
from halfstep.core.errors import HalfstepError, did_you_mean, one_of
from halfstep.core.formats import BF16, FP16, FP32, TF32, Format
from halfstep.core.policy import PRESETS, Policy, read
from halfstep.core.roles import Operand, is_narrow
from halfstep.training.telemetry.ceiling import Ceiling, recorded

BACKENDS = ("torch", "jax", "mlx")

# What a ceiling is measured at, and for how many seconds; on a CPU small matmuls are the fastest.
CEILING: tuple[Shape, ...] = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
CPU_CEILING: tuple[Shape, ...] = ((32, 32, 128), (128, 128, 512), (512, 512, 2048))
BUDGET, CPU_BUDGET = 1.5, 0.3


@dataclass(frozen=True)
class DeviceResult:
    """One device through one backend."""

    device: str
    description: Device
    timings: tuple[Timing, ...]
    support: tuple[tuple[Format, Support], ...]
    choice: Choice

    def ratio(self, timing: Timing) -> float | None:
        """Returns how many times faster than fp32 it is at the same shape, if fp32 was timed there."""
        for other in self.timings:
            if other.format == FP32 and other.shape == timing.shape:
                return other.typical / timing.typical
        return None

    def compared(self) -> list[Timing]:
        """Returns the deciding timings: each format at the largest shape it shares with fp32, and fp32 there."""
        formats = {timing.format for timing in self.timings} - {FP32}
        shared = {fmt: known.shape for fmt in formats if (known := gain(self.timings, fmt)) is not None}
        alone = gain(self.timings, FP32)
        at = set(shared.values()) or ({alone.shape} if alone else set())
        return [
            timing
            for timing in self.timings
            if (timing.shape in at if timing.format == FP32 else timing.shape == shared.get(timing.format))
        ]


@dataclass(frozen=True)
class BackendResult:
    """The answer of one backend, or why it has none."""

    name: str
    version: str = ""
    devices: tuple[DeviceResult, ...] = ()
    others: tuple[str, ...] = ()  # devices that were not asked
    missing: str = ""
    install: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """The answer of every backend."""

    backends: tuple[BackendResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as data."""
        return {"backends": [_backend_data(backend) for backend in self.backends]}


def run(backends: Sequence[str] | None = None, budget: float = 3.0, *, device: str | None = None) -> ProbeResult:
    """Asks each backend, or those named (which must be there), within `budget` seconds of measuring in total."""
    names = list(dict.fromkeys(backends)) if backends else list(BACKENDS)
    modules = {name: _load(name) for name in names}
    absent = [module for module in modules.values() if isinstance(module, BackendResult)]
    if backends and absent:
        raise HalfstepError(absent[0].missing, hint=absent[0].install)
    share = _checked(budget) / max(1, len(names) - len(absent))
    return ProbeResult(
        tuple(
            module if isinstance(module, BackendResult) else _ask(name, module, device, share)
            for name, module in modules.items()
        )
    )


def choose_policy(backend: str, device: str | None, config: RunConfig, budget: float = 3.0) -> Choice:
    """Returns the preset to train with by measuring the recipe's block: what `policy = "auto"` means."""
    module = _need(backend)
    device = device or module.devices()[0]
    support = {fmt: module.supported(fmt, device) for fmt in (FP32, BF16, FP16)}
    formats = [fmt for fmt, ok in support.items() if ok]
    return choose(_measure_block(module, device, formats, config, budget), support)


def resolve(config: RunConfig, device: str | None = None) -> tuple[Policy, Choice | None, list[str]]:
    """Returns the policy of a run, the choice if it was `auto`, and warnings if it was not."""
    spelling = read(config.policy)
    if spelling.base == "auto":
        choice = choose_policy(config.backend, device, config)
        return spelling.build(PRESETS[choice.preset]), choice, []
    policy = spelling.build()
    return policy, None, warnings_for(policy, config.backend, device, config)


def warnings_for(
    policy: Policy, backend: str, device: str | None, config: RunConfig, budget: float = 3.0
) -> list[str]:
    """Returns warnings about a policy that was named, not chosen: formats that are slower here than fp32."""
    if policy.emulate:
        return []
    module = _need(backend)
    device = device or module.devices()[0]
    formats = [fmt for fmt in _operand_formats(policy) if fmt not in (FP32, TF32) and not is_narrow(fmt)]
    formats = [fmt for fmt in formats if module.supported(fmt, device)]
    if not formats:
        return []
    timings = _measure_block(module, device, [FP32, *formats], config, budget)
    gains = [known for fmt in formats if (known := gain(timings, fmt)) is not None]
    return [f"{slow}; it runs as asked" for slow in gains if slow.ratio < 1]


def measure_ceiling(config: RunConfig, policy: Policy, device: str | None, known: Path | None = None) -> Ceiling:
    """Returns the device's best speed in the policy's compute format, or what the events in `known` recorded."""
    if not config.training.measure_ceiling:
        return Ceiling(None, "training.measure_ceiling is false")
    if policy.emulate:
        return Ceiling(None, f"{policy.compute.format} is emulated: no hardware multiplies it")
    module = _need(config.backend)
    device = device or module.devices()[0]
    hardware, fmt = module.describe(device), policy.compute.format
    earlier = recorded(known, hardware.name, fmt) if known is not None else None
    if earlier is not None:
        return earlier
    support = module.supported(fmt, device)
    if not support:
        return Ceiling(None, f"{fmt} is not supported: {support.reason}")
    budget, shapes = (CPU_BUDGET, CPU_CEILING) if hardware.kind == "cpu" else (BUDGET, CEILING)
    timings = [t for t in module.measure(device, [fmt], budget=budget, shapes=shapes) if t.format == fmt]
    if not timings:
        return Ceiling(None, f"no matmul in {fmt} could be timed within {budget:g} s")
    best = max(timings, key=lambda timing: timing.flops)
    return Ceiling(best.flops, f"{fmt} matmuls at {'x'.join(map(str, best.shape))}, timed on {hardware.name}")


def _measure_block(
    module: Any, device: str, formats: Sequence[Format], config: RunConfig, budget: float
) -> list[Timing]:
    tokens = config.training.batch * config.model.context
    timings: list[Timing] = module.measure_block(device, formats, config.model, tokens, budget=_checked(budget))
    return timings


def _ask(name: str, module: Any, device: str | None, budget: float) -> BackendResult:
    devices = module.devices()
    device = device or devices[0]
    support = tuple((fmt, module.supported(fmt, device)) for fmt in module.FORMATS)
    formats = [fmt for fmt, ok in support if ok]
    timings = tuple(module.measure(device, formats, budget=budget))
    choice = choose(timings, dict(support))
    result = DeviceResult(device, module.describe(device), timings, support, choice)
    others = tuple(other for other in devices if other != device.partition(":")[0])
    return BackendResult(name, module.version(), (result,), others)


def _load(name: str) -> Any:
    """Returns the module of a backend, or a result that says why there is none."""
    if name not in BACKENDS:
        raise HalfstepError(
            f"unknown backend `{name}`; it may be {one_of(BACKENDS)}", hint=did_you_mean(name, BACKENDS)
        )
    if find_spec(name) is None:
        return BackendResult(name, missing=f"{name} is not installed", install=f"pip install 'halfstep[{name}]'")
    return import_module(f"halfstep.{name}.measure")


def _need(name: str) -> Any:
    module = _load(name)
    if isinstance(module, BackendResult):
        raise HalfstepError(module.missing, hint=module.install)
    return module


def _checked(budget: float) -> float:
    if not 0 < budget <= 3600:
        raise HalfstepError(
            f"the time budget is {budget:g} seconds; it must be above 0 and at most 3600", hint="3 is usual"
        )
    return budget


def _operand_formats(policy: Policy) -> list[Format]:
    values = [*policy.roles().values(), *(value for rule in policy.rules for _, value in rule.changes)]
    formats = [value.format for value in values if isinstance(value, Operand)]
    if policy.eval.format is not None:
        formats.append(policy.eval.format)
    return list(dict.fromkeys(formats))


def _backend_data(backend: BackendResult) -> dict[str, Any]:
    if backend.missing:
        return {"name": backend.name, "missing": backend.missing, "install": backend.install}
    return {
        "name": backend.name,
        "version": backend.version,
        "devices": [_device_data(result) for result in backend.devices],
        "other_devices": list(backend.others),
    }


def _device_data(result: DeviceResult) -> dict[str, Any]:
    hardware = result.description
    return {
        "device": result.device,
        "kind": hardware.kind,
        "name": hardware.name,
        "capability": None if hardware.capability is None else list(hardware.capability),
        "architecture": hardware.architecture,
        "features": sorted(hardware.features),
        "support": {str(fmt): {"ok": support.ok, "reason": support.reason} for fmt, support in result.support},
        "timings": [
            {
                "format": str(timing.format),
                "shape": list(timing.shape),
                "seconds": list(timing.seconds),
                "typical_seconds": timing.typical,
                "flops_per_second": timing.flops,
                "ratio_to_fp32": result.ratio(timing),
            }
            for timing in result.timings
        ],
        "choice": {"preset": result.choice.preset, "reason": result.choice.reason},
    }
