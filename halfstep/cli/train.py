"""`halfstep train`: from a recipe to a run."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep import cli
from halfstep.cli.arguments import Device, Flag, Overrides
from halfstep.cli.output import print_words, rest
from halfstep.config.load import DEFAULT_RECIPE, load, other_meaning, read_policy, setting_meant
from halfstep.config.policy_schedule import PolicySchedule
from halfstep.config.run import Backend, RunConfig
from halfstep.config.schema import build, flatten, rows, to_table
from halfstep.core.choice import Choice
from halfstep.core.errors import HalfstepError, OptionError, PolicyError, RunFolderError
from halfstep.core.policy import Policy, read, read_as
from halfstep.training import paths

if TYPE_CHECKING:
    from halfstep.training.job import Job
    from halfstep.training.loop import Loop
    from halfstep.training.run.resume import Opened

RUNS = Path("runs")
# What each process of a job holds, by `parallel.shard`.
SHARED = {
    "none": "each with the whole state (DDP)",
    "full": "each with a share of the state (FSDP2)",
    "hybrid": "each with a share of its machine's state (HSDP)",
}


@dataclass(frozen=True)
class Request:
    """What this process was asked for."""

    recipe: str | None
    settings: tuple[str, ...]  # all that options change of the recipe, as --set writes it
    out: Path | None
    resume: bool
    allow_older: bool
    device: str | None
    deadline: float | None
    json: bool


def train(
    recipe: str | None = None,
    /,
    *,
    policy: str | None = None,
    backend: Backend | None = None,
    device: Device = None,
    overrides: Overrides = (),
    init: str | None = None,
    out: Path | None = None,
    resume: Flag = False,
    allow_older: Flag = False,
    deadline: float | None = None,
    gpus: int | None = None,
    json: Flag = False,
    help_settings: Flag = False,
) -> int:
    """Train a recipe, in a precision chosen by measurement unless you name one.

    A recipe is a name or your own TOML file; --set changes any of its settings. The run folder holds the
    configuration, the events, the checkpoints and, at the end, a report page.

    Parameters
    ----------
    recipe
        tiny (the default: a byte-level model that takes two minutes on two CPU cores), gpt2, qwen3, speedrun,
        golf, or a file that ends in .toml.
    policy
        The precision: auto, fp32, bf16-mixed, bf16-true, fp16-mixed, fp8-mixed, any policy (see `halfstep policy
        --help`), or a .toml file with one, such as `halfstep audit --fix-policy` writes.
    backend
        The framework.
    overrides
        A setting, such as training.steps=100; --help-settings lists them. May be repeated.
    init
        Start from these weights: a safetensors file, a folder in Hugging Face layout (for gpt2 and qwen3), a run
        folder, or a file that `halfstep export --to artifact` wrote.
    out
        The run folder; by default runs/RECIPE-DATE-TIME.
    resume
        Resume the run in --out; without --out, the run in runs/ that was trained last (of this recipe, if you
        name one). If you name both a recipe and --out and there is no run yet, start it. With --policy it
        continues in another precision, with --backend on another framework, and with --set training.steps=... it
        trains further; docs/checkpoints.md lists what else may change.
    allow_older
        With --resume: if the newest checkpoint is damaged, set it aside and resume from the one before it.
    deadline
        Seconds between SIGTERM and the shutdown of the machine: a save that would not finish in time is not
        started, and the report page is left to the next session. The default is HALFSTEP_DEADLINE, or no limit.
    gpus
        Train on this many GPUs of this machine, one process for each, started by torchrun. To train on several
        machines, start `-m halfstep train` with torchrun on each.
    json
        Print the outcome as JSON.
    help_settings
        Print every setting that --set takes, with its default, and train nothing.
    """
    from halfstep.training.job import open_job

    if help_settings:
        print(settings())
        return 0
    if policy is not None:
        policy = read_policy(policy)
    if init is not None and resume:
        raise OptionError(
            "--init and --resume exclude each other: a resumed run takes the weights of its newest checkpoint",
            hint=f"omit --init to resume, or omit --resume to start a new run from `{init}`",
        )
    if allow_older and not resume:
        raise OptionError("--allow-older only makes sense with --resume", hint="add --resume")
    deadline = _deadline(deadline)
    if gpus is not None:
        given: dict[str, object] = {"policy": policy, "backend": backend, "device": device, "init": init}
        given |= {"out": out, "deadline": deadline, "resume": resume, "allow-older": allow_older, "json": json}
        return _launch(gpus, recipe, given, overrides)
    named = (
        *([f"init={init}", "init_digest="] if init is not None else []),
        *overrides,
        *([f"policy={policy}"] if policy is not None else []),
        *([f"backend={backend}"] if backend else []),
    )
    asked = Request(recipe, named, out, resume, allow_older, device, deadline, json)
    job = open_job()
    try:
        with job.explain_lost_ranks():
            code = _train(job, asked)
    except (HalfstepError, OSError) as error:
        if (reported := job.error_to_report(error)) is None:
            return 2
        raise reported from None
    job.close()
    return code


def _train(job: "Job", asked: Request) -> int:
    from halfstep.cli import outcome

    say = print_words if job.owner else _quiet
    with ExitStack() as on_error:
        if job.owner:
            where = on_error.enter_context(_run_folder(asked))
            opened = _open(asked, where, later=job.ranks > 1) if asked.resume else None
            if opened is not None:
                on_error.callback(opened.lock.release)
            config = _load(asked, where) if opened is None else opened.config
            _tell(job, where, config, opened)
        else:
            where, config, opened = _receive(job)
        loop = _prepare(job, asked, config, where, opened, say)
        on_error.pop_all()
    if loop.pretrained is not None:
        say(f"weights {loop.pretrained.description}")
    say(f"data {loop.corpus.description}", f"run folder {where}")
    return outcome.run(loop, json=asked.json)


def _quiet(*_: str) -> None:
    """What the other ranks say: rank 0 speaks for all."""


def _tell(job: "Job", where: Path, config: RunConfig, opened: "Opened | None") -> None:
    """Tells the other ranks what rank 0 has opened."""
    resumed = None
    if opened is not None:
        resumed = [None if opened.saved is None else str(opened.saved.path), opened.written.policy]
    job.broadcast([str(where), to_table(config), resumed])


def _receive(job: "Job") -> "tuple[Path, RunConfig, Opened | None]":
    """Returns what rank 0 has opened, for another rank."""
    from halfstep.training.run.resume import follow_run

    where, settings, resumed = job.broadcast()
    config = build(RunConfig, settings)
    return Path(where), config, None if resumed is None else follow_run(Path(where), config, *resumed)


def _launch(gpus: int, recipe: str | None, given: dict[str, object], overrides: Sequence[str]) -> int:
    """Starts this command in one process for each GPU; returns the exit code of all."""
    from halfstep.training.session import backend_module

    if "RANK" in os.environ:
        raise OptionError("--gpus starts torchrun, and torchrun has started this", hint="omit --gpus")
    if given["backend"] not in (None, "torch"):
        jax = f"one process of JAX trains on all of them: --device cuda:0-{max(gpus, 1) - 1}"
        raise OptionError(
            f"--gpus starts processes of torch, and the backend is {given['backend']}",
            hint=jax if given["backend"] == "jax" else "omit --gpus",
        )
    words = [] if recipe is None else [recipe]
    for name, value in given.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    words += [word for setting in overrides for word in ("--set", setting)]
    rest()  # the processes speak
    return int(backend_module("torch", "parallel.job").launch(gpus, ["train", *words]))


def _open(asked: Request, where: Path, *, later: bool) -> "Opened | None":
    """Opens the run to resume; None if it was never started, or was killed first, and can be started now."""
    from halfstep.training.run import folder
    from halfstep.training.run.resume import open_run

    if asked.recipe is not None and asked.out is not None and not folder.holds_run(asked.out):
        # One command serves the start and every restart.
        print_words(f"`{asked.out}` holds no run yet: starting {asked.recipe}")
        return None
    # A run has its own settings, if the recipe was only named to find it, or not at all.
    own = asked.recipe is None or (asked.out is None and not asked.recipe.endswith(".toml"))
    config = None if own else load(str(asked.recipe), asked.settings)
    return open_run(where, config, overrides=asked.settings, allow_older=asked.allow_older, later=later)


def _load(asked: Request, where: Path) -> RunConfig:
    """Returns the settings of a new run, once its folder is known to be free."""
    from halfstep.training.run import folder

    folder.check_free(where)
    config = load(asked.recipe or DEFAULT_RECIPE, asked.settings)
    folder.check_apart(where, config.data)
    return config


def _prepare(
    job: "Job", asked: Request, config: RunConfig, where: Path, opened: "Opened | None", say: Callable[..., None]
) -> "Loop":
    """Reads the data, chooses the precision and builds the loop; says what it is doing before it takes seconds."""
    from halfstep.core.choice.layers import BUDGET
    from halfstep.tools import probe
    from halfstep.training.data.load import load_corpus
    from halfstep.training.loop import Loop
    from halfstep.training.run.opening import prepare_determinism
    from halfstep.training.telemetry import loggers
    from halfstep.training.telemetry.meters import UNMEASURED

    say(config.title or where.name)
    loggers.check(config.training.loggers)
    device = job.connect(config, asked.device)
    if job.ranks > 1:
        _check_alike(job, asked, config)
        held = SHARED[config.parallel.shard] if config.backend == "torch" else "each with the whole state"
        say(f"{job.ranks} processes, {held}")
    say(f"reading `{config.data.source}`")
    corpus = load_corpus(config.data.source, config.data.validation, config.model.vocabulary)
    prepare_determinism(config, where)  # before anything is measured
    if config.backend not in sys.modules:
        say(f"loading {config.backend}")
    ran = None if opened is None else opened.policy
    policy, choice = _resolve(job, config, device, ran, say)
    reason = choice.reason if choice else read_as(config.policy)
    say(f"precision {policy}" + (f": {reason}" if reason else ""))
    schedule = PolicySchedule.of(policy, config.schedule, config.training.steps)
    for after, later in schedule.phases[1:]:
        say(f"after step {after} of {config.training.steps}: {later}")
    running = schedule.of_step(0 if opened is None else opened.step)
    named = choice is None and config.policy != ran  # at a resume: another precision than before
    slow = probe.slow_formats(config, policy, device, say=say) if named and job.owner else []
    known = None if opened is None else where / paths.EVENTS
    ceiling = probe.measure_ceiling(config, running, device, known, say=say) if job.owner else UNMEASURED
    if running.is_measured and not running.emulate:
        say(f"timing the matmuls that rules call `measured`; after {BUDGET:g} s none is started")
    say("building the model")
    return Loop(
        config,
        policy,
        where,
        opened=opened,
        choice=choice,
        device=device,
        warnings=[*policy.warnings, *slow, *corpus.warnings(config.model.vocabulary)],
        deadline=asked.deadline,
        corpus=corpus,
        ceiling=ceiling,
        job=job,
        begun=cli.begun,
    )


def _check_alike(job: "Job", asked: Request, config: RunConfig) -> None:
    """Refuses ranks that were asked for something else, or that run other code."""
    from halfstep import __version__
    from halfstep.core.cache import code_digest
    from halfstep.training.session import backend_version

    if asked.resume and asked.recipe is None:
        settings: dict[str, object] = {"--set": list(asked.settings)}
    else:
        settings = flatten(to_table(load(asked.recipe or DEFAULT_RECIPE, asked.settings)))
    given = {"--out": str(asked.out), "--resume": asked.resume, **settings}
    job.check_same(given, "start every rank with the same arguments")
    own = {"halfstep": f"{__version__} ({code_digest('')})", config.backend: backend_version(config)}
    job.check_same(own, "install the same versions on every machine")


def _resolve(
    job: "Job", config: RunConfig, device: str | None, ran: str | None, say: Callable[..., None]
) -> tuple[Policy, Choice | None]:
    """Returns the policy of a run, and the choice behind it; of a job, what rank 0 measures."""
    from halfstep.tools import probe

    if job.ranks == 1:
        return probe.resolve(config, device, ran=ran, say=say)
    text = preset = reason = None
    if job.owner:
        policy, choice = probe.resolve(config, device, ran=ran, say=say)
        text, preset, reason = str(policy), choice and choice.preset, choice and choice.reason
    text, preset, reason = job.broadcast([text, preset, reason])
    return Policy.parse(text), None if preset is None else Choice(preset, reason)


def settings() -> str:
    """Returns every setting that --set takes, from the schema."""
    lines = [f"{row.key} = {row.shown} ({row.kind}): {row.help}" for row in rows(RunConfig)]
    return "\n".join(["Settings, with the defaults that apply unless the recipe says otherwise:", "", *lines])


def as_setting(option: str, arguments: Sequence[str]) -> str | None:
    """Returns how an option that does not exist is written as a setting, if it means one."""
    name, _, value = option.partition("=")
    if (explained := other_meaning(name.strip("-"))) is not None:
        return explained
    if (meant := setting_meant(name.strip("-"))) is None:
        return None
    following = dict(pairwise(arguments)).get(option, "--")
    value = value or ("" if following.startswith("--") else following)
    if meant == "policy":
        try:
            read(value)
            return f"the precision is a policy: `--policy {value}`"
        except PolicyError as error:
            return f"the precision is a policy, with `--policy`; {error.hint}"
    kind = {row.key: row.kind for row in rows(RunConfig)}[meant]
    if kind == "true or false":
        value = value.lower() or "true"
    elif kind.startswith("a list of any") and value:
        value = f'["{value}"]'
    return f"it is a setting: `--set {meant}={value or '...'}`"


@contextmanager
def _run_folder(asked: Request) -> Iterator[Path]:
    """Yields the folder of the run; removes a newly created one again if the run does not start."""
    from halfstep.training.run import folder

    recipe, existing = asked.recipe, asked.out
    if existing is None and not asked.resume:
        with _new_folder(Path(recipe or DEFAULT_RECIPE).stem) as created:
            yield created
        return
    if existing is None:
        existing = folder.newest(RUNS, Path(recipe).stem if recipe else None)
    if existing is None:
        of = f" of recipe {recipe}" if recipe else ""
        raise RunFolderError(f"there is no run{of} to resume in {RUNS}/", hint="name its folder with --out")
    yield existing


@contextmanager
def _new_folder(name: str) -> Iterator[Path]:
    """Yields a folder for this process alone: another that starts in the same second creates another folder."""
    from halfstep.training.files import make_folder

    first, had_runs = RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", RUNS.exists()
    for number in count(1):
        created = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            make_folder(created, exist_ok=False)
            break
        except FileExistsError:
            if not RUNS.is_dir():
                raise
        except OSError as error:
            if not had_runs:
                with suppress(OSError):
                    RUNS.rmdir()
            raise RunFolderError(
                f"cannot create `{created}`: {error.strerror}", hint="choose another folder with --out"
            ) from None
    try:
        yield created
    except BaseException:
        with suppress(OSError):  # it is not empty if the run started
            created.rmdir()
            if not had_runs:
                RUNS.rmdir()
        raise


def _deadline(given: float | None) -> float | None:
    """Returns the seconds that a signal leaves, from the flag or the environment."""
    text = os.environ.get("HALFSTEP_DEADLINE")
    try:
        seconds = float(text) if given is None and text else given
    except ValueError:
        seconds = -1.0
    if seconds is not None and not 0 < seconds < 1e6:
        what = f"--deadline {given:g}" if given is not None else f"HALFSTEP_DEADLINE={text}"
        raise OptionError(f"{what}: it must be a number of seconds above 0", hint="omit it for no limit")
    return seconds
