"""Findings that are accepted, from halfstep-audit.toml, and the policy that cures what rules of a policy can cure.

# halfstep-audit.toml
[[accept]]
rule = "HS101"
names = ["embed.*"]         # globs of tensors, modules or files; without them, all
reason = "a study of pure bf16"

What `halfstep audit --json` printed earlier is such a file, too: it accepts the findings that were known then.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

from halfstep.config.load import parse_toml
from halfstep.config.reading import MOST_SETTINGS, MOST_TABLE, parse_json, read_bytes
from halfstep.config.schema import build
from halfstep.core.audit.engine import Suppression
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import Record, is_narrow
from halfstep.core.errors import ConfigError, ConfigFileError, OptionError, PolicyError
from halfstep.core.policy import Policy
from halfstep.core.roles import Value
from halfstep.core.rules import Rule
from halfstep.training.files import os_errors, write_whole

ACCEPTED = "halfstep-audit.toml"


@dataclass(frozen=True)
class _Entry:
    rule: str
    reason: str
    names: tuple[str, ...] = ("*",)


@dataclass(frozen=True)
class _File:
    accept: tuple[_Entry, ...] = ()


def read_accepted(file: Path | None) -> list[Suppression]:
    """Returns the findings that a file accepts; without a name, halfstep-audit.toml if it is here."""
    if file is None:
        if not Path(ACCEPTED).exists():
            return []
        file = Path(ACCEPTED)
    try:
        text = read_bytes(file, MOST_TABLE if file.suffix == ".json" else MOST_SETTINGS).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigFileError(
            f"`{file}` cannot be read: {reason}", hint="name a TOML file with --accept"
        ) from None
    if file.suffix == ".json":
        return _known_before(text, file)
    try:
        entries = build(_File, parse_toml(text, str(file))).accept
        for each in entries:
            if not each.reason.strip():
                raise ConfigFileError(f"the entry for {each.rule} gives no reason", hint="say why it is accepted")
    except ConfigError as error:
        raise ConfigFileError(f"{file}: {error.message}", hint=error.hint) from None
    return [Suppression(each.rule.upper(), each.reason, each.names) for each in entries]


def _known_before(text: str, file: Path) -> list[Suppression]:
    """Returns what an earlier audit found, as accepted. The same finding may be at another line by now."""
    try:
        found = [Finding.from_dict(each) for each in parse_json(text)["findings"]]
    except (ValueError, TypeError, KeyError):
        raise ConfigFileError(
            f"`{file}` is not what `halfstep audit --json` prints",
            hint=f"halfstep audit --json TARGET > {file}, or name a TOML file",
        ) from None
    reason = f"it was known in {file}"
    return [
        Suppression(each.rule, reason, tuple(escape(name) for name in each.where) or _same_file(each.place))
        for each in found
    ]


def _same_file(place: str | None) -> tuple[str, ...]:
    path, _, line = (place or "").rpartition(":")
    return (f"{escape(path)}:*",) if path and line.isdigit() else (escape(place or ""),)


def fixing_policy(records: Sequence[Record], findings: Iterable[Finding]) -> tuple[Policy | None, list[str]]:
    """Returns the policy of a training with the rules that cure its findings; None if no rule cures any.

    What the preset cures by itself, such as weights without masters, needs no rule. Also returns the names of
    modules that no rule can name.
    """
    changes: dict[str, dict[str, str]] = {}
    for finding in findings:
        for glob, text in tomllib.loads(finding.policy_rule or "").items():
            changes.setdefault(glob, {}).update(item.split("=", 1) for item in text.split(","))
    base, rules, unnamed = _base(records), [], []
    for glob, roles in changes.items():
        try:
            rule = Rule.parse(glob, ",".join(f"{role}={value}" for role, value in roles.items()))
        except PolicyError:
            unnamed.append(glob)
            continue
        kept = tuple((role, value) for role, value in rule.changes if _differs(base, role, value))
        rules += [Rule(glob, kept)] if kept else []
    if len(unnamed) == len(changes):
        return None, unnamed
    return replace(base, rules=(*base.rules, *rules)), unnamed


def _differs(base: Policy, role: str, value: Value) -> bool:
    ruled = any(role == each for rule in base.rules for each, _ in rule.changes)
    return ruled or getattr(base, role) != value


def write_policy(file: Path, policy: Policy) -> None:
    """Writes a policy as TOML that `--policy FILE` and recipes read."""
    import tomli_w

    text = f"# {policy}\n{tomli_w.dumps({'policy': policy.to_table()})}"
    with os_errors(OptionError, f"`{file}` cannot be written", "name another file with --fix-policy"):
        write_whole(file, text.encode())


def _base(records: Sequence[Record]) -> Policy:
    """Returns the policy that trained, or the preset that does what was seen, as it should be done."""
    for record in records:
        if record.policy is not None:
            return Policy.parse(record.policy)
    seen = {fmt for r in records for op in r.operations for fmt in (*op.inputs, *op.outputs)}
    seen |= {weight.format for r in records for weight in r.weights}
    if "fp16" in seen or any(record.calls_of("scale") for record in records):
        return Policy.parse("fp16-mixed")
    return Policy.parse("bf16-mixed" if any(is_narrow(fmt) for fmt in seen) else "fp32")
