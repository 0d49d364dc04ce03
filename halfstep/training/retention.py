"""Which checkpoints stay: the last few, every so many steps, and the best.

    stays(step)  <=>  among the `last` newest, or step % every == 0, or the best, or protected

The best is the one with the lowest held-out loss among those that were saved at a step at which a look was taken;
its loss is in its manifest, so it is found again whoever asks. Protected is the newest one that is known to be
good (faults.py): what comes after may be worth nothing, and must not push it out. With `last` = 1 it is the one
before the newest, unless a look has shown that the newest one's weights are good.

**The good one is of the schedule.** Whoever stops a run leaves a checkpoint where none was due. A rollback goes
past it, to one that the run would have had anyway: so a run that was stopped decides as one that was not.

The newest complete checkpoint always stays, since `last` is 1 or more. What is not complete, or was not written by
this halfstep alone (another format, a pickle put beside the state), is left for its owner to look at, and counts
for nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from halfstep.config.run import TrainingConfig
from halfstep.training.arrays import CheckpointError
from halfstep.training.checkpoint import discard, is_complete, read_manifest, step_folders, step_of


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


def kept(
    steps: Iterable[int], retention: Retention, best: int | None = None, protected: int | None = None
) -> set[int]:
    """The steps whose checkpoints stay. `protected` is a step: the newest checkpoint up to it stays."""
    ordered = sorted(steps)
    stay = set(ordered[-retention.last :])
    if retention.every:
        stay |= {step for step in ordered if step % retention.every == 0}
    if retention.best and best is not None:
        stay.add(best)
    before = [step for step in ordered if protected is not None and step <= protected]
    return stay | set(before[-1:])


def prune(folder: Path, retention: Retention, good: int | None = None) -> list[Path]:
    """Removes the complete checkpoints that do not stay; returns what was removed."""
    found = complete(folder)
    best = best_step(found) if retention.best else None
    stay = kept(found, retention, best, None if good is None else good_step(found, good))
    old = [path for step, path in found.items() if step not in stay]
    for path in old:
        discard(path)
    return old


def complete(folder: Path) -> dict[int, Path]:
    """The checkpoints by their steps; one that would be refused is none."""
    return {step_of(path): path for path in step_folders(folder) if _is_ours(path)}


def _is_ours(path: Path) -> bool:
    try:
        return is_complete(path)
    except CheckpointError:
        return False


def good_step(found: Mapping[int, Path], good: int) -> int | None:
    """The newest checkpoint up to a step, of those that were due where there is one."""
    before = {step: path for step, path in found.items() if step <= good}
    return max([step for step, path in before.items() if _was_due(path)] or before, default=None)


def _was_due(path: Path) -> bool:
    """Whether the schedule of its own time asked for a checkpoint, and not somebody who stopped the run."""
    manifest = read_manifest(path)
    every = manifest.get("config", {}).get("training", {}).get("save_every", 1)
    return bool(manifest["step"] % every == 0)


def best_step(found: Mapping[int, Path]) -> int | None:
    """The step of the checkpoint with the lowest held-out loss, the earlier of two equal ones."""
    losses = {step: read_manifest(path).get("held_out") for step, path in found.items()}
    known = [(loss, step) for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)]
    return min(known)[1] if known else None


def best(folder: Path) -> Path | None:
    """The complete checkpoint with the lowest held-out loss, or None where none was looked at."""
    found = complete(folder)
    step = best_step(found)
    return None if step is None else found[step]
