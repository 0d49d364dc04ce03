"""HS302: gradients of several ranks are summed in a narrow format."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS302",
    name="reduction below fp32",
    severity="warning",
    shows="The calls, or the ranks.",
    what="Gradients are summed over ranks in bf16 or fp16.",
    why="Every addition on the way rounds to 8 or 11 bits, and the more ranks there are, the more is lost; fp16 "
    "overflows as well.",
    fix="Reduce in fp32: `MixedPrecisionPolicy(reduce_dtype=torch.float32)` for FSDP, no compressing "
    "communication hook, and fp32 weights under DDP, which sums in the format of the weights.",
    needs="a live run on several ranks",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per way of reducing, and one per sum inside a graph."""
    for op in record.operations:
        if op.kind == "reduction" and is_narrow(op.inside):
            yield RULE.finding(
                f"`{op.function}` sums {op.inside} over devices",
                *([op.module] if op.module else []),
                place=op.place,
                evidence={"calls": op.count},
            )
    for call in record.calls_of("reduce"):
        if is_narrow(call.format):
            yield RULE.finding(
                f"{call.target} sums gradients in {call.format} over {call.numbers.get('ranks', 0):.0f} ranks",
                place=call.place,
                evidence={"ranks": call.numbers.get("ranks", 0)},
            )
