"""HS403: a router whose logits are below fp32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS403",
    name="router below fp32",
    severity="warning",
    shows="The calls.",
    what="The logits by which a mixture chooses its experts are computed in bf16 or fp16.",
    why="Two logits that differ by less than 0.4 % become equal, and the order of the experts, not the numbers, "
    "decides where a token goes.",
    fix="Compute the router in fp32, outside autocast: `F.linear(x.float(), router.weight.float())`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per router."""
    for op in record.operations:
        if op.kind == "router" and is_narrow(op.inside) and not op.backward:
            yield RULE.finding(
                f"the router `{op.module}` computes its logits in {op.inside}",
                op.module,
                place=op.place,
                evidence={"calls": op.count},
                policy_rule=f'"{op.module}" = "router=fp32"',
            )
