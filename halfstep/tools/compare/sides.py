"""What A and B may be: runs that are there, logs, or policies to train."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from halfstep.config.load import load, read_policy, setting_named
from halfstep.config.run import RunConfig
from halfstep.core.compare.gaps import CompareInputError, IncomparableError
from halfstep.core.errors import PolicyError
from halfstep.core.policy import read
from halfstep.tools.compare.curves import EVENT_FILE, Curve, read_log, read_run
from halfstep.tools.compare.runs import Way, shorten
from halfstep.training.run.folder import holds_run

LOGS = (".csv", ".tsv", ".txt", ".log")
_WHAT = "a run folder, a folder of runs (one for each seed), a loss log (.csv or TensorBoard), or a policy"


@dataclass(frozen=True)
class Training:
    """What is to be trained on both sides, and how."""

    recipe: str
    seeds: tuple[int, ...]
    steps: int | None = None
    both: tuple[str, ...] = ()  # settings, as --set gives them
    own: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of A and of B
    ranks: tuple[int, int] = (1, 1)


def names_existing_runs(given: str) -> bool:
    """Whether A or B names something to read, and not a policy to train."""
    path = Path(given)
    looks = path.suffix in LOGS or EVENT_FILE in path.name or ("/" in given and path.suffix != ".toml")
    return looks or (path.exists() and path.suffix != ".toml")


def read_side(given: str, column: str | None = None) -> list[Curve]:
    """Returns the runs of a run folder, a folder of runs, or a log."""
    path = Path(given)
    if not path.exists():
        raise CompareInputError(f"there is no file or folder `{given}`", hint=f"name {_WHAT}")
    if not path.is_dir():
        return read_log(path, column)
    if holds_run(path):
        return [read_run(path)]
    if runs := sorted(each for each in path.iterdir() if each.is_dir() and holds_run(each)):
        return [read_run(each) for each in runs]
    if any(path.glob(f"{EVENT_FILE}*")):
        return read_log(path, column)
    raise CompareInputError(f"`{path}` holds no run and no log", hint=f"name {_WHAT}")


def resolve_ways(policies: tuple[str, str], training: Training) -> tuple[Way, Way]:
    """Returns the two ways to train that a command line describes."""
    first, second = (_way(policies[i], training, i) for i in (0, 1))
    if first.config == second.config and first.ranks == second.ranks:
        raise CompareInputError(
            f"A and B are the same: {first.name} with the same settings",
            hint="name two policies, or change a setting of one side: --set-a training.compile=true",
        )
    if first.name == second.name:
        first = dataclasses.replace(first, name=f"{first.name} (A)")
        second = dataclasses.replace(second, name=f"{second.name} (B)")
    return first, second


def _way(given: str, training: Training, side: int) -> Way:
    try:
        policy = read_policy(given)
        read(policy)
    except PolicyError as error:
        raise CompareInputError(
            f"`{given}` is neither a file or folder nor a policy: {error.message}",
            hint=f"name {_WHAT}" + (f"; {error.hint}" if error.hint else ""),
        ) from None
    own, ranks = training.own[side], training.ranks[side]
    if named := [each for each in (*training.both, *own) if setting_named(each) in ("seed", "policy")]:
        raise CompareInputError(
            f"`{named[0]}`: A and B are the policies, and --seeds says how many seeds each gets",
            hint="leave it out",
        )
    config = load(training.recipe, [*training.both, *own, f"policy={policy}"])
    if ranks > 1 and config.backend != "torch":
        raise CompareInputError(
            f"{ranks} ranks are started by torchrun, and the backend is {config.backend}", hint="use torch"
        )
    config = shorten(config, training.steps or config.training.steps)
    parts = [*own, *([f"{ranks} ranks"] if ranks > 1 else [])]
    return Way(", ".join([given, *parts]), config, ranks)


def check_alike(first: RunConfig, second: RunConfig) -> None:
    """Refuses to train what could not be compared: other data, or another model."""
    for name in ("data", "model"):
        if getattr(first, name) != getattr(second, name):
            raise IncomparableError(
                f"A and B would be trained with different settings of {name}.*: their losses would say nothing "
                "about each other",
                hint="give such a setting to both, with --set",
            )
