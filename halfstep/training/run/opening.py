"""Opening a run: its data, its session and its folder, before the loop takes a step.

Whatever can refuse a run refuses it here: before there is a folder, or before the one of a resumed run is changed.
A refusal releases the lock.

`training.deterministic`: the same run gives the same bits again, in another process too.

On a CPU every backend does so by default. On an NVIDIA GPU three things prevent it, each with a switch of PyTorch:

    kernels that add in any order     torch.use_deterministic_algorithms(True): another kernel, or an error
    cuBLAS workspaces by stream       CUBLAS_WORKSPACE_CONFIG=:4096:8, read when the first matmul runs
    kernels chosen by their speed     TORCHINDUCTOR_DETERMINISTIC=1; RUN/cache keeps what was tuned, for resuming

The last two are read before a session exists, when `halfstep train` measures matmuls: `prepare_determinism` comes
first. JAX and MLX promise no determinism on an accelerator.
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.config.policy_schedule import PolicySchedule
from halfstep.config.run import RunConfig
from halfstep.core.choice import Choice
from halfstep.core.errors import SettingConflictError
from halfstep.core.policy import Policy
from halfstep.core.refusal import slow_formats
from halfstep.training.checkpoints.writer import warn_of_keep_best
from halfstep.training.data.batches import make_batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus
from halfstep.training.evaluation import held_out_batches
from halfstep.training.files import NoLock, RunLock
from halfstep.training.job import Job
from halfstep.training.paths import CACHE
from halfstep.training.run.health import Health
from halfstep.training.run.manifest import RunContext
from halfstep.training.run.resume import Opened, create_run
from halfstep.training.session import open_session
from halfstep.training.telemetry import loggers
from halfstep.training.weights.pretrained import Pretrained, open_pretrained


@dataclass
class Parts:
    """An open run: what the loop trains, on what, and where."""

    context: RunContext  # its configuration has the digest of the initial weights, if they were given
    pretrained: Pretrained | None  # the weights a new run begins with, if they were given
    lock: RunLock
    start: int  # the step to start from
    warnings: list[str]


def open_parts(
    config: RunConfig,
    policy: Policy,
    out: Path,
    job: Job,
    *,
    opened: Opened | None = None,
    choice: Choice | None = None,
    device: str | None = None,
    corpus: Corpus | None = None,
    warnings: Iterable[str] = (),
) -> Parts:
    """Opens data, session and folder, and the checkpoint of a resumed run; refuses a run that cannot start."""
    found = list(warnings)
    with ExitStack() as on_error:
        if opened is not None:
            on_error.callback(opened.lock.release)
        device = job.connect(config, device)
        loggers.check(config.training.loggers)
        prepare_determinism(config, out)
        data = config.data
        corpus = corpus or load_corpus(data.source, data.validation, config.model.vocabulary)
        batches = make_batches(config, corpus.train)
        batches.rows(job.rank, job.ranks)  # refuses a batch that ranks cannot share
        if job.ranks > 1:
            digests = {"data": corpus.digest, "held-out data": corpus.held_out_digest}
            job.check_same(digests, "give every machine the same data, under the same name")
        held_out_batches(corpus, config)  # refuses text that is too short to evaluate on
        begins = opened is None or opened.saved is None
        pretrained = _open_pretrained(config, corpus, found) if config.init and begins else None
        if pretrained is not None:
            config = replace(config, init_digest=pretrained.digest)
        schedule = PolicySchedule.of(policy, config.schedule, config.training.steps)
        schedule.check(config.model)
        # A checkpoint may be that of the last step before a change: the loop makes it, as it would have.
        first, weights = schedule.of_step(0 if opened is None else opened.step), None
        if pretrained is not None:
            weights = pretrained.weights()
        session = open_session(config, first, device, weights=weights)
        check_determinism(config, session.description.kind)
        origin = None if pretrained is None else pretrained.record()
        known = (corpus, batches, session, Health(config.training.rollback))
        context = RunContext(config, policy, *known, choice=choice, origin=origin, ranks=job.ranks)
        if opened is None:
            batches.at(0, *job.share)  # refuses unreadable shards before there is a folder
            lock, start = create_run(out, context.resolved()) if job.owner else NoLock(), 0
            found += [lock.warning] if lock.warning else []
        else:
            lock, start = opened.lock, opened.restore(context)
            found += opened.warnings
        on_error.callback(lock.release)
        job.check_folder(out)
        on_error.pop_all()
    found += warn_of_keep_best(config.training)
    for i, later in enumerate(schedule.policies):
        found += later.warnings if i else []  # of the first, its caller has warned
        found += slow_formats(later, session.description)
    found += session.notes  # what was decided by measurement, or by a checkpoint
    return Parts(context, pretrained, lock, start, found)


def _open_pretrained(config: RunConfig, corpus: Corpus, warnings: list[str]) -> Pretrained:
    pretrained = open_pretrained(config.init, config.model, config.init_digest)
    if pretrained.layout.name != "halfstep" and corpus.bytes_per_token == 1:
        warnings.append(
            f"the data is bytes, and the weights of `{config.init}` expect the tokens of their own tokenizer; "
            "--set data.source=... names shards of those"
        )
    return pretrained


WORKSPACES = (":4096:8", ":16:8")


def prepare_determinism(config: RunConfig, folder: Path) -> None:
    """Sets the environment that determinism needs before the framework computes, if requested. Idempotent."""
    if not config.training.deterministic or config.backend != "torch":
        return
    given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if given not in WORKSPACES:
        raise SettingConflictError(
            f"training.deterministic = true, but CUBLAS_WORKSPACE_CONFIG is `{given}`, with which matmuls are not",
            hint=f"set it to {WORKSPACES[0]} or {WORKSPACES[1]}, or leave it unset",
        )
    cache = folder.absolute() / CACHE
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def check_determinism(config: RunConfig, kind: str) -> None:
    """Refuses a device that cannot be deterministic. `kind` is the device's: cpu, nvidia, ..."""
    if not config.training.deterministic or kind == "cpu" or (config.backend, kind) == ("torch", "nvidia"):
        return
    raise SettingConflictError(
        f"training.deterministic = true, but {config.backend} on {kind} does not promise the same bits twice",
        hint="use --device cpu, or --backend torch on an NVIDIA GPU; or leave the setting out",
    )
