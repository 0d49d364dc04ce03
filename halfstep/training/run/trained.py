"""A trained model in a session that does not train: for `halfstep eval`, `sample` and `artifact`.

It comes from a run folder, a checkpoint or an artifact, and runs in the precision and on the backend of its
training or in others: weights are handed over whole, in fp32, whatever form they had in training. It needs no
lock.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from halfstep.config.run import Backend, ParallelConfig, RunConfig
from halfstep.config.schema import build
from halfstep.config.session import Session
from halfstep.core.errors import OptionError, RunFolderError
from halfstep.core.policy import Policy
from halfstep.core.state_format import Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import Loaded
from halfstep.training.run.manifest import Recorded, check_manifest
from halfstep.training.session import open_session
from halfstep.training.weights.artifact import is_artifact, load_artifact, masters

Kind = Literal["model", "ema"]
_HINT = "name a run folder, such as runs/tiny-..., a checkpoint's own, or a file that `halfstep artifact` wrote"


@dataclass(frozen=True)
class Trained:
    """A trained model in a session, and where it comes from."""

    config: RunConfig
    policy: Policy  # the session's is without what only training uses
    session: Session
    saved: Loaded  # its tensors are released; the manifest of an artifact is what it knows of its run
    weights: Kind
    state: dict[str, Stored]  # the weights as they were saved, whole and in fp32
    other_text: bool  # whether the text to hold out may be another than that of the run


def open_trained(
    place: Path,
    device: str | None = None,
    data: str | None = None,
    validation: str | None = None,
    *,
    policy: str | None = None,
    backend: Backend | None = None,
    weights: Kind | None = None,
) -> Trained:
    """Loads a run's newest checkpoint, a named one or an artifact.

    `data` is where the data moved to, and `validation` another text to hold out than the run's.
    """
    saved, config = _load(place)
    config = replace(config, parallel=ParallelConfig())  # it is read whole, by one process
    if backend is not None:
        config = replace(config, backend=backend)
    named: dict[str, Any] = {"source": data, "validation": validation}
    named = {setting: each for setting, each in named.items() if each is not None}
    config = replace(config, data=replace(config.data, **named))
    kind = _kind(saved, config, weights)
    averaged = kind == "ema" and "weights" not in saved.manifest
    state = {
        f"model.{name}": Stored("F32", value.shape, value.tobytes())
        for name, value in masters(saved.arrays, config.model, averaged=averaged)
    }
    saved.arrays.clear()
    asked = Policy.parse(saved.manifest["policy"] if policy is None else policy)
    session = open_session(config, asked, device, train=False)
    session.load_weights(state)
    return Trained(config, asked, session, saved, kind, state, other_text=validation is not None)


def _load(place: Path) -> tuple[Loaded, RunConfig]:
    if is_artifact(place):
        saved = load_artifact(place)
        return saved, build(RunConfig, saved.manifest["config"])
    if not place.is_dir():
        what = (
            f"`{place}` is a file, but not an artifact"
            if place.exists()
            else f"there is no such folder: `{place}`"
        )
        raise RunFolderError(what, hint=_HINT)
    found = checkpoint.load_named(place)
    if found is None:
        inside = checkpoint.step_folders(place)
        hint = f"name one of those inside, such as `{inside[-1]}`" if inside else _HINT
        raise RunFolderError(f"`{place}` holds no checkpoint{' itself' if inside else ''}", hint=hint)
    return found, check_manifest(found.manifest, found.path, Recorded)


def _kind(saved: Loaded, config: RunConfig, asked: Kind | None) -> Kind:
    """Returns which weights to take: the average, if it was kept, unless others were asked for."""
    only: Kind | None = saved.manifest.get("weights")  # an artifact holds one of the two
    if only is not None and asked not in (None, only):
        raise OptionError(
            f"--weights {asked}: the artifact `{saved.path}` was made of its run's {only} weights",
            hint=f"name the run itself, or make another with `halfstep artifact RUN --weights {asked}`",
        )
    if asked == "ema" and not config.training.ema:
        raise OptionError(
            f"--weights ema: the run of `{saved.path}` kept no average of its weights",
            hint="use --weights model; `training.ema = 0.999` keeps one while training",
        )
    return only or asked or ("ema" if config.training.ema else "model")
