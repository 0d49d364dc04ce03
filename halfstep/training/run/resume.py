"""How a run begins: in a folder of its own, or where the newest checkpoint of the run in a folder left it.

That it is the same run, under the same policy and with the same data, is checked here, before a step is taken. The
folder is locked from then on (lock.py); who is refused lets go of it.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.config.run import RunConfig
from halfstep.core.choice import Choice
from halfstep.core.policy import Policy
from halfstep.training import paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.arrays import held
from halfstep.training.data.batches import Batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.files import RunLock
from halfstep.training.run import folder
from halfstep.training.run.health import Health
from halfstep.training.run.manifest import changes, check_manifest, describe_data, describe_run
from halfstep.training.session import Session


@dataclass
class Subject:
    """What is trained, and by what: all that a manifest says of a run but where it stands."""

    config: RunConfig
    policy: Policy
    corpus: Corpus
    batches: Batches
    session: Session
    health: Health
    choice: Choice | None  # the measurement behind the policy, where there was one
    origin: dict[str, Any] | None  # of the first weights, where they were not drawn

    def describe(self, step: int, held_out: float | None) -> dict[str, Any]:
        """What the manifest of a checkpoint says."""
        return {
            **describe_run(self.config, self.policy, self.choice, self.origin, self.session),
            "data": describe_data(self.corpus, self.batches, step, self.health.shift),
            "held_out": held_out,
            "guard": self.health.state(),
        }

    def resolved(self) -> RunConfig:
        """The configuration with the policy that runs in place of `auto`."""
        return dataclasses.replace(self.config, policy=str(self.policy))


@dataclass(frozen=True)
class Begun:
    """Where a run starts."""

    lock: RunLock
    step: int
    owes_look: bool  # whether the look at the step that it goes on from was broken off
    warnings: tuple[str, ...]


def open_run(subject: Subject, out: Path, *, resume: bool, allow_older: bool) -> Begun:
    """Makes or reopens the folder of a run, and locks it."""
    lock = folder.lock(out, new=not resume)
    warnings = [lock.warning] if lock.warning else []
    step, owes_look = 0, False
    try:
        if resume:
            step, owes_look = _go_on(subject, out, allow_older, warnings)
        else:
            folder.create(out, subject.resolved())
    except BaseException:
        lock.release()
        raise
    return Begun(lock, step, owes_look, tuple(warnings))


def _go_on(subject: Subject, out: Path, allow_older: bool, warnings: list[str]) -> tuple[int, bool]:
    """Takes over the newest checkpoint; its step, and whether a look at it is owed."""
    config = subject.config
    folder.check_same_run(out, config)
    found = checkpoint.load_latest(out / paths.CHECKPOINTS, allow_older=allow_older)
    if found is None:
        folder.check_not_lost(out, allow_older=allow_older)
        warnings.append(f"`{out}` holds no checkpoint yet: the run begins again with its first step")
        folder.rewrite(out, subject.resolved())
        return 0, False
    arrays, manifest, passed = found
    step = int(manifest["step"])
    warnings += [f"{e.message}; it was set aside, and the run goes on after step {step}" for e in passed]
    saved = out / paths.CHECKPOINTS / f"step-{step:06d}"
    check_manifest(manifest, saved, subject.policy, subject.corpus)
    folder.check_same_settings(saved, manifest["config"], config)
    subject.batches.check_position(manifest["data"]["position"])
    subject.session.load(held(arrays))
    subject.health.load(manifest["guard"])
    if subject.choice is None and manifest["choice"] is not None:
        subject.choice = Choice(**manifest["choice"])
    subject.origin = manifest.get("init")
    warnings += changes(manifest, subject.describe(step, None))
    folder.rewrite(out, subject.resolved())
    return step, manifest.get("held_out") is None and step % config.training.validate_every == 0
