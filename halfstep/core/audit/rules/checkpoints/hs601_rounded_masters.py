"""HS601: masters that a resume rebuilds from rounded weights."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import CheckpointFacts, Record

RULE = Rule(
    id="HS601",
    name="masters rebuilt from rounded weights",
    severity="error",
    shows="The weights that a resume would round.",
    what="A checkpoint to resume from holds weights in a format below fp32, while training steps fp32 masters.",
    why="The resumed run continues from rounded weights, and everything below 1/256 of each that training had "
    "gathered is gone: the loss jumps, or slowly falls behind.",
    fix="Save the fp32 masters: the state dict of the fp32 model, or of the optimizer that holds them. "
    "`halfstep.integrations.state` and `run.state_dict()` do.",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per checkpoint that lost its masters, and one for a load that was seen to."""
    live = [w for w in record.weights if w.trainable and w.optimizer and not is_narrow(w.stepped)]
    for facts in record.checkpoints[-1:]:  # the newest is what a run resumes from
        rounded = _rounded(facts, {w.name for w in live})
        if rounded:
            yield RULE.finding(
                f"`{facts.path}` holds {len(rounded)} weights in {facts.weights[rounded[0]]}, without masters and "
                "beside fp32 moments: a resume begins with rounded weights",
                *rounded,
                place=facts.path,
                evidence={"weights": len(rounded)},
                confidence="certain" if live else "likely",
            )
    loads = record.calls_of("load")
    if any(call.target == "moments" for call in loads):  # without them it is the start of a fine-tuning
        for call in loads:
            if call.target == "weights" and (count := call.numbers.get("rounded", 0)):
                yield RULE.finding(
                    f"{count:.0f} weights that are stepped in fp32 were loaded from a narrower format, together "
                    "with an optimizer's state",
                    place=call.place,
                    evidence={"weights": count},
                )


def _rounded(facts: CheckpointFacts, live: set[str]) -> list[str]:
    """Returns weights in a narrow format whose moments, or whose masters in the live run, are fp32."""
    wide = {name.rpartition("/")[0] for name, fmt in facts.moments.items() if not is_narrow(fmt)}
    return [
        name
        for name, fmt in facts.weights.items()
        if is_narrow(fmt) and name not in facts.masters and (name in wide or (name in live and facts.moments))
    ]
