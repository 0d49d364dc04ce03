"""HS406: matmuls that run in fp32 because an fp32 tensor met a narrow one before them."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, first_names
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS406",
    name="silent promotion to fp32",
    severity="warning",
    shows="The matmuls that ran in fp32.",
    what="In a model that computes in bf16 or fp16, an fp32 tensor (a mask, a table, the gain of a norm) meets an "
    "activation, the result is fp32, and matmuls after it run in fp32.",
    why="These matmuls cost several times as much, and their activations twice the memory, without anyone asking.",
    fix="Cast the result back where the two meet: `(x * table).to(x.dtype)`.",
    needs="a live run",
)

_PRODUCTS = ("matmul", "attention")


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per place of promotion, if most matmuls are narrow or have a narrow operand."""
    forward = [op for op in record.operations if not op.backward]
    products = [op for op in forward if op.kind in _PRODUCTS]
    narrow = sum(op.count for op in products if is_narrow(op.inside) or any(map(is_narrow, op.inputs)))
    promoted = [op for op in products if op.promoted]
    if not promoted or 2 * narrow <= sum(op.count for op in products):
        return
    before = forward[: forward.index(promoted[0])]
    source = next((op.module for op in reversed(before) if op.promoted and op.kind not in _PRODUCTS), "")
    for place in dict.fromkeys(op.place for op in promoted):
        those = [op for op in promoted if op.place == place]
        names = list(dict.fromkeys(op.module for op in those if op.module))
        cause = (
            f"`{source}` was given narrow numbers and returned fp32"
            if source
            else "an fp32 tensor met a narrow one"
        )
        yield RULE.finding(
            f"fp32 operands reach the matmuls of {first_names(names)}: {cause}",
            *dict.fromkeys([source, *names] if source else names),
            place=place,
            evidence={"calls": sum(op.count for op in those)},
        )
