"""HS101: weights that are stepped in a narrow format, and the updates that they lost."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, rule_for
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record, UpdateCounts, Weight

RULE = Rule(
    id="HS101",
    name="weights without a master",
    severity="error",
    shows="The intended updates that were not zero, how many were lost, their share, and the share that arrived.",
    what="The optimizer adds its updates to weights in a format below fp32, and no fp32 master keeps what rounds "
    "away.",
    why="A bf16 weight does not move for an update below 1/512 of it. With Adam at a learning rate of 1e-5, 84 % "
    "of the updates of usual weights vanish.",
    fix="Load or create the model in fp32 and let autocast, or `prepare(model, optimizer, 'bf16-mixed')`, cast it "
    "for computing; `param=fp32:split` keeps the memory of bf16 weights plus 2 bytes per parameter.",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per weight; without a live step it is a warning, as nobody knows what was lost."""
    for weight in record.weights:
        if weight.trainable and weight.optimizer and is_narrow(weight.stepped) and not weight.stochastic:
            yield _finding(weight, weight.updates if weight.updates and weight.updates.intended else None)


def _finding(weight: Weight, counts: UpdateCounts | None) -> Finding:
    base = f"`{weight.name}` is stepped in {weight.stepped} by {weight.optimizer}, without an fp32 master"
    cure = rule_for(weight.name, "param=fp32")
    if counts is None:
        return RULE.finding(
            base, weight.name, place=weight.place, severity="warning", confidence="likely", policy_rule=cure
        )
    lost = counts.lost / counts.intended
    numbers: dict[str, float] = {"updates": counts.intended, "lost": counts.lost, "lost_share": lost}
    if not counts.exact:
        words = f"{base}: {lost:.1%} of its elements with a nonzero gradient did not change"
    else:
        words = f"{base}: {lost:.1%} of its intended updates were lost"
        if counts.arrived is not None:
            numbers["arrived"] = counts.arrived
            words += f", and {counts.arrived:.1%} of what was intended arrived"
    return RULE.finding(
        words,
        weight.name,
        place=weight.place,
        evidence=numbers,
        severity=None if counts.lost else "warning",
        confidence="certain" if counts.exact else "weak",
        policy_rule=cure,
    )
