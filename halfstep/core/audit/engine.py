"""Finds all rules, and checks a record against them.

A rule is a module under `halfstep/core/audit/rules/` whose name begins with its id: `hs101_no_master`. It has one
`RULE` and one `check(record)` that yields findings. Nothing else registers it.
"""

import fnmatch
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

from halfstep.core.audit import rules
from halfstep.core.audit.finding import SEVERITIES, Finding, Rule
from halfstep.core.audit.fixes import in_words_of
from halfstep.core.audit.record import Record
from halfstep.core.errors import ConfigError, did_you_mean

Check = Callable[[Record], Iterator[Finding]]


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
    known = {}
    for module in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        name = module.name.rpartition(".")[2]
        if name.startswith("hs") and not module.ispkg:
            loaded = import_module(module.name)
            if loaded.RULE.id.lower() != name.partition("_")[0]:
                raise TypeError(f"{module.name} holds {loaded.RULE.id}")
            known[loaded.RULE.id] = (loaded.RULE, loaded.check)
    return dict(sorted(known.items()))


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
        _matching(each.rule, exact=True)
    merged: dict[object, Finding] = {}
    for record in [records] if isinstance(records, Record) else records:
        for id in chosen:
            for finding in registry()[id][1](record):
                finding = in_words_of(record.framework, finding)
                seen = merged.get(finding.key)
                merged[finding.key] = (seen or replace(finding, ranks=[])).also_on([record.rank])
    kept = [f for f in merged.values() if not any(each.covers(f) for each in suppressed)]
    return sorted(kept, key=lambda f: (SEVERITIES.index(f.severity), f.rule))


def chosen_rules(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[str]:
    """Returns the ids of the rules to check."""
    wanted = {id for name in select for id in _matching(name)} if (select := list(select)) else set(registry())
    return [id for id in registry() if id in wanted - {id for name in ignore for id in _matching(name)}]


def _matching(name: str, *, exact: bool = False) -> list[str]:
    ids = [id for id in registry() if id == name.upper() or (not exact and id.startswith(name.upper()))]
    if not ids or not name:
        raise ConfigError(
            f"there is no rule `{name}`",
            hint=did_you_mean(
                name.upper(), registry(), "`halfstep audit --rules` lists them; HS1 means all HS1xx"
            ),
        )
    return ids
