"""HS602: weights whose format changes from one checkpoint to the next."""

from collections.abc import Iterator
from itertools import pairwise

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS602",
    name="formats drift between checkpoints",
    severity="error",
    shows="The weights whose format changed.",
    what="The same weight has one format in a checkpoint and another in the next.",
    why="Something cast the model between the two, such as a `.half()` before a save or a loader with "
    "`dtype=auto`: what narrows once is lost for good, also if a later checkpoint is wide again.",
    fix="Find the cast between the two steps. If the precision was changed on purpose, resume with `--policy`, "
    "which converts exactly and records it.",
    needs="two checkpoints",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per pair of checkpoints that differ, unless another policy explains it."""
    for before, after in pairwise(record.checkpoints):
        if before.policy != after.policy:
            continue
        was, now = before.weights | before.masters, after.weights | after.masters
        changed = [name for name in was if name in now and was[name] != now[name]]
        if changed:
            first = changed[0]
            yield RULE.finding(
                f"`{first}` is {was[first]} in `{before.path}` and {now[first]} in `{after.path}`"
                + (f"; so are {len(changed) - 1} more" if changed[1:] else ""),
                *changed,
                place=after.path,
                evidence={"weights": len(changed)},
            )
