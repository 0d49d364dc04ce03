"""Beginning a run and resuming it.

create_run                a new run: its folder, locked, with its configuration
open_run(out)             locks the folder, reads it into facts (folder.RunFacts), decides, and opens:
                          -> Opened, checked to be the same run; a refusal unlocks
  Opened.restore(context) checks the data, puts the checkpoint into the session, and records what was changed
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from halfstep.config.load import override, setting_named
from halfstep.config.run import RunConfig
from halfstep.config.schema import build
from halfstep.core.choice import Choice
from halfstep.core.errors import RunFolderError
from halfstep.core.policy import read
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import Damaged, Loaded
from halfstep.training.checkpoints.tensors import DamagedCheckpointError
from halfstep.training.files import NoLock, RunLock, make_folder, os_errors
from halfstep.training.paths import CHECKPOINTS, EVENTS
from halfstep.training.run import folder, settings
from halfstep.training.run.folder import RunFacts, read_facts
from halfstep.training.run.manifest import (
    RunContext,
    check_manifest,
    check_same_data,
    describe_changes,
    describe_other_bits,
    how_compiled,
)
from halfstep.training.telemetry.events import check_writable


@dataclass
class Opened:
    """A run that this process holds, to resume it."""

    out: Path
    lock: RunLock
    config: RunConfig  # the settings to resume with
    written: RunConfig  # those in run.toml
    saved: Loaded | None  # the newest checkpoint; None if the run died before its first
    has_ended: bool  # whether its record says that it finished
    warnings: list[str]

    @property
    def step(self) -> int:
        """How many steps its checkpoint has made."""
        return 0 if self.saved is None else int(self.saved.manifest["step"])

    @property
    def policy(self) -> str:
        """The precision that the run began with, or has since; a checkpoint may not know it yet."""
        named = read(self.written.policy).base != "auto"
        return self.written.policy if named or self.saved is None else settings.first_policy(self.saved.manifest)

    def restore(self, context: RunContext) -> int:
        """Puts the checkpoint into a session and releases its tensors; returns its step. Updates run.toml."""
        saved, step = self.saved, self.step
        if saved is not None:
            check_same_data(saved.manifest, saved.path, context)
            context.batches.check_position(saved.manifest["data"]["position"])
            changed = context.load(saved)
            saved.arrays.clear()
            context.health.load(saved.manifest["guard"])
            self.warnings += describe_changes(saved.manifest, changed, context)
            if context.choice is None and saved.manifest["choice"] is not None and "policy" not in changed:
                context.choice = build(Choice, saved.manifest["choice"], others=True)
            context.origin = saved.manifest.get("init")
            self.warnings += describe_other_bits(saved.manifest, context.describe(step, None))
        follows = isinstance(self.lock, NoLock)
        if not follows and context.resolved() != self.written:  # a full disk stops no run whose settings are same
            folder.write_config(self.out, context.resolved(), "free space; or resume with the settings unchanged")
        return step

    def is_evaluation_pending(self) -> bool:
        """Whether the evaluation of the step to resume from was interrupted."""
        manifest = {} if self.saved is None else self.saved.manifest
        every = self.config.training.validate_every
        return bool(manifest) and manifest.get("held_out") is None and manifest["step"] % every == 0


def follow_run(out: Path, config: RunConfig, newest: str | None, policy: str) -> Opened:
    """Opens a run that rank 0 has opened, for another rank: with its settings, from the same checkpoint."""
    saved = None if newest is None else Loaded(Path(newest), {}, checkpoint.read_manifest(Path(newest)))
    has_ended = folder.read_record(out).has_ended
    return Opened(out, NoLock(), config, replace(config, policy=policy), saved, has_ended, [])


def create_run(out: Path, config: RunConfig) -> RunLock:
    """Makes the folder of a new run, locks it, and writes its configuration."""
    with os_errors(RunFolderError, f"`{out}` cannot be written", "name another folder with --out"):
        make_folder(out)
        lock = RunLock(out)
    try:
        folder.check_empty(out)
        folder.check_apart(out, config.data)
        folder.write_config(out, config, "name another folder with --out")
    except BaseException:
        lock.release()
        raise
    return lock


def open_run(
    out: Path,
    config: RunConfig | None = None,
    *,
    overrides: Sequence[str] = (),
    allow_older: bool = False,
    later: bool = False,
) -> Opened:
    """Opens a run to resume it with `config`, or with its own settings and `overrides`.

    `overrides` are what was named on the command line; `config` has them already. `later`: its checkpoint is only
    verified now, and each process reads the rows that it needs once it has a session.
    """
    if not folder.has_config(out) and not checkpoint.step_folders(out / CHECKPOINTS):
        raise folder.not_a_run(out)
    with os_errors(RunFolderError, f"`{out}` cannot be written", "change its permissions"):
        lock = RunLock(out)
    try:
        check_writable(out / EVENTS)
        damaged: Damaged = {}
        while True:
            facts = read_facts(out, damaged, allow_older=allow_older)
            decision = decide(facts, config, overrides, allow_older=allow_older)
            try:
                saved = _load(facts, later=later)
                break
            except DamagedCheckpointError as error:
                if not allow_older or facts.checkpoint is None:
                    raise
                damaged[facts.checkpoint] = error
        for bad in damaged:
            checkpoint.set_aside(bad)
        if facts.written is None:
            folder.write_config(out, decision.written, "change its permissions, or free space")
        then = f"it was set aside, and the run resumes after step {saved.manifest['step']}" if saved else ""
        warnings = [lock.warning] if lock.warning else []
        warnings += [*decision.warnings, *(f"{error.message}; {then}" for error in damaged.values())]
        return Opened(out, lock, decision.config, decision.written, saved, facts.record.has_ended, warnings)
    except BaseException:
        lock.release()
        raise


class Decision(NamedTuple):
    """How a run resumes."""

    config: RunConfig  # the settings to resume with
    written: RunConfig  # those of run.toml, or of the checkpoint if run.toml is lost
    warnings: list[str]


def decide(
    facts: RunFacts, config: RunConfig | None, overrides: Sequence[str], *, allow_older: bool = False
) -> Decision:
    """Decides how a run resumes, or refuses it. Takes all it needs from the facts."""
    out, manifest, warnings = facts.out, facts.manifest, list[str]()
    recorded = None
    if manifest is not None and facts.checkpoint is not None:
        recorded = check_manifest(manifest, facts.checkpoint)
    if facts.written is not None:
        written = facts.written
    elif manifest is not None and recorded is not None:
        written = replace(recorded, policy=settings.first_policy(manifest))
        warnings.append(f"`{out}` had no run.toml: it was restored from `{facts.checkpoint}`")
    else:
        raise folder.not_a_run(out)
    config = settings.with_origin(written, override(written, overrides) if config is None else config)
    older = manifest is not None and "compiled" not in manifest and how_compiled(manifest) == "whole"
    if older and config.training.compile is True and config.backend == "torch":
        config = replace(config, training=replace(config.training, compile="whole"))
    settings.check_same_run(out, written, config, {setting_named(each) for each in overrides})
    if not facts.is_writable:
        raise RunFolderError(f"`{out}` cannot be written", hint="change its permissions")
    if manifest is None or facts.checkpoint is None:
        check_not_lost(facts, allow_older=allow_older)
        warnings.append(f"`{out}` has no checkpoint yet: the run starts over from its first step")
    else:
        settings.check_same_settings(out, facts.checkpoint, manifest, config)
        settings.check_not_finished(out, manifest, config, has_ended=facts.record.has_ended)
        settings.check_policy_runs(out, manifest, config)
    return Decision(config, written, warnings)


def check_not_lost(facts: RunFacts, *, allow_older: bool) -> None:
    """Refuses to start a run over whose checkpoints are gone: their disk may not be mounted."""
    where, step = facts.out / CHECKPOINTS, facts.record.last_saved
    if facts.dangling is not None:
        raise RunFolderError(
            f"`{where}` is a link to `{facts.dangling}`, which is not there",
            hint="mount the disk; or remove the link, if what it held is gone",
        )
    if step is not None and not allow_older:
        again = settings.train_command("--resume", "--allow-older", "--out", facts.out)
        raise RunFolderError(
            f"`{where}` holds no checkpoint, and the record of the run says that step {step} was saved there",
            hint=f"mount the disk, or put them back; {again} starts over at step 0",
        )


def _load(facts: RunFacts, *, later: bool) -> Loaded | None:
    """Reads the checkpoint of the facts and verifies it; `later`, its tensors are not kept."""
    if facts.checkpoint is None or facts.manifest is None:
        return None
    if later:
        checkpoint.verify(facts.checkpoint, facts.manifest)
        return Loaded(facts.checkpoint, {}, facts.manifest)
    return Loaded(facts.checkpoint, *checkpoint.load(facts.checkpoint, manifest=facts.manifest))
