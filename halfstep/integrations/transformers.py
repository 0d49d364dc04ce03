"""transformers.Trainer under a policy: its own Trainer, with `policy=` where `bf16=True` was.

    from halfstep.integrations.transformers import Trainer

    trainer = Trainer(model, TrainingArguments(...), train_dataset=..., policy="bf16-mixed")

    class MySFT(PolicyMixin, SFTTrainer):      # any subclass of Trainer: the mixin first
        ...

Everything in Trainer passes through its accelerator, so that one gets the policy (accelerate.py): the update,
clipping by `max_grad_norm`, skips, and micro-batches, whose losses Trainer has divided already. The rest of this
file is the state: one halfstep.safetensors in each `checkpoint-N`, and weights saved from the fp32 masters.

Collators make an attention mask though nothing is padded, and compiled code cannot read that it is all ones, so
attention would keep a mask (torch/convert/hugging_face.py). Trainer moves batches itself here, not its data
loader: the mask is read before it is moved, and one of ones does not reach the compiled model.

Logging, callbacks, schedulers, evaluation, `generate`, `save_pretrained` and `torch_compile=True` are Trainer's.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from halfstep.core.arrays.measure import TOKENS
from halfstep.core.errors import AutocastError, ParallelError
from halfstep.core.policy import Policy
from halfstep.integrations import state
from halfstep.integrations.accelerate import Accelerator, run_of
from halfstep.integrations.first_steps import FirstSteps
from halfstep.integrations.refusals import preserve_fp32_matmuls, refuse_precision, refuse_sharding
from halfstep.torch.run import Run

logger = logging.get_logger("transformers.trainer")
# Settings of TrainingArguments that would cast beside the policy, and what says it instead.
_CASTS = {
    "bf16": "policy='bf16-mixed'",
    "fp16": "policy='fp16-mixed'",
    "bf16_full_eval": "policy='bf16-mixed,eval=bf16'",
    "fp16_full_eval": "policy='fp16-mixed,eval=fp16'",
}
# Settings that train in a form which a policy cannot reach.
_SHARDING = {"deepspeed": "DeepSpeed", "fsdp": "FSDP"}


class _Accelerator(Accelerator):
    """Trainer's accelerator, which leaves batches where they are and masks of ones out of compiled models."""

    plain_masks: WeakTensorKeyDictionary  # on the device, all ones as long as they have this version

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, **options: Any) -> Any:
        """Prepares a data loader; Trainer moves what it yields."""
        return super().prepare_data_loader(data_loader, device_placement=False, **options)

    def prepare_model(self, model: nn.Module, *given: Any, **options: Any) -> nn.Module:
        """Prepares a model, as Accelerator does."""
        prepared = super().prepare_model(model, *given, **options)
        run = run_of(self.unwrap_model(prepared, keep_torch_compile=False))
        chosen = () if run is None else run.conversion.attention
        if hasattr(prepared, "_orig_mod") and any(not row.why_not for row in chosen):
            prepared.register_forward_pre_hook(self._leave_out, with_kwargs=True)
        return prepared

    def _leave_out(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if mask is not None and self.plain_masks.get(mask) == mask._version:
            kwargs = {**kwargs, "attention_mask": None}
        return args, kwargs


class PolicyMixin:
    """Gives a policy to a subclass of transformers.Trainer: `class Mine(PolicyMixin, SFTTrainer)`.

    `ema` and `tokens` are those of `prepare`; the seed is TrainingArguments'.
    """

    args: Any
    model: Any
    accelerator: Any
    lr_scheduler: Any

    def __init__(
        self, *given: Any, policy: Policy | str, ema: float = 0.0, tokens: int = TOKENS, **options: Any
    ) -> None:
        self._policy, self._ema, self._tokens = policy, ema, tokens
        super().__init__(*given, **options)

    @property
    def run(self) -> Run:
        """The run that trains the model, from the first `train()` or `evaluate()` on."""
        return self.accelerator.run  # type: ignore[no-any-return]

    def create_accelerator_and_postprocess(self) -> None:
        """Makes Trainer's accelerator, and gives it the policy."""
        self._refuse()
        with preserve_fp32_matmuls():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        options = {"seed": self.args.seed, "ema": self._ema, "tokens": self._tokens}
        _Accelerator.from_stock(self.accelerator, self._policy, **options)
        self.accelerator.plain_masks = WeakTensorKeyDictionary()

    def _refuse(self) -> None:
        for name, instead in _CASTS.items():
            if getattr(self.args, name, False):
                raise AutocastError(
                    f"TrainingArguments({name}=True) beside policy=: both would cast",
                    hint=f"set {name}=False (TRL's configurations have bf16=True by default): {instead} says it; "
                    "or drop policy= to leave precision to Trainer",
                )
        for name, what in _SHARDING.items():
            if getattr(self.args, name, None):
                raise ParallelError(
                    f"TrainingArguments({name}=...) beside policy= is not implemented: {what} keeps parameters "
                    "and gradients in its own form",
                    hint=f"drop {name} and train on one device or with DDP; or drop policy=",
                )
        refuse_precision()
        refuse_sharding({"parallelism_config": getattr(self.args, "parallelism_config", None)})
        if self.args.n_gpu > 1:
            raise ParallelError(
                f"Trainer would copy the model to {self.args.n_gpu} GPUs in every step (DataParallel), and copies "
                "have no policy",
                hint="start one process per GPU, `torchrun --nproc-per-node=N script.py`, or show it one GPU with "
                "CUDA_VISIBLE_DEVICES=0",
            )

    def create_optimizer(self, *given: Any, **options: Any) -> torch.optim.Optimizer:
        """Makes the optimizer. A model that was prepared before, by `evaluate()` or `train()`, keeps its run."""
        self.accelerator.take_up(self.model)
        return super().create_optimizer(*given, **options)  # type: ignore[misc,no-any-return]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *given: Any) -> Any:
        """Fetches the micro-batches of an update, and counts their tokens on the device, without waiting."""
        return super().get_batch_samples(map(self._move, epoch_iterator), *given)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(self._move(inputs))  # type: ignore[misc]

    def _move(self, batch: Any) -> Any:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        plain = isinstance(mask, Tensor) and mask.device.type == "cpu" and bool((mask == 1).all())
        batch = self._prepare_input(batch)
        if plain:
            mask = batch["attention_mask"]
            self.accelerator.plain_masks[mask] = mask._version
        return batch

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, Tensor):  # pinned by Trainer's data loader
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)  # type: ignore[misc]

    def evaluation_loop(self, *given: Any, **options: Any) -> Any:
        """Evaluates as the policy's `eval` role says."""
        with self.accelerator.evaluation():
            return super().evaluation_loop(*given, **options)  # type: ignore[misc]

    def _save(self, *given: Any, **options: Any) -> None:
        with self._whole_masters():
            super()._save(*given, **options)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            state.save(self.run, Path(output_dir) / state.NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if took_over := state.take_over(self.run, folder, [folder / OPTIMIZER_NAME], SCALER_NAME):
            logger.warning(took_over)
        else:
            state.load(self.run, folder / state.NAME)
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Does nothing: the run's state has the scale, or took over that of a stock checkpoint."""

    def _load_from_checkpoint(self, *given: Any, **options: Any) -> None:
        with self._whole_masters():
            super()._load_from_checkpoint(*given, **options)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with self._whole_masters():
            super()._load_best_model()  # type: ignore[misc]

    def _whole_masters(self) -> ExitStack:
        """Inside, the model's parameters are its fp32 masters, in whatever form the policy holds them."""
        stack = ExitStack()
        if (run := run_of(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))) is not None:
            stack.enter_context(run.edit())
        return stack

    def summary(self) -> str:
        """Describes what the policy does to the model, and what Trainer adds."""
        lines = [self.accelerator.summary()]
        if self.args.logging_nan_inf_filter:
            lines.append(
                "  Trainer: logging_nan_inf_filter reads the loss of every micro-batch, which waits for the "
                "device, and hides losses that are not finite; TrainingArguments(logging_nan_inf_filter=False) "
                "does neither"
            )
        return "\n".join(lines)


class Trainer(PolicyMixin, transformers.Trainer):
    """transformers.Trainer with a precision policy."""


class AuditCallback(transformers.TrainerCallback):
    """Audits the first updates of any Trainer: `Trainer(..., callbacks=[AuditCallback()])`.

    It says on stderr what it found, and `findings` has it; with a policy or without.
    """

    def __init__(self, steps: int | None = None):
        self.audit = FirstSteps(steps)

    @property
    def findings(self) -> list[Any]:
        """What was found, once the first updates are over."""
        return self.audit.findings

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begins to watch."""
        self.audit.begin(int(state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the watch after enough updates."""
        self.audit.look()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the watch of a short run."""
        self.audit.end()
