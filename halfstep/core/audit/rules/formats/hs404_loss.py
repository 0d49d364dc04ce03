"""HS404: a loss that is computed below fp32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS404",
    name="loss below fp32",
    severity="error",
    shows="The calls.",
    what="The loss is computed or returned in bf16 or fp16.",
    why="A loss of 10 has steps of 0.06 in bf16, so a curve shows stairs and small gains vanish; in fp16 a loss "
    "times its scale of 65536 is infinite.",
    fix="Widen what goes into it: `F.cross_entropy(logits.float(), target)`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per loss function; if there is none, one for the narrow loss that backward was given."""
    losses = [op for op in record.operations if op.kind == "loss" and is_narrow(op.inside) and not op.backward]
    for op in [op for op in losses if op.function] or losses[:1]:
        what = f"`{op.function}` computes" if op.function else "backward starts from a loss"
        yield RULE.finding(
            f"{what} in {op.inside}",
            *([op.module] if op.module else []),
            place=op.place,
            evidence={"calls": op.count},
        )
