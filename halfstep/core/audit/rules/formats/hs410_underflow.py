"""HS410: gradients of activations below the range of their format."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS410",
    name="gradients underflow",
    severity="error",
    shows="The elements that underflowed, of how many, their share, and the largest gradient.",
    what="Most of a layer's activation gradients are zero or have lost nearly all of their bits, because they are "
    "below the smallest numbers of their format.",
    why="fp16 has nothing below 6e-8, and less than 4 bits below 1e-6. What is zero here trains nothing before "
    "this layer.",
    fix="Scale the loss (`torch.amp.GradScaler`, `fp16-mixed`); if one layer alone is that small, run it in bf16 "
    "or fp32.",
    needs="a live run",
)
# Half of the numbers is no accident of the tail of a distribution.
SHARE = 0.5


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per layer."""
    for op in record.operations:
        if op.backward and op.elements and op.underflow >= SHARE * op.elements:
            share = op.underflow / op.elements
            format = op.outputs[0] if op.outputs else "its format"
            numbers: dict[str, float] = {"underflow": op.underflow, "elements": op.elements, "share": share}
            if op.amax is not None:
                numbers["amax"] = op.amax
            yield RULE.finding(
                f"gradients underflow {format}: {share:.0%} of those of what `{op.module}` returns are too small",
                op.module,
                place=op.place,
                evidence=numbers,
                confidence="likely",
                policy_rule=f'"{op.module}" = "compute=fp32"',
            )
