"""HS604: checkpoints without the state of the loss scaler."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS604",
    name="scaler state not saved",
    severity="warning",
    shows="The checkpoint, in the place.",
    what="Training uses a dynamic loss scale, and the checkpoints that it writes do not hold it.",
    why="A resumed run begins at the first scale, 65536 by default: it skips updates until the scale has fallen "
    "to where it was, and takes other steps than the uninterrupted run.",
    fix='Save and load `scaler.state_dict()` beside the optimizer\'s: `{"scaler": scaler.state_dict(), ...}`.',
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding for the newest checkpoint to resume from that lacks it."""
    saved = [facts for facts in record.checkpoints if facts.moments]  # without them it is no place to resume from
    if saved and saved[-1].scaler is False:
        yield RULE.finding(
            f"`{saved[-1].path}` holds the state of the optimizer and not that of the loss scaler",
            place=saved[-1].path,
        )
