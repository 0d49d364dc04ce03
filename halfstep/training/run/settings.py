"""Which settings of a run may differ when it resumes, and what a change is refused with. No disk is touched here.

A folder belongs to one run, and a resumed run must be the same run. Of its settings,

    FREE           may differ whenever it resumes: they change no update
    CHANGEABLE     may be changed on purpose: named on the command line, or edited in run.toml. They hold for the
                   updates that follow, and the change is recorded in events, manifests and the page
    all others     may not: REASONS says why
"""

import dataclasses
import json
import math
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from halfstep.config.run import RunConfig
from halfstep.config.schema import flatten, shown, to_table
from halfstep.core.errors import ResumeError
from halfstep.core.policy import read
from halfstep.training.paths import CONFIG

FREE = {"title", "data.source", "artifact.format", "artifact.limit"}  # data may move: its digest is checked
FREE |= {f"training.{name}" for name in ("validate_every", "validation_tokens", "save_every", "rollback")}
FREE |= {f"training.{name}" for name in ("keep_last", "keep_every", "keep_best", "loggers", "measure_ceiling")}
FREE |= {f"training.{name}" for name in ("compile", "recompute_blocks", "memory")} | {"parallel.shard"}
FREE |= {"parallel.timeout", "training.graph"}
FREE |= {f"monitor.{name}" for name in ("on", "every", "sample_every", "slice", "shadow_every")}

CHANGEABLE = {"policy", "schedule", "backend"}
CHANGEABLE |= {f"training.{name}" for name in ("steps", "warmup", "warmdown", "clip_norm")}
CHANGEABLE |= {f"optimizer.{name}" for name in ("rate", "embedding_rate", "head_rate", "scalar_rate", "muon_rate")}
CHANGEABLE |= {f"optimizer.{name}" for name in ("epsilon", "weight_decay", "muon_weight_decay")}

# What may differ while the product stays: an update sees the same sequences, in other pieces.
PIECES = ("training.batch", "training.micro_batches")

# Why the others may not differ, by the setting or its section.
REASONS = {
    "seed": "the order of the data follows from it, and data would be repeated or omitted",
    **dict.fromkeys(("init", "init_digest"), "the run has left its initial weights behind"),
    "model": "the weights in the checkpoint have its shape",
    "data.validation": "text that the run was trained on would be held out, or the reverse",
    **dict.fromkeys(PIECES, "the position in the data is counted in updates of batch x micro_batches sequences"),
    "training.deterministic": "the same bits are promised for a whole run or not at all",
    "training.ema": "the average in the checkpoint was taken with it, or there is none",
    "optimizer.name": "the moments in the checkpoint are of another optimizer",
    "optimizer": "the moments in the checkpoint were gathered with it",
}


def train_command(*words: str | Path) -> str:
    """Returns a `halfstep train` command for a hint, quoted for a shell."""
    return f"`halfstep train {shlex.join(map(str, words))}`"


def check_same_run(folder: Path, written: RunConfig, config: RunConfig, named: Collection[str] = ()) -> None:
    """Refuses a configuration that does not continue the run whose run.toml says `written`.

    What may be changed must be `named`: a recipe that happens to say something else changes nothing.
    """
    was, now = flatten(to_table(written)), flatten(to_table(config))
    resume = ("--resume", "--out", folder)
    own = f"{train_command(*resume)} continues with what it was started with"
    for key in _differing(was, now):
        if key not in CHANGEABLE:
            differs = f"`{folder}` holds another run: {key} was {was[key]!r} and is now {now[key]!r}"
            raise _immutable_error(differs, key, now[key], own, folder / CONFIG, folder)
        if key not in named:
            raise ResumeError(
                f"`{folder}` holds a run whose {key} is {was[key]!r}, and the recipe says {now[key]!r}",
                hint=f"{own}; {train_command(*resume, *_set_words(key, now[key]))} changes it from here on",
            )


def _set_words(key: str, value: Any) -> list[str]:
    """Returns the words of a command that set a setting."""
    return ["--set", f"{key}={value if isinstance(value, str) else shown(value)}"]


def _immutable_error(differs: str, key: str, value: Any, remedy: str, recipe: Path, weights: Path) -> ResumeError:
    """Returns the error of a setting that a run cannot change: why, and how a run starts anew with it."""
    anew = "another model needs a new run, with another --out"
    if not key.startswith("model."):
        command = train_command(recipe, "--init", weights, "--out", "OTHER", *_set_words(key, value))
        anew = f"{command} begins a new run with its weights"
    return ResumeError(f"{differs}; it cannot change, because {_reason(key)}", hint=f"{remedy}; {anew}")


def check_same_settings(out: Path, saved: Path, manifest: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses settings that differ from a checkpoint's and may not: run.toml may have been edited since."""
    was, now = flatten(manifest["config"]), flatten(json.loads(json.dumps(to_table(config))))
    for key in _differing(was, now):
        if key not in CHANGEABLE:
            differs = f"`{saved}` was saved with {key} = {was[key]!r}, and the run has {now[key]!r}"
            remedy = f"set it back in `{out / CONFIG}`"
            raise _immutable_error(differs, key, now[key], remedy, out / CONFIG, saved)
    if config.training.steps < manifest["step"]:
        raise ResumeError(
            f"`{saved}` has made {manifest['step']} steps, and training.steps is {config.training.steps}",
            hint=_train_further_hint(out, manifest["step"]),
        )


def check_not_finished(out: Path, manifest: Mapping[str, Any], config: RunConfig, *, has_ended: bool) -> None:
    """Refuses to change a run that takes no more steps."""
    step = manifest["step"]
    if not has_ended or step != config.training.steps:
        return
    asked = read(config.policy)
    policy = first_policy(manifest) if asked.base == "auto" else str(asked.build())  # `auto` keeps what it was
    if changed := changed_settings(manifest, dataclasses.replace(config, policy=policy)):
        raise ResumeError(
            f"`{out}` has finished, at step {step}: {next(iter(changed))} would change nothing",
            hint=_train_further_hint(out, step),
        )


def check_policy_runs(out: Path, manifest: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses another first policy for a run whose schedule is past it."""
    done, entries = manifest["step"], config.schedule
    later = [entry for entry in entries if entry.after(config.training.steps) <= done]
    if later and read(config.policy).base != "auto" and "policy" in changed_settings(manifest, config):
        command = train_command("--resume", "--out", out, *_set_words("schedule", to_table(entries)))
        raise ResumeError(
            f"`{config.policy}` would change nothing: after step {done} the policy is that of the schedule, "
            f"`{later[-1].policy}`",
            hint=f"change the schedule, as in {command}, or end it with `--set schedule=[]`",
        )


def _train_further_hint(out: Path, step: int) -> str:
    return f"{train_command('--resume', '--out', out, *_set_words('training.steps', 2 * step))} trains it further"


def changed_settings(manifest: Mapping[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """Returns the settings of updates that changed since a checkpoint: [before, now]. `config` is resolved."""
    before = {**manifest["config"], "policy": first_policy(manifest)}
    was, now = flatten(before), flatten(json.loads(json.dumps(to_table(config))))
    return {key: [was[key], now[key]] for key in now if key in CHANGEABLE and key in was and was[key] != now[key]}


def first_policy(manifest: Mapping[str, Any]) -> str:
    """Returns the policy that a run had at its start; that of its last step may be another (`[[schedule]]`)."""
    schedule = manifest.get("schedule") or [{"policy": manifest["policy"]}]
    return str(schedule[0]["policy"])


def with_origin(written: RunConfig, config: RunConfig) -> RunConfig:
    """Returns the configuration of a resumed run, with the origin of its initial weights unless it has its own."""
    if config is written or config.init not in ("", written.init):
        return config  # the same, or another origin, which `check_same_run` refuses
    return dataclasses.replace(config, init=written.init, init_digest=config.init_digest or written.init_digest)


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the settings that differ and are not free. An update may be cut into other pieces."""
    free = set(FREE)
    if math.prod(was.get(key, 0) for key in PIECES) == math.prod(now[key] for key in PIECES):
        free.update(PIECES)
    if isinstance(was.get("data.validation"), str) and isinstance(now["data.validation"], str):
        free.add("data.validation")  # a text may move, as the source may: its digest is checked
    if _same_policy(was.get("policy", "auto"), now["policy"]):
        free.add("policy")
    return [key for key in now if key not in free and key in was and was[key] != now[key]]


def _same_policy(was: str, now: str) -> bool:
    """Whether two texts mean one policy. `auto` was measured when the run began: it keeps what it has."""
    before, after = read(was), read(now)
    return after.base == "auto" or (before.base != "auto" and (was == now or before.build() == after.build()))


def _reason(key: str) -> str:
    return REASONS.get(key) or REASONS[key.partition(".")[0]]
