"""HS402: a softmax that computes below fp32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS402",
    name="softmax below fp32",
    severity="error",
    shows="The calls.",
    what="A softmax is summed in bf16 or fp16, or its logarithms are rounded to it.",
    why="Exponentials that are rounded before they are summed do not add up to one, and a log-probability of -10 "
    "has steps of 0.06 in bf16. `F.softmax` itself sums in fp32 whatever it is given, and so does attention.",
    fix="Use `F.softmax(x, -1, dtype=torch.float32)` or `F.log_softmax(x.float(), -1)`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per module and function."""
    for op in record.operations:
        if op.kind == "softmax" and is_narrow(op.inside) and not op.backward:
            where = f" in `{op.module}`" if op.module else ""
            yield RULE.finding(
                f"a softmax{where} computes in {op.inside} ({op.function or 'softmax'})",
                *([op.module] if op.module else []),
                place=op.place,
                evidence={"calls": op.count},
                policy_rule=f'"{op.module}" = "softmax=fp32"' if op.module else None,
            )
