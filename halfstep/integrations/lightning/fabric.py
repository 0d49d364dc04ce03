"""Fabric with `policy=`."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric import Fabric as PlainFabric
from lightning.fabric.plugins import Precision as PlainFabricPrecision
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import Tensor, nn

from halfstep.core.arrays.measure import TOKENS
from halfstep.core.errors import (
    ArgumentError,
    AutocastError,
    HalfstepError,
    OptimizerParametersError,
    RunStateError,
    StateError,
    UnsupportedOptimizerError,
)
from halfstep.core.policy import Policy
from halfstep.integrations.lightning.shared import (
    check_backward,
    check_replicas,
    check_step,
    check_strategy,
    covered_functions,
    load_state,
    run_state,
    update,
)
from halfstep.torch.parallel.ranks import num_ranks
from halfstep.torch.run import Run, prepare

STATE = "halfstep"  # the entry of a Fabric checkpoint
_SET_UP = "model, optimizer = fabric.setup(model, optimizer)"


class Fabric(PlainFabric):
    """Lightning's Fabric with a policy: `Fabric(policy="bf16-mixed")`; other arguments are Fabric's.

    `run_of(model)` is the Run of a model that was set up. `optimizer.step()` returns its StepResult.
    """

    def __init__(
        self, *, policy: Policy | str, seed: int = 0, ema: float = 0.0, tokens: int = TOKENS, **kwargs: Any
    ):
        if kwargs.get("precision") is not None:
            raise AutocastError(
                f"both policy={str(policy)!r} and precision={kwargs['precision']!r} were given",
                hint="drop `precision=`: the policy says all of it",
            )
        check_strategy(kwargs.get("strategy", "auto"))
        given = kwargs.pop("plugins", None)
        plugins = given if isinstance(given, list) else [] if given is None else [given]
        options = {"seed": seed, "ema": ema, "tokens": tokens}
        self._policy_plugin = _FabricPrecision(policy, options)
        super().__init__(plugins=[*plugins, self._policy_plugin], **kwargs)
        check_strategy(self.strategy)

    def run_of(self, model: nn.Module) -> Run:
        """Returns the run of a model that was set up."""
        return self._policy_plugin.run_of(model)

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Sets up a model and its optimizer, as Fabric does, and prepares them."""
        if kwargs.get("move_to_device", True):
            self.to_device(module)  # a policy may depend on the device
        made = super().setup(module, *optimizers, **kwargs)
        self._policy_plugin.attach(optimizers)
        _give_context(made[0] if optimizers else made)
        return made

    def setup_module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Sets up a model alone: to evaluate it, or to train it once `setup_optimizers` has its optimizer."""
        if kwargs.get("move_to_device", args[0] if args else True):
            self.to_device(module)
        made = super().setup_module(module, *args, **kwargs)
        _give_context(made)
        return made

    def setup_optimizers(self, *optimizers: torch.optim.Optimizer) -> Any:
        """Sets up the optimizer of a model that was set up before."""
        self._policy_plugin.attach(optimizers)
        return super().setup_optimizers(*optimizers)

    def clip_gradients(
        self,
        module: Any,
        optimizer: Any,
        clip_val: float | int | None = None,
        max_norm: float | int | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clips in the next update if by the 2-norm, here otherwise; returns the norm, on the device.

        A step that is not finite is skipped, so it is not an error here.
        """
        if error_if_nonfinite:
            raise ArgumentError(
                "error_if_nonfinite=True: a step that is not finite is skipped, and nothing waits for its norm",
                hint="leave it out; `optimizer.step()` returns a result whose `skipped` says so",
            )
        if max_norm is None or clip_val is not None or norm_type != 2.0:
            options: dict[str, Any] = {"clip_val": clip_val, "max_norm": max_norm, "norm_type": norm_type}
            return super().clip_gradients(module, optimizer, **options, error_if_nonfinite=False)
        run = self._policy_plugin.run_for(optimizer)
        run.clip_norm = float(max_norm)
        return run.grad_norm()

    def save(
        self, path: Any, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Saves a checkpoint, with the whole state of each run whose optimizer is in it."""
        if STATE in state:
            raise ArgumentError(f"`{STATE}` is the entry of the runs' states", hint="name yours something else")
        runs = self._runs_in(state)
        super().save(path, {**state, STATE: _States(runs)} if runs else state, filter)

    def load(
        self, path: Any, state: dict[str, Any] | None = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Loads a checkpoint; with an optimizer in `state`, resumes its run bit for bit."""
        runs = self._runs_in(state or {})
        if state is None or not runs:
            return super().load(path, state, strict, **kwargs)
        states = _States(runs)
        given = {name: value for name, value in state.items() if name not in runs} | {STATE: states}
        try:
            rest = super().load(path, given, strict, **kwargs)
        except KeyError as error:
            if STATE in str(error):
                raise _missing_state_error(path) from error
            raise
        if not states.loaded:
            raise _missing_state_error(path)
        state.update({name: given[name] for name in state if name in given})
        return {name: value for name, value in rest.items() if name not in runs}

    def _runs_in(self, state: Mapping[str, Any]) -> dict[str, Run]:
        found = {name: self._policy_plugin.find(value) for name, value in state.items()}
        return {name: run for name, run in found.items() if run is not None}


def _missing_state_error(path: Any) -> HalfstepError:
    """Returns the refusal of a checkpoint that was saved without a policy."""
    return StateError(
        f"`{path}` has no state of a run: it was saved without a policy",
        hint='fabric.load(path, {"model": model}) loads the weights, fabric.run_of(model).load_torch_amp the rest',
    )


class _States:
    """The states of runs, as Fabric saves and loads an object."""

    def __init__(self, runs: dict[str, Run]):
        self.runs, self.loaded = runs, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each run, by the name of its model."""
        return {name: run_state(run) for name, run in self.runs.items()}

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


class _Model(_FabricModule):
    """A model that was set up. Fabric forgets the context of marked methods, as `training_step`, on one device."""

    def __getattr__(self, item: Any) -> Any:
        attribute = super().__getattr__(item)
        if item not in self.__dict__.get("_forward_methods", ()) or self._forward_module is not self.module:
            return attribute

        def method(*args: Any, **kwargs: Any) -> Any:
            with self._strategy.precision.forward_context():
                return attribute(*args, **kwargs)

        return method


def _give_context(model: _FabricModule) -> None:
    object.__setattr__(model, "__class__", _Model)  # its own __setattr__ would change the original module too


class _FabricPrecision(PlainFabricPrecision):
    """What Fabric calls: it names no model in a backward pass, and no optimizer when it converts one."""

    def __init__(self, policy: Policy | str, options: dict[str, Any]):
        self._policy, self._options = policy, options
        self._runs: list[Run] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepares the model, before it is wrapped and compiled."""
        run = prepare(module, self._policy, **self._options)
        check_replicas(run, wrapped=num_ranks() > 1)
        self._runs.append(run)
        return module

    def attach(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """Gives a model that was set up its optimizer."""
        if len(optimizers) > 1:
            raise UnsupportedOptimizerError(
                f"{len(optimizers)} optimizers for one model: each would be stepped alone, and an update has one "
                "norm",
                hint="one optimizer with several groups; or halfstep.torch.prepare(model, optimizers, policy) and "
                "its run.step",
            )
        for optimizer in optimizers:
            held = {p for group in optimizer.param_groups for p in group["params"]}
            runs = [run for run in self._runs if not held.isdisjoint(run.model.parameters())]
            if not runs:
                raise OptimizerParametersError(
                    f"no model that was set up has the parameters of this {type(optimizer).__name__}",
                    hint="model = fabric.setup_module(model) first, then make the optimizer",
                )
            check_replicas(runs[0].attach(optimizer), wrapped=num_ranks() > 1)

    def run_of(self, model: nn.Module) -> Run:
        """Returns the run of a model, wrapped or not."""
        modules = {id(module) for module in model.modules()}
        for run in self._runs:
            if id(run.model) in modules:
                return run
        raise RunStateError("this model was not set up", hint=_SET_UP)

    def find(self, optimizer: Any) -> Run | None:
        """Returns the run of an optimizer, wrapped or not; None if it has none, or is not an optimizer."""
        plain = optimizer.optimizer if isinstance(optimizer, _FabricOptimizer) else optimizer
        return next((run for run in self._runs for held in run.optimizers if held is plain), None)

    def run_for(self, optimizer: Any) -> Run:
        """Returns the run of an optimizer, wrapped or not."""
        if (run := self.find(optimizer)) is None:
            kind = type(optimizer).__name__
            raise RunStateError(f"this {kind} was not set up", hint=_SET_UP)
        return run

    def forward_context(self) -> AbstractContextManager[Any]:
        """Inside, the policy covers functions that code outside of the model calls: `fabric.autocast()`."""
        if not self._runs:
            raise RunStateError("no model was set up", hint=_SET_UP)
        return covered_functions(self._runs[0])  # all have the same policy

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Adds the gradients of a micro-batch; Fabric divides nothing, and neither does the update."""
        check_backward(args, kwargs)
        self._trained_run(model).backward(tensor, normalized=True)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Runs the closure, if there is one, and updates."""
        run, closure = self.run_for(optimizer), kwargs.pop("closure", None)
        check_step(kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        result = update(run)
        run.clip_norm = 0.0  # fabric.clip_gradients is for one update
        return result if closure is None else loss

    def unscale_gradients(self, optimizer: Any) -> None:
        """Makes each `p.grad` the gradient itself, for code that clips by value."""
        self.run_for(optimizer).unscale()

    def _trained_run(self, model: nn.Module | None) -> Run:
        if model is not None:
            return self.run_of(model)
        trained = [run for run in self._runs if run.optimizers]
        if len(trained) != 1:
            what = f"{len(trained)} models were set up with an optimizer" if trained else "no optimizer was set up"
            hint = "fabric.backward(loss, model=model) says whose loss it is" if trained else _SET_UP
            raise RunStateError(what, hint=hint)
        return trained[0]
