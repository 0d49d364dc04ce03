"""The race: one model trained by the usual recipes and by ours, each in a process of its own.

    model       a GPT-2 that knows nothing of halfstep
    arms        the recipes: how each is set up, and what one update is
    worker      the process of one arm: holds it, waits its turn, trains, measures

`halfstep.tools.bench.run` starts the workers and lets them take turns. Both sides agree on this module, which
imports no framework.
"""

from dataclasses import dataclass

# Every arm clips to this norm and skips a step whose norm is not finite.
CLIP_NORM = 1.0
RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.1
# Updates before the first timed one: the first compiles, the second meets gradients that are there already.
WARM_STEPS = 4
# The arm that is no recipe: a bf16 matmul of this size, the ceiling of the device.
CEILING = "ceiling"
CEILING_SIZE = 8192


@dataclass(frozen=True)
class Recipe:
    """An arm, as it is told: what it is, the package it needs besides torch, and whether it is halfstep's."""

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
    "casted": Recipe("fp32 weights cast by each layer, bf16 residual stream: the strong stock recipe"),
    "pure-bf16": Recipe("everything in bf16, no master: loses updates"),
    "halfstep": Recipe("prepare with halfstep's AdamW, split fp32 masters", ours=True),
    "halfstep-fp32-masters": Recipe("prepare with halfstep's AdamW, whole fp32 masters", ours=True),
    "halfstep-stock": Recipe("prepare with torch's fused AdamW through the seam, split masters", ours=True),
    "halfstep-fp16": Recipe("prepare in fp16 with dynamic scaling, halfstep's AdamW", ours=True),
    "halfstep-fp8": Recipe(
        "prepare in fp8-mixed, fp8 where it is measured to be faster, split masters", ours=True
    ),
    "halfstep-fp8-all": Recipe("the same with every matmul in fp8, faster or not", ours=True),
}


@dataclass(frozen=True)
class Setting:
    """What a worker is told at its start; the same for every arm but for `arm` itself."""

    arm: str
    device: str | None  # None: the accelerator there is, and no CPU in its place
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    micro_batches: int
    compile: bool | None  # None: on an accelerator
    seed: int
    tokens: str  # a file of the updates' tokens: (update, micro-batch, sequence, context + 1), uint16
    held_out: str  # a file of held-out sequences: (sequence, context + 1), uint16

    def flops_per_token(self) -> int:
        """Of forward and backward: 6 a weight that multiplies, and attention's two products over the context."""
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return 6 * weights + 12 * self.layers * self.width * self.context

    def tokens_per_step(self) -> int:
        """Targets of one update."""
        return self.batch * self.micro_batches * self.context
