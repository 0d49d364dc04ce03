"""What a run says about itself: what was converted, how masters are held, how an update is made."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from halfstep.core.roles import print_value


def summarize(run: Any) -> Iterator[str]:
    """Yields the lines of `Run.summary`."""
    yield from run.conversion.lines()
    if run.note:
        yield f"  {run.note}"
    if run.ranks is not None:
        size = sum(place.array.size for place in run.conversion.places.values()) * mx.float32.size
        rank = f"  rank {run.ranks.rank} of {run.ranks.size}"
        yield f"{rank}: each update sums {size:,} bytes of fp32 gradients over ranks"
    clip = f"clipped to {run.clip_norm:g}" if run.clip_norm else "not clipped"
    summed = f"accumulated in {run.policy.accumulate} and {clip}"
    yield f"  gradients are {summed}; loss scale: {print_value(run.policy.scale)}"
    kinds = ", ".join(type(optimizer).__name__ for optimizer in run.optimizers)
    yield f"  {kinds}: fp32 masters and gradients; a skipped step costs no sync"
    if run.averages is not None:
        yield f"  averages of the masters in fp32, decay {run.averages.decay:g}"
    yield f"  the step is {'compiled' if run.compile else 'not compiled'}"
    yield (
        "  softmax, norms, attention and losses that the model calls as functions follow the policy; other "
        "functions compute in the dtype of their inputs: run.reach(loss_fn, batch) lists them"
    )
