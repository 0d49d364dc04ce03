"""Finds what this machine runs natively, how fast, and which precision to train in.

For each backend and device: the hardware, what is supported and why, and the choice that `auto` makes there, by
the same measurement (core.arrays.measure) of the same recipe. The answer depends on the backend: on one CPU a
bf16 matmul took 290 times as long as an fp32 one in torch, and no longer in JAX.

A backend is a module `halfstep.<name>.measure`, imported when needed, with FORMATS to ask about, version(),
devices() (the one to train on first), describe(device), supported(fmt, device), measure(device, formats, *,
budget), a matmul, and measure_block(device, formats, model, tokens, *, budget), a block, which decides a policy.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, get_args

from halfstep.config.load import DEFAULT_RECIPE, load
from halfstep.config.run import Backend, RunConfig
from halfstep.core.arrays.ladder import ENOUGH
from halfstep.core.arrays.measure import (
    BUDGET,
    CANDIDATES,
    CPU_SHAPES,
    MATMUL_SHARE,
    accelerator_shapes,
    decide,
    time_candidates,
)
from halfstep.core.choice import MIN_GAIN, Choice, Gain, Shape, Support, Timing, choose, gain
from halfstep.core.devices import Device
from halfstep.core.errors import (
    MissingPackageError,
    OptionError,
    PolicyError,
    did_you_mean,
    how_to_install,
    one_of,
)
from halfstep.core.formats import FP32, TF32, Format
from halfstep.core.policy import PRESETS, Policy, read
from halfstep.core.precision import operand_formats
from halfstep.core.roles import is_narrow
from halfstep.training.telemetry.meters import Ceiling, recorded_ceiling

Say = Callable[[str], None]

BACKENDS: tuple[str, ...] = get_args(Backend)

# What a ceiling is measured at, and for how many seconds.
CEILING: tuple[Shape, ...] = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
CPU_CEILING: tuple[Shape, ...] = (*CPU_SHAPES[:-1], (1024, 1024, 1024))
CEILING_BUDGET = 0.9
CHECK_BUDGET = 0.6  # for a named policy, which is compared with fp32 only to warn
COMPILED = ("jax",)  # backends that compile what is timed, before the clock starts


@dataclass(frozen=True)
class DeviceResult:
    """One device through one backend."""

    device: str
    description: Device
    timings: tuple[Timing, ...]  # which decide
    others: tuple[Timing, ...]  # of formats that `auto` does not choose from, and of fp32 beside them
    support: tuple[tuple[Format, Support], ...]
    choice: Choice

    def gains(self) -> list[Gain]:
        """Returns how each format compares with fp32, in matmuls and in blocks, at the largest shape of both."""
        return [
            known
            for timings in (self.timings, self.others)
            for fmt, work in dict.fromkeys((timing.format, timing.work) for timing in timings)
            if fmt != FP32 and (known := gain([t for t in timings if t.work == work], fmt)) is not None
        ]


@dataclass(frozen=True)
class BackendResult:
    """The answer of one backend, or why it has none."""

    name: str
    version: str = ""
    devices: tuple[DeviceResult, ...] = ()
    other_devices: tuple[str, ...] = ()  # that were not asked
    missing: str = ""
    install: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """The answer of every backend."""

    backends: tuple[BackendResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as data."""
        return {"backends": [_backend_data(backend) for backend in self.backends]}


def run(
    backends: Sequence[str] | None = None,
    budget: float = BUDGET,
    *,
    device: str | None = None,
    config: RunConfig | None = None,
    say: Say = lambda _: None,
) -> ProbeResult:
    """Asks each backend, or those named (which must be there), what `auto` would choose for a recipe, and why.

    `budget` is the seconds to choose in, for each. `say` gets what is being done.
    """
    names = list(dict.fromkeys(backends)) if backends else list(BACKENDS)
    config, budget = config or load(DEFAULT_RECIPE), _check_budget(budget)
    modules = {name: _load(name, say) for name in names}
    absent = [module for module in modules.values() if isinstance(module, BackendResult)]
    if backends and absent:
        raise MissingPackageError(absent[0].missing, hint=absent[0].install)
    return ProbeResult(
        tuple(
            module if isinstance(module, BackendResult) else _ask(name, module, device, config, budget, say)
            for name, module in modules.items()
        )
    )


def choose_policy(backend: str, device: str | None, config: RunConfig, budget: float = BUDGET) -> Choice:
    """Returns the preset to train with by measuring the recipe's block: what `policy = "auto"` means."""
    module = _need(backend)
    return decide(module, device or module.devices()[0], config.model, _tokens(config), _check_budget(budget))


def resolve(
    config: RunConfig, device: str | None = None, *, ran: str | None = None, say: Say = lambda _: None
) -> tuple[Policy, Choice | None]:
    """Returns the policy of a run, and the choice if it was `auto`. `ran` is what a resumed run chose then."""
    from halfstep.training.session import check_device

    spelling = read(config.policy)
    with suppress(PolicyError):  # fp32 cannot have some items that the chosen policy can
        # Before measuring a block that does not fit. Whatever `auto` chooses has masters as wide as fp32's.
        check_device(config, spelling.build(PRESETS["fp32"]), device)
    if spelling.base != "auto":
        return spelling.build(), None
    if ran is not None:  # measuring again could choose another precision midway
        return Policy.parse(ran), None
    say(f"measuring which precision is fastest here: {_describe_timing(config, config.backend, device)}")
    choice = choose_policy(config.backend, device, config)
    return spelling.build(PRESETS[choice.preset]), choice


def measure_ceiling(
    config: RunConfig, policy: Policy, device: str | None, known: Path | None = None, say: Say = lambda _: None
) -> Ceiling:
    """Returns the device's best speed in the policy's compute format, or what the events in `known` recorded."""
    if not config.training.measure_ceiling:
        return Ceiling(None, "training.measure_ceiling is false")
    if policy.emulate:
        return Ceiling(None, f"{policy.compute.format} is emulated: no hardware multiplies it")
    module = _need(config.backend)
    device = device or module.devices()[0]
    hardware, fmt = module.describe(device), policy.compute.format
    earlier = recorded_ceiling(known, hardware.name, fmt) if known is not None else None
    if earlier is not None:
        return earlier
    if not (support := module.supported(fmt, device)):
        return Ceiling(None, f"{fmt} is not supported: {support.reason}")
    shapes = _cpu_ceiling(config) if hardware.kind == "cpu" else CEILING
    say(f"measuring this device's fastest {fmt} matmul, for utilization")
    timings = module.measure(device, [fmt], budget=CEILING_BUDGET, shapes=shapes)
    if shapes[-1] != timings[-1].shape and min(timings[-1].seconds) < ENOUGH:
        return Ceiling(None, f"no {fmt} matmul that is more than its launch fit into {CEILING_BUDGET:g} s")
    best = max(timings, key=lambda timing: timing.peak)
    basis = f"{fmt} matmuls at {'x'.join(map(str, best.shape))}, timed on {hardware.name}"
    return Ceiling(best.peak, basis)


def slow_formats(config: RunConfig, policy: Policy, device: str | None, say: Say = lambda _: None) -> list[str]:
    """Returns a warning for each format of a named policy that is slower here than fp32, by what `auto` times.

    Only a CPU may be so much slower, and JAX compiles for longer than the warning is worth.
    """
    module = _need(config.backend)
    device = device or module.devices()[0]
    if policy.emulate or config.backend in COMPILED or module.describe(device).kind != "cpu":
        return []
    named = dict.fromkeys([*operand_formats(policy), *filter(None, [policy.eval.format])])
    formats = [
        fmt for fmt in named if fmt not in (FP32, TF32) and not is_narrow(fmt) and module.supported(fmt, device)
    ]
    if not formats:
        return []
    say(f"comparing {' and '.join(map(str, formats))} with fp32")
    timings = module.measure_block(device, [FP32, *formats], config.model, _tokens(config), budget=CHECK_BUDGET)
    gains = [known for fmt in formats if (known := gain(timings, fmt)) is not None]
    return [f"{known}; it runs as asked" for known in gains if known.ratio < 1 / MIN_GAIN]


def _cpu_ceiling(config: RunConfig) -> tuple[Shape, ...]:
    """Returns what a CPU is timed at: also the run's own matmul, which may suit it better, if it is small."""
    own = _tokens(config), config.model.width, config.model.size_of_mlp
    return tuple(sorted({*CPU_CEILING, own} if prod(own) < prod(CPU_CEILING[-1]) else CPU_CEILING, key=prod))


def _ask(name: str, module: Any, device: str | None, config: RunConfig, budget: float, say: Say) -> BackendResult:
    devices = module.devices()
    device = device or devices[0]
    support = {fmt: module.supported(fmt, device) for fmt in module.FORMATS}
    others = [fmt for fmt, ok in support.items() if ok and fmt not in CANDIDATES]
    say(f"{name} on {device}: {_describe_timing(config, name, device)}")
    timings, candidates = time_candidates(module, device, config.model, _tokens(config), budget)
    beside = module.measure(device, [FP32, *others], budget=budget * MATMUL_SHARE) if others else []
    choice = choose(timings, candidates)
    description = module.describe(device)
    result = DeviceResult(device, description, tuple(timings), tuple(beside), tuple(support.items()), choice)
    return BackendResult(
        name, module.version(), (result,), tuple(other for other in devices if other != device.partition(":")[0])
    )


def _tokens(config: RunConfig) -> int:
    return config.training.batch * config.model.context


def _describe_timing(config: RunConfig, backend: str, device: str | None) -> str:
    """Says what `time_candidates` does."""
    module, tokens = _need(backend), _tokens(config)
    work = f"matmuls, and a block of the model at up to {tokens} tokens"
    if module.describe(device or module.devices()[0]).kind != "cpu":
        work = f"matmuls up to {'x'.join(map(str, accelerator_shapes(config.model, tokens)[-1]))}"
    compiled = ", after compiling them" if backend in COMPILED else ""
    return f"timing {', '.join(map(str, CANDIDATES))} in {work}{compiled}"


def _load(name: str, say: Say = lambda _: None) -> Any:
    """Returns the module of a backend, or a result that says why there is none."""
    if name not in BACKENDS:
        raise OptionError(
            f"unknown backend `{name}`; it may be {one_of(BACKENDS)}", hint=did_you_mean(name, BACKENDS)
        )
    if find_spec(name) is None:
        return BackendResult(name, missing=f"{name} is not installed", install=how_to_install(name))
    if name not in sys.modules:
        say(f"loading {name}")
    return import_module(f"halfstep.{name}.measure")


def _need(name: str) -> Any:
    module = _load(name)
    if isinstance(module, BackendResult):
        raise MissingPackageError(module.missing, hint=module.install)
    return module


def _check_budget(budget: float) -> float:
    if not 0 < budget <= 3600:
        raise OptionError(
            f"the time budget is {budget:g} seconds; it must be above 0 and at most 3600",
            hint=f"{BUDGET:g} is usual",
        )
    return budget


def _backend_data(backend: BackendResult) -> dict[str, Any]:
    if backend.missing:
        return {"name": backend.name, "missing": backend.missing, "install": backend.install}
    return {
        "name": backend.name,
        "version": backend.version,
        "devices": [_device_data(result) for result in backend.devices],
        "other_devices": list(backend.other_devices),
    }


def _device_data(result: DeviceResult) -> dict[str, Any]:
    return {
        "device": result.device,
        **_fields(result.description, "kind", "name", "capability", "architecture", "features"),
        "support": {str(fmt): _fields(support, "ok", "reason") for fmt, support in result.support},
        "timings": [
            {
                **_fields(timing, "format", "work", "shape", "seconds"),
                "typical_seconds": timing.typical,
                "flops_per_second": timing.flops if timing.work == "matmuls" else None,
            }
            for timing in (*result.timings, *result.others)
        ],
        "compared_with_fp32": [
            _fields(known, "format", "work", "shape", "seconds", "fp32_seconds", "ratio")
            for known in result.gains()
        ],
        "choice": _fields(result.choice, "preset", "reason"),
    }


def _fields(source: Any, *names: str) -> dict[str, Any]:
    """Returns some fields as JSON has them."""
    values = {name: getattr(source, name) for name in names}
    plain: dict[type, Callable[[Any], Any]] = {Format: str, frozenset: sorted, tuple: list}
    return {name: plain[type(value)](value) if type(value) in plain else value for name, value in values.items()}
