"""Runs a user's training script and watches it: `halfstep audit -- python train.py ARGS`.

The command runs as it is, in this terminal. A folder on PYTHONPATH holds a `sitecustomize` that Python runs in
each process, behind whatever launcher; each that trains on torch writes one record
(halfstep.torch.instruments.collect). If the audit itself fails there, the script runs as it would have without it.
"""

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.core.audit.record import Record
from halfstep.core.errors import OptionError, TargetError, how_to_install
from halfstep.tools.audit.inject.sitecustomize import FOLDER, PACKAGE, STEPS

INJECTED = Path(__file__).parent / "inject"
HALFSTEP = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What was seen of a script, one record per process that trained; how it ended; what a reader must know."""

    records: tuple[Record, ...]
    exit_code: int
    notes: tuple[str, ...]
    failures: tuple[str, ...] = ()  # of the audit itself


def run(
    command: Sequence[str],
    steps: int = 20,
    stdout: int | None = None,
    on_words: Callable[[], None] = lambda: None,
    on_failure: Callable[[str], None] = lambda failure: None,
) -> Outcome:
    """Runs a command until each process that trains has made `steps` updates, or until it ends.

    What it prints goes to the descriptor `stdout`, by default to ours. `on_words` is called when its Python has
    printed something for the first time, `on_failure` when the audit itself has failed: the script then continues
    without it.
    """
    if not command:
        raise TargetError("there is no command to audit", hint="halfstep audit -- python train.py")
    if steps < 1:
        raise OptionError(f"an audit needs at least one update, not {steps}", hint="leave out --steps for 20")
    with tempfile.TemporaryDirectory(prefix="halfstep-audit-") as folder:
        exit_code = _run(command, _environment(folder, steps), stdout, on_words, on_failure)
        seen = [json.loads(path.read_text("utf-8")) for path in sorted(Path(folder).glob("record-*.json"))]
        left = {
            kind: [path.read_text("utf-8") for path in sorted(Path(folder).glob(f"{kind}-*.txt"))]
            for kind in ("python", "crash", "unwatched")
        }
    trained = sorted((each for each in seen if each["record"]["updates"]), key=lambda each: each["record"]["rank"])
    records = tuple(Record.from_dict(each["record"]) for each in trained)
    if exit_code == -signal.SIGINT and trained and all(each["ended"] for each in trained):
        exit_code = 0  # it trains in a thread, and was interrupted by the audit itself
    notes = [*_how_it_ended(command, steps, exit_code, trained, left)]
    if not records:
        notes.append(_why_nothing(seen, left))
    return Outcome(records, exit_code, tuple(notes), tuple(left["unwatched"]))


def _environment(folder: str, steps: int) -> dict[str, str]:
    path = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {FOLDER: folder, STEPS: str(steps), PACKAGE: str(HALFSTEP), "PYTHONPATH": os.pathsep.join(path)}
    return {**os.environ, **own}


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    stdout: int | None,
    on_words: Callable[[], None],
    on_failure: Callable[[str], None],
) -> int:
    try:
        process = subprocess.Popen(command, env=environment, stdout=stdout)
    except OSError as error:
        hint = f"python {command[0]}" if command[0].endswith(".py") else "write it as you would in a shell"
        raise TargetError(f"`{command[0]}` cannot be run: {error.strerror}", hint=hint) from None
    with process:
        try:
            spoke = failed = False
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(0.25)
                if not spoke and any(Path(environment[FOLDER]).glob("words-*")):
                    spoke = True
                    on_words()
                if not failed and (notes := [*Path(environment[FOLDER]).glob("unwatched-*.txt")]):
                    failed = True
                    on_failure(notes[0].read_text("utf-8"))
        except KeyboardInterrupt:  # the script has it too, and ends as it does on Ctrl-C
            return process.wait()


def _how_it_ended(
    command: Sequence[str], steps: int, exit_code: int, trained: list[dict[str, Any]], left: dict[str, list[str]]
) -> list[str]:
    updates = min((each["record"]["updates"] for each in trained), default=0)
    name = shlex.join(command)
    notes = []
    if exit_code:
        killed = exit_code < 0
        how = (
            f"was killed by {signal.Signals(-exit_code).name}" if killed else f"failed with exit code {exit_code}"
        )
        lines = "".join(f"\n    {line}" for line in (left["crash"] or [""])[0].splitlines())
        notes.append(f"`{name}` {how}, after {updates} updates{lines}")
    elif trained and all(each["ended"] for each in trained):
        notes.append(f"`{name}` was ended after {updates} updates; what it has written until then is real")
    elif trained:
        notes.append(f"`{name}` ended by itself, after {updates} of {steps} updates; what it has written is real")
    if len({each["record"]["updates"] for each in trained}) > 1:
        counts = ", ".join(str(each["record"]["updates"]) for each in trained)
        notes.append(f"its processes have made different numbers of updates: {counts}")
    return notes


def _why_nothing(seen: list[dict[str, Any]], left: dict[str, list[str]]) -> str:
    if left["unwatched"]:
        why = left["unwatched"][0]
        hint = f"; with its pip, {how_to_install('torch')}" if why.startswith(("ImportError", "ModuleNot")) else ""
        return f"it could not be watched, and ran as it would have: {why}{hint}"
    if any(each["record"]["losses"] for each in seen):
        return "no update was seen: backward passes ran, and no torch.optim.Optimizer was stepped"
    if seen:
        return "no update was seen: torch was imported, and no torch.optim.Optimizer was stepped"
    if left["python"]:
        return "no process imported torch: only training on torch can be watched by a command"
    return (
        "no Python was reached: a launcher that sets PYTHONPATH anew, or `python -I`, `-E` or `-S`, "
        "leaves out what the audit needs"
    )
