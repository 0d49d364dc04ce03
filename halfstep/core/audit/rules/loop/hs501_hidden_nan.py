"""HS501: losses that are not finite, and a log that does not show them."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS501",
    name="NaN hidden by a filter",
    severity="error",
    shows="The losses that were not finite, of how many, and those that were logged as numbers.",
    what="Losses were NaN or infinite, and the framework's filter replaces them in the log.",
    why="transformers.Trainer writes the mean of earlier losses instead (`logging_nan_inf_filter`, on by "
    "default): the curve looks healthy while updates are lost or weights are NaN.",
    fix="`TrainingArguments(logging_nan_inf_filter=False)`, then look for the cause (HS503).",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding."""
    bad = sum(loss is None for loss in record.losses)
    if record.switches.get("nan_filter") and bad:
        shown = [loss for loss in record.logged if loss is not None]
        yield RULE.finding(
            f"{bad} of {len(record.losses)} losses were not finite; `logging_nan_inf_filter` hides them",
            place=next((call.place for call in record.calls_of("backward")), None),
            evidence={"losses": bad, "of": len(record.losses), "logged as numbers": len(shown)},
        )
