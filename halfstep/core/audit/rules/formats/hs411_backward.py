"""HS411: a layer that is fp32 forward, and whose gradients compiled code computes below fp32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS411",
    name="backward of an fp32 region in bf16",
    severity="warning",
    shows="The calls.",
    what="A region with autocast off is compiled inside one with autocast on: its matmuls are fp32 forward, and "
    "their gradients are computed in bf16 or fp16.",
    why="torch.compile traces the backward pass with the autocast that the compiled function was called in. What "
    "was kept in fp32 on purpose, such as a router, is trained by rounded gradients.",
    fix='`torch._functorch.config.backward_pass_autocast = "off"` before compiling, or leave the layer out of the '
    "compiled function.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per layer."""
    wide = {op.module for op in record.operations if op.inside == "fp32" and not op.backward}
    for op in record.operations:
        if op.backward and is_narrow(op.inside) and op.module in wide:
            yield RULE.finding(
                f"`{op.module}` is fp32 forward, and its gradients are computed in {op.inside}",
                *([op.module] if op.module else []),
                place=op.place,
                evidence={"calls": op.count},
            )
