"""What a checkpoint says of the run that wrote it, and whether a run may go on from it.

The manifest holds, beside the digests of files.py:

    policy, choice       the precision that ran, and the measurement behind it where it was chosen
    device, versions     what computed it; `threads` of a CPU, where sums hang on their number
    config, init         the settings, and where the first weights came from
    data                 identity of the data, position in it, and how much of it rollbacks left out
    random               every random state there is, and what is drawn without one
    aliases              tensors that are saved once under another name: tied weights
    held_out             the loss of a look at this very step, or null
    guard                which step was good, and the memory of the spike rule (health.py)

Formats of tensors are in the manifest's own table, and the scaler's state is among the tensors (core.stored).
"""

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfstep import __version__
from halfstep.config.run import RunConfig
from halfstep.core.choice import Choice
from halfstep.core.devices import Device
from halfstep.core.errors import ConfigError
from halfstep.core.policy import Policy
from halfstep.training.data.batches import Batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.evaluation import bigram_of
from halfstep.training.session import Session, backend_version

# Settings that a run may change when it goes on, and that other bits come of: sums are taken in another order.
_SWITCHES = ("compile", "recompute_blocks", "batch", "micro_batches")
# The tables of a manifest that are read here and elsewhere, and what they must hold.
_TABLES = {
    "config": (),
    "versions": (),
    "choice": ("preset", "reason"),
    "data": ("digest", "description", "position"),
    "guard": ("good", "in_a_row", "shift", "went_back", "spikes"),
}


def describe_run(
    config: RunConfig, policy: Policy, choice: Choice | None, origin: Mapping[str, Any] | None, session: Session
) -> dict[str, Any]:
    """What does not change from one checkpoint to the next."""
    return {
        "policy": str(policy),
        "choice": told_choice(choice),
        "device": session.description.name,
        "threads": session.threads,
        "config": dataclasses.asdict(config),
        "init": origin,
        "aliases": {"model.lm_head.weight": "model.embed.weight"} if config.model.tied else {},
        "random": {
            "seed": config.seed,
            "states": "tensors named rng.*: the framework's own generators; the decoder draws nothing from them",
            "data order": "Philox keyed by (seed, epoch); no state",
            "stochastic rounding": "Philox keyed by (seed, update, tensor, element); no state",
        },
        "versions": {
            "halfstep": __version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "safetensors": version("safetensors"),
            config.backend: backend_version(config),
        },
    }


def describe_start(
    config: RunConfig, policy: Policy, choice: Choice | None, device: Device, corpus: Corpus
) -> dict[str, Any]:
    """What the event of a start says, but for where it starts."""
    return {
        "halfstep": __version__,
        "config": dataclasses.asdict(config),
        "policy": str(policy),
        "choice": told_choice(choice),
        "backend": {"name": config.backend, "version": backend_version(config)},
        "device": {"kind": device.kind, "name": device.name},
        "parameters": config.model.num_parameters,
        "data": {
            "description": corpus.description,
            "digest": corpus.digest,
            "train_tokens": len(corpus.train),
            "validation_tokens": len(corpus.validation),
            "bigram_bits": bigram_of(corpus, config),
        },
    }


def describe_data(corpus: Corpus, batches: Batches, step: int, shift: int) -> dict[str, Any]:
    """Where in the data a run stands after `step` updates."""
    return {
        "digest": corpus.digest,
        "description": corpus.description,
        "position": batches.position(step + shift),
        "left_out": shift,
        "bytes_per_token": corpus.bytes_per_token,
    }


def told_choice(choice: Choice | None) -> dict[str, str] | None:
    """A choice as events and manifests hold it."""
    return None if choice is None else {"preset": choice.preset, "reason": choice.reason}


def _computes(told: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a manifest that bits hang on and that a run may change when it goes on."""
    training = told["config"].get("training", {})
    switches = {f"training.{name}": training.get(name) for name in _SWITCHES}
    return {"device": told.get("device"), "threads": told.get("threads"), **told.get("versions", {}), **switches}


def check_readable(manifest: Mapping[str, Any], found: Path) -> None:
    """Refuses a manifest that verifies and that no halfstep wrote."""
    wrong = [] if isinstance(manifest.get("policy", ""), str) else ["policy"]
    wrong += [key for key, names in _TABLES.items() if not _holds(manifest.get(key), names)]
    if not wrong and not isinstance(manifest.get("data", {}).get("position", {}), dict):
        wrong = ["data"]
    if wrong:
        raise ConfigError(
            f"`{found}`: what its manifest says of `{wrong[0]}` is not what halfstep writes",
            hint="no halfstep wrote it: do not load what you do not trust; name another checkpoint",
        )


def _holds(table: Any, names: Sequence[str]) -> bool:
    return table is None or (isinstance(table, dict) and all(name in table for name in names))


def check_manifest(manifest: Mapping[str, Any], found: Path, policy: Policy, corpus: Corpus) -> None:
    """Refuses to go on from a checkpoint of another policy or other data, or of what was no run like this."""
    if missing := [key for key in ("policy", "choice", "config", "data", "guard") if key not in manifest]:
        raise ConfigError(
            f"`{found}` cannot be gone on from: its manifest says nothing of `{missing[0]}`",
            hint=f"an earlier halfstep wrote it; start anew from its weights with `--init {found}`",
        )
    check_readable(manifest, found)
    if manifest["policy"] != str(policy):
        raise ConfigError(
            f"`{found}` was saved under policy `{manifest['policy']}`, and this run has `{policy}`",
            hint=f"resume with --policy '{manifest['policy']}'",
        )
    if manifest["data"]["digest"] != corpus.digest:
        raise ConfigError(
            f"`{found}` was saved with other data: {manifest['data']['description']}; "
            f"now it is {corpus.description}",
            hint="resume with the data it was started with, or start anew with --out",
        )


def changes(manifest: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What computes now and did not then, as a warning: the same bits are promised by the same software alone."""
    was, here = _computes(manifest), _computes(now)
    pairs = {name: (then, here.get(name)) for name, then in was.items() if then is not None}
    found = [f"{name} was {then} and is {now}" for name, (then, now) in pairs.items() if then != now]
    if not found:
        return []
    return [f"since step {manifest['step']} {', '.join(found)}: the bits may differ from an uninterrupted run's"]
