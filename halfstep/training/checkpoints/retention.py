"""Which checkpoints stay: the last few, every so many steps, and the best.

    stays(step)  <=>  the newest, among the `last` that were due, step % every == 0, the best, or protected

The best is the one with the lowest held-out loss among those that were saved at a step at which a look was taken;
its loss is in its manifest, so it is found again whoever asks. Protected is the newest one that is known to be
good (health.py): what comes after may be worth nothing, and must not push it out. With `last` = 1 it is the one
before the newest, unless a look has shown that the newest one's weights are good.

**Stops change nothing.** Whoever stops a run leaves a checkpoint where none was due. It is no rollback's goal, and
not one of the `last`: it stays until there is a newer one. So a run that was stopped has what another has.

The newest complete checkpoint always stays, since `last` is 1 or more. What is not complete, or was not written by
this halfstep alone (another format, a pickle put beside the state), is left for its owner to look at, and counts
for nothing.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from halfstep.config.run import TrainingConfig
from halfstep.training.checkpoints.arrays import CheckpointError
from halfstep.training.checkpoints.checkpoint import check_complete, discard, step_folders, step_of


@final
@dataclass(frozen=True)
class Retention:
    """What the settings `training.keep_*` ask for."""

    last: int = 2
    every: int = 0  # 0 is none
    best: bool = False

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise ValueError(f"retention must keep 1 checkpoint or more, not {self.last}, every {self.every}")


def unseen(training: TrainingConfig) -> list[str]:
    """A warning where `keep_best` has no choice: no step before the last is both saved and looked at."""
    both = math.lcm(training.save_every, training.validate_every)
    if not training.keep_best or both < training.steps or training.save_every >= training.steps:
        return []
    return [
        f"training.keep_best keeps the last checkpoint alone: it is saved every {training.save_every} steps and "
        f"looked at every {training.validate_every}, which first meet at step {both}; make one a multiple of the "
        "other"
    ]


@final
@dataclass(frozen=True)
class Seen:
    """A complete checkpoint, and what its manifest says that decides whether it stays."""

    path: Path
    due: bool  # the schedule of its own time asked for it, and not somebody who stopped the run
    held_out: float | None


def survey(folder: Path) -> dict[int, Seen]:
    """The checkpoints by their steps; one that would be refused is none."""
    found = {}
    for path in step_folders(folder):
        try:
            manifest = check_complete(path)
        except (CheckpointError, OSError):
            continue
        step, loss = manifest["step"], manifest.get("held_out")
        training = manifest.get("config", {}).get("training", {})
        due = step % training.get("save_every", 1) == 0 or step == training.get("steps")
        known = loss if isinstance(loss, float) and math.isfinite(loss) else None
        found[step_of(path)] = Seen(path, due, known)
    return found


def kept(
    steps: Iterable[int],
    retention: Retention,
    best: int | None = None,
    protected: int | None = None,
    undue: Collection[int] = (),
) -> set[int]:
    """The steps whose checkpoints stay. `protected` is a step: the newest checkpoint up to it stays."""
    ordered = sorted(steps)
    due = [step for step in ordered if step not in undue]
    stay = set(due[-retention.last :]) | set(ordered[-1:])
    if retention.every:
        stay |= {step for step in ordered if step % retention.every == 0}
    if retention.best and best is not None:
        stay.add(best)
    before = [step for step in ordered if protected is not None and step <= protected]
    return stay | set(before[-1:])


def prune(folder: Path, retention: Retention, good: int | None = None) -> list[Path]:
    """Removes the complete checkpoints that do not stay; returns what was removed."""
    found = survey(folder)
    best = best_step(found) if retention.best else None
    protected = None if good is None else good_step(found, good)
    stay = kept(found, retention, best, protected, [step for step, seen in found.items() if not seen.due])
    old = [seen.path for step, seen in found.items() if step not in stay]
    for path in old:
        discard(path)
    return old


def due_step(found: Mapping[int, Seen], good: int) -> int | None:
    """The newest checkpoint up to a step of those that were due: what a rollback goes to."""
    return max((step for step, seen in found.items() if step <= good and seen.due), default=None)


def good_step(found: Mapping[int, Seen], good: int) -> int | None:
    """The same, or where none was due, the newest that there is."""
    due = due_step(found, good)
    return max((step for step in found if step <= good), default=None) if due is None else due


def best_step(found: Mapping[int, Seen]) -> int | None:
    """The step of the checkpoint with the lowest held-out loss, the earlier of two equal ones."""
    known = [(seen.held_out, step) for step, seen in found.items() if seen.held_out is not None]
    return min(known)[1] if known else None
