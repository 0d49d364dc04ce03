"""HS401: a norm that computes below fp32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Operation, Record

RULE = Rule(
    id="HS401",
    name="norm below fp32",
    severity="error",
    shows="The calls.",
    what="A norm takes its mean or its square root in bf16 or fp16, or it alone has gains in that format.",
    why="Eight bits of a mean square are off by up to 0.4 %, in every layer and in the same direction for a whole "
    "row. The norms of torch itself sum in fp32 whatever they are given; hand-written ones do what they say.",
    fix="Widen the input first and narrow the result: `norm(x.float()).to(x.dtype)`, with gains in fp32; or use "
    "`torch.nn.RMSNorm`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per norm."""
    norms = [op for op in record.operations if op.kind == "norm" and not op.backward]
    narrow_gains = {op.module for op in norms if _has_narrow_gains(op)}
    # A model that is bf16 throughout is what HS101 is about; one norm that differs from the rest is an accident.
    accident = 0 < len(narrow_gains) < len({op.module for op in norms}) / 2
    named: set[str] = set()  # one finding is enough for the parts of a norm
    for op in norms:
        if is_narrow(op.inside) and op.module not in named:
            message = f"{_name(op)} computes in {op.inside}" + (f" (`{op.function}`)" if op.function else "")
            named.update({op.module} - {""})
            yield _finding(op, message)
    for op in norms:
        if accident and op.module in narrow_gains - named:
            named.add(op.module)
            message = f"{_name(op)} has gains in {op.inputs[-1]}; most norms of the model have them in fp32"
            yield _finding(op, message, likely=True)


def _finding(op: Operation, message: str, *, likely: bool = False) -> Finding:
    return RULE.finding(
        message,
        *([op.module] if op.module else []),
        place=op.place,
        evidence={"calls": op.count},
        severity="warning" if likely else None,
        confidence="likely" if likely else "certain",
        policy_rule=f'"{op.module}" = "norm=fp32"' if op.module else None,
    )


def _name(op: Operation) -> str:
    return f"the norm `{op.module}`" if op.module else "a norm"


def _has_narrow_gains(op: Operation) -> bool:
    return len(op.inputs) > 1 and all(is_narrow(each) for each in op.inputs)
