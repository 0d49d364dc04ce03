"""Reads recipes, TOML files and `--set` into a `RunConfig`, and writes it as TOML.

Applied in this order: the schema's defaults, the recipe (a name that comes with halfstep, or a file), each `--set`
from left to right. The policy may be a text or a table ([policy] with `preset`, roles and [policy.rules]); either
way the configuration holds its text form.
"""

import ast
import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from halfstep.config import reading, schema
from halfstep.config.run import NAMES_ELSEWHERE, NEEDS, OTHER_MEANINGS, RunConfig
from halfstep.config.schema import Bounds
from halfstep.core import policy
from halfstep.core.errors import (
    ConfigError,
    ConfigFileError,
    HalfstepError,
    OptionError,
    SettingConflictError,
    SettingPolicyError,
    UnknownRecipeError,
    UnknownSettingError,
    did_you_mean,
    one_of,
)

DEFAULT_RECIPE = "tiny"


def recipe_names() -> list[str]:
    """Returns the recipes that come with halfstep, the default first."""
    return sorted(packaged_names("recipes"), key=lambda name: name != DEFAULT_RECIPE)


def load(recipe: str = DEFAULT_RECIPE, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the run that a recipe's name or file and `a.b=c` overrides describe."""
    table = read_recipe(recipe)
    if "policy" in table:
        table["policy"] = _policy_text(table["policy"], recipe)
    return _build(table, overrides)


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Returns a configuration with `a.b=c` overrides applied."""
    return config if not overrides else _build(tomllib.loads(to_toml(config)), overrides)


def _build(table: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Returns the run of a table and overrides; refuses an override that changes nothing.

    A recipe's own settings may lose their effect by an override, and run.toml names those that have none.
    """
    defaults = schema.flatten(schema.to_table(RunConfig()))
    before = defaults | schema.flatten(table)
    for key in before:
        if key not in defaults and _hint(key):
            raise _unknown(key)
    for each in overrides:
        apply_override(table, each)
    _spell_policies(table.get("schedule"))
    config = schema.build(RunConfig, table)
    after = schema.flatten(schema.to_table(config))
    for key, other, allowed in ((key, *need) for key, needs in NEEDS.items() for need in needs.items()):
        if after[other] not in allowed and after[key] not in (before[key], defaults[key]):
            legal = str(allowed) if isinstance(allowed, Bounds) else one_of(map(schema.shown, allowed))
            raise SettingConflictError(
                f"{key} = {schema.shown(after[key])} changes nothing: {other} is {schema.shown(after[other])}",
                hint=f"leave {key} out, or set {other} to {legal}",
            )
    return config


def other_meaning(name: str) -> str | None:
    """Returns what to do about another library's setting that has no counterpart of the same meaning here."""
    return OTHER_MEANINGS.get(_last_part(name))


def setting_meant(name: str) -> str | None:
    """Returns the setting that a name without its section, or of another library, probably means."""
    last = _last_part(name)
    named = [key for key in schema.flatten(schema.to_table(RunConfig())) if key.rpartition(".")[2] == last]
    return named[0] if len(named) == 1 else NAMES_ELSEWHERE.get(last)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].replace("-", "_").lower()


def _hint(key: str) -> str | None:
    meant = setting_meant(key)
    return other_meaning(key) or (f"did you mean `{meant}`?" if meant else None)


def _unknown(key: str) -> ConfigError:
    if hint := _hint(key):
        return UnknownSettingError(f"unknown setting `{key}`", hint=hint)
    return schema.unknown_key(key, [row.key for row in schema.rows(RunConfig)])


def read_recipe(recipe: str) -> dict[str, Any]:
    """Returns the table of a recipe, given its name or the path of a TOML file."""
    if recipe.endswith(".toml"):
        return parse_toml(read_text(recipe), recipe)
    if recipe not in (known := recipe_names()):
        raise UnknownRecipeError(
            f"unknown recipe `{recipe}`; recipes are {', '.join(known)}",
            hint=did_you_mean(recipe, known, otherwise="the name of a file must end in .toml"),
        )
    return read_packaged("recipes", recipe)


def packaged_names(folder: str) -> list[str]:
    """Returns the names of the TOML files that come with halfstep in a folder: `recipes` or `machines`."""
    entries = (resources.files("halfstep.config") / folder).iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def read_packaged(folder: str, name: str) -> dict[str, Any]:
    """Returns the table of one of them."""
    file = resources.files("halfstep.config") / folder / f"{name}.toml"
    return parse_toml(file.read_text(encoding="utf-8"), file.name)


def read_policy(given: str) -> str:
    """Returns the text form of a policy, given either that form or a TOML file that has a [policy]."""
    if not given.endswith(".toml"):
        return given
    table = parse_toml(read_text(given), given)
    return str(_policy_text(table.get("policy", table), given))


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Reads a TOML document; an error names file, line and column."""
    try:
        return reading.parse_toml(text)
    except ValueError as error:
        if not isinstance(error, tomllib.TOMLDecodeError):  # a number or a nesting that is too long
            raise ConfigFileError(f"{name}: this cannot be read: {error}", hint="shorten it") from None
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        at = f"{place[1]}:{place[2]}" if place and place[1] else f"{text.count(chr(10)) + 1}:1"
        reason = re.sub(r"\s*\(at .*\)$", "", str(error))
        hint = 'a line is `key = value`, with text in quotes: source = "stdlib"'
        if section := re.match(r"Cannot (?:declare|\w+(?: \w+)? namespace) (\(.*\))", reason):  # a tuple of Python
            reason = reason.replace(section[1], f"[{'.'.join(ast.literal_eval(section[1]))}]")
            hint = "write a section such as [model] once, with all of its settings below it"
        raise ConfigFileError(
            f"{name}:{at}: this is not TOML: {reason[:1].lower() + reason[1:]}", hint=hint
        ) from None


def apply_override(table: dict[str, Any], override: str) -> None:
    """Applies one `--set a.b=c` to a table. The value is TOML; what does not parse as TOML is text."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise OptionError(
            f"`--set {override}` is not of the form key=value", hint="such as `--set training.steps=100`"
        )
    dotted = dotted.strip().replace('"', "")
    if dotted.startswith("policy."):
        table["policy"] = _override_policy(str(table.get("policy", "auto")), dotted.removeprefix("policy."), text)
        return
    section: Any = RunConfig
    *path, last = dotted.split(".")
    for step in path:
        section = _step(section, step, dotted)
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            raise schema.wrong(step, table, "a table of settings")
    if _step(section, last, dotted) is not None:
        raise UnknownSettingError(
            f"`{dotted}` is a section, not a setting", hint=_hint(dotted) or f"set one of its keys: `{dotted}.…`"
        )
    table[last] = text.strip().strip('"') if schema.is_text(section, last) else _toml_value(text)


def setting_named(override: str) -> str:
    """Returns the setting that one `--set a.b=c` changes; a role or a rule is a part of the policy."""
    dotted = override.partition("=")[0].strip().replace('"', "")
    return "policy" if dotted.startswith("policy.") else dotted


def to_toml(config: RunConfig) -> str:
    """Returns the whole configuration as TOML; `load` reads it back as the same run."""
    import tomli_w

    return tomli_w.dumps(schema.to_table(config))


def _step(section: Any, name: str, dotted: str) -> type | None:
    """Returns the section of that name, or None if `name` is a setting; refuses other names."""
    if section is None or name not in {field.name for field in dataclasses.fields(section)}:
        raise _unknown(dotted)
    return schema.section_of(section, name)


def _toml_value(text: str) -> Any:
    try:
        return reading.parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def _override_policy(text: str, key: str, value: str) -> str:
    try:
        table = policy.read(text).to_table()
        value = value.strip().strip('"')
        if key.startswith("rules."):
            table.setdefault("rules", {})[key.removeprefix("rules.")] = value
        else:
            table[key] = value
        return str(policy.read_table(table))
    except HalfstepError as error:
        raise SettingPolicyError(f"--set policy.{key}={value}: {error.message}", hint=error.hint) from None


def _spell_policies(entries: Any) -> None:
    """Replaces policies that a [[schedule]] gives as tables by their text form."""
    for i, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict) and "policy" in entry:
            entry["policy"] = _policy_text(entry["policy"], f"schedule[{i}]")


def _policy_text(given: Any, name: str) -> Any:
    """Returns the text form of a policy that a file gives as a table; the schema checks everything else."""
    if str(given) in policy.OTHER_NAMES | policy.NOT_OFFERED:  # Lightning's 16, 32 and 64 are numbers in TOML
        return str(given)
    if not isinstance(given, Mapping):
        return given
    try:
        return str(policy.read_table(given))
    except HalfstepError as error:
        raise SettingPolicyError(f"[policy] of {name}: {error.message}", hint=error.hint) from None


def read_text(path: str) -> str:
    """Returns the text of a file of settings; one that cannot be read is an error that says why."""
    try:
        return reading.read_bytes(path, reading.MOST_SETTINGS).decode("utf-8")
    except FileNotFoundError:
        raise ConfigFileError(
            f"there is no file `{path}`", hint=f"recipes are {', '.join(recipe_names())}"
        ) from None
    except IsADirectoryError:
        raise ConfigFileError(f"`{path}` is a folder, not a file", hint="name the file in it") from None
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise ConfigFileError(
            f"{path}:{line}: this is not UTF-8: byte {byte:#04x}", hint="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "change its permissions, or name another"
        raise ConfigFileError(f"`{path}` cannot be read: {reason}", hint=hint) from None
