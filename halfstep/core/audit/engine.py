"""Checks a record against all rules, or against those that were chosen.

The rules are in `halfstep/core/audit/rules/`, one file for each family.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from halfstep.core.audit.finding import SEVERITIES, Finding, Rule, merge
from halfstep.core.audit.record import Record
from halfstep.core.audit.rules import checkpoints, files, formats, loop, scaling, sums, updates
from halfstep.core.errors import OptionError, did_you_mean

FAMILIES = (updates, scaling, sums, formats, loop, checkpoints, files)


@dataclass(frozen=True)
class Suppression:
    """Findings that someone has judged and accepts: a rule, globs of tensor, module or file names, and why."""

    rule: str
    reason: str
    names: tuple[str, ...] = ("*",)

    def covers(self, finding: Finding) -> bool:
        """Returns whether a finding is accepted: the rule is the same, and every name of it matches a glob."""
        named = finding.where or [finding.place or ""]
        return self.rule == finding.rule and all(
            any(fnmatch.fnmatchcase(name, glob) for glob in self.names) for name in named
        )


@cache
def registry() -> dict[str, Rule]:
    """Returns every rule by its id, in order."""
    return {rule.id: rule for family in FAMILIES for rule in vars(family).values() if isinstance(rule, Rule)}


def check(
    records: Record | Sequence[Record],
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    suppressed: Sequence[Suppression] = (),
) -> list[Finding]:
    """Returns the mistakes that were made, worst first.

    `select` and `ignore` take ids and their beginnings, as in `HS1`; without `select`, all rules are checked.
    """
    for each in suppressed:
        _matching_ids(each.rule, exact=True)
    return group([f for f in check_each(records, select, ignore) if not any(r.covers(f) for r in suppressed)])


def check_each(
    records: Record | Sequence[Record], select: Iterable[str] = (), ignore: Iterable[str] = ()
) -> list[Finding]:
    """Returns a finding for each tensor, module or line that breaks a rule; what several ranks show is one."""
    found: dict[object, Finding] = {}
    chosen = chosen_rules(select, ignore)
    for record in [records] if isinstance(records, Record) else records:
        for id in chosen:
            rule = registry()[id]
            for finding in rule.check(rule, record):
                if record.framework == "jax" and rule.fix_jax:
                    finding = replace(finding, fix=rule.fix_jax)
                seen = found.get(finding.key)
                found[finding.key] = (
                    seen.also_on(record.rank, finding) if seen else replace(finding, ranks=[record.rank])
                )
    return [*found.values()]


def group(findings: Iterable[Finding]) -> list[Finding]:
    """Returns one finding for each mistake, worst first."""
    mistakes: dict[object, list[Finding]] = {}
    for each in findings:
        mistakes.setdefault((each.rule, each.cause) if each.cause else each.key, []).append(each)
    return sorted(map(merge, mistakes.values()), key=lambda each: (SEVERITIES.index(each.severity), each.rule))


def chosen_rules(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[str]:
    """Returns the ids of the rules to check."""
    named, ignored = ([given] if isinstance(given, str) else [*given] for given in (select, ignore))
    wanted = {id for name in named for id in _matching_ids(name)} if named else set(registry())
    return [id for id in registry() if id in wanted - {id for name in ignored for id in _matching_ids(name)}]


def _matching_ids(name: str, *, exact: bool = False) -> list[str]:
    ids = [id for id in registry() if id == name.upper() or (not exact and id.startswith(name.upper()))]
    if not ids or not name:
        raise OptionError(
            f"there is no rule `{name}`",
            hint=did_you_mean(
                name.upper(), registry(), "`halfstep audit --rules` lists them; HS1 means all HS1xx"
            ),
        )
    return ids
