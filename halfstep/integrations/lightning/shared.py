"""What the Trainer and Fabric share: what they refuse alike, the update, and the state of a run."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from halfstep.core.errors import ArgumentError, ParallelError
from halfstep.core.formats import FP32
from halfstep.core.scaling import DynamicScale
from halfstep.torch.numerics.record import record_of
from halfstep.torch.parallel.ranks import num_ranks
from halfstep.torch.run import Run
from halfstep.torch.update.step import StepResult

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FabricSingleDevice, FabricDDP)


def check_strategy(strategy: Any) -> None:
    """Refuses strategies that no policy is implemented for."""
    named = isinstance(strategy, str)
    if not (strategy == "auto" or strategy.startswith("ddp") if named else isinstance(strategy, _STRATEGIES)):
        what = strategy if named else type(strategy).__name__
        raise ParallelError(
            f"strategy={what}: no policy is implemented for it, only for one device, DDP and the Trainer's FSDP2",
            hint='strategy="auto" or "ddp"; to shard, ModelParallelStrategy of halfstep.integrations.lightning',
        )
    if (hook := getattr(strategy, "_ddp_comm_hook", None)) is not None:
        raise ParallelError(
            f"ddp_comm_hook={hook.__name__}: replicas would exchange gradients by it, and not as the policy says",
            hint="omit it: gradients are summed in the format of the role `reduce`, fp32",
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
    trained = [p for p in run.masters.names if p.requires_grad]
    if wrapped and not (all(map(run.masters.is_whole, trained)) and run.policy.accumulate == FP32):
        run.unprepare()
        raise ParallelError(
            "Lightning's DDP takes parameters and the sums of their gradients for fp32, and exchanges no others",
            hint="hold masters whole, with `param=fp32`, and sum in fp32, with `accumulate=fp32`",
        )


def update(run: Run) -> StepResult:
    """Makes an update; with a loss scale, raises if no scale can save the run."""
    result = run.update()
    if isinstance(run.policy.scale, DynamicScale) and bool(result.skipped):
        run.check(result)  # no scale can save it
    return result


def covered_functions(run: Run) -> AbstractContextManager[Any]:
    """Returns the context in which functions of the model's own code follow the policy."""
    mode = record_of(run.model).model_mode
    assert mode is not None
    return cast(AbstractContextManager[Any], mode)


def warn_between_micro_batches(run: Run) -> None:
    """Warns of a save that lacks gradients."""
    if run.accumulation.begun:
        rank_zero_warn(
            "The checkpoint is saved between the micro-batches of an update, and lacks their gradients, as with "
            "plain Lightning: a run that resumes from it is not the same. From one after an update it is."
        )


def run_state(run: Run) -> dict[str, Any]:
    """Returns the state of a run, with the random state of each replica."""
    warn_between_micro_batches(run)
    state = run.state_dict()
    if (count := num_ranks()) > 1:
        state["replicas"] = [None] * count
        torch.distributed.all_gather_object(state["replicas"], _random_state(state))
    return state


def load_state(run: Run, given: dict[str, Any]) -> None:
    """Restores a run; each replica gets its own random state, and keeps the one it has if it is new."""
    state = dict(given)
    if (replicas := state.pop("replicas", None)) is not None:
        rank = torch.distributed.get_rank() if num_ranks() > 1 else 0
        own = replicas[rank] if rank < len(replicas) else _random_state(run.state_dict())
        state["tensors"] = {**state["tensors"], **own}
    run.load_state_dict(state)


def _random_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state["tensors"].items() if name.startswith("rng.")}
