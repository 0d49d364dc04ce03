"""Checks a record against all rules, or against those that were chosen.

A rule is a `Rule` and a function that yields its findings on a record. Both are in the file of their family under
`halfstep/core/audit/rules/`, and in its table `RULES`.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from halfstep.core.audit.finding import SEVERITIES, Check, Finding, Rule
from halfstep.core.audit.record import Record
from halfstep.core.audit.rules import checkpoints, formats, loop, scaling, sums, updates
from halfstep.core.errors import OptionError, did_you_mean

FAMILIES = (updates, scaling, sums, formats, loop, checkpoints)


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
def registry() -> dict[str, tuple[Rule, Check]]:
    """Returns every rule with its check, by id, in order."""
    return {rule.id: (rule, check) for family in FAMILIES for rule, check in family.RULES.items()}


def check(
    records: Record | Sequence[Record],
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    suppressed: Sequence[Suppression] = (),
) -> list[Finding]:
    """Returns what is wrong, worst first; a finding that several ranks show is one.

    `select` and `ignore` take ids and their beginnings, as in `HS1`; without `select`, all rules are checked.
    """
    chosen = chosen_rules(select, ignore)
    for each in suppressed:
        _matching_ids(each.rule, exact=True)
    merged: dict[object, Finding] = {}
    for record in [records] if isinstance(records, Record) else records:
        for id in chosen:
            rule, find = registry()[id]
            for finding in find(record):
                if record.framework == "jax" and rule.fix_jax:
                    finding = replace(finding, fix=rule.fix_jax)
                seen = merged.get(finding.key)
                merged[finding.key] = (seen or replace(finding, ranks=[])).also_on([record.rank])
    kept = [f for f in merged.values() if not any(each.covers(f) for each in suppressed)]
    return sorted(kept, key=lambda f: (SEVERITIES.index(f.severity), f.rule))


def chosen_rules(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[str]:
    """Returns the ids of the rules to check."""
    wanted = {id for name in select for id in _matching_ids(name)} if (select := list(select)) else set(registry())
    return [id for id in registry() if id in wanted - {id for name in ignore for id in _matching_ids(name)}]


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
