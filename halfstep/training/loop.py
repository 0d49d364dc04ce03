"""The training loop: when to step, look, save and stop.

It knows no framework. A backend gives it a `Session`; data, events, checkpoints and progress are framework-free.
On a device that works on its own, step k is launched before the numbers of step k - 1 are read, so that it has
work while the host prints: reading waits for a step that is over, never for the one that runs.

Everything that decides an update (weights, moments, scale, random state, position in the data) is in the
checkpoint, and the data is a function of (seed, step): a resumed run continues as if it had never stopped.
"""

import dataclasses
import math
import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from halfstep import __version__
from halfstep.config.run import RunConfig
from halfstep.core.choice import Choice
from halfstep.core.errors import ConfigError, ScalingError
from halfstep.core.policy import Policy
from halfstep.training import checkpoint, folder
from halfstep.training.data import Batches, Corpus, Prefetch, load_corpus
from halfstep.training.evaluation import Evaluation, bigram_of, check_held_out, evaluate
from halfstep.training.events import Events
from halfstep.training.pretrained import Pretrained, open_pretrained
from halfstep.training.progress import progress
from halfstep.training.schedule import factor
from halfstep.training.session import Tokens, backend_version, open_session
from halfstep.training.signals import stop_requests


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    step: int
    finished: bool
    seconds: float
    tokens_per_second: float
    held_out: Evaluation | None  # None where it was stopped: whoever asks to stop does not wait for a look


# A dynamic scale falls from its start to its floor in 16 such steps; nothing else recovers by waiting.
HOPELESS = 50


class _Watch:
    """Time spent training, and the speed over the last few steps.

    Where results are read a step late, two can be read at once: the time between two reads says little of one
    step, and the speed is that of several.
    """

    def __init__(self, steps: int = 10):
        self.seconds = 0.0
        self._reads: deque[tuple[float, int]] = deque(maxlen=steps + 1)

    def start(self, step: int) -> None:
        """Training goes on after a pause."""
        self._reads.clear()
        self._reads.append((time.perf_counter(), step))

    def read(self, step: int) -> float:
        """A step was read; steps a second."""
        now = time.perf_counter()
        self.seconds += now - self._reads[-1][0]
        self._reads.append((now, step))
        first, before = self._reads[0]
        return (step - before) / (now - first)


@dataclass
class _Tally:
    """What the loop counts while it runs."""

    step: int
    skipped: int = 0
    in_a_row: int = 0
    tokens: int = 0
    loss: float = math.nan
    watch: "_Watch" = field(default_factory=lambda: _Watch())


class Loop:
    """One run, from its folder to its outcome."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        out: Path,
        *,
        choice: Choice | None = None,
        resume: bool = False,
        device: str | None = None,
        warnings: Iterable[str] = (),
    ):
        if resume:
            config = folder.with_origin(out, config)
        self.config, self.policy, self.out, self.choice = config, policy, out, choice
        self.warnings = list(warnings)
        self.corpus: Corpus = load_corpus(config.data.source, config.data.validation, config.model.vocabulary)
        training, context = config.training, config.model.context
        self.batches = Batches(
            self.corpus.train,
            context=context,
            batch=training.batch,
            micro_batches=training.micro_batches,
            seed=config.seed,
            name=f"`{config.data.source}`",
        )
        check_held_out(self.corpus, config)
        self.origin: dict[str, Any] | None = None  # of the first weights, where they were not drawn
        self.pretrained = self._pretrained() if config.init and not resume else None
        first = None if self.pretrained is None else self.pretrained.weights()
        self.session = open_session(config, policy, device, weights=first)
        self.warnings += getattr(self.session, "notes", [])  # what was decided by measurement as it was opened
        self.start = self._open(resume)

    def run(self) -> Outcome:
        """Trains to the end, or until someone asks to stop."""
        if self.start == self.config.training.steps:  # finished before; nothing is added to its record
            return Outcome(self.out, self.start, True, 0.0, 0.0, evaluate(self.session, self.corpus, self.config))
        with Events(self.out / folder.EVENTS) as self.events:
            self._announce()
            return self._run()

    def _run(self) -> Outcome:
        total = self.config.training.steps
        skipped = self.start - self.session.applied()
        self.tally = tally = _Tally(self.start, skipped, tokens=self.start * self._tokens_per_step)
        with stop_requests() as stop, progress(total, start=self.start) as self.bar:
            for message in self.warnings:
                self.bar.note(f"warning: {message}")
            with Prefetch(self.batches.at, self.start, total) as batches:
                self._steps(batches, stop)
            finished = tally.step == total
            if tally.step > self.start and not self._is_saved(tally.step):
                self._save()
            if not finished:
                self.events.write("stop", step=tally.step, reason=stop.requested or "stopped")
                self.bar.note(f"stopped by {stop.requested} after step {tally.step}; --resume goes on")
            return self._finish(finished)

    def _steps(self, batches: Iterable[Tokens], stop: Any) -> None:
        """Launches step after step; `pending` is the one whose numbers were not read yet."""
        training, pending = self.config.training, None
        self.tally.watch.start(self.tally.step)
        for batch in batches:
            result = self.session.step(batch)
            if pending is not None:
                self._record(pending)
            pending = result
            done = self.tally.step + 1
            look = done % training.validate_every == 0 and done < training.steps
            save = done % training.save_every == 0 or done == training.steps
            if look or save or stop.requested or not self.session.asynchronous:
                self._record(pending)
                pending = None
                if look:
                    self._validate()
                if save:
                    self._save()
                if look or save:
                    self.tally.watch.start(self.tally.step)  # looking and saving are not training
            if stop.requested:
                break
        if pending is not None:
            self._record(pending)

    def _record(self, result: Any) -> None:
        """Reads a step that is over, and tells of it."""
        numbers = self.session.read(result)
        tally = self.tally
        tally.step += 1
        steps_per_second = tally.watch.read(tally.step)
        tally.tokens += self._tokens_per_step
        tally.skipped += int(numbers["skipped"])
        tally.in_a_row = tally.in_a_row + 1 if numbers["skipped"] else 0
        tally.loss = numbers["loss"]
        speed = self._tokens_per_step * steps_per_second
        memory = self.session.memory()
        training = self.config.training
        rate = factor(
            np.float32(tally.step - 1 - tally.skipped),
            steps=training.steps,
            warmup=training.warmup_steps,
            warmdown_share=training.warmdown,
            xp=np,
        )
        self.events.write(
            "step",
            step=tally.step,
            loss=numbers["loss"],
            tokens=tally.tokens,
            seconds=tally.watch.seconds,
            tokens_per_second=speed,
            learning_rate=float(rate) * self.config.optimizer.rate,
            grad_norm=numbers["grad_norm"],
            scale=numbers["scale"],
            skipped=tally.skipped,
            memory=memory,
        )
        self.bar.update(
            tally.step,
            loss=numbers["loss"],
            tokens_per_second=speed,
            memory=memory,
            scale=numbers["scale"],
            skipped=tally.skipped,
        )
        if tally.in_a_row == HOPELESS:
            raise ScalingError(
                f"the gradients of {HOPELESS} steps in a row were not finite, up to step {tally.step}",
                hint="lower the learning rate; under fp16, let the scale fall with `scale=dynamic`",
            )

    def _validate(self) -> Evaluation:
        found = evaluate(self.session, self.corpus, self.config)
        step = self.tally.step
        self.events.write(
            "validation", step=step, loss=found.loss, bits_per_byte=found.bits_per_byte, tokens=found.tokens
        )
        self.bar.note(f"step {step}: {found}")
        return found

    def _save(self) -> None:
        started = time.perf_counter()
        step = self.tally.step
        arrays = {name: checkpoint.Array(*record) for name, record in self.session.state().items()}
        path = checkpoint.save(self.out / folder.CHECKPOINTS, step, arrays, self._meta(step))
        checkpoint.prune(self.out / folder.CHECKPOINTS, keep=2)
        size = sum(len(array.data) for array in arrays.values())
        took = time.perf_counter() - started
        self.events.write("checkpoint", step=step, path=str(path.relative_to(self.out)), seconds=took, bytes=size)

    def _finish(self, finished: bool) -> Outcome:
        found = self._validate() if finished else None
        tally = self.tally
        trained = tally.tokens - self.start * self._tokens_per_step
        speed = trained / tally.watch.seconds if tally.watch.seconds else 0.0
        if found is not None:
            self.events.write(
                "end",
                step=tally.step,
                seconds=tally.watch.seconds,
                loss=tally.loss,
                validation_loss=found.loss,
                bits_per_byte=found.bits_per_byte,
                tokens_per_second=speed,
            )
        return Outcome(self.out, tally.step, finished, tally.watch.seconds, speed, found)

    def _pretrained(self) -> Pretrained:
        """The first weights, from where the configuration says, and what there is to tell of them."""
        config = self.config
        found = open_pretrained(config.init, config.model, config.init_digest)
        self.config = dataclasses.replace(config, init_digest=found.digest)
        self.origin = found.record()
        if found.layout.name != "halfstep" and self.corpus.bytes_per_token == 1:
            self.warnings.append(
                f"the data are bytes, and the weights of `{config.init}` know the tokens of their own tokenizer; "
                "--set data.source=... names shards of those"
            )
        return found

    def _open(self, resume: bool) -> int:
        """Makes or reopens the folder; the step to start after."""
        if not resume:
            folder.create(self.out, self._resolved())
            return 0
        folder.check_same_run(self.out, self.config)
        found = checkpoint.latest(self.out / folder.CHECKPOINTS)
        if found is None:
            raise ConfigError(f"`{self.out}` holds no checkpoint to resume from", hint="start anew with --out")
        arrays, manifest = checkpoint.load(found)
        self._check_manifest(manifest, found)
        self.session.load({name: (a.dtype, a.shape, bytes(a.data)) for name, a in arrays.items()})
        if self.choice is None and manifest["choice"] is not None:
            self.choice = Choice(**manifest["choice"])
        self.origin = manifest.get("init")
        folder.rewrite(self.out, self._resolved())
        return int(manifest["step"])

    def _check_manifest(self, manifest: Mapping[str, Any], found: Path) -> None:
        if manifest["policy"] != str(self.policy):
            raise ConfigError(
                f"`{found}` was saved under policy `{manifest['policy']}`, and this run has `{self.policy}`",
                hint=f"resume with --policy '{manifest['policy']}'",
            )
        if manifest["data"]["digest"] != self.corpus.digest:
            raise ConfigError(
                f"`{found}` was saved with other data: {manifest['data']['description']}; "
                f"now it is {self.corpus.description}",
                hint="resume with the data it was started with, or start anew with --out",
            )

    def _meta(self, step: int) -> dict[str, Any]:
        return {
            "policy": str(self.policy),
            "choice": self._told_choice(),
            "device": self.session.description.name,
            "config": dataclasses.asdict(self.config),
            "init": self.origin,
            "data": {
                "digest": self.corpus.digest,
                "description": self.corpus.description,
                "position": self.batches.position(step),
                "bytes_per_token": self.corpus.bytes_per_token,
            },
            "versions": {
                "halfstep": __version__,
                "python": platform.python_version(),
                self.config.backend: backend_version(self.config),
            },
        }

    def _told_choice(self) -> dict[str, str] | None:
        return None if self.choice is None else {"preset": self.choice.preset, "reason": self.choice.reason}

    def _resolved(self) -> RunConfig:
        """The configuration with the policy that runs in place of `auto`."""
        return dataclasses.replace(self.config, policy=str(self.policy))

    def _announce(self) -> None:
        described = self.session.description
        self.events.write(
            "start",
            halfstep=__version__,
            config=dataclasses.asdict(self.config),
            policy=str(self.policy),
            choice=self._told_choice(),
            backend={"name": self.config.backend, "version": backend_version(self.config)},
            device={"kind": described.kind, "name": described.name},
            parameters=self.config.model.num_parameters,
            tokens_per_step=self._tokens_per_step,
            resumed_from=self.start or None,
            init=self.origin,
            data={
                "description": self.corpus.description,
                "digest": self.corpus.digest,
                "train_tokens": len(self.corpus.train),
                "validation_tokens": len(self.corpus.validation),
                "bigram_bits": bigram_of(self.corpus, self.config),
            },
        )
        for message in self.warnings:
            self.events.write("warning", message=message)

    def _is_saved(self, step: int) -> bool:
        found = checkpoint.latest(self.out / folder.CHECKPOINTS)
        return found is not None and found.name == f"step-{step:06d}"

    @property
    def _tokens_per_step(self) -> int:
        training = self.config.training
        return training.batch * training.micro_batches * self.config.model.context
