"""HS406: matmuls that run in fp32 because an fp32 tensor met a narrow one before them."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, first_names
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS406",
    name="silent promotion to fp32",
    severity="warning",
    what="In a model that computes in bf16 or fp16, an fp32 tensor (a mask, a table, the gain of a norm) meets an "
    "activation, the result is fp32, and matmuls after it run in fp32.",
    why="These matmuls cost several times as much, and their activations twice the memory, without anyone asking.",
    fix="Cast the result back where the two meet: `(x * table).to(x.dtype)`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per place of promotion, if most matmuls are narrow."""
    products = [op for op in record.operations if op.kind in ("matmul", "attention") and not op.backward]
    narrow = sum(op.count for op in products if is_narrow(op.inside))
    promoted = [op for op in products if op.promoted]
    if not promoted or 2 * narrow <= sum(op.count for op in products):
        return
    for place in dict.fromkeys(op.place for op in promoted):
        those = [op for op in promoted if op.place == place]
        names = list(dict.fromkeys(op.module for op in those if op.module))
        yield RULE.finding(
            f"fp32 operands reach the matmuls of {first_names(names)}: an fp32 tensor met a narrow one",
            *names,
            place=place,
            evidence={"calls": sum(op.count for op in those)},
        )
