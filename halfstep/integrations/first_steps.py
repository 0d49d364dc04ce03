"""Audits the first updates of a real run, within 2 % of its time, and then leaves nothing of itself behind.

An audited update takes at most half as much time again, so of a run of n updates at most 4 % are audited: 20 of
500, three of a shorter run, because a rule on adapters needs three. The numbers of the run stay the same.
"""

import sys

from halfstep.core.audit.engine import check
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import Record
from halfstep.core.errors import as_message
from halfstep.torch.instruments.collect.watch import Watch

SHARE, FEWEST, MOST = 0.04, 3, 20


class FirstSteps:
    """The audit of a run's first updates: `begin`, `look` after each update, `end`."""

    def __init__(self, steps: int | None = None):
        self.findings: list[Finding] = []
        self.record: Record | None = None  # once the audit is over
        self._steps, self._watch = steps, Watch()
        self._running = False

    def begin(self, updates: int) -> None:
        """Begins to watch a run of so many updates; 0 or less if that is not known."""
        chosen = min(MOST, max(FEWEST, int(SHARE * updates))) if updates > 0 else MOST
        self._steps = self._steps or chosen
        self._watch.__enter__()
        self._running = True

    def look(self) -> None:
        """Ends the watch once enough updates were seen."""
        if self._running and self._watch.log.updates >= (self._steps or MOST):
            self.end()

    def end(self) -> None:
        """Ends the watch, and says on stderr what was found."""
        if not self._running:
            return
        self._running = False
        self._watch.__exit__()
        try:
            self.record = self._watch.record()
            self.findings = check(self.record)
        except Exception as error:  # no error of an audit may end a training
            self._watch.guard.fail(error)
        if (failure := self._watch.guard.failure) is not None:
            print(f"the halfstep audit failed, and training continues without it: {failure}", file=sys.stderr)
        print(self.report(), file=sys.stderr)

    def report(self) -> str:
        """Returns the findings for people: errors and warnings, each with its fix."""
        updates = self.record.updates if self.record is not None else 0
        told = [finding for finding in self.findings if finding.severity != "note"]
        lines = [f"halfstep audit of the first {updates} updates: {len(told) or 'no'} errors and warnings"]
        lines += [describe(finding) for finding in told]
        return "\n".join(lines)


def describe(finding: Finding) -> str:
    """Returns a finding in two lines."""
    place = f"{finding.place}: " if finding.place else ""
    message = as_message(f"{place}{finding.message}")
    return f"{finding.rule} {finding.severity}: {message}\n    fix: {as_message(finding.fix)} ({finding.page})"
