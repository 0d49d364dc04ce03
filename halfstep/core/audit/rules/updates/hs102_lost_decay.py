"""HS102: weight decay that is too small for the stored format."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, rule_for
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS102",
    name="lost weight decay",
    severity="error",
    shows="The decays that were not zero, how many were lost, and their share.",
    what="Weight decay is below half of the last bit of the stored weights, so it does nothing to them.",
    why="Decay takes rate x decay of a weight, often 1e-6 of it; bf16 keeps nothing below 1/512. The run trains "
    "without the regularization that its settings name, and norms of weights grow.",
    fix="Keep trainable weights in fp32 (see HS101).",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per narrow weight of whose decays more than half were lost."""
    for weight in record.weights:
        counts = weight.updates
        if counts is None or weight.stochastic or not is_narrow(weight.stepped):
            continue
        if 2 * counts.decay_lost <= counts.decay_intended:
            continue
        share = counts.decay_lost / counts.decay_intended
        yield RULE.finding(
            f"{share:.1%} of the weight decay of `{weight.name}` is lost, below half an ulp of {weight.stepped}",
            weight.name,
            place=weight.place,
            policy_rule=rule_for(weight.name, "param=fp32"),
            evidence={"decays": counts.decay_intended, "lost": counts.decay_lost, "lost_share": share},
        )
