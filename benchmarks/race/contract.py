"""What the race and its workers agree on: the arms, and the setting of a worker. It imports no framework."""

from dataclasses import dataclass

from halfstep.config.model import ModelConfig, flops_per_token

# Every arm clips to this norm and skips a step whose norm is not finite.
CLIP_NORM = 1.0
RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.1
# Updates before the first timed one: the first compiles, the second finds gradients in place.
WARM_STEPS = 4
# Not a recipe: a bf16 matmul of this size, the ceiling of the device.
CEILING = "ceiling"
CEILING_SIZE = 8192


@dataclass(frozen=True)
class Recipe:
    """An arm: a description, the package it needs besides torch, and whether it is halfstep's."""

    words: str
    package: str = ""
    ours: bool = False


ARMS = {
    "fp32": Recipe("fp32 throughout"),
    "tf32": Recipe("fp32 with TF32 matmuls"),
    "autocast-eager": Recipe("torch.autocast in bf16, fused AdamW, not compiled"),
    "autocast": Recipe("torch.autocast in bf16, torch.compile, fused AdamW: the usual recipe"),
    "autocast-fp16": Recipe("torch.autocast in fp16 with a GradScaler"),
    "accelerate": Recipe("Accelerate, mixed_precision bf16", package="accelerate"),
    "fabric": Recipe("Lightning Fabric, precision bf16-mixed", package="lightning"),
    "hf": Recipe("transformers' GPT2LMHeadModel under torch.autocast in bf16", package="transformers"),
    "torchao": Recipe(
        "torchao's float8 training, tensor-wise, without the head, under autocast", package="torchao"
    ),
    "casted": Recipe("fp32 weights cast by each layer, bf16 residual stream: the strong stock recipe"),
    "pure-bf16": Recipe("everything in bf16, no master: loses updates"),
    "halfstep": Recipe("prepare with halfstep's AdamW, split fp32 masters", ours=True),
    "halfstep-lean": Recipe("the same with lean memory: cheap activations are computed again", ours=True),
    "halfstep-graph": Recipe("the same as one CUDA graph per update", ours=True),
    "halfstep-fp32-masters": Recipe("prepare with halfstep's AdamW, whole fp32 masters", ours=True),
    "halfstep-stock": Recipe("prepare with torch's fused AdamW, split masters", ours=True),
    "halfstep-fp16": Recipe("prepare in fp16 with dynamic scaling, halfstep's AdamW", ours=True),
    "halfstep-fp8": Recipe(
        "prepare in fp8-mixed, fp8 where it is measured to be faster, split masters", ours=True
    ),
    "halfstep-fp8-all": Recipe("the same with every matmul in fp8, faster or not", ours=True),
}


@dataclass(frozen=True)
class Options:
    """What a race may be asked for."""

    micro_batches: int = 1
    """Micro-batches per update."""
    rounds: int = 6
    """How many turns each arm gets."""
    steps: int = 10
    """Timed updates per turn."""
    layers: int = 12
    """Layers of the model."""
    width: int = 768
    """Width of the model; each head is 64 wide."""
    context: int = 1024
    """Tokens per sequence."""
    batch: int = 32
    """Sequences per micro-batch."""
    vocabulary: int = 50304
    """Rows of the embedding. Text is read as bytes; the other rows only add their size."""
    device: str | None = None
    """cuda, cuda:1 or cpu; by default an NVIDIA GPU."""
    compile: bool | None = None
    """Whether recipes that can compile do; by default, only on a GPU."""
    source: str = "stdlib"
    """The text: stdlib, a file, a folder, or token shards."""
    seconds: float | None = None
    """Stop after this time, and report what was done. An arm must be ready after four fifths of it."""
    at_once: int = 4
    """How many arms start and compile at the same time; each needs the memory of a step meanwhile."""


@dataclass(frozen=True)
class Setting:
    """What a worker is started with; the same for every arm except `arm` itself."""

    arm: str
    device: str | None  # None: the NVIDIA GPU, and an error without one
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    micro_batches: int
    compile: bool | None  # None: only on an accelerator
    seed: int
    tokens: str  # a file of the updates' tokens: (update, micro-batch, sequence, context + 1), uint16
    held_out: str  # a file of held-out sequences: (sequence, context + 1), uint16

    def flops_per_token(self) -> int:
        """Returns the floating-point operations of forward and backward per token."""
        shape = (self.vocabulary, self.context, self.layers, self.width, self.heads)
        return flops_per_token(ModelConfig(*shape, positions="learned"))

    def tokens_per_step(self) -> int:
        """Returns the number of targets in one update."""
        return self.batch * self.micro_batches * self.context
