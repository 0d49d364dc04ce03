"""The folder of a run (paths.py names what is inside), and which runs may resume in it.

A folder belongs to one run: a new run refuses a folder that holds one, and a resumed run must be the same run. Of
its settings,

    FREE           may differ whenever it resumes: they change no update
    CHANGEABLE     may be changed on purpose: named on the command line, or edited in run.toml. They hold for the
                   updates that follow, and the change is recorded in events, manifests and the page
    all others     may not: REASONS says why

run.toml is what a run continues with. It is replaced before the first update under new settings, so a crash at any
moment leaves the old settings or the new ones.
"""

import dataclasses
import glob
import json
import math
import os
import re
import shlex
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from halfstep.config.load import load, to_toml
from halfstep.config.run import DataConfig, RunConfig
from halfstep.config.schema import flatten, shown, to_table
from halfstep.core.errors import ConfigError
from halfstep.core.policy import read
from halfstep.training.checkpoints.checkpoint import step_folders
from halfstep.training.files import make_folder, os_errors, write_whole
from halfstep.training.paths import CHECKPOINTS, CONFIG, EVENTS
from halfstep.training.telemetry.events import EventsError, newest_first

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

# Why the others may not differ, by the setting or its section.
_MOMENTS = "the moments in the checkpoint were gathered with it"
REASONS = {
    "seed": "the order of the data follows from it, and data would be repeated or omitted",
    "init": "the run has left its initial weights behind",
    "init_digest": "the run has left its initial weights behind",
    "model": "the weights in the checkpoint have its shape",
    "data.validation": "text that the run was trained on would be held out, or the reverse",
    "training.batch": "the position in the data is counted in updates of batch x micro_batches sequences",
    "training.micro_batches": "the position in the data is counted in updates of batch x micro_batches sequences",
    "training.deterministic": "the same bits are promised for a whole run or not at all",
    "training.ema": "the average in the checkpoint was taken with it, or there is none",
    "optimizer.name": "the moments in the checkpoint are of another optimizer",
    "optimizer.betas": _MOMENTS,
    "optimizer.muon_momentum": _MOMENTS,
    "optimizer.muon_momentum_start": _MOMENTS,
    "optimizer.muon_momentum_warmup": _MOMENTS,
}

# What may differ while the product stays: an update sees the same sequences, in other pieces.
PIECES = ("training.batch", "training.micro_batches")


def has_config(folder: Path) -> bool:
    """Whether a folder has a run.toml."""
    return (folder / CONFIG).exists()


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    # Checkpoints alone are a run too: its later ones would outlive, and push out, those of a new one.
    return has_config(folder) or (folder / EVENTS).exists() or bool(step_folders(folder / CHECKPOINTS))


def not_a_run(folder: Path) -> ConfigError:
    """Returns the error of a folder without a run to resume."""
    start = "name the folder of one" if folder.exists() else f"{train_command('--out', folder)} starts one"
    return ConfigError(f"`{folder}` holds no run: it has no {CONFIG}", hint=start)


def train_command(*words: str | Path) -> str:
    """Returns a command for a hint, as a shell takes it."""
    return f"`halfstep train {shlex.join(map(str, words))}`"


def read_config(folder: Path) -> RunConfig:
    """Returns the configuration of the run in a folder."""
    if not has_config(folder):
        raise not_a_run(folder)
    return load(str(folder / CONFIG))


def write_config(folder: Path, config: RunConfig, hint: str) -> None:
    """Writes run.toml; `hint` says what to do if that fails."""
    with os_errors(ConfigError, f"`{folder / CONFIG}` cannot be written", hint):
        make_folder(folder)
        write_whole(folder / CONFIG, to_toml(config).encode())


def restore_config(folder: Path, config: RunConfig) -> RunConfig:
    """Writes a lost run.toml again, as a checkpoint knows it."""
    write_config(folder, config, "change its permissions, or free space")
    return config


def check_empty(folder: Path) -> None:
    """Refuses a folder that holds a run."""
    if holds_run(folder):
        raise ConfigError(
            f"`{folder}` already holds a run",
            hint=f"{train_command('--resume', '--out', folder)} continues it; or name another folder with --out",
        )


def check_free(folder: Path) -> None:
    """Refuses early what `create_run` would, before anything is measured on a device that others may use."""
    check_empty(folder)
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        reason = f"`{there}` is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = f"`{there}` is not writable"
    else:
        return
    raise ConfigError(f"`{folder}` cannot be written: {reason}", hint="name another folder with --out")


def check_apart(folder: Path, data: DataConfig) -> None:
    """Refuses a run folder that holds the run's own data: its record would be read as data when it resumes."""
    for source in (data.source, data.validation):
        if isinstance(source, str):
            _check_apart(folder, source)


def _check_apart(folder: Path, source: str) -> None:
    named = Path(os.path.expanduser(source))
    if glob.has_magic(source) and not named.exists():
        if not fnmatch(CONFIG, named.name):
            return
        named = named.parent
    if source and named.is_dir() and folder.is_dir() and named.samefile(folder):
        raise ConfigError(
            f"`{folder}` holds the data of the run, and its record would be read as data",
            hint="name another folder with --out; one inside this one will do",
        )


def check_not_lost(folder: Path, *, allow_older: bool) -> None:
    """Refuses to start a run over whose checkpoints are gone: their disk may not be mounted."""
    where = folder / CHECKPOINTS
    if where.is_symlink() and not where.exists():
        raise ConfigError(
            f"`{where}` is a link to `{os.readlink(where)}`, which is not there",
            hint="mount the disk; or remove the link, if what it held is gone",
        )
    step = None if allow_older else _last_saved(folder)
    if step is not None:
        raise ConfigError(
            f"`{where}` holds no checkpoint, and the record of the run says that step {step} was saved there",
            hint="mount the disk, or put them back; "
            f"{train_command('--resume', '--allow-older', '--out', folder)} starts over at step 0",
        )


def _last_saved(folder: Path) -> int | None:
    if not (folder / EVENTS).exists():
        return None
    for event in newest_first(folder / EVENTS):
        if event["event"] == "checkpoint" and "step" in event:
            return int(event["step"])
        if event["event"] == "start" and event.get("resumed_from") is None:
            return None
    return None


def has_ended(folder: Path) -> bool:
    """Whether the record of a run says that it finished."""
    if not (folder / EVENTS).exists():  # a copy of the checkpoints alone
        return False
    for event in newest_first(folder / EVENTS):
        if event["event"] in ("end", "start"):
            return bool(event["event"] == "end")
    return False


def check_same_run(folder: Path, written: RunConfig, config: RunConfig, named: Collection[str] = ()) -> None:
    """Refuses a configuration that does not continue the run whose run.toml was read.

    What may be changed must be `named`: a recipe that happens to say something else changes nothing.
    """
    was, now = flatten(to_table(written)), flatten(to_table(config))
    resume = ("--resume", "--out", folder)
    own = f"{train_command(*resume)} continues with what it was started with"
    for key in _differing(was, now):
        if key not in CHANGEABLE:
            raise ConfigError(
                f"`{folder}` holds another run: {key} was {was[key]!r} and is now {now[key]!r}; it cannot change, "
                f"because {_reason(key)}",
                hint=f"{own}; {_anew(key, now[key], folder / CONFIG, folder)}",
            )
        if key not in named:
            raise ConfigError(
                f"`{folder}` holds a run whose {key} is {was[key]!r}, and the recipe says {now[key]!r}",
                hint=f"{own}; {train_command(*resume, *_given(key, now[key]))} changes it from here on",
            )
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"`{folder}` cannot be written", hint="change its permissions")


def _given(key: str, value: Any) -> list[str]:
    """Returns the words of a command that give a setting a value."""
    return ["--set", f"{key}={value if isinstance(value, str) else shown(value)}"]


def _anew(key: str, value: Any, recipe: Path, weights: Path) -> str:
    """Says how a run starts anew with a setting that it cannot change."""
    if key.startswith("model."):
        return "another model needs a new run, with another --out"
    command = train_command(recipe, "--init", weights, "--out", "OTHER", *_given(key, value))
    return f"{command} begins a new run with its weights"


def check_same_settings(out: Path, saved: Path, manifest: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses settings that differ from a checkpoint's and may not: run.toml may have been edited since."""
    was, now = flatten(manifest["config"]), flatten(json.loads(json.dumps(to_table(config))))
    for key in _differing(was, now):
        if key not in CHANGEABLE:
            raise ConfigError(
                f"`{saved}` was saved with {key} = {was[key]!r}, and the run has {now[key]!r}; it cannot change, "
                f"because {_reason(key)}",
                hint=f"set it back in `{out / CONFIG}`; {_anew(key, now[key], out / CONFIG, saved)}",
            )
    if config.training.steps < manifest["step"]:
        raise ConfigError(
            f"`{saved}` has made {manifest['step']} steps, and training.steps is {config.training.steps}",
            hint=_further(out, manifest["step"]),
        )


def check_not_finished(out: Path, manifest: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses to change a run that takes no more steps."""
    asked, step = read(config.policy), manifest["step"]
    policy = first_policy(manifest) if asked.base == "auto" else str(asked.build())  # `auto` keeps what it was
    changed = changed_settings(manifest, dataclasses.replace(config, policy=policy))
    if changed and step == config.training.steps and has_ended(out):
        raise ConfigError(
            f"`{out}` has finished, at step {step}: {next(iter(changed))} would change nothing",
            hint=_further(out, step),
        )


def check_policy_runs(out: Path, manifest: Mapping[str, Any], config: RunConfig) -> None:
    """Refuses another first policy for a run whose schedule is past it."""
    done, entries = manifest["step"], config.schedule
    later = [entry for entry in entries if entry.after(config.training.steps) <= done]
    if later and read(config.policy).base != "auto" and "policy" in changed_settings(manifest, config):
        command = train_command("--resume", "--out", out, *_given("schedule", to_table(entries)))
        raise ConfigError(
            f"`{config.policy}` would change nothing: after step {done} the policy is that of the schedule, "
            f"`{later[-1].policy}`",
            hint=f"change the schedule, as in {command}, or end it with `--set schedule=[]`",
        )


def _further(out: Path, step: int) -> str:
    return f"{train_command('--resume', '--out', out, *_given('training.steps', 2 * step))} trains it further"


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
    if config.init not in ("", written.init):
        return config  # another origin: `check_same_run` refuses it
    return dataclasses.replace(config, init=written.init, init_digest=config.init_digest or written.init_digest)


def newest(parent: Path, name: str | None = None) -> Path | None:
    """Returns the run below a folder that was trained last, of a recipe if named (NAME-DATE-TIME)."""
    named = re.compile(".*" if name is None else rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?", re.DOTALL)
    runs = [path for path in parent.glob("*") if named.fullmatch(path.name) and has_config(path)]
    return max(runs, key=lambda path: (_last_trained(path), path.name), default=None)


def _last_trained(folder: Path) -> float:
    try:
        return float(next(newest_first(folder / EVENTS))["time"])
    except (EventsError, StopIteration, KeyError, TypeError, ValueError):  # none was written, or it is damaged
        saved = step_folders(folder / CHECKPOINTS)
        return (saved[-1] if saved else folder / CONFIG).stat().st_mtime


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the settings that differ and are not free. An update may be cut into other pieces."""
    free = set(FREE)
    if math.prod(was.get(key, 0) for key in PIECES) == math.prod(now[key] for key in PIECES):
        free.update(PIECES)
    if isinstance(was.get("data.validation"), str) and isinstance(now["data.validation"], str):
        free.add("data.validation")  # a text may move, as the source may: its digest is checked
    before, after = (read(each.get("policy", "auto")) for each in (was, now))
    if after.base == "auto" or (before.base != "auto" and before.build() == after.build()):
        free.add("policy")  # `auto` was measured when the run began: it keeps what it has
    return [key for key in now if key not in free and key in was and was[key] != now[key]]


def _reason(key: str) -> str:
    return REASONS.get(key) or REASONS[key.partition(".")[0]]
