"""What is measured on every backend, and what `auto` makes of it: one measurement and one answer for a recipe,
for `halfstep probe`, and for a model of your own.

`measure` times the matmul alone, which compares formats: random operands (zeros draw less power, and a device runs
them faster), tokens x width x 4 width as in an MLP of GPT-2, the result in the format of the operands, or in bf16
for fp8. These sizes are ours; on an accelerator the recipe's own comes last, if it is larger.

`measure_block` times a block of the decoder, forward and backward, with its casts and islands, at the recipe's own
width and as many of its tokens as fit. This decides on a CPU, where a bf16 matmul can be faster than an fp32 one
and the small block around it slower; a format whose matmuls are TOO_SLOW gets no block. On an accelerator a small
block would time how fast the host launches kernels, which a compiled step does not wait for; there the matmuls
decide.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import median
from typing import Any

from halfstep.core.arrays.ladder import Clock, Run, climb
from halfstep.core.choice import Choice, Shape, Support, Timing, choose, gain
from halfstep.core.devices import Device
from halfstep.core.errors import UnmatchedRuleError, warn_caller
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format
from halfstep.core.policy import PRESETS, Policy, as_policy, read, read_as
from halfstep.core.refusal import slow_formats

FORMATS = (FP32, TF32, BF16, FP16, E4M3, E5M2)  # that a probe asks about
CANDIDATES = (FP32, BF16, FP16)  # that `auto` chooses from
BUDGET = 3.0  # seconds in which it chooses
TOKENS = 16384  # of a micro-batch, if the caller does not give their number
# GPT-2's MLP. At 4096 tokens an fp8 matmul takes no longer than its launch (H200), hence four times as many.
_ON_ACCELERATOR = ((256, 256), (1024, 512), (4096, 768), (16384, 768))
_ON_CPU = ((32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (1024, 768))
ACCELERATOR_SHAPES: tuple[Shape, ...] = tuple((tokens, width, 4 * width) for tokens, width in _ON_ACCELERATOR)
CPU_SHAPES: tuple[Shape, ...] = tuple((tokens, width, 4 * width) for tokens, width in _ON_CPU)
# No block is timed in a format whose matmuls are this many times slower than fp32's: it cannot win.
TOO_SLOW = 4
# Of the time budget of `measure_block`; the blocks get the rest.
MATMUL_SHARE = 1 / 3


def time_candidates(
    backend: Any, device: Any, model: Any, tokens: int, budget: float = BUDGET
) -> tuple[list[Timing], dict[Format, Support]]:
    """Times what `auto` chooses from, for a model (config.model) that trains on `tokens` tokens at once.

    `backend` is a module halfstep.<framework>.measure.
    """
    support = {fmt: backend.supported(fmt, device) for fmt in CANDIDATES}
    formats = [fmt for fmt, ok in support.items() if ok]
    return backend.measure_block(device, formats, model, tokens, budget=budget), support


def decide(backend: Any, device: Any, model: Any, tokens: int, budget: float = BUDGET) -> Choice:
    """Returns the preset that is fastest, with the reason: what `auto` means."""
    return choose(*time_candidates(backend, device, model, tokens, budget))


decide_once = cache(decide)  # for a process that prepares one model after another


def resolve_policy(
    given: Policy | str, choose: Callable[[], Choice], device: Device | None = None
) -> tuple[Policy, Choice | None, str]:
    """Returns the policy that `prepare` or `init` was given, for `auto` the choice, and what a summary says of it.

    Warns their caller.
    """
    choice = choose() if isinstance(given, str) and read(given).base == "auto" else None
    policy = as_policy(given) if choice is None else Policy.parse(str(given), auto=PRESETS[choice.preset])
    if policy.export not in (FP32, policy.param.format):
        raise UnmatchedRuleError(
            f"`export={policy.export}` changes nothing here: `halfstep export` reads it, of a run of ours, and "
            "`save_model` of transformers' Trainer",
            hint="leave it out, and save the weights in the format you want",
        )
    for message in [*policy.warnings, *([] if device is None else slow_formats(policy, device))]:
        warn_caller(message)
    return policy, choice, read_as(str(given)) if choice is None else f"auto chose {choice}"


def accelerator_shapes(model: Any, tokens: int) -> tuple[Shape, ...]:
    """Returns the matmuls to time on an accelerator, small to large: ours, and the model's if that is larger."""
    own = (tokens, model.width, model.size_of_mlp)
    return (*ACCELERATOR_SHAPES, *[own] * (math.prod(own) > math.prod(ACCELERATOR_SHAPES[-1])))


def block_limits(matmuls: Sequence[Timing], formats: Iterable[Format]) -> dict[Format, float]:
    """Returns the formats worth a block, by their matmuls; each with how much slower than fp32 it may be."""
    gains = {fmt: known.ratio for fmt in formats if (known := gain(matmuls, fmt)) is not None}
    return {fmt: max(2.0, 2 / ratio) for fmt, ratio in gains.items() if ratio > 1 / TOO_SLOW}


def halved(tokens: int) -> list[int]:
    """Returns `tokens`, a half, a quarter, ... of it, the smallest first, down to 8 tokens."""
    return [tokens >> halves for halves in range(20) if tokens >> halves >= 8][::-1] or [tokens]


def time_blocks(
    start: Callable[[Format, Any, int], Run],
    limits: Iterable[Format],
    model: Any,
    counts: Sequence[int],
    *,
    budget: float,
    clock: Clock,
) -> list[Timing]:
    """Times a block of a model in each format, on `counts` of tokens from few to many, as `budget` allows."""
    formats = list(limits)
    for fmt in formats:
        start(fmt, model, counts[0])(1)  # the first backward pass of a process takes longer than all that is timed
    return climb(
        lambda fmt, shape: start(fmt, model, shape[0]),
        formats,
        [(count, model.width, model.size_of_mlp) for count in counts],
        budget=budget * (1 - MATMUL_SHARE),
        clock=clock,
        work="training steps of a block",
    )


def take_turns(runs: Sequence[Run], rounds: int, seconds_of: Callable[[Run], float]) -> list[float]:
    """Returns the median seconds of each run. They alternate, so that other work slows all of them alike."""
    taken = [[seconds_of(run) for run in runs] for _ in range(rounds)]
    return [median(seconds) for seconds in zip(*taken, strict=True)]
