"""HS301: gradients of several micro-batches are summed in a narrow format."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS301",
    name="accumulation below fp32",
    severity="warning",
    shows="The backward passes that were summed, and the tensors.",
    what="Gradients of several backward passes are summed in bf16 or fp16.",
    why="Each sum is rounded: in bf16 the relative error is 0.4 % over 8 micro-batches and 2.3 % over 512, where "
    "an fp32 sum has 0.1 %. Dividing the sum does not restore what it lost.",
    fix="Keep trainable weights in fp32 (their gradients are then fp32), or let "
    "`prepare(model, optimizer, 'bf16-mixed')` accumulate in fp32.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per optimizer, and one per loop inside a graph that sums."""
    for op in record.operations:
        if op.kind == "accumulation" and is_narrow(op.inside):
            of = f" of `{op.module}`" if op.module else ""
            yield RULE.finding(
                f"{op.function} sums gradients in {op.inside}"
                if op.function
                else f"a loop sums gradients{of} in {op.inside}, over {op.count} turns",
                *([op.module] if op.module else []),
                place=op.place,
                evidence={"passes": op.count},
            )
    passes = [call for call in record.calls_of("backward") if call.numbers.get("micro", 1) > 1]
    for optimizer in dict.fromkeys(call.target for call in passes):
        its = [call for call in passes if call.target == optimizer]
        kind = (optimizer or "").split(" ")[0]
        narrow = [w for w in record.weights if w.optimizer == kind and is_narrow(w.grad_format)]
        if narrow:
            most = max(call.numbers["micro"] for call in its)
            yield RULE.finding(
                f"gradients of {most:.0f} backward passes are summed in {narrow[0].grad_format}, for "
                f"{len(narrow)} tensors",
                place=its[0].place,
                evidence={"passes": most, "tensors": len(narrow)},
            )
