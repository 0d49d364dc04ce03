"""What no policy can be given under Lightning, with the way out."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from halfstep.core.errors import (
    ArgumentError,
    HalfstepError,
    ParallelError,
    SplitMasterError,
    StateError,
    UnsupportedModelError,
    UnsupportedOptimizerError,
)
from halfstep.core.formats import FP32
from halfstep.torch.run import Run

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FabricSingleDevice, FabricDDP)


def check_strategy(strategy: Any) -> None:
    """Refuses strategies that no policy is implemented for."""
    named = isinstance(strategy, str)
    if not (strategy == "auto" or strategy.startswith("ddp") if named else isinstance(strategy, _STRATEGIES)):
        what = strategy if named else type(strategy).__name__
        raise ParallelError(
            f"strategy={what}: no policy is implemented for it, only for one device and for DDP",
            hint='strategy="auto" or strategy="ddp"',
        )
    if (hook := getattr(strategy, "_ddp_comm_hook", None)) is not None:
        raise ParallelError(
            f"ddp_comm_hook={hook.__name__}: replicas would exchange gradients by it, and not as the policy says",
            hint="omit it: gradients are summed in the format of the role `reduce`, fp32",
        )


def check_module(module: pl.LightningModule) -> None:
    """Refuses modules that make their own updates or backward passes."""
    if not module.automatic_optimization:
        raise manual()
    if is_overridden("backward", module):
        raise UnsupportedModelError(
            f"{type(module).__name__}.backward is its own, and would bypass the run: no scale, no finite check",
            hint="remove it; return the loss from training_step",
        )


def manual() -> HalfstepError:
    """Returns the refusal of manual optimization."""
    return UnsupportedModelError(
        "manual optimization: the module makes its own updates, which a plugin cannot check, clip or skip",
        hint="automatic_optimization = True; or halfstep.torch.prepare and run.step in training_step, "
        "with the Trainer at 32-true",
    )


def check_backward(args: Any, kwargs: Any) -> None:
    """Refuses arguments of a backward pass."""
    if args or kwargs:
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        raise ArgumentError(
            f"backward was given {given}: a run makes one backward pass of each loss",
            hint="sum the losses that share a graph, and call it once",
        )


def check_step(kwargs: Any) -> None:
    """Refuses arguments of an optimizer's step."""
    if kwargs:
        raise ArgumentError(
            f"the optimizer's step was given {', '.join(kwargs)}, which a run does not pass on",
            hint="set it in the optimizer's groups",
        )


def check_replicas(run: Run, *, wrapped: bool) -> None:
    """Refuses what DDP does not exchange: gradients that are not summed in the parameters' own `grad`."""
    if wrapped and not (_is_whole(run) and run.policy.accumulate == FP32):
        run.unprepare()
        raise ParallelError(
            "Lightning's DDP takes parameters and the sums of their gradients for fp32, and exchanges no others",
            hint="hold masters whole, with `param=fp32`, and sum in fp32, with `accumulate=fp32`",
        )


def check_averages(run: Run, callbacks: list[Any]) -> None:
    """Refuses callbacks that average parameters which are half of their masters."""
    found = next((c for c in callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)), None)
    if found is not None and not _is_whole(run):
        run.unprepare()
        raise SplitMasterError(
            f"{type(found).__name__} averages the module's parameters, which hold a part of their masters",
            hint="HalfstepPrecision(policy, ema=0.999) averages masters; or hold them whole, with `param=fp32`",
        )


def _is_whole(run: Run) -> bool:
    return all(map(run.masters.is_whole, run.parameters))


def check_one(optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Refuses several optimizers for one model."""
    if len(optimizers) > 1:
        raise UnsupportedOptimizerError(
            f"{len(optimizers)} optimizers for one model: each would be stepped alone, and an update has one norm",
            hint="one optimizer with several groups; or halfstep.torch.prepare(model, optimizers, policy) and its "
            "run.step",
        )


def without_state(path: Any) -> HalfstepError:
    """Returns the refusal of a checkpoint that was saved without a policy."""
    return StateError(
        f"`{path}` has no state of a run: it was saved without a policy",
        hint='fabric.load(path, {"model": model}) loads the weights, fabric.run_of(model).load_torch_amp the rest',
    )
