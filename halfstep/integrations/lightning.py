"""Lightning's Trainer and Fabric under a policy: one plugin for the Trainer, and a Fabric with `policy=`.

    trainer = lightning.Trainer(plugins=HalfstepPrecision("bf16-mixed"), gradient_clip_val=1.0)
    fabric = Fabric(policy="bf16-mixed")                # of this module

    backward        run.backward: Lightning has divided the loss by the number of micro-batches, so they are summed
    optimizer_step  runs the closure first, which holds the last micro-batch; then clipping; then run.update
    connect         the model is on its device and the optimizers exist: here the Trainer's run begins
    state_dict      the run's whole state, in Lightning's own checkpoint

**The checkpoint is Lightning's**, in one file. A file of ours beside it would stay behind when ModelCheckpoint
removes its own or when somebody moves it, and Lightning also writes to remote file systems. What a plain Lightning
job reads, `state_dict` and `optimizer_states`, stays there in torch's format. torch.save writes storage that two
entries share once, so the run's state adds little.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric as PlainFabric
from lightning.fabric.plugins import Precision as PlainFabricPrecision
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision as PlainPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import FP32
from halfstep.core.measure import TOKENS
from halfstep.core.policy import Policy
from halfstep.core.scaling import DynamicScale
from halfstep.torch.convert.modules import Root
from halfstep.torch.parallel.ranks import num_ranks
from halfstep.torch.step import Run, StepResult, prepare

STATE = "halfstep"  # the entry of a Fabric checkpoint
_SET_UP = "model, optimizer = fabric.setup(model, optimizer)"
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")  # by torch.compile
_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FabricSingleDevice, FabricDDP)


class HalfstepPrecision(PlainPrecision):
    """A policy for Lightning's Trainer: `Trainer(plugins=HalfstepPrecision("bf16-mixed"))`.

    `run` is the Run of the model that is trained or evaluated. `result` is what the last update did, in device
    scalars. `seed`, `ema` and `tokens` are those of `prepare`; clipping is the Trainer's `gradient_clip_val`.
    """

    def __init__(self, policy: Policy | str, *, seed: int = 0, ema: float = 0.0, tokens: int = TOKENS):
        self._policy = policy
        self._options: dict[str, Any] = {"seed": seed, "ema": ema, "tokens": tokens}
        self._run: Run | None = None
        self.result: StepResult | None = None

    @property
    def run(self) -> Run:
        """The run of the model that is trained or evaluated."""
        if self._run is None:
            raise HalfstepError(
                "the plugin has no model yet: the Trainer connects it when it fits or evaluates",
                hint="read it in on_fit_start or later; strategies that shard the model are not supported",
            )
        return self._run

    @property
    def skipped(self) -> bool:
        """Whether the last update was skipped, because its gradients were not finite. Reads the device."""
        return self.result is not None and bool(self.result.skipped)

    def summary(self) -> str:
        """Describes the run, and what the Trainer adds to its costs."""
        return "\n".join([self.run.summary(), *_costs(self.run)])

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Refuses a strategy that no policy is implemented for, before it changes the model."""
        trainer = getattr(module, "_trainer", None)
        if trainer is None:
            raise HalfstepError(
                "HalfstepPrecision is for Lightning's Trainer",
                hint=f"from halfstep.integrations.lightning import Fabric; Fabric(policy={str(self._policy)!r})",
            )
        _check_strategy(trainer.strategy)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Prepares the model, which is on its device, with its optimizers; to evaluate it, without."""
        module = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(module, pl.LightningModule)
        trainer = module.trainer
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            _check_module(module)
        if self._run is not None and self._run.model is module and not fits:
            return model, optimizers, lr_schedulers  # to evaluate what was trained
        self._release()
        before = module.__dict__.get("halfstep_prepared")  # by another Trainer
        if isinstance(before, HalfstepPrecision) and before.run.model is module:
            before._release()
        with _uncompiled(module):
            run = prepare(module, optimizers if fits else None, self._policy, **self._options)
        if fits:
            _check_replicas(run, wrapped=module is not model)
            _check_averages(run, trainer.callbacks)  # type: ignore[attr-defined]
            if trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE:
                run.clip_norm = float(trainer.gradient_clip_val or 0.0)  # for the summary
        self._run, self.result = run, None
        module.__dict__["halfstep_prepared"] = self  # which unprepare removes
        return model, optimizers, lr_schedulers

    def __deepcopy__(self, _: Any) -> "HalfstepPrecision":
        return self  # a copy of a module has no run of its own

    def _release(self) -> None:
        """Gives a module back to whom else may train or evaluate it."""
        if self._run is not None and self._run._open:
            self._run.unprepare()
        self._run = None

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the gradients of a micro-batch, whose loss Lightning has divided by their number."""
        if optimizer is None:
            raise _manual()
        _check_backward(args, kwargs)
        self.run.backward(tensor, normalized=True)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, which holds the last micro-batch, then clips and updates."""
        _check_step(kwargs)
        run = self.run
        if optimizer not in run.optimizers:
            raise HalfstepError(
                f"the Trainer steps another optimizer than the run's, a {type(optimizer).__name__}",
                hint="return it from configure_optimizers; to change to another, fit again: that begins a new run",
            )
        loss = closure()
        if not run.accumulation.begun:
            self.result = None
            return loss  # training_step returned None for every micro-batch
        run.clip_norm = 0.0  # until Lightning's hook says otherwise
        if any(is_overridden(hook, user) for hook in _HOOKS for user in _users(model, hook)):
            run.unscale()  # somebody else will read or change the gradients
        self._after_closure(model, optimizer)
        self.result = _update(run)
        return loss

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips by norm in the update, after unscaling; by value here."""
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.run.unscale()
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            self.run.clip_norm = float(clip_val)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Inside, functions that a step's own code calls are reached, such as a loss."""
        return _reached(self.run)

    @contextmanager
    def val_step_context(self) -> Iterator[None]:  # type: ignore[override]
        """Inside, the model computes as the policy's `eval` role says."""
        with self.run.evaluation(), self.forward_context():
            yield

    test_step_context = val_step_context
    predict_step_context = val_step_context

    def state_dict(self) -> dict[str, Any]:
        """Returns everything the next step depends on, for Lightning's checkpoint."""
        return _state_of(self._run) if self._run is not None and self._run.optimizers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a run bit for bit; to evaluate, Lightning has loaded the weights already."""
        if self.run.optimizers and self._fits():
            _load_state(self.run, state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps Lightning from loading the optimizers' state over the run's; takes over that of a plain job."""
        if not self._fits() or "optimizer_states" not in checkpoint:
            return  # Lightning refuses to resume from weights alone
        if type(self).__qualname__ not in checkpoint:
            scaled = isinstance(self.run.policy.scale, DynamicScale)
            scaler = checkpoint.get("MixedPrecision") if scaled else None
            rank_zero_info(
                "The checkpoint was saved without a policy; took over\n"
                + self.run.load_torch_amp(checkpoint["optimizer_states"], scaler)
            )
        checkpoint["optimizer_states"] = []

    def _fits(self) -> bool:
        return cast(pl.LightningModule, self.run.model).trainer.state.fn == TrainerFn.FITTING


class Fabric(PlainFabric):
    """Lightning's Fabric with a policy: `Fabric(policy="bf16-mixed")`; other arguments are Fabric's.

    `run_of(model)` is the Run of a model that was set up. `optimizer.step()` returns its StepResult.
    """

    def __init__(
        self, *, policy: Policy | str, seed: int = 0, ema: float = 0.0, tokens: int = TOKENS, **kwargs: Any
    ):
        if kwargs.get("precision") is not None:
            raise HalfstepError(
                f"both policy={str(policy)!r} and precision={kwargs['precision']!r} were given",
                hint="drop `precision=`: the policy says all of it",
            )
        _check_strategy(kwargs.get("strategy", "auto"))
        given = kwargs.pop("plugins", None)
        plugins = given if isinstance(given, list) else [] if given is None else [given]
        options = {"seed": seed, "ema": ema, "tokens": tokens}
        self._policy_plugin = _FabricPrecision(policy, options)
        super().__init__(plugins=[*plugins, self._policy_plugin], **kwargs)
        _check_strategy(self.strategy)

    def run_of(self, model: nn.Module) -> Run:
        """Returns the run of a model that was set up."""
        return self._policy_plugin.run_of(model)

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Sets up a model and its optimizer, as Fabric does, and prepares them."""
        if kwargs.get("move_to_device", True):
            self.to_device(module)  # a policy may depend on the device
        with self._policy_plugin.taking(optimizers):
            made = super().setup(module, *optimizers, **kwargs)
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
            raise HalfstepError(
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
            raise HalfstepError(f"`{STATE}` is the entry of the runs' states", hint="name yours something else")
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
                raise _without_state(path) from error
            raise
        if not states.loaded:
            raise _without_state(path)
        state.update({name: given[name] for name in state if name in given})
        return {name: value for name, value in rest.items() if name not in runs}

    def _runs_in(self, state: Mapping[str, Any]) -> dict[str, Run]:
        found = {name: self._policy_plugin.find(value) for name, value in state.items()}
        return {name: run for name, run in found.items() if run is not None}


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
        self._given: tuple[torch.optim.Optimizer, ...] = ()

    @contextmanager
    def taking(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> Iterator[None]:
        """Inside, the model that is converted gets these optimizers."""
        _check_one(optimizers)
        self._given = optimizers
        try:
            yield
        finally:
            self._given = ()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepares the model, before it is wrapped and compiled."""
        run = prepare(module, [*self._given] or None, self._policy, **self._options)
        _check_replicas(run, wrapped=num_ranks() > 1)
        self._runs.append(run)
        return module

    def attach(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """Gives a model that was set up alone its optimizer."""
        _check_one(optimizers)
        for optimizer in optimizers:
            held = {p for group in optimizer.param_groups for p in group["params"]}
            runs = [run for run in self._runs if not held.isdisjoint(run.model.parameters())]
            if not runs:
                raise HalfstepError(
                    f"no model that was set up has the parameters of this {type(optimizer).__name__}",
                    hint="model = fabric.setup_module(model) first, then make the optimizer",
                )
            _check_replicas(runs[0].attach(optimizer), wrapped=num_ranks() > 1)

    def run_of(self, model: nn.Module) -> Run:
        """Returns the run of a model, wrapped or not."""
        modules = {id(module) for module in model.modules()}
        for run in self._runs:
            if id(run.model) in modules:
                return run
        raise HalfstepError("this model was not set up", hint=_SET_UP)

    def find(self, optimizer: Any) -> Run | None:
        """Returns the run of an optimizer, wrapped or not; None if it has none, or is not an optimizer."""
        plain = optimizer.optimizer if isinstance(optimizer, _FabricOptimizer) else optimizer
        return next((run for run in self._runs for held in run.optimizers if held is plain), None)

    def run_for(self, optimizer: Any) -> Run:
        """Returns the run of an optimizer, wrapped or not."""
        run = self.find(optimizer)
        if run is None:
            kind = type(optimizer).__name__
            raise HalfstepError(f"this {kind} was not set up", hint=_SET_UP)
        return run

    def forward_context(self) -> AbstractContextManager[Any]:
        """Inside, functions that code outside of the model calls are reached: `fabric.autocast()`."""
        if not self._runs:
            raise HalfstepError("no model was set up", hint=_SET_UP)
        return _reached(self._runs[0])  # all have the same policy

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Adds the gradients of a micro-batch; Fabric divides nothing, and neither does the update."""
        _check_backward(args, kwargs)
        self._trained(model).backward(tensor, normalized=True)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Runs the closure, if there is one, and updates."""
        run, closure = self.run_for(optimizer), kwargs.pop("closure", None)
        _check_step(kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        result = _update(run)
        run.clip_norm = 0.0  # fabric.clip_gradients is for one update
        return result if closure is None else loss

    def unscale_gradients(self, optimizer: Any) -> None:
        """Makes each `p.grad` the gradient itself, before somebody clips by value."""
        self.run_for(optimizer).unscale()

    def _trained(self, model: nn.Module | None) -> Run:
        if model is not None:
            return self.run_of(model)
        trained = [run for run in self._runs if run.optimizers]
        if len(trained) != 1:
            what = f"{len(trained)} models were set up with an optimizer" if trained else "no optimizer was set up"
            hint = "fabric.backward(loss, model=model) says whose loss it is" if trained else _SET_UP
            raise HalfstepError(what, hint=hint)
        return trained[0]


class _States:
    """The states of runs, as Fabric saves and loads an object."""

    def __init__(self, runs: dict[str, Run]):
        self.runs, self.loaded = runs, False

    def state_dict(self) -> dict[str, Any]:
        return {name: _state_of(run) for name, run in self.runs.items()}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        for name, run in self.runs.items():
            if name not in given:
                raise HalfstepError(
                    f"the checkpoint has no run for `{name}`, only for {', '.join(given)}",
                    hint="name the optimizer as it was named when it was saved",
                )
            _load_state(run, given[name])
        self.loaded = True


def _update(run: Run) -> StepResult:
    result = run.update()
    if isinstance(run.policy.scale, DynamicScale) and bool(result.skipped):
        run.check(result)  # no scale can save it
    return result


def _reached(run: Run) -> AbstractContextManager[Any]:
    mode = cast(Root, run.model).halfstep_model.mode
    assert mode is not None
    return cast(AbstractContextManager[Any], mode)


@contextmanager
def _uncompiled(module: pl.LightningModule) -> Iterator[None]:
    """Inside, a module that `torch.compile` was given is as it was built; after, its steps are compiled again."""
    context = module._compiler_ctx
    if context is not None:
        for name in _COMPILED:
            module.__dict__.pop(name, None)
    try:
        yield
    finally:
        if context is not None:
            for name in _COMPILED:
                context[f"original_{name}"] = getattr(module, name)
                setattr(module, name, context["dynamo_ctx"](getattr(module, name)))


def _costs(run: Run) -> list[str]:
    if not isinstance(run.policy.scale, DynamicScale) or not run.optimizers:
        return []
    return ["  the skip flag is read after each update, one sync: a run that no loss scale can save ends"]


def _users(model: pl.LightningModule, hook: str) -> list[Any]:
    callbacks = model.trainer.callbacks if hook == "on_before_optimizer_step" else []  # type: ignore[attr-defined]
    return [model, *callbacks]


def _state_of(run: Run) -> dict[str, Any]:
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


def _load_state(run: Run, given: dict[str, Any]) -> None:
    """Restores a run; each replica gets its own random state, and keeps the one it has if it is new."""
    state = dict(given)
    if (replicas := state.pop("replicas", None)) is not None:
        rank = torch.distributed.get_rank() if num_ranks() > 1 else 0
        own = replicas[rank] if rank < len(replicas) else _random_state(run.state_dict())
        state["tensors"] = {**state["tensors"], **own}
    run.load_state_dict(state)


def _random_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state["tensors"].items() if name.startswith("rng.")}


def _check_strategy(strategy: Any) -> None:
    named = isinstance(strategy, str)
    if not (strategy == "auto" or strategy.startswith("ddp") if named else isinstance(strategy, _STRATEGIES)):
        what = strategy if named else type(strategy).__name__
        raise HalfstepError(
            f"strategy={what}: no policy is implemented for it, only for one device and for DDP",
            hint='strategy="auto" or strategy="ddp"',
        )
    if (hook := getattr(strategy, "_ddp_comm_hook", None)) is not None:
        raise HalfstepError(
            f"ddp_comm_hook={hook.__name__}: replicas would exchange gradients by it, and not as the policy says",
            hint="omit it: gradients are summed in the format of the role `reduce`, fp32",
        )


def _check_module(module: pl.LightningModule) -> None:
    if not module.automatic_optimization:
        raise _manual()
    if is_overridden("backward", module):
        raise HalfstepError(
            f"{type(module).__name__}.backward is its own, and would bypass the run: no scale, no finite check",
            hint="remove it; return the loss from training_step",
        )


def _manual() -> HalfstepError:
    return HalfstepError(
        "manual optimization: the module makes its own updates, which a plugin cannot check, clip or skip",
        hint="automatic_optimization = True; or halfstep.torch.prepare and run.step in training_step, "
        "with the Trainer at 32-true",
    )


def _check_backward(args: Any, kwargs: Any) -> None:
    if args or kwargs:
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        raise HalfstepError(
            f"backward was given {given}: a run makes one backward pass of each loss",
            hint="sum the losses that share a graph, and call it once",
        )


def _check_step(kwargs: Any) -> None:
    if kwargs:
        raise HalfstepError(
            f"the optimizer's step was given {', '.join(kwargs)}, which a run does not pass on",
            hint="set it in the optimizer's groups",
        )


def _check_replicas(run: Run, *, wrapped: bool) -> None:
    """Refuses what DDP does not exchange: gradients that are not summed in the parameters' own `grad`."""
    if wrapped and not (_is_whole(run) and run.policy.accumulate == FP32):
        run.unprepare()
        raise HalfstepError(
            "Lightning's DDP takes parameters and the sums of their gradients for fp32, and exchanges no others",
            hint="hold masters whole, with `param=fp32`, and sum in fp32, with `accumulate=fp32`",
        )


def _check_averages(run: Run, callbacks: list[Any]) -> None:
    found = next((c for c in callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)), None)
    if found is not None and not _is_whole(run):
        run.unprepare()
        raise HalfstepError(
            f"{type(found).__name__} averages the module's parameters, which hold a part of their masters",
            hint="HalfstepPrecision(policy, ema=0.999) averages masters; or hold them whole, with `param=fp32`",
        )


def _is_whole(run: Run) -> bool:
    return all(map(run.masters.is_whole, run.parameters))


def _check_one(optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    if len(optimizers) > 1:
        raise HalfstepError(
            f"{len(optimizers)} optimizers for one model: each would be stepped alone, and an update has one norm",
            hint="one optimizer with several groups; or halfstep.torch.prepare(model, optimizers, policy) and its "
            "run.step",
        )


def _without_state(path: Any) -> HalfstepError:
    return HalfstepError(
        f"`{path}` has no state of a run: it was saved without a policy",
        hint='fabric.load(path, {"model": model}) loads the weights, fabric.run_of(model).load_torch_amp the rest',
    )
