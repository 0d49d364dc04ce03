"""HS605: the newest checkpoint is not complete."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS605",
    name="unfinished newest checkpoint",
    severity="error",
    shows="What is missing, in the message.",
    what="The newest checkpoint is not complete: the process that wrote it was killed, or the disk was full.",
    why="Loaders that take the newest folder, such as `get_last_checkpoint`, do not look whether it is whole: a "
    "resume fails, or begins with some weights freshly initialized.",
    fix="Remove or rename that folder and resume from the one before. halfstep's own checkpoints are whole or "
    "absent.",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields a finding if the newest of the checkpoints is not whole."""
    for facts in record.checkpoints[-1:]:
        if not facts.complete:
            yield RULE.finding(f"`{facts.path}` is not complete: {facts.problem}", place=facts.path)
