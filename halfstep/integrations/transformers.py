"""transformers.Trainer under a policy: its own Trainer, with `policy=` where `bf16=True` was.

    from halfstep.integrations.transformers import Trainer

    trainer = Trainer(model, TrainingArguments(...), train_dataset=..., policy="bf16-mixed")

    class MySFT(PolicyMixin, SFTTrainer):      # any subclass of Trainer: the mixin first
        ...

Everything in Trainer passes through its accelerator, so that one gets the policy (accelerate.py): the update,
clipping by `max_grad_norm`, skips, and micro-batches, whose losses Trainer has divided already. The rest of this
file is the state: one halfstep.safetensors in each `checkpoint-N`, or under FSDP2 the rows of each rank (parts.py)
with the scheduler and random states. Both have the masters, so the weights beside them, for `from_pretrained`, are
in the format that the policy's `export` says, and config.json names it.

Collators make an attention mask though nothing is padded, and compiled code cannot read that it is all ones, so
attention would keep a mask (torch/convert/hugging_face.py). Trainer moves batches itself here, not its data
loader: the mask is read before it is moved, and one of ones does not reach the compiled model.

Logging, callbacks, schedulers, evaluation, `generate`, `save_pretrained` and `torch_compile=True` are Trainer's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from halfstep.config.reading import parse_json, read_bytes
from halfstep.core.arrays.measure import TOKENS
from halfstep.core.errors import AutocastError, ParallelError, StateError
from halfstep.core.formats import FP32, Format
from halfstep.core.policy import Policy, as_policy, read
from halfstep.integrations import adapters, fsdp, parts, state, stock
from halfstep.integrations.accelerate import Accelerator, masters_of, run_of
from halfstep.integrations.first_steps import FirstSteps
from halfstep.integrations.refusals import preserve_fp32_matmuls, refuse_precision, refuse_sharding
from halfstep.torch.numerics.dtypes import dtype_of
from halfstep.torch.run import Run
from halfstep.training.files import write_whole

logger = logging.get_logger("transformers.trainer")
# Settings of TrainingArguments that would cast beside the policy, and what says it instead.
_CASTS = {
    "bf16": "policy='bf16-mixed'",
    "fp16": "policy='fp16-mixed'",
    "bf16_full_eval": "policy='bf16-mixed,eval=bf16'",
    "fp16_full_eval": "policy='fp16-mixed,eval=fp16'",
}


class _Accelerator(Accelerator):
    """Trainer's accelerator, which leaves batches where they are and masks of ones out of compiled models."""

    plain_masks: WeakTensorKeyDictionary  # on the device, all ones as long as they have this version

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, **options: Any) -> Any:
        """Prepares a data loader; Trainer moves what it yields."""
        return super().prepare_data_loader(data_loader, device_placement=False, **options)

    def prepare_model(self, model: nn.Module, *given: Any, **options: Any) -> nn.Module:
        """Prepares a model, as Accelerator does."""
        return self._leave_out_masks(super().prepare_model(model, *given, **options))

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepares objects; a model alone, to be evaluated before it is trained, is not sharded yet."""
        if self.is_fsdp2 and len(args) == 1 and isinstance(args[0], nn.Module):
            return self.prepare_model(args[0], evaluation_mode=True)
        return super().prepare(*args, device_placement=device_placement)

    def _prepare_fsdp2(self, *args: Any) -> Sequence[Any]:
        prepared = super()._prepare_fsdp2(*args)
        for each in prepared:
            if isinstance(each, nn.Module):
                self._leave_out_masks(each)
        return prepared

    def _leave_out_masks(self, prepared: nn.Module) -> nn.Module:
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

    _loss_alone: "_LossAlone | None" = None
    args: Any
    compute_loss_func: Any
    label_smoother: Any
    model: Any
    accelerator: Any
    state: Any
    lr_scheduler: Any

    def __init__(
        self, *given: Any, policy: Policy | str, ema: float = 0.0, tokens: int = TOKENS, **options: Any
    ) -> None:
        self._policy, self._export = split_export(policy)
        self._ema, self._tokens = ema, tokens
        self._base: Mapping[str, int] = {}  # of adapters, as saved beside them
        self._random_states: Mapping[str, Tensor] | None = None  # of the checkpoint that training resumes from
        super().__init__(*given, **options)

    @property
    def run(self) -> Run:
        """The run that trains the model, from the first `train()` or `evaluate()` on."""
        return self.accelerator.run  # type: ignore[no-any-return]

    def create_accelerator_and_postprocess(self) -> None:
        """Makes Trainer's accelerator, and gives it the policy."""
        self._refuse()
        plugin = fsdp.plugin_of({}, getattr(self.args, "fsdp_plugin_args", None))
        with preserve_fp32_matmuls():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        fsdp.use(self.accelerator, plugin)
        self.is_fsdp_enabled = self.accelerator.is_fsdp2
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
        refuse_precision()
        given = {"deepspeed_plugin": "deepspeed", "parallelism_config": "parallelism_config"}
        refuse_sharding({theirs: getattr(self.args, name, None) or None for theirs, name in given.items()})
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

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Computes the loss; a compiled model returns nothing beside it where nobody sees it."""
        compute: Any = super().compute_loss  # type: ignore[misc]
        theirs = compute.__func__ is transformers.Trainer.compute_loss
        seen = return_outputs or self.compute_loss_func is not None or self.label_smoother is not None
        if seen or not theirs or not hasattr(model, "_orig_mod"):
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if self._loss_alone is None or self._loss_alone.compiled is not model:
            self._loss_alone = _LossAlone(model, self.accelerator.unwrap_model(model, keep_torch_compile=False))
        with self._loss_alone:
            return compute(model, inputs, False, num_items_in_batch)

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

    def train(self, resume_from_checkpoint: Any = None, *given: Any, **options: Any) -> Any:
        """Trains; `resume_from_checkpoint=True` takes the newest whole checkpoint, past what a kill left."""
        if resume_from_checkpoint is True:
            folders = Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            whole = {int(folder.name.rpartition("-")[2]): str(folder) for folder in folders if _is_whole(folder)}
            resume_from_checkpoint = whole[max(whole)] if whole else True
        return super().train(resume_from_checkpoint, *given, **options)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model; of one whose checkpoints are in shards alone, the whole when you call it."""
        if self.accelerator.is_fsdp2 and not _internal_call:
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        run = run_of(self._unwrapped())
        if run is not None and hasattr(run.model, "peft_config"):
            self._base = adapters.base_of(run)
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        model = self._unwrapped()
        with masters_of(model):
            super()._save(str(folder), self._in_export_format(model, state_dict))  # type: ignore[misc]
        if isinstance(model, transformers.PreTrainedModel) and not hasattr(model, "peft_config"):
            dtype = str(dtype_of(self._export)).removeprefix("torch.")
            if model.config.dtype != dtype:  # of the parameters, which stay masters
                model.config.dtype = dtype
                model.config.save_pretrained(folder)
        if self._base:
            adapters.write_base(folder, self._base)
        # Nothing reads this pickle.
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        write_whole(folder / "training_args.json", self.args.to_json_string().encode())

    def _in_export_format(self, model: nn.Module, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the state dictionary to write; weights in another format are cast to it, on the CPU.

        Of a model with adapters only those are written, so its base is not cast.
        """
        dtype, casts = dtype_of(self._export), dict[tuple[int, torch.Size], Tensor]()
        found = dict(model.state_dict() if state_dict is None else state_dict)
        for name, p in model.named_parameters(remove_duplicate=False):
            is_written = p.requires_grad or not hasattr(model, "peft_config")
            weight = found.get(name)
            if weight is None or not is_written or not p.is_floating_point() or weight.dtype == dtype:
                continue
            key = (weight.data_ptr(), weight.shape)  # tied weights stay tied
            if key not in casts:
                casts[key] = weight.to("cpu", dtype)
                if not casts[key].isfinite().all() and weight.isfinite().all():
                    raise StateError(
                        f"`{name}` has a weight beyond the largest number of {self._export}",
                        hint="leave `export` out of the policy: weights are then saved in fp32",
                    )
            found[name] = casts[key]
        return found

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.accelerator.is_fsdp2:
            parts.save(self.run, Path(output_dir), {"scheduler": self.lr_scheduler.state_dict()})
        elif self.args.should_save:
            state.save(self.run, Path(output_dir) / state.NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (saved := parts.newest(folder)) is not None:
            facts, self._random_states = parts.load(self.run, saved)
            self.lr_scheduler.load_state_dict(facts["scheduler"])
            return
        if took_over := stock.take_over(self.run, folder):
            logger.warning(took_over)
        else:
            state.load(self.run, folder / state.NAME)
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Does nothing: the run's state has the scale, or took over that of a stock checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        if not self.accelerator.is_fsdp2:  # else they are in the parts
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._random_states is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:  # again: skipping batches has drawn numbers
            parts.restore_random_states(self._random_states, self.run.device)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *given: Any, **options: Any) -> None:
        folder = Path(resume_from_checkpoint)
        ours = (folder / state.NAME).is_file() or parts.newest(folder) is not None
        if self.accelerator.is_fsdp2 or ours or stock.fsdp_weights(folder) is not None:
            return  # they are loaded with the state of the run or of its optimizers
        with masters_of(self._unwrapped()):
            super()._load_from_checkpoint(resume_from_checkpoint, *given, **options)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if (best := parts.newest(folder)) is not None:
            parts.load_weights(self.run, best)
        elif (folder / state.NAME).is_file():
            state.load_weights(self.run, folder / state.NAME)
        else:  # save_only_model
            with masters_of(self._unwrapped()):
                super()._load_best_model()  # type: ignore[misc]

    def _unwrapped(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)  # type: ignore[no-any-return]

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


def split_export(policy: Policy | str) -> tuple[Policy | str, Format]:
    """Returns a policy as a run takes it, and the format that it says models are saved in."""
    if isinstance(policy, str) and read(policy).base == "auto":
        return policy, FP32
    given = as_policy(policy)
    if given.export in (FP32, given.param.format):
        return policy, given.export
    return replace(given, export=FP32), given.export


class _LossAlone:
    """Inside, a model's forward returns its loss alone.

    Logits that compiled code returns have a gradient, of zeros as large as they are, though nobody uses them.
    """

    def __init__(self, compiled: nn.Module, model: nn.Module):
        self.compiled = compiled
        forward, self.attributes = model.forward, vars(model)
        self.own = {name: each for name, each in self.attributes.items() if name == "forward"}

        def compute(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            if isinstance(outputs, dict):
                return {"loss": outputs["loss"]} if "loss" in outputs else outputs
            return outputs[:1]

        self.compute = compute  # one for all steps: dynamo would compile each anew

    def __enter__(self) -> None:
        self.attributes["forward"] = self.compute

    def __exit__(self, *_: object) -> None:
        del self.attributes["forward"]
        self.attributes.update(self.own)


def _is_whole(folder: Path) -> bool:
    """Whether all of a checkpoint was written: Trainer's own state comes last."""
    try:
        parse_json(read_bytes(folder / TRAINER_STATE_NAME))
    except (OSError, ValueError):
        return False
    return (folder / state.NAME).is_file() or parts.newest(folder) is not None


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
