"""HS202: gradients are clipped while they are scaled."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record
from halfstep.core.audit.rules.scaling.scaled import by_place, scaled_calls

RULE = Rule(
    id="HS202",
    name="clip before unscale",
    severity="error",
    shows="How many clips came too early, the scale, and the norm that was clipped.",
    what="Gradients are clipped while they still carry the loss scale.",
    why="The norm is too large by the scale, so that every update is clipped, to a length that falls when the "
    "scale grows: a limit of 1.0 under a scale of 65536 is one of 0.000015.",
    fix="Call `scaler.unscale_(optimizer)` before the clip; in Accelerate, `accelerator.clip_grad_norm_`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per line that clips."""
    for place, calls in by_place(scaled_calls(record, "clip")).items():
        call, scale = calls[0]
        yield RULE.finding(
            f"gradients of {call.target} are clipped at {scale:g} times their size",
            place=place,
            evidence={"clips": len(calls), "scale": scale, "norm": call.numbers.get("norm", 0.0)},
        )
