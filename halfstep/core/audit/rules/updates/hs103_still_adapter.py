"""HS103: adapters that never leave their first values."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS103",
    name="adapter that never moves",
    severity="error",
    shows="The steps with a nonzero gradient, the updates intended and lost.",
    what="A trainable adapter still has its first values although it was stepped with nonzero gradients, or no "
    "optimizer holds it.",
    why="A LoRA matrix in bf16 starts at values that are large beside its updates: all of them round away. In "
    "a known case A kept its first values for 84,000 steps.",
    fix="Create adapters in fp32 (PEFT: `autocast_adapter_dtype=True`, its default), and give all of them to the "
    "optimizer.",
    needs="a live run",
)
_ENOUGH = (
    3  # steps: LoRA's A has no gradient in the first, because B is zero, and a warm-up may begin at rate zero
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per adapter weight that stood still."""
    for weight in record.weights:
        if weight.kind != "adapter" or not weight.trainable:
            continue
        counts = weight.updates
        if counts and counts.steps >= _ENOUGH and counts.gradient and not counts.moved:
            yield RULE.finding(
                f"`{weight.name}` ({weight.stepped}) was stepped {counts.steps} times with nonzero gradients and "
                "still has its first values",
                weight.name,
                place=weight.place,
                evidence={"steps": counts.steps, "lost": counts.lost, "updates": counts.intended},
            )
        elif weight.optimizer is None and record.updates >= _ENOUGH and _others_are_stepped(record):
            yield RULE.finding(
                f"no optimizer holds `{weight.name}`, which is trainable",
                weight.name,
                place=weight.place,
                severity="warning",
                confidence="likely",
            )


def _others_are_stepped(record: Record) -> bool:
    return any(each.optimizer for each in record.weights)
