"""What the Trainer and Fabric do alike with a run: update it, save and load its state."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from halfstep.core.errors import StateError
from halfstep.core.scaling import DynamicScale
from halfstep.torch.numerics.record import record_of
from halfstep.torch.parallel.ranks import num_ranks
from halfstep.torch.run import Run
from halfstep.torch.update.step import StepResult


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


class States:
    """The states of runs, as Fabric saves and loads an object."""

    def __init__(self, runs: dict[str, Run]):
        self.runs, self.loaded = runs, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each run, by the name of its model."""
        return {name: state_of(run) for name, run in self.runs.items()}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Restores each run."""
        for name, run in self.runs.items():
            if name not in given:
                raise StateError(
                    f"the checkpoint has no run for `{name}`, only for {', '.join(given)}",
                    hint="name the optimizer as it was named when it was saved",
                )
            load_state(run, given[name])
        self.loaded = True


def state_of(run: Run) -> dict[str, Any]:
    """Returns the state of a run, with the random state of each replica."""
    if run.accumulation.begun:
        rank_zero_warn(
            "The checkpoint is saved between the micro-batches of an update, and lacks their gradients, as with "
            "plain Lightning: a run that resumes from it is not the same. From one after an update it is."
        )
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
