"""The configuration of a run. Defaults, help, docs and TOML files all come from these fields."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from halfstep.config.model import ModelConfig
from halfstep.config.policy_schedule import ScheduleEntry, check_entries
from halfstep.config.schema import Bounds, Count, Decay, Positive, Rate, Seed, Share, shown
from halfstep.core.errors import HalfstepError, SettingConflictError, SettingPolicyError
from halfstep.core.policy import read

Backend = Literal["torch", "jax", "mlx"]

MOST_SLICE = 2**20  # elements of a tensor that the monitor counts


@dataclass(frozen=True)
class DataConfig:
    """The data."""

    source: str = "stdlib"
    """`stdlib` (the text of Python's standard library), a text file, a folder of text, token shards (`*.bin`), or
    the folder that `halfstep data pack` wrote."""
    validation: Annotated[float, Bounds(above=0, at_most=0.5)] | str = 0.1
    """The share of the documents that is held out; or your own text to hold out, such as `valid.txt`: a file, a
    folder or a glob. Packed data keeps the split it was packed with."""

    @property
    def held_out(self) -> str:
        """What errors call the held-out text."""
        own = self.validation
        return f"held-out text `{own}`" if isinstance(own, str) else f"held-out text of `{self.source}`"


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and on how much at once."""

    steps: Positive = 1000
    """Updates of the weights."""
    batch: Positive = 16
    """Sequences in a micro-batch."""
    micro_batches: Positive = 1
    """Micro-batches per update."""
    clip_norm: Rate = 1.0
    """Gradients are scaled down to this norm; 0 is off."""
    warmup: Share = 0.02
    """Share of the steps, at the start, in which the learning rate rises from near zero."""
    warmdown: Share = 0.4
    """Share of the steps, at the end, in which the learning rate falls to near zero."""
    validate_every: Positive = 250
    """Steps between two evaluations on held-out text."""
    validation_tokens: Positive = 65536
    """Held-out tokens per evaluation."""
    save_every: Positive = 500
    """Steps between two checkpoints."""
    keep_last: Positive = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Count = 0
    """Also keeps the checkpoints of steps that are multiples of this; 0 is none."""
    keep_best: bool = False
    """Also keeps the checkpoint with the lowest held-out loss, which is saved right after an evaluation."""
    rollback: Rate = 0.0
    """Rolls back to the last good checkpoint, and skips the data since, if the loss of 3 consecutive steps is more
    than this many nats above the recent median; 0 is off."""
    deterministic: bool = False
    """Whether a repeated run has the same bits on an NVIDIA GPU too; slower. On a CPU it always does."""
    compile: bool | Literal["block", "whole"] = False
    """Whether the step is compiled by the framework; JAX always does. `block`, on torch: each block by itself, so
    that one compilation serves all that are alike, and the head with its loss: the first step comes sooner.
    `whole`: as one graph. `true` takes `block` where later steps are as fast, and a run says which and why."""
    graph: bool = False
    """Whether each step is launched as one CUDA graph, on torch and an NVIDIA GPU: faster where batches are small
    and the host is the limit, with the same bits. It needs `monitor.on = false`."""
    loggers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where else the run's events are shown; each needs its package. W&B is offline unless WANDB_MODE says
    otherwise."""
    measure_ceiling: bool = True
    """Whether to time this device's fastest matmul before the run; utilization is a share of it."""
    recompute_blocks: bool = False
    """Whether the backward pass runs each block's forward again instead of storing its activations (gradient
    checkpointing): much less memory, about a third more time, and the same gradients."""
    memory: Literal["fast", "lean"] = "fast"
    """`lean`: the backward pass computes norms and activation functions again instead of keeping their results:
    less memory, a few percent more time, and the same gradients. On torch a loss that is fused with the head makes
    a quarter of the logits at a time. Not on MLX."""
    ema: Decay = 0.0
    """Decay of a moving average of the weights, kept in fp32, saved, and evaluated in their place; 0.999 averages
    over about a thousand updates, 0 is off."""

    @property
    def warmup_steps(self) -> int:
        """How many steps the warmup takes."""
        return round(self.warmup * self.steps)


@dataclass(frozen=True)
class OptimizerConfig:
    """What updates the weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for all, or Muon for the matrices inside blocks and AdamW for the rest."""
    rate: Annotated[float, Bounds(above=0)] = 3e-3
    """Learning rate of AdamW, for all parameters without a more specific rate below."""
    embedding_rate: Rate = 0.0
    """AdamW's rate for embeddings, including a tied head; 0 is `rate`."""
    head_rate: Rate = 0.0
    """AdamW's rate for an output head that is not tied; 0 is `rate`."""
    scalar_rate: Rate = 0.0
    """AdamW's rate for gains, biases, learned factors and mixes; 0 is `rate`."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    epsilon: Annotated[float, Bounds(above=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: Rate = 0.1
    """Decoupled decay of the matrices that AdamW updates; gains, biases and scalars do not decay."""
    muon_rate: Annotated[float, Bounds(above=0)] = 0.02
    """Learning rate of Muon, for the matrices inside blocks."""
    muon_momentum: Decay = 0.95
    """Momentum of Muon."""
    muon_momentum_start: Decay = 0.85
    """Momentum of Muon at the first update, if it warms up."""
    muon_momentum_warmup: Count = 0
    """Updates in which the momentum rises from `muon_momentum_start` to `muon_momentum`; 0 is none."""
    muon_weight_decay: Rate = 0.0
    """Decoupled decay of the matrices that Muon updates."""

    @property
    def matrix_rate(self) -> float:
        """The rate of the matrices inside blocks, which is reported as the learning rate; the others follow it."""
        return self.muon_rate if self.name == "muon" else self.rate


@dataclass(frozen=True)
class ArtifactConfig:
    """What a finished run writes besides its checkpoints."""

    format: Literal["none", "int8-zlib"] = "none"
    """`int8-zlib`: matrices in int8 with a scale per row, the rest in fp16, compressed; loaded back and scored."""
    limit: Count = 0
    """The most bytes the artifact should have; a larger one is still written, and reported. 0 is no limit."""


@dataclass(frozen=True)
class ParallelConfig:
    """How several processes share a run."""

    shard: Literal["none", "full", "hybrid"] = "none"
    """What each process holds: `none`, everything (DDP); `full`, its share of weights, gradients and moments
    (FSDP2); `hybrid`, its share within a machine, and machines hold the same (HSDP). One process may shard too."""
    timeout: Annotated[float, Bounds(at_least=1, at_most=86400)] = 600.0
    """Seconds that processes wait for one that does not arrive; then the run ends, and names it."""


@dataclass(frozen=True)
class MonitorConfig:
    """What is watched in each layer while it trains; no update depends on it."""

    on: bool = True
    """Whether to watch what enters and leaves each layer: overflow, underflow, lost updates, and what other
    formats would lose."""
    every: Positive = 100
    """Steps between two records of each layer's numbers, which cover all steps since the last; fewer for a while
    after an alarm."""
    sample_every: Count = 200
    """Steps between two samples: part of a batch runs again, for exponents and what other formats would lose. 0
    samples only after an alarm and at the end."""
    slice: Annotated[int, Bounds(at_least=1, at_most=MOST_SLICE)] = 4096
    """How many elements of each tensor are counted in every step, always the same ones."""
    shadow_every: Count = 0
    """Steps between two shadows: before a step, the same weights and batch run in fp32, and eight times with noise
    of the format, to compare the loss and each layer's gradient. Takes some fifteen steps' time; 0 for none; on
    torch."""


@dataclass(frozen=True)
class RunConfig:
    """One run: everything that determines what it computes."""

    title: str = ""
    """One line that says what the recipe is for."""
    backend: Backend = "torch"
    """The framework that runs it."""
    policy: str = "auto"
    """The precision: `auto` measures this machine; else a preset, roles, rules (`halfstep policy --help`)."""
    schedule: tuple[ScheduleEntry, ...] = ()
    """Policies that take over during the run. `[[schedule]]` with `from = 0.85` and `policy = "bf16-mixed"`: after
    85 % of the steps; a whole number is a number of steps. Masters and moments keep every bit."""
    seed: Seed = 0
    """Determines initial weights, the order of the data and stochastic rounding."""
    init: str = ""
    """Where the initial weights come from: a safetensors file, a folder in Hugging Face layout, a run folder, or a
    file that `halfstep artifact` wrote; by default they are drawn from the seed."""
    init_digest: str = ""
    """SHA-256 that the weights of `init` must have; a run records theirs here."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    artifact: ArtifactConfig = field(default_factory=ArtifactConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        try:
            read(self.policy)
        except HalfstepError as error:
            raise SettingPolicyError(f'policy = "{self.policy}": {error.message}', hint=error.hint) from None
        check_entries(self.policy, self.schedule, self.training.steps)
        if self.init_digest and not self.init:
            raise SettingConflictError(
                f'init_digest is "{self.init_digest}", but there is no `init`',
                hint="name the weights with --init, or leave init_digest out",
            )
        if self.training.warmup + self.training.warmdown > 1:
            raise SettingConflictError(
                f"training.warmup {self.training.warmup} and training.warmdown {self.training.warmdown} "
                "are shares of one run and add up to more than 1",
                hint="lower one of them",
            )
        if self.model.tied and self.optimizer.head_rate:
            raise SettingConflictError(
                f"optimizer.head_rate is {self.optimizer.head_rate:g}, but the head is tied to the embedding",
                hint="set optimizer.embedding_rate, or model.tied = false",
            )
        if self.training.memory == "lean" and self.backend == "mlx":
            raise SettingConflictError(
                'training.memory = "lean", and backend mlx cannot keep what matmuls return and compute the rest '
                "again: mx.checkpoint runs all of a function again",
                hint="set training.recompute_blocks = true, which does so by block, or use --backend torch or jax",
            )
        if self.training.compile == "block" and self.backend != "torch":
            raise SettingConflictError(
                f'training.compile = "block", and backend {self.backend} compiles a step as a whole',
                hint="set training.compile = true, or use --backend torch",
            )
        if self.monitor.shadow_every and self.backend != "torch":
            raise SettingConflictError(
                f"monitor.shadow_every = {self.monitor.shadow_every}, and backend {self.backend} cannot run a "
                "step again in other formats: they are compiled into it",
                hint="use --backend torch, or leave monitor.shadow_every at 0",
            )
        if self.training.graph and (self.backend != "torch" or self.monitor.on):
            elsewhere = f"backend {self.backend} has no CUDA graphs of its own to make"
            watched = "the monitor sends numbers of layers to the host within a step"
            raise SettingConflictError(
                f"training.graph is true, and {elsewhere if self.backend != 'torch' else watched}",
                hint="set monitor.on = false" if self.backend == "torch" else "set training.graph = false",
            )
        self._check_parallel()

    def _check_parallel(self) -> None:
        shard = self.parallel.shard
        if shard == "none":
            return
        if self.backend != "torch":
            raise SettingConflictError(
                f'parallel.shard = "{shard}", and backend {self.backend} shards nothing: FSDP is torch\'s',
                hint='use --backend torch, or leave parallel.shard at "none"',
            )
        if self.artifact.format != "none":
            raise SettingConflictError(
                f'artifact.format = "{self.artifact.format}" needs whole weights, and parallel.shard = "{shard}" '
                "leaves each process a share of them",
                hint='set artifact.format = "none"; `halfstep artifact RUN` makes it from a checkpoint',
            )


def describe_value(key: str, value: object) -> str:
    """Returns the value of a setting as a message has it: a rate of 0 is that of all parameters."""
    own = ("optimizer.embedding_rate", "optimizer.head_rate", "optimizer.scalar_rate")
    if key == "schedule":
        return shown(value)
    return "`optimizer.rate`" if key in own and value == 0 else str(value)


_SEVERAL = Bounds(at_least=2)
# Settings that change nothing unless others have one of these values.
NEEDS: dict[str, dict[str, Bounds | tuple[object, ...]]] = {
    "model.rope_base": {"model.positions": ("rotary",)},
    "model.q_gain_start": {"model.q_gain": (True,)},
    "model.unet_skips": {"model.layers": _SEVERAL},
    "model.value_residual": {"model.layers": _SEVERAL},
    "model.embedding_std": {"init": ("",)},
    "model.zero_init": {"init": ("",)},
    "optimizer.muon_rate": {"optimizer.name": ("muon",)},
    "optimizer.muon_momentum": {"optimizer.name": ("muon",)},
    "optimizer.muon_momentum_start": {"optimizer.name": ("muon",), "optimizer.muon_momentum_warmup": _SEVERAL},
    "optimizer.muon_momentum_warmup": {"optimizer.name": ("muon",)},
    "optimizer.muon_weight_decay": {"optimizer.name": ("muon",)},
    **{f"monitor.{name}": {"monitor.on": (True,)} for name in ("every", "sample_every", "slice", "shadow_every")},
}
# What other libraries call a setting with the same meaning.
NAMES_ELSEWHERE = {
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("eps", "adam_epsilon"), "optimizer.epsilon"),
    **dict.fromkeys(("optim", "optimizer"), "optimizer.name"),
    **dict.fromkeys(("max_steps", "iters", "max_iters", "iterations"), "training.steps"),
    **dict.fromkeys(("batch_size", "micro_batch_size", "per_device_train_batch_size"), "training.batch"),
    **dict.fromkeys(
        ("accumulate", "accumulation_steps", "gradient_accumulation_steps", "grad_accum"), "training.micro_batches"
    ),
    **dict.fromkeys(("grad_clip", "clip", "max_grad_norm", "gradient_clip_val"), "training.clip_norm"),
    "warmup_ratio": "training.warmup",
    **dict.fromkeys(("eval_every", "eval_interval", "eval_steps", "val_every"), "training.validate_every"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_every"), "training.save_every"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "training.recompute_blocks"),
    **dict.fromkeys(("logger", "report_to"), "training.loggers"),
    **dict.fromkeys(("vocab", "vocab_size"), "model.vocabulary"),
    **dict.fromkeys(("seq_len", "sequence_length", "block_size", "context_length", "max_length"), "model.context"),
    **dict.fromkeys(("depth", "n_layer", "n_layers", "num_layers", "num_hidden_layers"), "model.layers"),
    **dict.fromkeys(("dim", "d_model", "n_embd", "hidden_size", "embed_dim"), "model.width"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("dtype", "precision", "mixed_precision"), "policy"),
    **dict.fromkeys(("fsdp", "sharding", "sharding_strategy"), "parallel.shard"),
    **dict.fromkeys(("dataset", "data", "data_path", "train_data"), "data.source"),
}
# What other libraries have where halfstep has something else, and what to do.
_FOLDER = ("out", "output", "output_dir", "out_dir", "save_dir", "log_dir", "checkpoint_dir", "default_root_dir")
OTHER_MEANINGS = {
    **dict.fromkeys(
        ("lr", "learning_rate", "max_lr"),
        "`optimizer.rate` is AdamW's learning rate, and `optimizer.muon_rate` Muon's, for the matrices in blocks",
    ),
    **dict.fromkeys(
        ("epochs", "max_epochs", "num_epochs", "num_train_epochs"),
        "there are no epochs: `training.steps` is the number of updates",
    ),
    **dict.fromkeys(
        ("warmup_steps", "warmup_iters", "num_warmup_steps"),
        "`training.warmup` is a share of the steps: 0.02 for 20 of 1000",
    ),
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), "`optimizer.betas` holds both: [0.9, 0.95]"),
    **dict.fromkeys(("bf16", "amp"), "the precision is a policy: `--policy bf16-mixed`"),
    "fp16": "the precision is a policy: `--policy fp16-mixed`",
    "fp8": "the precision is a policy: `--policy fp8-mixed`",
    "tf32": "the precision is a policy: `--policy fp32,compute=tf32`",
    **dict.fromkeys(_FOLDER, "`--out` names the run folder"),
    **dict.fromkeys(
        ("name", "run_name", "experiment_name"), "`--out` names the run folder, and `title` describes the run"
    ),
    **dict.fromkeys(
        ("model", "model_name", "recipe", "config"), "name a recipe or a TOML file: `halfstep train gpt2`"
    ),
    **dict.fromkeys(("model_name_or_path", "pretrained", "init_from"), "`--init` names the weights to start from"),
    **dict.fromkeys(
        ("resume_from_checkpoint", "ckpt_path", "resume_from"), "`--resume` continues the run that `--out` names"
    ),
}
