"""HS104: moments of an optimizer below fp32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, rule_for
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS104",
    name="moments below fp32",
    severity="warning",
    shows="The format of each moment, in the message.",
    what="The optimizer keeps its moments in a format below fp32.",
    why="The second moment of Adam changes by 1/1000 of itself in a step: bf16 rounds that to nothing, so it "
    "freezes, and with it the size of every step.",
    fix="Moments follow the format of the weight that they belong to: keep trainable weights in fp32, or use an "
    "optimizer that keeps its own fp32 state, such as `halfstep.torch.AdamW`.",
)
_BLOCKWISE = ("int8", "uint8")  # with a scale per block: a choice that someone made, with an error of its own kind


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per weight, with the moments that are narrow."""
    for weight in record.weights:
        narrow = {k: fmt for k, fmt in weight.moments.items() if is_narrow(fmt) and fmt not in _BLOCKWISE}
        if narrow:
            formats = ", ".join(f"{name} in {fmt}" for name, fmt in narrow.items())
            yield RULE.finding(
                f"{weight.optimizer or 'the optimizer'} keeps {formats} for `{weight.name}`",
                weight.name,
                place=weight.place,
                policy_rule=rule_for(weight.name, "moments=fp32"),
            )
