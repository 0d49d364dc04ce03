"""What a run is. Defaults, help, docs and TOML files all come from these fields."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from halfstep.config.model import ModelConfig
from halfstep.config.schema import Bounds, Decay, Positive, Rate, Seed, Share
from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.core.policy import read


@dataclass(frozen=True)
class DataConfig:
    """What is read."""

    source: str = "stdlib"
    """`stdlib` (the text of this Python's own standard library), a text file, a folder of text, or token
    shards (`*.bin`)."""
    validation: Annotated[float, Bounds(above=0, at_most=0.5)] = 0.1
    """Share of the documents that is held out."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long, and how much at once."""

    steps: Positive = 1000
    """Updates of the weights."""
    batch: Positive = 16
    """Sequences in a micro-batch."""
    micro_batches: Positive = 1
    """Micro-batches that are summed into one update."""
    clip_norm: Rate = 1.0
    """Gradients are scaled down to this norm; 0 is off."""
    warmup: Share = 0.02
    """Share of the steps, at the beginning, in which the learning rate rises from near zero."""
    warmdown: Share = 0.4
    """Share of the steps, at the end, in which the learning rate falls to near zero."""
    validate_every: Positive = 250
    """Steps between two looks at held-out text."""
    validation_tokens: Positive = 65536
    """Held-out tokens of one look."""
    save_every: Positive = 500
    """Steps between two checkpoints."""
    compile: bool = False
    """Whether the step is compiled by the framework."""

    @property
    def warmup_steps(self) -> int:
        """Steps of the warmup."""
        return round(self.warmup * self.steps)


@dataclass(frozen=True)
class OptimizerConfig:
    """What updates the weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for all, or Muon for the matrices inside blocks and AdamW for the rest."""
    rate: Annotated[float, Bounds(above=0)] = 3e-3
    """Learning rate of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    epsilon: Annotated[float, Bounds(above=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: Rate = 0.1
    """Decoupled decay of the matrices that AdamW updates; gains, biases and scalars do not decay."""
    muon_rate: Annotated[float, Bounds(above=0)] = 0.02
    """Learning rate of Muon."""
    muon_momentum: Decay = 0.95
    """Momentum of Muon."""


@dataclass(frozen=True)
class RunConfig:
    """One run: everything that decides what it computes."""

    title: str = ""
    """One line that says what the recipe is for."""
    backend: Literal["torch", "jax", "mlx"] = "torch"
    """The framework that runs it."""
    policy: str = "auto"
    """The precision: `auto` measures this machine; else a preset, roles, rules (`halfstep policy --help`)."""
    seed: Seed = 0
    """Decides initial weights, the order of the data and stochastic rounding."""
    init: str = ""
    """Where the first weights come from: a safetensors file, a folder in Hugging Face layout, or a run folder;
    without it they are drawn from the seed."""
    init_digest: str = ""
    """SHA-256 that the weights of `init` must have; a run writes down what it found."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        try:
            read(self.policy)
        except HalfstepError as error:
            raise ConfigError(f'policy = "{self.policy}": {error.message}', hint=error.hint) from None
        if self.init_digest and not self.init:
            raise ConfigError(
                f'init_digest is "{self.init_digest}", and there is no `init` that it could be of',
                hint="name the weights by --init, or leave init_digest out",
            )
        if self.training.warmup + self.training.warmdown > 1:
            raise ConfigError(
                f"training.warmup {self.training.warmup} and training.warmdown {self.training.warmdown} "
                "are shares of one run and add up to more than 1",
                hint="lower one of them",
            )
