"""Rules: other values for some modules, chosen by name.

A rule is a glob on the qualified name of a module or parameter and the roles it changes there:

    blocks.*.mlp.*: compute=e4m3, grad=e5m2
    lm_head: compute=fp32                         and `grad` with it, unless the rule says otherwise

In a glob, `*` matches any characters within one segment and `**`, as a whole segment, any number of segments,
including none. If several rules change the same role at one name, the rule with more literal segments (those
without a `*`) wins; the order of the rules does not matter. Two that tie and disagree are an error, and so is a
rule that matches no name: either would be a precision that was asked for and never runs. So is a rule whose role
means nothing to the modules it names (refusal.check_reach): a rule reaches those, not the modules inside them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from halfstep.core.errors import (
    PolicyConflictError,
    PolicyError,
    PolicySyntaxError,
    UnknownRoleError,
    UnmatchedRuleError,
    did_you_mean,
    one_of,
)
from halfstep.core.roles import ROLES, Operand, Value, check_offered, is_narrow, parse_value, print_value

_SEGMENT = re.compile(r"[\w*\-/\[\]]+")


@dataclass(frozen=True)
class Rule:
    """The roles that change where `glob` matches, in the order of the table of roles."""

    glob: str
    changes: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        check_glob(self.glob)
        given = with_grad(dict(self.changes))
        if not given:
            raise UnmatchedRuleError(f"rule `{self.glob}` changes nothing", hint="such as `lm_head: compute=fp32`")
        for role, value in given.items():
            check_offered(role, value)
        object.__setattr__(self, "changes", tuple((role, given[role]) for role in ROLES if role in given))

    @classmethod
    def parse(cls, glob: str, text: str) -> "Rule":
        """Reads a rule from its two parts: the glob, and `role=value,...`."""
        try:
            return cls(glob, tuple(parse_items(text, in_rule=True).items()))
        except PolicyError as error:
            raise error.within(f"in rule `{glob}`") from None

    def __str__(self) -> str:
        return f"{self.glob}: {self.changes_text}"

    @property
    def changes_text(self) -> str:
        """The second part of the rule's text; a `grad` that `compute` sets is left out."""
        given = dict(self.changes)
        implied = {role for role in given if role == "grad" and with_grad({**given, "grad": None}) == given}
        return ",".join(f"{role}={print_value(value)}" for role, value in self.changes if role not in implied)

    @property
    def literals(self) -> int:
        """How specific the rule is: its segments without a wildcard."""
        return sum("*" not in segment for segment in self.glob.split("."))

    def matches(self, name: str) -> bool:
        """Whether the rule applies to the module or parameter of this name."""
        return _pattern(self.glob).fullmatch("." + name) is not None


@dataclass(frozen=True)
class Resolved:
    """What holds for one name: the value of each role, and the glob it comes from, if any."""

    values: Mapping[str, Value]
    sources: Mapping[str, str | None]

    def without_matmul(self, base: Mapping[str, Value]) -> "Resolved":
        """Returns what holds where nothing is multiplied, such as in a norm: narrow operands do not apply."""
        narrow = [r for r, v in self.values.items() if isinstance(v, Operand) and is_narrow(v.format)]
        values = {**self.values, **{role: base[role] for role in narrow}}
        return Resolved(values, {**self.sources, **dict.fromkeys(narrow)})


def owner(parameter: str) -> str:
    """Returns the name that rules match for a parameter: its module's, or its own if the model itself holds it."""
    return parameter.rpartition(".")[0] or parameter


def with_grad(items: Mapping[str, Value | None]) -> dict[str, Value]:
    """Returns the items, with `grad` in the format of `compute` if that is wide and `grad` is not given."""
    given = {role: value for role, value in items.items() if value is not None}
    compute = given.get("compute")
    if isinstance(compute, Operand) and not is_narrow(compute.format):
        return {"grad": compute, **given}
    return given


def check_glob(glob: str) -> None:
    """Refuses what cannot be a glob on qualified names."""
    for segment in glob.split("."):
        if not _SEGMENT.fullmatch(segment) or ("**" in segment and segment != "**"):
            raise PolicySyntaxError(
                f"`{glob}` is not a glob on module names: segment `{segment}` is not letters, digits, `_`, `-` "
                "and `*`, nor `**` alone",
                hint="such as `blocks.*.mlp.*`, `**.attn.*` or `lm_head`",
            )


def parse_items(text: str, *, in_rule: bool) -> dict[str, Value]:
    """Reads `role=value,role=value`; each role once."""
    items: dict[str, Value] = {}
    for item in (part.strip() for part in text.split(",")):
        role, equals, value = item.partition("=")
        role = role.strip()
        if not equals:
            hint = f"such as `{role}=bf16`" if role in ROLES else did_you_mean(role, ROLES)
            raise PolicySyntaxError(f"`{item}` is not of the form role=value", hint=hint)
        check_role(role, in_rule=in_rule)
        if role in items:
            raise PolicyConflictError(f"role `{role}` is given twice", hint="keep one of the two")
        items[role] = parse_value(role, value)
    return items


def check_role(role: str, *, in_rule: bool) -> None:
    """Refuses a name that is not a role, or a role that no rule may change."""
    legal = [name for name, spec in ROLES.items() if spec.in_rules or not in_rule]
    if role not in ROLES:
        hint = did_you_mean(role, legal, otherwise="leave it out; `halfstep policy fp32` says what each role is")
        raise UnknownRoleError(f"unknown role `{role}`; roles are {', '.join(legal)}", hint=hint)
    if role not in legal:
        raise UnknownRoleError(
            f"role `{role}` applies to the whole run and cannot differ by module; a rule may change "
            f"{', '.join(legal)}",
            hint=f"set `{role}` outside the rules",
        )


def merge(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns one rule per glob, sorted by glob; of two changes of one role under one glob the later counts."""
    by_glob: dict[str, dict[str, Value]] = {}
    for rule in rules:
        by_glob.setdefault(rule.glob, {}).update(rule.changes)
    return tuple(Rule(glob, tuple(by_glob[glob].items())) for glob in sorted(by_glob))


def resolve(base: Mapping[str, Value], rules: Sequence[Rule], names: Sequence[str]) -> dict[str, Resolved]:
    """Returns what holds for each name. Every rule must match at least one; ties must agree."""
    for rule in rules:
        if not any(rule.matches(name) for name in names):
            raise UnmatchedRuleError(
                f"rule `{rule}` matches none of the {len(names)} names of this model",
                hint=_near_names(rule.glob, names),
            )
    return {name: _resolve_one(base, [rule for rule in rules if rule.matches(name)], name) for name in names}


def _resolve_one(base: Mapping[str, Value], matching: Sequence[Rule], name: str) -> Resolved:
    values, sources = dict(base), dict.fromkeys(base)
    rivals_of: dict[str, list[tuple[Rule, Value]]] = {}
    for rule in matching:
        for role, value in rule.changes:
            rivals_of.setdefault(role, []).append((rule, value))
    # Every most specific rule is compared with every other one, so a tie cannot hide behind the order.
    for role in ROLES:
        rivals = rivals_of.get(role)
        if rivals is None:
            continue
        most = max(rule.literals for rule, _ in rivals)
        best = [(rule, value) for rule, value in rivals if rule.literals == most]
        if any(value != best[0][1] for _, value in best):
            tied = " and ".join(f"`{rule.glob}: {role}={print_value(value)}`" for rule, value in best)
            raise PolicyConflictError(
                f"rules {tied} disagree about `{name}`, and neither is more specific",
                hint=f"add a rule with more literal segments, such as `{name}: {role}={print_value(best[0][1])}`",
            )
        winner, values[role] = best[0]
        sources[role] = winner.glob
    return Resolved(values, sources)


def _near_names(glob: str, names: Sequence[str]) -> str:
    near = did_you_mean(glob, names)
    if near is not None or not names:
        return near or "the model has no names"
    return f"names look like {one_of(names[:3])}; `*` stays within one segment, `**` crosses dots"


@lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    """Compiles a glob for names with a dot in front, so that every segment is matched with its dot."""
    parts = []
    for segment in glob.split("."):
        if segment == "**":
            parts.append(r"(?:\.[^.]+)*")
        else:
            parts.append(r"\." + "[^.]*".join(re.escape(piece) for piece in segment.split("*")))
    return re.compile("".join(parts))
