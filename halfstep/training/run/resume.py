"""Beginning a run and resuming it.

create_run                a new run: its folder, locked, with its configuration
open_run(out)             lock, run.toml, checkpoint -> Opened, checked to be the same run; refusing unlocks
  Opened.restore(context) checks the data, puts the checkpoint into the session, and records what was changed
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.config.load import override, setting_named
from halfstep.config.run import RunConfig
from halfstep.config.schema import build
from halfstep.core.choice import Choice
from halfstep.core.errors import ConfigError
from halfstep.core.policy import read
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import Loaded
from halfstep.training.files import NoLock, RunLock, make_folder, os_errors
from halfstep.training.paths import CHECKPOINTS, EVENTS
from halfstep.training.run import folder
from halfstep.training.run.manifest import (
    RunContext,
    changes,
    check_manifest,
    check_same_data,
    describe_changes,
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
    warnings: list[str]

    @property
    def step(self) -> int:
        """How many steps its checkpoint has made."""
        return 0 if self.saved is None else int(self.saved.manifest["step"])

    @property
    def policy(self) -> str:
        """The precision that the run began with, or has since; a checkpoint may not know it yet."""
        named = read(self.written.policy).base != "auto"
        return self.written.policy if named or self.saved is None else folder.first_policy(self.saved.manifest)

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
            self.warnings += changes(saved.manifest, context.describe(step, None))
        follows = isinstance(self.lock, NoLock)
        if not follows and context.resolved() != self.written:  # a full disk stops no run whose settings are same
            folder.write_config(self.out, context.resolved(), "free space; or resume with the settings unchanged")
        return step

    def owes_evaluation(self) -> bool:
        """Whether the evaluation of the step to resume from was interrupted."""
        manifest = {} if self.saved is None else self.saved.manifest
        every = self.config.training.validate_every
        return bool(manifest) and manifest.get("held_out") is None and manifest["step"] % every == 0


def follow_run(out: Path, config: RunConfig, newest: str | None, policy: str) -> Opened:
    """Opens a run that rank 0 has opened, for another rank: with its settings, from the same checkpoint."""
    saved = None if newest is None else Loaded(Path(newest), {}, checkpoint.read_manifest(Path(newest)))
    return Opened(out, NoLock(), config, replace(config, policy=policy), saved, [])


def create_run(out: Path, config: RunConfig) -> RunLock:
    """Makes the folder of a new run, locks it, and writes its configuration."""
    with os_errors(ConfigError, f"`{out}` cannot be written", "name another folder with --out"):
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
    read = checkpoint.verified if later else checkpoint.load
    if not folder.has_config(out) and not checkpoint.step_folders(out / CHECKPOINTS):
        raise folder.not_a_run(out)
    with os_errors(ConfigError, f"`{out}` cannot be written", "change its permissions"):
        lock = RunLock(out)
    try:
        check_writable(out / EVENTS)
        warnings = [lock.warning] if lock.warning else []
        saved = None
        if folder.has_config(out):
            written = folder.read_config(out)
        else:
            saved = checkpoint.load_newest(out / CHECKPOINTS, allow_older=allow_older, read=read)
            if saved is None:
                raise folder.not_a_run(out)
            recorded = check_manifest(saved.manifest, saved.path)
            written = folder.restore_config(out, replace(recorded, policy=folder.first_policy(saved.manifest)))
            warnings.append(f"`{out}` had no run.toml: it was restored from `{saved.path}`")
        config = folder.with_origin(written, override(written, overrides) if config is None else config)
        folder.check_same_run(out, written, config, {setting_named(each) for each in overrides})
        saved = saved or checkpoint.load_newest(out / CHECKPOINTS, allow_older=allow_older, read=read)
        if saved is None:
            folder.check_not_lost(out, allow_older=allow_older)
            warnings.append(f"`{out}` has no checkpoint yet: the run starts over from its first step")
        else:
            then = f"it was set aside, and the run resumes after step {saved.manifest['step']}"
            warnings += [f"{error.message}; {then}" for error in saved.damaged]
            check_manifest(saved.manifest, saved.path)
            folder.check_same_settings(out, saved.path, saved.manifest, config)
            folder.check_not_finished(out, saved.manifest, config)
            folder.check_policy_runs(out, saved.manifest, config)
        return Opened(out, lock, config, written, saved, warnings)
    except BaseException:
        lock.release()
        raise
