"""HS409: activations beyond the range of their format."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS409",
    name="activations overflow",
    severity="error",
    shows="The elements that overflowed, of how many, and their share.",
    what="An operation was given finite numbers and returned infinities or NaN.",
    why="Nothing in fp16 is above 65504. A loss scale acts on gradients alone, so no scale helps: every update is "
    "skipped, and the scale falls to zero.",
    fix="Run this layer in bf16 or fp32, which have the range.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per operation; what comes after it was given infinities and is not one."""
    for op in record.operations:
        if op.overflow and not op.backward:
            what = f"`{op.function}`" if op.function else f"a {op.kind}"
            at = f" in `{op.module}`" if op.module else ""
            format = op.outputs[0] if op.outputs else "its format"
            share = op.overflow / op.elements if op.elements else 0.0
            yield RULE.finding(
                f"activations overflow {format}: {what}{at} made {op.overflow} of {op.elements} numbers infinite "
                "or NaN out of finite ones",
                *([op.module] if op.module else []),
                place=op.place,
                evidence={"overflow": op.overflow, "elements": op.elements, "share": share},
                policy_rule=f'"{op.module}" = "compute=fp32"' if op.module else None,
            )
