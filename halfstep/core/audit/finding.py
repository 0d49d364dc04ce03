"""What a rule is, and what it says when it is broken."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from halfstep.core.audit.record import Operation, Record, Weight, from_plain

Severity = Literal["error", "warning", "note"]
Confidence = Literal["certain", "likely", "weak"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One broken rule at one place."""

    rule: str
    message: str
    severity: Severity
    confidence: Confidence
    fix: str
    page: str
    place: str | None = None  # file:line
    where: list[str] = field(default_factory=list)  # tensors or modules
    evidence: dict[str, float] = field(default_factory=dict)
    policy_rule: str | None = None  # a rule of a policy that cures it, such as `"blocks.3.norm" = "norm=fp32"`
    ranks: list[int] = field(default_factory=list)  # that show it

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Finding":
        """Returns the finding of plain data."""
        return from_plain(cls, data)

    @property
    def key(self) -> tuple[str, str | None, tuple[str, ...]]:
        """What makes two findings the same, on whatever rank: rule, place and names."""
        return self.rule, self.place, tuple(self.where)

    def also_on(self, ranks: list[int]) -> "Finding":
        """Returns the same finding, seen on more ranks."""
        return replace(self, ranks=sorted({*self.ranks, *ranks}))


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong. `what` says it in a sentence, `why` what it costs, `fix` what to do."""

    id: str
    name: str
    severity: Severity
    check: "Check"
    what: str
    why: str
    fix: str
    shows: str = "The calls."  # which numbers its evidence has
    needs: str = "a live run"  # what must have been seen for it to be judged; empty if anything will do
    fix_jax: str = ""  # the fix in the words of JAX, where those of torch do not fit

    @property
    def page(self) -> str:
        """Where it is documented."""
        return f"docs/audit.md#{self.id.lower()}"

    def finding(self, message: str, *where: str, **more: Any) -> Finding:
        """Returns a finding of this rule; `more` are other fields of it, or None for what the rule says."""
        own = {"severity": self.severity, "confidence": "certain", "fix": self.fix, "page": self.page}
        given = {name: value for name, value in more.items() if value is not None}
        return Finding(self.id, message, where=list(where), **own | given)

    def finding_on_weight(self, weight: Weight, message: str, change: str = "", **more: Any) -> Finding:
        """Returns a finding on one weight; `change` is what a rule of the policy would set, as in `param=fp32`."""
        cure = rule_for(weight.name, change) if change else None
        return self.finding(message, weight.name, place=weight.place, policy_rule=cure, **more)

    def finding_on_operation(self, op: Operation, message: str, change: str = "", **more: Any) -> Finding:
        """Returns a finding on one operation, with its number of calls as evidence unless there is better."""
        where = [op.module] if op.module else []
        cure = f'"{op.module}" = "{change}"' if change and op.module else None
        return self.finding(
            message, *where, place=op.place, policy_rule=cure, **{"evidence": {"calls": op.count}, **more}
        )


Check = Callable[[Rule, Record], Iterator[Finding]]  # yields the places where a record breaks a rule


def define_rule(id: str, name: str, severity: Severity, **texts: str) -> Callable[[Check], Rule]:
    """Makes a rule of the function that checks it; `texts` are the other fields of `Rule`."""
    return lambda check: Rule(id, name, severity, check, **texts)


def first_names(names: list[str], most: int = 4) -> str:
    """Returns the first few names for a message, and how many there are beyond them."""
    quoted = ", ".join(f"`{name}`" for name in names[:most]) or "the loop"
    return quoted + (f" and {len(names) - most} more" if len(names) > most else "")


def rule_for(parameter: str, change: str) -> str:
    """Returns the rule of a policy that changes a role of the module that holds a parameter."""
    return f"{json.dumps(parameter.rpartition('.')[0] or parameter)} = {json.dumps(change)}"
