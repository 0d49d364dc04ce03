"""HS503: losses or gradients that are not finite."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS503",
    name="non-finite loss or gradients",
    severity="error",
    shows="The losses, or the tensors and the update of the first gradient that was not finite.",
    what="The loss was NaN or infinite, or an optimizer stepped with gradients that were.",
    why="One step with a NaN makes the weights NaN for good. A loss that overflows does so in the forward pass: "
    "no loss scale cures it.",
    fix="Skip such updates (`prepare` does under every policy), and find the first operation that overflows: "
    "activations beyond 65504 need bf16, or fp32 for that layer.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding for losses, and one for the first step with bad gradients."""
    bad = [i for i, loss in enumerate(record.losses) if loss is None]
    passes = record.calls_of("backward")
    if bad:
        yield RULE.finding(
            f"{len(bad)} of {len(record.losses)} losses are not finite, the first of them number {bad[0] + 1}",
            place=passes[0].place if passes else None,
            evidence={"losses": len(bad), "first": bad[0] + 1},
        )
    steps = [call for call in record.calls_of("step") if call.numbers.get("nonfinite") and not call.skipped]
    if steps:
        first = steps[0]
        yield RULE.finding(
            f"{first.target} steps with gradients that are not finite, of {first.numbers['nonfinite']:.0f} "
            f"tensors, in update {first.update + 1}",
            *first.names,
            place=first.place,
            evidence={"tensors": first.numbers["nonfinite"], "update": first.update + 1, "steps": len(steps)},
        )
