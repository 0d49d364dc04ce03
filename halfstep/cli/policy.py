"""`halfstep formats`: the number formats. `halfstep policy`: what a policy means, for each role or parameter."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from halfstep.cli.arguments import Json
from halfstep.cli.output import print_json, print_table, print_words
from halfstep.config.load import load, read_policy
from halfstep.config.model import ModelConfig, is_matmul, module_names, owner, parameter_shapes
from halfstep.config.policy_schedule import PolicySchedule
from halfstep.core.errors import TargetError
from halfstep.core.formats import NAMED, Format
from halfstep.core.policy import Policy, read_as
from halfstep.core.roles import ROLES, print_value
from halfstep.core.rules import Resolved

# `halfstep formats`: the table of number formats.

PROPERTIES = (
    *("name", "bits", "exponent_bits", "mantissa_bits", "bias", "max", "smallest_normal", "smallest_subnormal"),
    *("epsilon", "decimal_digits", "has_inf", "has_nan", "native_overflow"),
)
HEAD = ("format", "bits", "layout", "largest", "normal", "smallest", "digits", "special", "overflow")


def formats(*names: str, json: Json = False) -> None:
    """Show number formats: bits, range, precision, special values, and what a number beyond the largest becomes.

    `normal` is the smallest number with full precision, `smallest` the smallest above zero.

    You can name any ExMy. Its suffix states its special values: `ieee` has infinities and NaN, `fn` only
    NaN, `f` neither, `fnuz` NaN in place of negative zero: e3m4ieee, e4m3fn, e2m1f, e5m2fnuz.

    Parameters
    ----------
    names
        The formats to show; by default, all named ones.
    """
    chosen = [Format.parse(name) for name in names] or list(NAMED.values())
    if json:
        print_json([{name: getattr(fmt, name) for name in PROPERTIES} for fmt in chosen])
        return
    print_table(HEAD, map(_row, chosen), right=HEAD[3:7])


def _row(fmt: Format) -> tuple[str, ...]:
    return (
        fmt.name,
        str(fmt.bits),
        f"e{fmt.exponent_bits}m{fmt.mantissa_bits}",
        f"{fmt.max:.6g}" if fmt.max < 1e6 else f"{fmt.max:.3g}",
        f"{fmt.smallest_normal:.3g}",
        f"{fmt.smallest_subnormal:.3g}",
        f"{fmt.decimal_digits:.1f}",
        ", ".join(["inf"] * fmt.has_inf + ["NaN"] * fmt.has_nan) or "none",
        {"inf": "inf", "nan": "NaN", "saturate": "largest"}[fmt.native_overflow],
    )


def policy(
    spec: str | None = None,
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
        The policy, in quotes if it contains spaces or a star; or a .toml file with one. By default, the model's.
    model
        A recipe: show what applies to each of its parameters, and the policies that take over during its run.
    module
        The name of a module: show what applies to it. May be repeated.
    """
    if spec is None and model is None:
        raise TargetError("no policy was named", hint="halfstep policy bf16-mixed; or name a recipe with --model")
    spec = load(str(model)).policy if spec is None else read_policy(spec)
    parsed = Policy.parse(spec)
    for note in (read_as(spec), *(f"warning: {warning}" for warning in parsed.warnings)):
        if note:
            print_words(note)
    if model is None and not module:
        _print_policy(parsed, json=json)
        return
    later: Sequence[Phase] = ()
    if model is None:
        shown: Mapping[str, Resolved] = parsed.resolve(module)
    else:
        (_, _, shown), *later = _phases(parsed, spec, model, module)
    if json:
        schedule = [
            {"from": after, "policy": str(each), "parameters": _data_of(now)} for after, each, now in later
        ]
        print_json(_data_of(shown) | ({"schedule": schedule} if later else {}))
        return
    _print_resolved(shown)
    for after, each, now in later:
        print_words(f"after step {after:,}: {each}")
        _print_resolved(now)


def _print_policy(parsed: Policy, *, json: bool) -> None:
    """Prints the text of a policy, the value of each role, and its rules."""
    if json:
        roles = {role: _data(value) for role, value in parsed.roles().items()}
        rules = {rule.glob: {role: _data(v) for role, v in rule.changes} for rule in parsed.rules}
        print_json({"policy": str(parsed), "roles": roles, "rules": rules})
        return
    print_words(str(parsed), "")
    rows = [(role, print_value(value), ROLES[role].meaning) for role, value in parsed.roles().items()]
    print_table(("role", "value", "what it is"), rows)
    if parsed.rules:
        print_table(("rule", "changes"), [(rule.glob, rule.changes_text) for rule in parsed.rules])


def _data(value: Any) -> Any:
    return value if isinstance(value, bool) else print_value(value)


# After how many steps a policy takes over, and what applies to each parameter from there on.
Phase = tuple[int, Policy, dict[str, Resolved]]


def _phases(parsed: Policy, spec: str, recipe: str, modules: Sequence[str]) -> list[Phase]:
    """Returns the policies of a recipe's run, the first one as it was named."""
    config = load(recipe, [f"policy={spec}"])
    schedule = PolicySchedule.of(parsed, config.schedule, config.training.steps)
    schedule.check(config.model)
    return [(after, each, _resolve(each, config.model, modules)) for after, each in schedule.phases]


def _resolve(parsed: Policy, config: "ModelConfig", modules: Sequence[str]) -> dict[str, Resolved]:
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


def _data_of(shown: Mapping[str, Resolved]) -> dict[str, Any]:
    roles = [role for role in ROLES if ROLES[role].in_rules]
    return {
        name: {
            "values": {role: _data(resolved.values[role]) for role in roles},
            "rules": {role: glob for role, glob in resolved.sources.items() if glob is not None},
        }
        for name, resolved in shown.items()
    }


def _print_resolved(shown: Mapping[str, Resolved]) -> None:
    rows = []
    for name, resolved in shown.items():
        globs = dict.fromkeys(glob for glob in resolved.sources.values() if glob is not None)
        rows.append((name, *(print_value(resolved.values[role]) for role in _COLUMNS), " ".join(globs)))
    print_table(("name", *_COLUMNS, "by rule"), rows)
