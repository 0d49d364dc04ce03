"""`halfstep policy`: shows what a policy means, for each role or for each parameter."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from halfstep.cli.arguments import Json
from halfstep.cli.output import print_json, print_table, print_words
from halfstep.core.policy import Policy, read_as
from halfstep.core.roles import ROLES, print_value
from halfstep.core.rules import Resolved


def policy(
    spec: str,
    /,
    *,
    model: str | None = None,
    module: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    json: Json = False,
) -> None:
    """Show what a policy means: the format of each role, and its rules.

    A policy starts from a preset (fp32, bf16-mixed, bf16-true, fp16-mixed, fp8-mixed) and changes roles:
    `bf16-mixed,norm=bf16`. Names of other libraries (bf16, fp16, 16-mixed, fp8, no) are read as the preset that
    they mean there. Values take modifiers: `param=fp32:split`, `scale=dynamic:init=1024`. Rules for modules follow
    after semicolons: `bf16-mixed; blocks.*.mlp.*: compute=e4m3; lm_head: compute=fp32`.

    Parameters
    ----------
    spec
        The policy, in quotes if it contains spaces or a star; or a .toml file with one.
    model
        A recipe: show what applies to each of its parameters.
    module
        The name of a module: show what applies to it. May be repeated.
    """
    from halfstep.config.load import read_policy

    spec = read_policy(spec)
    parsed = Policy.parse(spec)
    for note in (read_as(spec), *(f"warning: {warning}" for warning in parsed.warnings)):
        if note:
            print_words(note)
    if model is not None or module:
        _print_resolved(_resolve(parsed, model, module), json=json)
    elif json:
        print_json(describe(parsed))
    else:
        print_words(str(parsed), "")
        rows = [(role, print_value(value), ROLES[role].meaning) for role, value in parsed.roles().items()]
        print_table(("role", "value", "what it is"), rows)
        if parsed.rules:
            print_table(("rule", "changes"), [(rule.glob, rule.changes_text) for rule in parsed.rules])


def describe(parsed: Policy) -> dict[str, Any]:
    """Returns the text of a policy, the value of each role, and its rules."""
    return {
        "policy": str(parsed),
        "roles": {role: _data(value) for role, value in parsed.roles().items()},
        "rules": {rule.glob: {role: _data(v) for role, v in rule.changes} for rule in parsed.rules},
    }


def _data(value: Any) -> Any:
    return value if isinstance(value, bool) else print_value(value)


def _resolve(parsed: Policy, recipe: str | None, modules: Sequence[str]) -> dict[str, Resolved]:
    if recipe is None:
        return parsed.resolve(modules)
    from halfstep.config.load import load
    from halfstep.config.model import is_matmul, module_names, owner, parameter_shapes

    config = load(recipe).model
    owners = {name: owner(name) for name in parameter_shapes(config)}
    resolved = parsed.resolve(list(dict.fromkeys([*module_names(config), *owners.values(), *modules])))
    shown = {
        name: resolved[where] if is_matmul(name) else resolved[where].without_matmul(parsed.roles())
        for name, where in owners.items()
    }
    if config.tied:
        shown["lm_head.weight (tied to embed.weight)"] = resolved["lm_head"]
    return shown | {name: resolved[name] for name in modules}


# The roles shown for a parameter; the others apply to activations or to the whole run.
_COLUMNS = ("param", "compute", "grad", "grad_weight", "moments")


def _print_resolved(shown: dict[str, Resolved], *, json: bool) -> None:
    if json:
        roles = [role for role in ROLES if ROLES[role].in_rules]
        data = {
            name: {
                "values": {role: _data(resolved.values[role]) for role in roles},
                "rules": {role: glob for role, glob in resolved.sources.items() if glob is not None},
            }
            for name, resolved in shown.items()
        }
        print_json(data)
        return
    rows = []
    for name, resolved in shown.items():
        globs = dict.fromkeys(glob for glob in resolved.sources.values() if glob is not None)
        rows.append((name, *(print_value(resolved.values[role]) for role in _COLUMNS), " ".join(globs)))
    print_table(("name", *_COLUMNS, "by rule"), rows)
