"""`halfstep audit`: which rules of mixed precision a training breaks, where, by which numbers, and what to do."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from halfstep.cli.arguments import Flag, Json
from halfstep.cli.output import STDERR, print_json, print_table, print_words, rest
from halfstep.core.errors import OptionError, TargetError, as_message

if TYPE_CHECKING:
    from halfstep.core.audit.finding import Finding
    from halfstep.tools.audit.targets import Collected

STEPS = 20
Channel = Literal["text", "json", "sarif", "github", "junit"]
Ids = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


def audit(
    *target: str,
    steps: int | None = None,
    select: Ids = (),
    ignore: Ids = (),
    before: str | None = None,
    accept: Path | None = None,
    fix_policy: Path | None = None,
    rules: Flag = False,
    explain: str | None = None,
    channel: Annotated[Channel, Parameter(name="--format")] = "text",
    json: Json = False,
) -> int:
    """Find what is wrong with the precision of a training: your own script, a run, a checkpoint, a model.

    `halfstep audit -- python train.py ARGS` runs a script for some updates and watches it; nothing in it has to
    change, and its numbers stay the same. What it writes is written. Otherwise the target is a run folder, a
    checkpoint, a recipe, or module:factory, a function that returns model, optimizer or model, optimizer, loss_fn,
    batch. The exit code is 1 if there are errors or warnings; notes alone leave it at 0.

    Parameters
    ----------
    target
        A folder, a file, a recipe or module:factory; or, after `--`, the command to run.
    steps
        How many updates to watch, of a script or of a factory's model; by default 20.
    select
        Check only these rules: ids such as HS101, or their beginnings, such as HS1. May be repeated, or separated
        by commas.
    ignore
        Leave these rules out.
    before
        An older file or folder of the same model: then it is known what training changed.
    accept
        A file of findings that are accepted, each with its reason; by default halfstep-audit.toml, if it is here.
        Or what `--json` printed earlier: then only new findings fail.
    fix_policy
        Write a policy with the rules that cure what rules can cure, for `halfstep train --policy FILE`.
    rules
        List all rules.
    explain
        Say what a rule is, what it costs and what to do.
    channel
        Where the findings go: to people, to programs, to code scanning (SARIF 2.1.0), to annotations of GitHub's
        workflows, or to a test report. `--json` is short for `--format json`.
    """
    if json and channel not in ("text", "json"):
        raise OptionError(f"--json and --format {channel} name two formats", hint="leave one of them out")
    channel = "json" if json else channel
    from halfstep.core.audit.engine import check, check_each, chosen_rules, group
    from halfstep.tools.audit.settings import read_accepted

    select, ignore = _split(select), _split(ignore)
    if rules or explain is not None:
        return _print_rules((explain,) if explain else select, ignore, json=channel == "json", whole=bool(explain))
    if not target:
        raise TargetError(
            "`halfstep audit` needs a target",
            hint="a script (`halfstep audit -- python train.py`), a run folder, a checkpoint, a recipe or "
            "module:factory",
        )
    if steps is not None and steps < 1:
        raise OptionError(
            f"--steps {steps}: at least 1 update must be watched", hint="20 show most of what goes wrong"
        )
    accepted = read_accepted(accept)
    check([], select, ignore, accepted)  # a typo is refused before a script runs
    collected, code = _collect(target, steps, before, apart=channel != "text")
    every = check_each(collected.records, select, ignore)
    chosen = chosen_rules(select, ignore)
    # What a run counted by itself while it trained stands in place of what formats alone make likely.
    own = [each for each in collected.findings if each.rule in chosen]
    counted = {each.rule for each in own}
    seen = [each for each in every if each.confidence != "likely" or each.rule not in counted]
    every = [*{each.key: each for each in [*own, *seen]}.values()]
    judged = [each for each in every if any(rule.covers(each) for rule in accepted)]
    found, judged = group(each for each in every if each not in judged), group(judged)
    if channel == "text":
        _print(target, collected, found, len(judged))
    else:
        _print_for_machines(channel, target, collected, found, len(judged), complete=code == 0)
    if fix_policy is not None:
        _write_policy(fix_policy, collected, found)
    return 1 if any(each.severity != "note" for each in found) else code


def _split(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(part.strip() for name in names for part in name.split(","))


def _collect(
    target: Sequence[str], steps: int | None, before: str | None, *, apart: bool
) -> "tuple[Collected, int]":
    """Returns what was seen, and 2 if a script could not be watched."""
    from halfstep.tools.audit.targets import Collected, collect

    is_command = len(target) > 1 or (os.path.isfile(target[0]) and os.access(target[0], os.X_OK))
    if not is_command:
        collected = collect(target[0], steps or STEPS, before)
        if steps is not None and collected.records[0].source in ("run", "checkpoint", "recipe"):
            raise OptionError(
                f"--steps {steps} changes nothing: nothing is run to audit `{target[0]}`", hint="leave it out"
            )
        return collected, 0
    from halfstep.tools.audit import script

    if before is not None:
        raise OptionError(f"--before {before} is about files, and a command runs", hint="leave it out")
    print_words(f"watching {steps or STEPS} updates of `{shlex.join(target)}`")
    # What the script prints must not be among our data. From its first words on, it speaks for itself.
    outcome = script.run(
        target, steps or STEPS, stdout=STDERR if apart else None, on_words=rest, on_failure=_tell_failure
    )
    collected = Collected([*outcome.records])
    print_words(*(line for note in outcome.notes for line in note.splitlines()))
    complete = outcome.exit_code == 0 and outcome.records and not outcome.failures
    return collected, 0 if complete else 2


def _tell_failure(failure: str) -> None:
    print_words(f"the audit itself failed: {failure}", "the script continues without it")


def _print_for_machines(
    channel: Channel,
    target: Sequence[str],
    collected: "Collected",
    found: "list[Finding]",
    accepted: int,
    *,
    complete: bool,
) -> None:
    from halfstep.tools.audit.channels import github, junit, sarif
    from halfstep.tools.audit.fixes import edit_of

    if channel == "sarif":
        print_json(sarif(found, complete=complete, unseen=collected.unseen))
    elif channel == "github":
        print(*github(found), sep="\n", end="\n" if found else "")
    elif channel == "junit":
        print(junit(found, " ".join(target)))
    else:
        edits = [edit_of(each) for each in found]
        data = {
            "target": list(target),
            "findings": [
                each.to_dict() | {"edit": edit and edit.to_dict()} for each, edit in zip(found, edits, strict=True)
            ],
            "accepted": accepted,
            "unseen": collected.unseen,
            "updates": max((record.updates for record in collected.records), default=0),
            "complete": complete,
        }
        print_json(data)


def _print(target: Sequence[str], collected: "Collected", found: "list[Finding]", accepted: int) -> None:
    from halfstep.core.audit.engine import registry

    groups: dict[str, list[Finding]] = {}
    for each in found:
        groups.setdefault(each.rule, []).append(each)
    for id, group in groups.items():
        rule = registry()[id]
        print(f"{id} {group[0].severity}: {rule.name}")
        for each in group:
            place = f"{each.place}: " if each.place and each.place not in each.message else ""
            sure = "" if each.confidence == "certain" else f" ({each.confidence})"
            named = f" [rank{'s' * (len(each.ranks) > 1)} {', '.join(map(str, each.ranks))}]"
            ranks = named if each.ranks and len(collected.records) > 1 else ""
            print(as_message(f"  {place}{each.message}{sure}{ranks}"))
        print(as_message(f"  fix: {group[0].fix}"))
        print(f"  see {rule.page}\n")
    for text in collected.unseen:
        print_words(f"not seen: {text}")
    counts = {s: sum(each.severity == s for each in found) for s in ("error", "warning", "note")}
    clean = "nothing is wrong" if collected.records else "nothing was seen, so nothing can be said"
    said = ", ".join(f"{n} {s}{'s' if n != 1 else ''}" for s, n in counts.items() if n) or clean
    said += f", {accepted} accepted" if accepted else ""
    updates = max((record.updates for record in collected.records), default=0)
    watched = f" ({updates} updates watched)" if updates else ""
    print_words(f"{' '.join(target)}: {said}{watched}")


def _print_rules(select: Sequence[str], ignore: Sequence[str], *, json: bool, whole: bool = False) -> int:
    from halfstep.core.audit.engine import chosen_rules, registry

    chosen = [registry()[id] for id in chosen_rules(select, ignore)]
    if json:
        keys = ("id", "name", "severity", "what", "why", "fix", "page")
        print_json([{key: getattr(rule, key) for key in keys} for rule in chosen])
    elif whole:
        for rule in chosen:
            print(f"{rule.id} {rule.severity}: {rule.name}")
            words = {"what": rule.what, "why": rule.why, "evidence": rule.shows, "fix": rule.fix}
            print(*(f"  {key}: {text}" for key, text in words.items()), sep="\n")
            print(f"  seen in: {rule.needs or 'anything'}\n  see {rule.page}")
    else:
        print_table(("id", "severity", "rule", "what"), [(r.id, r.severity, r.name, r.what) for r in chosen])
    return 0


def _write_policy(file: Path, collected: "Collected", found: "list[Finding]") -> None:
    from halfstep.tools.audit.settings import fixing_policy, write_policy

    policy, unnamed = fixing_policy(collected.records, found)
    if unnamed:
        print_words(f"no rule of a policy can name {', '.join(f'`{name}`' for name in unnamed)}")
    if policy is None:
        print_words(f"no finding is cured by a rule of a policy: `{file}` is not written")
        return
    write_policy(file, policy)
    print_words(f"wrote `{file}`: {policy}")
