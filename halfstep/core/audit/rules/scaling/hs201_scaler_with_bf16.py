"""HS201: a loss scaler where everything narrow is bf16."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS201",
    name="loss scaler with bf16",
    severity="warning",
    shows="How many losses were scaled, and how many updates were skipped.",
    what="A GradScaler scales the loss of a training in bf16.",
    why="bf16 has the range of fp32, so there is nothing to scale. The scaler still looks at every gradient, "
    "makes the host wait at each step, and skips updates when the scale itself overflows.",
    fix="Leave the scaler out, or make it with `enabled=False`; it belongs to fp16.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per scaler, if nothing computes in fp16."""
    used = {call.format for call in record.calls_of("autocast")} | {w.format for w in record.weights}
    used |= {op.inside for op in record.operations}
    if "fp16" in used or "bf16" not in used:
        return
    scales = record.calls_of("scale")
    for scaler in dict.fromkeys(call.target for call in scales):
        calls = [call for call in scales if call.target == scaler]
        skipped = sum(call.skipped for call in record.calls_of("step"))
        yield RULE.finding(
            f"{scaler} scales losses that are computed in bf16",
            place=calls[0].place,
            evidence={"scaled": len(calls), "skipped": skipped},
        )
