"""Which checkpoints are kept: the last few, every so many steps, and the best.

    kept(step)  <=>  the newest, among the `last` that were due, step % every == 0, the best, or protected

The best has the lowest held-out loss, which its manifest holds. Protected is the newest one known to be good
(health.py): what comes after may be worthless, and must not push it out. Stopping a run leaves a checkpoint that
was not due: it is not rolled back to, and not one of the `last`, so a stopped run keeps what an uninterrupted one
keeps. What is incomplete, or not written by this halfstep alone, is left for its owner to examine, and does not
count.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfstep.config.run import TrainingConfig
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """What the settings `training.keep_*` ask for."""

    last: int = 2
    every: int = 0  # 0 is none
    best: bool = False


def warn_of_keep_best(training: TrainingConfig) -> list[str]:
    """Returns a warning if `keep_best` has no choice: no step before the last is both saved and evaluated."""
    both = math.lcm(training.save_every, training.validate_every)
    if not training.keep_best or both < training.steps or training.save_every >= training.steps:
        return []
    return [
        f"training.keep_best keeps the last checkpoint alone: it is saved every {training.save_every} steps and "
        f"evaluated every {training.validate_every}, which first meet at step {both}; make one a multiple of the "
        "other"
    ]


@dataclass(frozen=True)
class Seen:
    """A complete checkpoint, and what decides whether it is kept."""

    path: Path
    due: bool  # the schedule of its time asked for it, not somebody who stopped the run
    held_out: float | None


def survey(folder: Path) -> dict[int, Seen]:
    """Returns the complete checkpoints by step."""
    seen = {}
    for path in checkpoint.step_folders(folder):
        try:
            manifest = checkpoint.check_complete(path)
        except (CheckpointError, OSError):
            continue
        step, loss = manifest["step"], manifest.get("held_out")
        training = manifest.get("config", {}).get("training", {})
        due = step % training.get("save_every", 1) == 0 or step == training.get("steps")
        known = loss if isinstance(loss, float) and math.isfinite(loss) else None
        seen[checkpoint.step_of(path)] = Seen(path, due, known)
    return seen


def kept(
    steps: Iterable[int],
    retention: Retention,
    best: int | None = None,
    protected: int | None = None,
    undue: Collection[int] = (),
) -> set[int]:
    """Returns the steps whose checkpoints stay; the newest up to step `protected` is one of them."""
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
    """Removes the complete checkpoints that are not kept; returns them."""
    seen = survey(folder)
    best = best_step(seen) if retention.best else None
    protected = None if good is None else good_step(seen, good)
    stay = kept(seen, retention, best, protected, [step for step, one in seen.items() if not one.due])
    old = [one.path for step, one in seen.items() if step not in stay]
    for path in old:
        checkpoint.discard(path)
    return old


def due_step(seen: Mapping[int, Seen], good: int) -> int | None:
    """Returns the newest checkpoint up to a step that was due: the one to roll back to."""
    return max((step for step, one in seen.items() if step <= good and one.due), default=None)


def good_step(seen: Mapping[int, Seen], good: int) -> int | None:
    """Returns the same, or if none was due, the newest one."""
    due = due_step(seen, good)
    return max((step for step in seen if step <= good), default=None) if due is None else due


def best_step(seen: Mapping[int, Seen]) -> int | None:
    """Returns the step with the lowest held-out loss, the earlier of two equal ones."""
    known = [(one.held_out, step) for step, one in seen.items() if one.held_out is not None]
    return min(known)[1] if known else None
