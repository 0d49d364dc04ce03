"""What a checkpoint records of the run that wrote it, and whether a run may resume from it.

In addition to the digests of checkpoint.py, the manifest holds:

    policy, choice       the precision of the last step, and the measurement behind it if it was chosen
    schedule             the precisions of the run: [{"from": 0, "policy": "fp8-mixed"}, {"from": 850, ...}]
    device, versions     what computed it; `threads` of a CPU, if sums depend on their number
    compiled             how its code was compiled, {"how": "no", "block" or "whole", "why"}
    changes              what was changed at resumes: [{"step": 8, "settings": {"policy": ["fp32", "bf16-mixed"]}}]
    config, init         the settings, and where the initial weights came from
    data                 identity of the data, position in it, and how much of it rollbacks skipped
    random               every random state there is, and what is drawn without one
    other backends       what a run on another backend takes over, what starts anew there, and what is refused
    aliases              tensors that are saved once under another name: tied weights
    held_out             the loss of an evaluation at this very step, or null
    guard                which step was good, and the state of the spike rule (health.py)
"""

import dataclasses
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import safetensors

from halfstep import __version__
from halfstep.config.model import flops_per_token
from halfstep.config.policy_schedule import PolicySchedule, ScheduleEntry
from halfstep.config.run import Backend, RunConfig, TrainingConfig, describe_value
from halfstep.config.schema import Count, build, to_table
from halfstep.config.session import Session
from halfstep.config.weights import carry_over
from halfstep.core.choice import Choice
from halfstep.core.errors import ConfigError, ResumeError
from halfstep.core.policy import Policy
from halfstep.core.scaling import NoScale
from halfstep.core.state_format import Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import Loaded
from halfstep.training.data.batches import Batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.evaluation import bigram_entropy
from halfstep.training.run.health import Health
from halfstep.training.run.settings import changed_settings
from halfstep.training.schedule import build_schedule
from halfstep.training.session import backend_version
from halfstep.training.telemetry.events import SettingsChange

# Settings that a resumed run may change although they change bits: sums are taken in another order.
_SWITCHES = ("recompute_blocks", "memory", "batch", "micro_batches")


@dataclass(frozen=True)
class RecordedData:
    """The data of a run, as a manifest records it."""

    digest: str
    description: str
    position: Mapping[str, Any]
    bytes_per_token: float | None = None
    held_out_digest: str | None = None


@dataclass(frozen=True)
class RecordedSpikes:
    """What the spike rule remembers."""

    recent: tuple[float, ...]
    streak: Count


@dataclass(frozen=True)
class RecordedHealth:
    """What a manifest records under `guard`."""

    good: Count
    in_a_row: Count
    shift: Count
    went_back: tuple[Count, ...]
    spikes: RecordedSpikes


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The part of a manifest that an evaluation reads."""

    policy: str
    config: Mapping[str, Any]
    data: RecordedData
    init: Mapping[str, Any] | None = None
    held_out: float | None = None
    device: str | None = None
    threads: Count | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Resumable(Recorded):
    """The part of a manifest that a resumed run reads."""

    choice: Choice | None
    guard: RecordedHealth
    compiled: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[SettingsChange, ...] = ()
    schedule: tuple[ScheduleEntry, ...] = ()


@dataclass
class RunContext:
    """What is trained, and by what: everything a manifest records of a run except how far it is."""

    config: RunConfig
    policy: Policy  # that the run begins with; the session has the one that runs
    corpus: Corpus
    batches: Batches
    session: Session
    health: Health
    choice: Choice | None  # the measurement behind the policy, if there was one
    origin: dict[str, Any] | None  # of the initial weights, if they were not drawn
    changes: list[dict[str, Any]] = field(default_factory=list)  # of settings, at the steps where it resumed
    ranks: int = 1  # processes that share it

    def load(self, saved: Loaded) -> dict[str, list[Any]]:
        """Puts a checkpoint into the session; returns the settings that differ from its own, and records them.

        A checkpoint that was verified and not read is read here: of processes that share the state, each its rows.
        Under another policy or backend, masters, moments and averages keep every bit or the checkpoint is refused.
        """
        changed, session = changed_settings(saved.manifest, self.resolved()), self.session
        before, now = Policy.parse(saved.manifest["policy"]), self.schedule.of_step(saved.manifest["step"])
        arrays = saved.arrays or checkpoint.load(saved.path, session.rows, saved.manifest)[0]
        crosses = "backend" in changed
        if now != session.policy:  # a rollback, to a step of another policy
            session.change_policy(now, keep=False)
        if now != before or crosses:
            ours = session.state()
            _check_optimizer(saved, arrays, ours, self.config.backend)
            arrays = carry_over(arrays, ours, before, now, self.config.model, crosses=crosses)
        session.load(arrays)
        self.changes = list(saved.manifest.get("changes", []))
        if changed:
            self.changes.append({"step": saved.manifest["step"], "settings": changed})
        return changed

    @cached_property
    def schedule(self) -> PolicySchedule:
        """The policies of the run."""
        return PolicySchedule.of(self.policy, self.config.schedule, self.config.training.steps)

    def describe(self, step: int, held_out: float | None) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint holds."""
        return {
            **self._constants,
            "policy": self._policy_text,
            "compiled": self.session.compilation._asdict(),
            "changes": self.changes,
            "data": {
                "digest": self.corpus.digest,
                "held_out_digest": self.corpus.held_out_digest,
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
            "schedule": self.schedule.record(),
            "choice": None if choice is None else {"preset": choice.preset, "reason": choice.reason},
            "device": self.session.description.name,
            "threads": self.session.threads,
            "ranks": self.ranks,
            "config": to_table(config),
            "init": self.origin,
            "aliases": {"model.lm_head.weight": "model.embed.weight"} if config.model.tied else {},
            "random": {
                "seed": config.seed,
                "states": "tensors named rng.*: the framework's own generators; the decoder draws none from them",
                "data order": "Philox keyed by (seed, epoch); no state",
                "stochastic rounding": "Philox keyed by (seed, update, tensor, element); no state",
            },
            "other backends": {
                "taken over": "masters, moments of AdamW and Muon, averages, counts, loss scale, data position",
                "anew": "random states (rng.*), amax histories (amax.*), the choice of measured layers (narrow.*)",
                "refused": "moments of other optimizers; --init takes the weights alone",
            },
            "versions": {
                "halfstep": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "safetensors": safetensors.__version__,
                config.backend: backend_version(config),
            },
        }

    @property
    def _policy_text(self) -> str:
        """The text of the policy that runs. To spell one takes a while; the schedule has spelled them all."""
        phases = zip(self.schedule.phases, self._constants["schedule"], strict=True)
        return next(str(phase["policy"]) for (_, policy), phase in phases if policy == self.session.policy)

    def describe_start(self) -> dict[str, Any]:
        """Returns the fields of a `start` event, except where it starts."""
        config, device, known = self.config, self.session.description, self._constants
        return {
            "halfstep": __version__,
            **{key: known[key] for key in ("config", "schedule", "choice", "init")},
            "policy": self._policy_text,
            "outcome": self.session.outcome,
            "compiled": self.session.compilation._asdict(),
            "changes": self.changes,
            "backend": {"name": config.backend, "version": known["versions"][config.backend]},
            "device": {"kind": device.kind, "name": device.name},
            "ranks": self.ranks,
            "parameters": config.model.num_parameters,
            "data": {
                "description": self.corpus.description,
                "digest": self.corpus.digest,
                "train_tokens": len(self.corpus.train),
                "validation_tokens": len(self.corpus.validation),
                "bigram_bits": bigram_entropy(self.corpus, config),
            },
            "flops_per_token": flops_per_token(config.model),
        }

    def resolved(self) -> RunConfig:
        """Returns the configuration with `auto` replaced by the policy that runs."""
        return dataclasses.replace(self.config, policy=str(self.policy))


def check_manifest(manifest: Mapping[str, Any], path: Path, needed: type[Recorded] = Resumable) -> RunConfig:
    """Returns the settings of a checkpoint; refuses a manifest that lacks what a resumed run or evaluation needs.

    It may hold more, but no settings that are unknown here: they would change what is computed.
    """
    hint = f"another halfstep wrote it; start anew from its weights with `--init {path}`"
    try:
        build(needed, manifest, others=True)
        hint = "another halfstep wrote it: use that one; if it is newer, update yours"
        return build(RunConfig, manifest["config"], "config.")
    except ConfigError as error:
        raise ResumeError(
            f"`{path}` cannot be {'resumed' if needed is Resumable else 'used'}: in its manifest, {error.message}",
            hint=hint,
        ) from None


def _check_optimizer(
    saved: Loaded, arrays: Mapping[str, Stored], ours: Mapping[str, Stored], backend: str
) -> None:
    """Refuses moments of an optimizer that the backend of the run does not have."""
    was = saved.manifest["config"].get("backend", backend)
    odd = sorted(name for name in arrays if name.startswith("optimizer.") and name not in ours)
    if odd and was != backend:
        raise ResumeError(
            f"`{saved.path}` was saved on {was} and holds `{odd[0]}` ({len(odd)} such tensors), which no "
            f"optimizer of this run has on {backend}: AdamW and Muon come over, others do not",
            hint=f"resume it on {was}; or begin a new run with its weights: `--init {saved.path} "
            f"--backend {backend}`",
        )


def check_same_data(manifest: Mapping[str, Any], path: Path, context: RunContext) -> None:
    """Refuses to resume a checkpoint of other data."""
    if manifest["data"]["digest"] != context.corpus.digest:
        raise ResumeError(
            f"`{path}` was saved with other data: {manifest['data']['description']}; "
            f"now it is {context.corpus.description}",
            hint="if that data moved, name it with `--set data.source=PATH`; or start anew with another --out",
        )


def describe_changes(
    manifest: Mapping[str, Any], changed: Mapping[str, Sequence[Any]], context: RunContext
) -> list[str]:
    """Returns what a resumed run does differently from here on, and what follows from it."""
    lines, rest, begin = [], dict(changed), f"from step {manifest['step']} on"
    rest.pop("policy", None)
    before, now = Policy.parse(manifest["policy"]), context.session.policy
    if before != now:
        anew = f", and the loss scale starts at {now.scale.init().scale:g}"
        scaled = "" if isinstance(now.scale, NoScale) or now.scale == before.scale else anew
        kept = f"masters, moments and averages are kept bit for bit{scaled}"
        lines.append(f"{begin} the policy is `{now}` (it was `{before}`): {kept}")
    if backend := rest.pop("backend", None):
        kept = "masters, moments, averages and the position in the data are kept bit for bit"
        kept += ", and so is the loss scale" if now.scale == before.scale else ""
        lines.append(f"{begin} {backend[1]} computes (it was {backend[0]}): {kept}; random states start anew")
    if rest:
        words = [
            f"{key} is {describe_value(key, now)} (it was {describe_value(key, was)})"
            for key, (was, now) in rest.items()
        ]
        lines.append(f"{begin} {', '.join(words)}{_describe_schedule(manifest, rest, context)}")
    return lines


def _describe_schedule(manifest: Mapping[str, Any], changed: Collection[str], context: RunContext) -> str:
    """Says what the learning rate does: it follows the schedule of the whole run, as if begun with it."""
    if not {"training.steps", "training.warmup", "training.warmdown"} & set(changed):
        return ""
    now, applied = context.config.training, context.session.applied()
    before = build(TrainingConfig, manifest["config"].get("training", {}), "training.")
    last, following = (
        float(build_schedule(each)(np.float32(n), np))
        for each, n in ((before, max(0, applied - 1)), (now, applied))
    )
    return (
        f"; the learning rate follows the schedule of {now.steps} steps: {following:.3g} of its peak in the next "
        f"update, after {last:.3g} in the last one"
    )


def describe_other_bits(manifest: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a warning if other software or hardware computes now: only the same promises the same bits."""
    was, here = _computed_by(manifest), _computed_by(now)
    moved = manifest["config"].get("backend") != now["config"]["backend"]  # which is said on its own
    gone = set(get_args(Backend)) | {"threads"} if moved else set()
    pairs = {name: (then, here.get(name)) for name, then in was.items() if then is not None and name not in gone}
    differ = [f"{name} was {then} and is {now}" for name, (then, now) in pairs.items() if then != now]
    if not differ:
        return []
    return [f"since step {manifest['step']} {', '.join(differ)}: the bits may differ from an uninterrupted run's"]


def how_compiled(manifest: Mapping[str, Any]) -> str:
    """Returns how a step was compiled; in an older version `training.compile = true` was one graph."""
    asked = manifest["config"].get("training", {}).get("compile") or manifest["config"].get("backend") == "jax"
    before = "whole" if asked is True else asked or "no"
    return str(manifest.get("compiled", {}).get("how", before))


def _computed_by(manifest: Mapping[str, Any]) -> dict[str, Any]:
    training = manifest["config"].get("training", {})
    switches = {f"training.{name}": training.get(name) for name in _SWITCHES}
    versions = manifest.get("versions", {})
    switches["training.compile"] = how_compiled(manifest)
    switches["parallel.shard"] = manifest["config"].get("parallel", {}).get("shard")
    run = {name: manifest.get(name) for name in ("device", "threads", "ranks")}
    return {**run, **versions, **switches}
