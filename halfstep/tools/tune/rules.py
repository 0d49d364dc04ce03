"""What the search chose, as a policy: few rules, each with the reason for it.

Rules come in three levels, of which the more specific one wins (core/rules.py): `**` for the most common narrow
formats, one for all blocks (`blocks.*.mlp.down`) where most of them differ from that, and one for a single module
where it differs from its like in other blocks.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from halfstep.core.policy import EVERYWHERE, Policy
from halfstep.core.roles import Evaluation, Operand, is_narrow, parse_value, print_value
from halfstep.core.rules import Rule
from halfstep.tools.tune.search import Assignment

Formats = tuple[Operand, Operand]  # of a module's operands, and of the gradients that enter it


@dataclass(frozen=True)
class ModuleRule:
    """A rule, and the modules that it decides about."""

    rule: Rule
    modules: tuple[str, ...]


def formats_of(base: Policy, compute: str, grad: str) -> Formats:
    """Returns the formats of an option; those of the base where it names none."""
    forward = parse_value("compute", compute) if compute else base.compute
    backward = parse_value("grad", grad) if grad else base.grad
    return cast(Operand, forward), cast(Operand, backward)


def apply_assignment(
    base: Policy, names: Sequence[str], assignment: Assignment
) -> tuple[Policy, list[ModuleRule]]:
    """Returns the base with rules for what was chosen, and the rules; `names` are all modules that may change."""
    formats = dict.fromkeys(names, (base.compute, base.grad))
    formats |= {name: formats_of(base, o.compute, o.grad) for name, o in assignment.items()}
    wanted = _module_rules(formats, (base.compute, base.grad))
    rules = (*base.rules, *(each.rule for each in wanted))
    # Held-out text is scored in wide formats, as under fp8-mixed: what is kept of a training is its weights.
    scored = base.eval if base.eval.format is not None or not wanted else Evaluation(base.compute.format)
    return replace(base, rules=rules, eval=scored), wanted


def _module_rules(formats: Mapping[str, Formats], base: Formats) -> list[ModuleRule]:
    default = base
    narrow = Counter(pair for pair in formats.values() if is_narrow(pair[0].format))
    if narrow and (common := narrow.most_common(1)[0])[1] > 1:
        default = common[0]  # a wide format for `**` would also be one for activations between matmuls
    rules: dict[str, tuple[Formats, list[str]]] = {}
    if default != base:
        rules[EVERYWHERE] = default, []
    likes: dict[str, list[str]] = {}
    for name in formats:
        likes.setdefault(_in_every_block(name), []).append(name)
    for glob, names in likes.items():
        most = Counter(formats[name] for name in names).most_common(1)[0][0]
        caught = [name for name in formats if _rule(glob, most).matches(name)]  # `*.*` of a Sequential: too many
        shared = most if len(names) > 1 and caught == names else default
        if shared != default:
            rules[glob] = shared, []
        for name in names:
            if formats[name] != shared:
                rules[name] = formats[name], [name]
            elif shared != default:
                rules[glob][1].append(name)
            elif default != base:
                rules[EVERYWHERE][1].append(name)
    return [ModuleRule(_rule(glob, pair), tuple(decided)) for glob, (pair, decided) in rules.items()]


def _in_every_block(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _rule(glob: str, pair: Formats) -> Rule:
    return Rule(glob, (("compute", pair[0]), ("grad", pair[1])))


def to_toml(
    policy: Policy, wanted: Sequence[ModuleRule], why: Callable[[ModuleRule], str], heading: Sequence[str]
) -> str:
    """Returns a file that `--policy` reads: the policy, with a comment above each rule that was found."""
    ours, table = {each.rule.glob: each for each in wanted}, policy.to_table()
    lines = [*(f"# {line}" for line in heading), "", "[policy]"]
    for key, value in table.items():
        note = "  # this machine lacks the formats; leave it out on one that has them" if key == "emulate" else ""
        if key != "rules":
            lines.append(f"{key} = {_toml(value)}{note}")
    lines += ["", "[policy.rules]"]
    for glob, changes in table.get("rules", {}).items():
        reason = why(ours[glob]) if glob in ours else "as in the policy that the search began with"
        lines += [f"# {reason}", f"{_toml(glob)} = {_toml(changes)}"]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"'


def describe_formats(base: Policy, compute: str, grad: str) -> str:
    """Names the formats of an option: `e4m3 with gradients in e5m2`."""
    forward, backward = formats_of(base, compute, grad)
    if forward == backward:
        return print_value(forward)
    return f"{print_value(forward)} with gradients in {print_value(backward)}"
