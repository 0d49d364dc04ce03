"""Accelerate under a policy: its own Accelerator, with `policy=` where `mixed_precision=` was.

    from halfstep.integrations.accelerate import Accelerator

    accelerator = Accelerator(policy="bf16-mixed")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

It is Accelerate at `mixed_precision="no"`: devices, processes, data, accumulation, schedulers, logging and
`torch.compile` are Accelerate's. What a number is held and computed in is ours, at the places that it leaves open:

    prepare_model               the model is moved, prepared for its policy, then wrapped (DDP) and compiled
    prepare_optimizer           a wrapper, as Accelerate has one, whose `step` makes the run's update
    backward                    scales; losses are divided by gradient_accumulation_steps, gradients summed
    clip_grad_norm_             the norm is taken once, and the update clips while it steps
    optimizer_step_was_skipped  exact with a loss scale, which waits for the device; else the last known flag
    save_state, load_state      one file halfstep.safetensors beside Accelerate's, with masters, moments and scale;
                                a folder that Accelerate saved without a policy is taken over

One model is trained per Accelerator; those that are prepared without an optimizer (a teacher) have the policy too.
"""

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from halfstep.core.arrays.measure import TOKENS
from halfstep.core.errors import (
    ArgumentError,
    GradientsError,
    OptimizerParametersError,
    ParallelError,
    RunStateError,
    UnsupportedModelError,
    UnsupportedOptimizerError,
)
from halfstep.core.policy import Policy
from halfstep.core.scaling import NoScale
from halfstep.integrations import fsdp, parts, state, stock
from halfstep.integrations.refusals import preserve_fp32_matmuls, refuse_precision, refuse_sharding, sharding_error
from halfstep.torch.numerics.record import record_of, update_record
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.run import Run, prepare
from halfstep.torch.update.step import StepResult

logger = get_logger(__name__)
_IN_BACKWARD = ("Lomo", "AdaLomo", "LayerWiseDummyOptimizer")  # they step inside of the backward pass


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator with a precision policy. `seed`, `ema` and `tokens` are those of `prepare`."""

    def __init__(
        self,
        *args: Any,
        policy: Policy | str,
        seed: int = 0,
        ema: float = 0.0,
        tokens: int = TOKENS,
        **options: Any,
    ):
        given = inspect.signature(accelerate.Accelerator.__init__).bind_partial(self, *args, **options).arguments
        refuse_precision(given.pop("mixed_precision", None))
        config = given.pop("parallelism_config", None)
        refuse_sharding(given)
        given.pop("self")
        plugin = fsdp.plugin_of(given)
        fsdp.check_parallelism(config, plugin)
        with preserve_fp32_matmuls():
            super().__init__(mixed_precision="no", **given)
        fsdp.use(self, plugin, config)
        self._start(policy, seed, ema, tokens)

    @classmethod
    def from_stock(
        cls, stock: accelerate.Accelerator, policy: Policy | str, *, seed: int, ema: float, tokens: int
    ) -> "Accelerator":
        """Gives a policy to an Accelerator that a framework made at `mixed_precision="no"`; it stays the same."""
        stock.__class__ = cls
        stock._start(policy, seed, ema, tokens)
        return stock  # type: ignore[no-any-return]

    def _start(self, policy: Policy | str, seed: int, ema: float, tokens: int) -> None:
        kind = self.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_") and not self.is_fsdp2:
            raise sharding_error(kind)
        self.policy = policy
        self._options: dict[str, Any] = {"seed": seed, "ema": ema, "tokens": tokens}
        self._runs: list[Run] = []
        self._forget_updates()
        self._wrapped: list[PolicyOptimizer] | None = None  # by the `prepare` that is running
        self._evaluation: ExitStack | None = None
        self.register_save_state_pre_hook(self._save)
        self.register_load_state_pre_hook(self._load)

    def _forget_updates(self) -> None:
        self.result: StepResult | None = None
        self._waiting: list[AcceleratedOptimizer] = []  # stepped by the user, before others of the same model
        self._was_skipped = False  # the last update whose flag is known
        self._flags: deque[tuple[Tensor, Any]] = deque()  # of later ones, on their way with their events

    # -- preparing

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepares models, optimizers, data and schedulers, in any order; returns them in the same order."""
        self._wrapped = []
        try:
            prepared = super().prepare(*args, device_placement=device_placement)
            wrapped = self._wrapped
        finally:
            self._wrapped = None
        self._attach(wrapped)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Moves a model to its device, gives it the policy, wraps and compiles it."""
        inner = self.unwrap_model(model, keep_torch_compile=False)
        if (run := run_of(inner)) is None:
            place = self.device_placement if device_placement is None else device_placement
            if place and not self.verify_device_map(model):
                model = model.to(self.device)
            run = self._begin_run(model)
            if self.num_processes > 1 and not self.is_fsdp2 and run.averages_all():
                run.unprepare()
                raise ParallelError(
                    "DDP averages the gradients of whole fp32 masters, and the policy leaves it none",
                    hint="hold masters whole, with `param=fp32`, and sum in fp32, with `accumulate=fp32`",
                )
        self.take_up(run.model)
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    def _begin_run(self, model: nn.Module) -> Run:
        run = prepare(model, self.policy, **self._options)
        update_record(model, prepared=run)
        return run

    def _prepare_fsdp2(self, *args: Any) -> Sequence[Any]:
        """Gives a model its policy, has Accelerate shard it, and compiles it; `prepare` attaches optimizers."""
        model = next((each for each in args if isinstance(each, nn.Module)), None)
        if model is not None:
            inner = self.unwrap_model(model, keep_torch_compile=False)
            if run_of(inner) is None:
                fsdp.check_parameters(inner)
                self._begin_run(inner)
                if self.state.fsdp_plugin.activation_checkpointing:
                    fsdp.checkpoint_layers(self, inner)
            self.take_up(inner)
        with ExitStack() as stack:
            stack.enter_context(fsdp.left_to_us(self.state))
            for each in args:
                optimizer = each.optimizer if isinstance(each, PolicyOptimizer) else each
                if isinstance(optimizer, Optimizer):
                    stack.enter_context(optimizer.replacing_parameters())
            result = [*super()._prepare_fsdp2(*args)]
        for place, each in enumerate(result):
            if isinstance(each, nn.Module):
                result[place] = self._models[-1] = fsdp.compiled(self.state, each)
        return result

    def take_up(self, model: nn.Module) -> None:
        """Continues with a model that this class has prepared before, as after `free_memory`."""
        run = run_of(model)
        if run is not None and run not in self._runs:
            self._runs.append(run)
            if self._evaluation is not None:
                self._evaluation.enter_context(run.evaluation())

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> "PolicyOptimizer":
        """Wraps an optimizer, whose model must be prepared before it or with it."""
        if not isinstance(optimizer, PolicyOptimizer):
            place = self.device_placement if device_placement is None else device_placement
            optimizer = PolicyOptimizer(self, optimizer, place)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        if self._wrapped is None:
            self._attach([optimizer])
        else:
            self._wrapped.append(optimizer)
        return optimizer

    def _attach(self, wrapped: Sequence["PolicyOptimizer"]) -> None:
        """Gives optimizers to the run of their model; other ones than it has begin a new run of the same model."""
        if not wrapped:
            return
        runs = {id(run): run for run in (self._find_run(each) for each in wrapped)}
        others = [run for run in self._runs if run.optimizers and id(run) not in runs]
        if len(runs) > 1 or others:
            raise UnsupportedModelError(
                "two models would be trained by one Accelerator, and a loss does not say whose scale it takes",
                hint="train one nn.ModuleDict of both, or make an Accelerator for each",
            )
        (run,), optimizers = runs.values(), [each.optimizer for each in wrapped]
        if any(each not in run.optimizers for each in optimizers):
            if run.optimizers:
                self._runs.remove(run)
                run = self._begin_run(run.unprepare())
                self._runs.append(run)
            run.attach(optimizers)
        for each in wrapped:
            each.run = run

    def _find_run(self, wrapped: "PolicyOptimizer") -> Run:
        held = {p for group in wrapped.param_groups for p in group["params"]}
        for run in self._runs:
            if not held.isdisjoint(run.model.parameters()):
                return run
        if wrapped.run is not None and run_of(wrapped.run.model) is wrapped.run:
            self.take_up(wrapped.run.model)
            return wrapped.run
        raise OptimizerParametersError(
            f"{type(wrapped.optimizer).__name__} holds parameters of no model that was prepared, so the policy "
            "would not reach them",
            hint="accelerator.prepare(model, optimizer); a model that was prepared elsewhere, or is wrapped in "
            "DataParallel, does not count",
        )

    # -- training

    @property
    def run(self) -> Run:
        """The run of the model that is trained, or of the only one that was prepared."""
        training = [run for run in self._runs if run.optimizers] or self._runs
        if len(training) != 1:
            what = "no model was prepared yet" if not training else "several models were prepared, none is trained"
            raise RunStateError(what, hint="call accelerator.prepare(model, optimizer) first")
        return training[0]

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Adds the gradient of a micro-batch's loss, divided by `gradient_accumulation_steps`."""
        if options:
            raise ArgumentError(
                f"backward({next(iter(options))}=...) is not what a policy can do: the backward pass is the run's",
                hint="call accelerator.backward(loss) alone; optimizers that step inside of it are not supported",
            )
        self._check_all_stepped()
        if self.gradient_accumulation_steps != 1:
            loss = loss / self.gradient_accumulation_steps
        self.run.backward(loss, last=self.sync_gradients, normalized=True)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Makes each `p.grad` the gradient itself, to clip, measure or change it before the step."""
        self.run.unscale()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Returns the norm of the gradients, and clips them to `max_norm`: all of them in the update itself."""
        if not self.sync_gradients:
            raise GradientsError(
                "gradients were to be clipped before all micro-batches of the update are in",
                hint="if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)",
            )
        if not max_norm > 0.0:
            raise ArgumentError(f"max_norm={max_norm!r} would clip every gradient to zero", hint="such as 1.0")
        run = self.run
        given = {parameters} if isinstance(parameters, Tensor) else {*parameters}
        if norm_type != 2 or not given.issuperset(run.parameters):
            return super().clip_grad_norm_(given, max_norm, norm_type=norm_type)  # type: ignore[no-any-return]
        if max_norm != float("inf"):
            run.clip_norm = min(max_norm, run.clip_norm or max_norm)
        return run.grad_norm()

    def step_for(self, optimizer: "PolicyOptimizer") -> None:
        """Makes the update once every optimizer of the model was stepped."""
        run = self.run
        if optimizer.run is not run:
            raise RunStateError(
                "the optimizer's model is not being trained: its run has ended", hint="prepare both again"
            )
        if optimizer in self._waiting:
            self._check_all_stepped()
        self._waiting.append(optimizer)
        if len(self._waiting) < len(run.optimizers):
            return
        self._waiting.clear()
        try:
            self.result = run.update()
        finally:
            run.clip_norm = 0.0
        if not _waits_for_flags(run):
            event = torch.get_device_module(run.device).Event()
            self._flags.append((self.result.skipped.to("cpu", non_blocking=True), event))
            event.record()

    def forget_for(self, optimizer: "PolicyOptimizer") -> None:
        """Drops gradients that no update will use."""
        if optimizer not in self._waiting:
            self.run.forget()

    def skipped(self) -> bool:
        """Whether the last update was skipped, as `optimizer_step_was_skipped` says it.

        With a loss scale, raises if no scale can save the run.
        """
        self._check_all_stepped()
        if self.result is not None and _waits_for_flags(self.run):
            self._was_skipped = bool(self.result.skipped)
            if self._was_skipped:
                self.run.check(self.result)
        while self._flags and self._flags[0][1].query():
            self._was_skipped = bool(self._flags.popleft()[0])
        return self._was_skipped

    def _check_all_stepped(self) -> None:
        if self._waiting:
            raise GradientsError(
                f"{len(self._waiting)} of the model's {len(self.run.optimizers)} optimizers were stepped: the "
                "update is one, with one decision whether gradients are finite",
                hint="step all of them, one after the other, before the scheduler and the next backward",
            )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, models compute as the policy's `eval` role says, also those that are prepared inside."""
        if self._evaluation is not None:
            yield
            return
        with ExitStack() as self._evaluation:
            self._evaluation.callback(setattr, self, "_evaluation", None)
            for run in self._runs:
                self._evaluation.enter_context(run.evaluation())
            yield

    def summary(self) -> str:
        """Describes what the policy does to the model, and what Accelerate and the policy do for each other."""
        run = self.run
        known = "as far as known without waiting for the device: the flag may be some updates late"
        if _waits_for_flags(run):
            waits = "" if run.device.type == "cpu" else "; reading the flag waits for the device after each update"
            known = f"known exactly{waits}"
        run.clipped_by = "clip_grad_norm_"
        return "\n".join([run.summary(), f"  skipped updates: {known}"])

    # -- saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the state dictionary of a model, its masters in fp32 whatever form they are held in."""
        with masters_of(self.unwrap_model(model, keep_torch_compile=False)):
            return super().get_state_dict(model, unwrap=unwrap)  # type: ignore[no-any-return]

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Saves everything to a folder; the trained model's state is in halfstep.safetensors, bit for bit.

        Under FSDP2 each rank writes its rows, and all that Accelerate has is beside them, without a pickle.
        """
        if self.is_fsdp2:
            return fsdp.save_state(self, self.run, self._folder_of(args, options, "output_dir"))
        with self._without_optimizers():
            return super().save_state(*args, **options)

    def load_state(self, *args: Any, **options: Any) -> None:
        """Restores what `save_state` wrote, bit for bit; a state of another policy is refused.

        From a folder that was saved without a policy, weights and the optimizers' state are taken over.
        """
        given = self._folder_of(args, options, "input_dir")
        folder = None if given is None else Path(given).expanduser()
        if folder is None and self.project_configuration.automatic_checkpoint_naming:
            folder = fsdp.newest_of(self)
        if folder is not None and (newest := parts.newest(folder)) is not None:
            fsdp.load_state(self, self.run, newest)
        else:
            with self._without_optimizers(), ExitStack() as self._weights:
                super().load_state(*args, **options)
        self._forget_updates()

    @staticmethod
    def _folder_of(args: Sequence[Any], options: dict[str, Any], name: str) -> str | None:
        return args[0] if args else options.get(name)

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Hides the optimizers from Accelerate, which would pickle the moments that our file holds.

        Under FSDP2 models are hidden too: it would read its own files, which are pickled, before it calls us.
        """
        held, models = self._optimizers, self._models  # type: ignore[has-type]
        self._optimizers = list[PolicyOptimizer]()
        self._models = [] if self.is_fsdp2 else models
        try:
            yield
        finally:
            self._optimizers, self._models = held, models

    def _trained_run(self) -> Run | None:
        return next((run for run in self._runs if run.optimizers), None)

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        everywhere = self.project_configuration.save_on_each_node
        saves = self.is_local_main_process if everywhere else self.is_main_process
        if saves and not self.is_fsdp2 and (run := self._trained_run()) is not None:
            state.save(run, Path(folder) / state.NAME)
        for place, model in enumerate(models):
            if any(state.scales_of(model)):  # it is loaded again from where it was, and never from here
                held = {name for name, p in model.named_parameters() if p.requires_grad}
                weights[place] = {name: tensor for name, tensor in weights[place].items() if name in held}

    def _load(self, models: list[nn.Module], folder: str) -> None:
        if (run := self._trained_run()) is None:
            return
        if took_over := stock.take_over(run, Path(folder)):
            logger.warning(took_over)
            theirs = not stock.has_weights(run, Path(folder))
            if run.averages is not None:
                self._weights.callback(run.averages.restart)
        else:
            whole = not self.is_fsdp2 and not any(state.scales_of(run.model))  # what Accelerate has saved
            state.load(run, Path(folder) / state.NAME, frozen_later=whole)
            theirs = whole and bool(state.frozen_weights(run))
        if theirs:
            self._weights.enter_context(run.edit())  # while Accelerate loads them
        else:
            models[:] = [m for m in models if self.unwrap_model(m, keep_torch_compile=False) is not run.model]

    def free_memory(self, *objects: Any) -> Any:
        """Drops references to models and optimizers; those that are prepared again keep their run."""
        self._runs = []
        self._forget_updates()
        return super().free_memory(*objects)


class PolicyOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper of an optimizer, whose step is the update of a run."""

    def __init__(self, accelerator: Accelerator, optimizer: torch.optim.Optimizer, device_placement: bool):
        if any(base.__name__ in _IN_BACKWARD for base in type(optimizer).__mro__):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} steps inside of the backward pass, where gradients are neither "
                "summed nor known to be finite",
                hint="choose an optimizer that steps after it, such as torch.optim.AdamW",
            )
        super().__init__(optimizer, device_placement=device_placement, scaler=None)
        self._accelerator = accelerator
        self.run: Run | None = None

    def step(self, closure: Any = None) -> None:
        """Makes the update if this is the last micro-batch."""
        if closure is not None:
            raise ArgumentError("step(closure) computes gradients that the policy does not see", hint="step()")
        if self.gradient_state.sync_gradients:
            self._accelerator.step_for(self)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients after the last micro-batch; an update has used them up."""
        if self.gradient_state.sync_gradients and self.run is not None:
            self._accelerator.forget_for(self)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped: exact with a loss scale, else the last flag that is known."""
        return self._accelerator.skipped()


def _waits_for_flags(run: Run) -> bool:
    """Whether the flag of a skipped update is read at once, which waits for the device.

    With a loss scale skips are part of normal training, and a scheduler must not step. Without one a skip means
    that something is broken, and nobody waits: flags arrive behind the updates, and the last one that arrived is
    the answer.
    """
    return run.device.type == "cpu" or not isinstance(run.policy.scale, NoScale)


def run_of(model: nn.Module) -> Run | None:
    """Returns the run of a model that an Accelerator of ours has prepared, if it still is."""
    run = record_of(model).prepared
    return run if isinstance(run, Run) and run.model is model else None  # a copy of the model shares its record


def masters_of(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, a model's parameters are its fp32 masters, in whatever form the policy holds them."""
    run = run_of(model)
    return nullcontext() if run is None else run.edit()
