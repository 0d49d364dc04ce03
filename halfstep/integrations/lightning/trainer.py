"""The Trainer's plugin."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision as PlainPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.core.arrays.measure import TOKENS
from halfstep.core.errors import (
    ArgumentError,
    HalfstepError,
    OptimizerParametersError,
    ParallelError,
    RunStateError,
    SplitMasterError,
    UnsupportedModelError,
)
from halfstep.core.policy import Policy
from halfstep.core.scaling import DynamicScale
from halfstep.integrations.lightning.sharded import ModelParallelStrategy
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
from halfstep.torch.numerics.record import record_of, update_record
from halfstep.torch.run import Run, prepare
from halfstep.torch.update.parts import device_of
from halfstep.torch.update.step import StepResult

_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")  # by torch.compile
_BEFORE_STEP, _CLIPS = "on_before_optimizer_step", "configure_gradient_clipping"


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
            raise RunStateError(
                "the plugin has no model yet: the Trainer connects it when it fits or evaluates",
                hint="read it in on_fit_start or later",
            )
        return self._run

    @property
    def skipped(self) -> bool:
        """Whether the last update was skipped, because it was not finite. Reads the device."""
        return self.result is not None and bool(self.result.skipped)

    def summary(self) -> str:
        """Describes the run, and what the Trainer adds to its costs."""
        lines = [self.run.summary()]
        if isinstance(self.run.policy.scale, DynamicScale) and self.run.optimizers:
            lines.append(
                "  the skip flag is read after each update, one sync: a run that no loss scale can save ends"
            )
        return "\n".join(lines)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Refuses a strategy that no policy is implemented for, before it changes the model."""
        if (trainer := getattr(module, "_trainer", None)) is None:
            raise ArgumentError(
                "HalfstepPrecision is for Lightning's Trainer",
                hint=f"from halfstep.integrations.lightning import Fabric; Fabric(policy={str(self._policy)!r})",
            )
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            check_strategy(trainer.strategy)
        elif self._run is None or self._run.model is not module:
            raise RunStateError(
                f"{type(module).__name__}.configure_model has not applied the policy before it sharded the model",
                hint="self.trainer.precision_plugin.prepare(self), before its first fully_shard",
            )
        return module

    def prepare(self, module: pl.LightningModule) -> None:
        """Applies the policy to a model that `configure_model` is about to shard; call it before `fully_shard`."""
        strategy = module.trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy):
            check_strategy(strategy)
            raise ArgumentError(
                "prepare() is for a model that configure_model shards; otherwise the Trainer applies the policy",
                hint="strategy=ModelParallelStrategy() of halfstep.integrations.lightning, or leave the call out",
            )
        before = record_of(module).prepared
        if before is self and not (self.run.optimizers and module.trainer.training):
            return
        if isinstance(before, HalfstepPrecision) and before.run.sharded is not None:
            raise RunStateError(
                f"this {type(module).__name__} was sharded for an earlier fit, and cannot be given back",
                hint="make a new one, with ckpt_path= to continue from what was saved",
            )
        if device_of(module).type != "meta":
            module.to(strategy.root_device)
        self._begin(module, None)

    def _begin(self, module: pl.LightningModule, optimizers: list[torch.optim.Optimizer] | None) -> Run:
        self._release()
        before = record_of(module).prepared  # by another Trainer
        if isinstance(before, HalfstepPrecision) and before.run.model is module:
            before._release()
        with _without_compile(module):
            self._run = prepare(module, optimizers, self._policy, **self._options)
        update_record(module, prepared=self)  # which unprepare removes
        return self._run

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
        shards = isinstance(trainer.strategy, ModelParallelStrategy)
        if shards:
            self.run.follow_model()
            _check_sharded(self.run)
        if self._run is not None and self._run.model is module and not fits:
            return model, optimizers, lr_schedulers
        run = self.run.attach(optimizers) if shards else self._begin(module, optimizers if fits else None)
        if fits:
            check_replicas(run, wrapped=module is not model)
            _check_averages(run, trainer.callbacks)  # type: ignore[attr-defined]
            if trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE:
                run.clip_norm = float(trainer.gradient_clip_val or 0.0)  # for the summary
        self.result = None
        return model, optimizers, lr_schedulers

    def __deepcopy__(self, _: Any) -> "HalfstepPrecision":
        return self  # a copy of a module has no run of its own

    def _release(self) -> None:
        """Releases the module, so that another Trainer may train or evaluate it."""
        if self._run is not None and self._run._open:
            self._run.unprepare()
        self._run = None

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the gradients of a micro-batch, whose loss Lightning has divided by their number."""
        if optimizer is None:
            raise _manual_optimization_error()
        check_backward(args, kwargs)
        strategy = model.trainer.strategy
        last = not isinstance(strategy, ModelParallelStrategy) or strategy.is_last_micro_batch
        self.run.backward(tensor, normalized=True, last=last)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, which holds the last micro-batch, then clips and updates."""
        check_step(kwargs)
        run = self.run
        if optimizer not in run.optimizers:
            raise OptimizerParametersError(
                f"the Trainer steps another optimizer than the run's, a {type(optimizer).__name__}",
                hint="return it from configure_optimizers; to change to another, fit again: that begins a new run",
            )
        loss = closure()
        if not run.accumulation.begun:
            self.result = None
            return loss  # training_step returned None for every micro-batch
        run.clip_norm = 0.0  # until Lightning's hook says otherwise
        users = [model, *model.trainer.callbacks]  # type: ignore[attr-defined]
        if is_overridden(_CLIPS, model) or any(is_overridden(_BEFORE_STEP, user) for user in users):
            run.unscale()  # other code is about to read or change the gradients
        self._after_closure(model, optimizer)
        self.result = update(run)
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
        """Inside, the policy covers functions that a step's own code calls, such as a loss."""
        return covered_functions(self.run)

    @contextmanager
    def val_step_context(self) -> Iterator[None]:  # type: ignore[override]
        """Inside, the model computes as the policy's `eval` role says."""
        with self.run.evaluation(), self.forward_context():
            yield

    test_step_context = val_step_context
    predict_step_context = val_step_context

    def state_dict(self) -> dict[str, Any]:
        """Returns everything the next step depends on, for Lightning's checkpoint."""
        if (
            self._run is None or not self._run.optimizers or self._run.sharded is not None
        ):  # then in the strategy's
            return {}
        return run_state(self._run)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a run bit for bit; to evaluate, Lightning has loaded the weights already."""
        if self.run.optimizers and self._is_fitting():
            load_state(self.run, state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps Lightning from loading the optimizers' state over the run's; takes over that of a plain job."""
        if not self._is_fitting() or "optimizer_states" not in checkpoint:
            return  # Lightning refuses to resume from weights alone
        if type(self).__qualname__ not in checkpoint:
            scaled = isinstance(self.run.policy.scale, DynamicScale)
            scaler = checkpoint.get("MixedPrecision") if scaled else None
            rank_zero_info(
                "The checkpoint was saved without a policy; took over\n"
                + self.run.load_torch_amp(checkpoint["optimizer_states"], scaler)
            )
        checkpoint["optimizer_states"] = []

    def _is_fitting(self) -> bool:
        return cast(pl.LightningModule, self.run.model).trainer.state.fn == TrainerFn.FITTING


def _check_module(module: pl.LightningModule) -> None:
    """Refuses modules that make their own updates or backward passes."""
    if not module.automatic_optimization:
        raise _manual_optimization_error()
    if is_overridden("backward", module):
        raise UnsupportedModelError(
            f"{type(module).__name__}.backward is its own, and would bypass the run: no scale, no finite check",
            hint="remove it; return the loss from training_step",
        )


def _check_sharded(run: Run) -> None:
    """Refuses a model that configure_model left whole: nobody would exchange its gradients."""
    if run.sharded is None:
        raise ParallelError(
            f"{type(run.model).__name__}.configure_model has not sharded the model",
            hint='fully_shard(layer, mesh=self.device_mesh["data_parallel"]) of each layer, then of the model',
        )


def _manual_optimization_error() -> HalfstepError:
    """Returns the refusal of manual optimization."""
    return UnsupportedModelError(
        "manual optimization: the module makes its own updates, which a plugin cannot check, clip or skip",
        hint="automatic_optimization = True; or halfstep.torch.prepare and run.step in training_step, "
        "with the Trainer at 32-true",
    )


def _check_averages(run: Run, callbacks: list[Any]) -> None:
    """Refuses callbacks that average parameters which are half of their masters."""
    found = next((c for c in callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)), None)
    if found is not None and not all(map(run.masters.is_whole, run.parameters)):
        run.unprepare()
        raise SplitMasterError(
            f"{type(found).__name__} averages the module's parameters, which hold a part of their masters",
            hint="HalfstepPrecision(policy, ema=0.999) averages masters; or hold them whole, with `param=fp32`",
        )


@contextmanager
def _without_compile(module: pl.LightningModule) -> Iterator[None]:
    """Inside, a module that `torch.compile` was given is as it was built; after, its steps are compiled again."""
    if (context := module._compiler_ctx) is not None:
        for name in _COMPILED:
            module.__dict__.pop(name, None)
    try:
        yield
    finally:
        if context is not None:
            for name in _COMPILED:
                context[f"original_{name}"] = getattr(module, name)
                setattr(module, name, context["dynamo_ctx"](getattr(module, name)))
