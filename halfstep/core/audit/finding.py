"""What a rule is, and what it says when it is broken."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from halfstep.core.audit.record import Operation, Record, Weight, from_plain

Severity = Literal["error", "warning", "note"]
Confidence = Literal["certain", "likely", "weak"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One mistake: a broken rule, with every tensor or module that shows it.

    Message, place and evidence are those of the worst of them, on the first of the ranks.
    """

    rule: str
    message: str
    severity: Severity
    confidence: Confidence
    fix: str
    page: str
    place: str | None = None  # file:line
    where: list[str] = field(default_factory=list)  # tensors or modules
    evidence: dict[str, float] = field(default_factory=dict)
    policy_rule: str | None = None  # rules of a policy that cure it, a line each: `"blocks.3.norm" = "norm=fp32"`
    ranks: list[int] = field(default_factory=list)  # that show it
    cause: str = ""  # such as `tensors in bf16`: what a rule finds with one cause is one mistake
    each: dict[str, dict[str, float]] = field(default_factory=dict)  # the evidence of each name, given a cause

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

    @property
    def order(self) -> tuple[int, float]:
        """What sorts findings of a rule, the worst first."""
        share = self.evidence.get("lost_share", self.evidence.get("share", 0.0))
        return SEVERITIES.index(self.severity), -share

    def also_on(self, rank: int, seen: "Finding") -> "Finding":
        """Returns the same finding, which another rank shows too; if with other numbers, it says whose it has."""
        whose = f" (on rank {self.ranks[0]})"
        new = seen.evidence != self.evidence and not self.message.endswith(whose)
        return replace(self, ranks=[*self.ranks, rank], message=self.message + (whose if new else ""))


def merge(findings: Sequence[Finding]) -> Finding:
    """Returns one finding for those of one cause: the worst of them, with the names of all."""
    worst = min(findings, key=lambda each: each.order)
    names = list(dict.fromkeys(name for each in findings for name in each.where))
    message = worst.message
    if len(findings) > 1:
        which = "the worst" if len({each.order for each in findings}) > 1 else "one"
        what = worst.cause.removesuffix(f" at {worst.place}")
        shares = {name: -each.order[1] for each in findings for name in each.where}
        message += f"; {which} of {len(names)} {what}: {first_names(names, shares)}"
    return replace(
        worst,
        message=message,
        where=names,
        policy_rule="\n".join(dict.fromkeys(each.policy_rule for each in findings if each.policy_rule)) or None,
        ranks=sorted({rank for each in findings for rank in each.ranks}),
        each={name: each.evidence for each in findings for name in each.where if each.cause},
    )


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
        cause = f"{'adapters' if weight.kind == 'adapter' else 'tensors'} in {weight.stepped}"
        return self.finding(message, weight.name, place=weight.place, policy_rule=cure, **{"cause": cause, **more})

    def finding_on_operation(self, op: Operation, message: str, change: str = "", **more: Any) -> Finding:
        """Returns a finding on one operation, with its number of calls as evidence unless there is better."""
        where = [op.module] if op.module else []
        cure = f'"{op.module}" = "{change}"' if change and op.module else None
        format = op.inside or (op.outputs or ["an unknown format"])[0]
        cause = f"modules in {format}" + (f" at {op.place}" if op.place else "")
        own = {"evidence": {"calls": op.count}, "cause": cause if where else ""}
        return self.finding(message, *where, place=op.place, policy_rule=cure, **{**own, **more})


Check = Callable[[Rule, Record], Iterator[Finding]]  # yields the places where a record breaks a rule


def define_rule(id: str, name: str, severity: Severity, **texts: str) -> Callable[[Check], Rule]:
    """Makes a rule of the function that checks it; `texts` are the other fields of `Rule`."""
    return lambda check: Rule(id, name, severity, check, **texts)


def first_names(names: list[str], shares: Mapping[str, float] | None = None, most: int = 4) -> str:
    """Returns the first few names for a message, with their shares if given, and how many more there are."""
    known = shares or {}
    quoted = [f"`{name}` {known[name]:.1%}" if any(known.values()) else f"`{name}`" for name in names[:most]]
    return (", ".join(quoted) or "the loop") + (f" and {len(names) - most} more" if len(names) > most else "")


def rule_for(parameter: str, change: str) -> str:
    """Returns the rule of a policy that changes a role of the module that holds a parameter."""
    return f"{json.dumps(parameter.rpartition('.')[0] or parameter)} = {json.dumps(change)}"
