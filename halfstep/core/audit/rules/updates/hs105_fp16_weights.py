"""HS105: trainable weights in fp16."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, rule_for
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS105",
    name="trainable weights in fp16",
    severity="error",
    shows="The format and the optimizer, in the message.",
    what="The optimizer steps weights that are stored in fp16.",
    why="fp16 has 11 bits and nothing below 6e-8: most updates of a usual learning rate round away, and a loss "
    "scaler refuses them (`Attempting to unscale FP16 gradients`).",
    fix="Keep trainable weights in fp32; autocast or `prepare(model, optimizer, 'fp16-mixed')` casts them.",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per trainable fp16 weight that has no wider master."""
    for weight in record.weights:
        if weight.trainable and weight.optimizer and weight.stepped == "fp16":
            yield RULE.finding(
                f"`{weight.name}` is trained in fp16 by {weight.optimizer}, without a master in fp32",
                weight.name,
                place=weight.place,
                policy_rule=rule_for(weight.name, "param=fp32"),
            )
