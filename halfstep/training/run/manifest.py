"""What a checkpoint records of the run that wrote it, and whether a run may resume from it.

In addition to the digests of checkpoint.py, the manifest holds:

    policy, choice       the precision that ran, and the measurement behind it if it was chosen
    device, versions     what computed it; `threads` of a CPU, if sums depend on their number
    config, init         the settings, and where the initial weights came from
    data                 identity of the data, position in it, and how much of it rollbacks skipped
    random               every random state there is, and what is drawn without one
    aliases              tensors that are saved once under another name: tied weights
    held_out             the loss of an evaluation at this very step, or null
    guard                which step was good, and the state of the spike rule (health.py)
"""

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfstep import __version__
from halfstep.config.flops import flops_per_token
from halfstep.config.run import RunConfig
from halfstep.core.choice import Choice
from halfstep.core.errors import ConfigError
from halfstep.core.policy import Policy
from halfstep.training.data.batches import Batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.evaluation import bigram_of
from halfstep.training.run.health import Health
from halfstep.training.session import Session, backend_version

# Settings that a resumed run may change although they change bits: sums are taken in another order.
_SWITCHES = ("compile", "recompute_blocks", "batch", "micro_batches")


@dataclass
class RunContext:
    """What is trained, and by what: everything a manifest records of a run except how far it is."""

    config: RunConfig
    policy: Policy
    corpus: Corpus
    batches: Batches
    session: Session
    health: Health
    choice: Choice | None  # the measurement behind the policy, if there was one
    origin: dict[str, Any] | None  # of the initial weights, if they were not drawn

    def describe(self, step: int, held_out: float | None) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint holds."""
        return {
            **self._constants,
            "data": {
                "digest": self.corpus.digest,
                "description": self.corpus.description,
                "position": self.batches.position(step + self.health.shift),
                "left_out": self.health.shift,
                "bytes_per_token": self.corpus.bytes_per_token,
            },
            "held_out": held_out,
            "guard": self.health.state(),
        }

    @cached_property
    def _constants(self) -> dict[str, Any]:
        config, choice = self.config, self.choice
        return {
            "policy": str(self.policy),
            "choice": None if choice is None else {"preset": choice.preset, "reason": choice.reason},
            "device": self.session.description.name,
            "threads": self.session.threads,
            "config": dataclasses.asdict(config),
            "init": self.origin,
            "aliases": {"model.lm_head.weight": "model.embed.weight"} if config.model.tied else {},
            "random": {
                "seed": config.seed,
                "states": "tensors named rng.*: the framework's own generators; the decoder draws none from them",
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

    def describe_start(self) -> dict[str, Any]:
        """Returns the fields of a `start` event, except where it starts."""
        config, device, known = self.config, self.session.description, self._constants
        return {
            "halfstep": __version__,
            **{key: known[key] for key in ("config", "policy", "choice", "init")},
            "backend": {"name": config.backend, "version": known["versions"][config.backend]},
            "device": {"kind": device.kind, "name": device.name},
            "parameters": config.model.num_parameters,
            "data": {
                "description": self.corpus.description,
                "digest": self.corpus.digest,
                "train_tokens": len(self.corpus.train),
                "validation_tokens": len(self.corpus.validation),
                "bigram_bits": bigram_of(self.corpus, config),
            },
            "flops_per_token": flops_per_token(config.model),
        }

    def resolved(self) -> RunConfig:
        """Returns the configuration with the policy that runs in place of `auto`."""
        return dataclasses.replace(self.config, policy=str(self.policy))


def check_resumable(manifest: Mapping[str, Any], path: Path) -> None:
    """Refuses a manifest that lacks what a resumed run needs."""
    if missing := [key for key in ("policy", "choice", "config", "data", "guard") if key not in manifest]:
        raise ConfigError(
            f"`{path}` cannot be resumed: its manifest has no `{missing[0]}`",
            hint=f"an earlier halfstep wrote it; start anew from its weights with `--init {path}`",
        )


def check_same(manifest: Mapping[str, Any], path: Path, context: RunContext) -> None:
    """Refuses to resume a checkpoint of another policy or other data."""
    if manifest["policy"] != str(context.policy):
        raise ConfigError(
            f"`{path}` was saved under policy `{manifest['policy']}`, and this run has `{context.policy}`",
            hint=f"resume with --policy '{manifest['policy']}'",
        )
    if manifest["data"]["digest"] != context.corpus.digest:
        raise ConfigError(
            f"`{path}` was saved with other data: {manifest['data']['description']}; "
            f"now it is {context.corpus.description}",
            hint="resume with the data it was started with, or start anew with --out",
        )


def changes(manifest: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a warning if other software or hardware computes now: only the same promises the same bits."""
    was, here = _computed_by(manifest), _computed_by(now)
    pairs = {name: (then, here.get(name)) for name, then in was.items() if then is not None}
    differ = [f"{name} was {then} and is {now}" for name, (then, now) in pairs.items() if then != now]
    if not differ:
        return []
    return [f"since step {manifest['step']} {', '.join(differ)}: the bits may differ from an uninterrupted run's"]


def _computed_by(manifest: Mapping[str, Any]) -> dict[str, Any]:
    training = manifest["config"].get("training", {})
    switches = {f"training.{name}": training.get(name) for name in _SWITCHES}
    versions = manifest.get("versions", {})
    return {"device": manifest.get("device"), "threads": manifest.get("threads"), **versions, **switches}
