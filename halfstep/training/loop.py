"""The training loop: when to step, look, save and stop.

It knows no framework. A backend gives it a `Session`; data, events, checkpoints and progress are framework-free.
On a device that works on its own, step k is launched before the numbers of step k - 1 are read, so that it has
work while the host prints: reading waits for a step that is over, never for the one that runs.

Everything that decides an update (weights, moments, scale, random state, position in the data) is in the
checkpoint, and the data is a function of (seed, step): a resumed run continues as if it had never stopped.

Checkpoints are written by a thread (writer.py, checkpointing.py). After a bad step the run continues,
rolls back or stops (health.py). The folder is locked from opening it to the end of `run` (lock.py).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.config.flops import flops_per_token
from halfstep.config.run import RunConfig
from halfstep.core.choice import Choice
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.training import memory, paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.retention import Retention, unseen
from halfstep.training.checkpoints.writer import Saver
from halfstep.training.data.batches import Batches
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.load import load_corpus
from halfstep.training.data.prefetch import Prefetch
from halfstep.training.data.types import DataError
from halfstep.training.evaluation import Evaluation, check_held_out, evaluate
from halfstep.training.run import determinism, folder
from halfstep.training.run.checkpointing import Keeper
from halfstep.training.run.health import Health
from halfstep.training.run.manifest import describe_start
from halfstep.training.run.response import Judge, RollBackError
from halfstep.training.run.resume import Subject, open_run
from halfstep.training.run.signals import StopRequest, stop_requests
from halfstep.training.schedule import factor
from halfstep.training.session import Tokens, open_session
from halfstep.training.telemetry import loggers
from halfstep.training.telemetry.ceiling import UNMEASURED, Ceiling
from halfstep.training.telemetry.events import Events
from halfstep.training.telemetry.meters import Meters, Tally
from halfstep.training.telemetry.progress import StepProgress
from halfstep.training.weights import artifact
from halfstep.training.weights.pretrained import Pretrained, open_pretrained


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    step: int
    finished: bool
    seconds: float
    tokens_per_second: float  # after the first step
    held_out: Evaluation | None  # None where it was stopped: whoever asks to stop does not wait for a look
    saved: int | None  # the step of the newest complete checkpoint
    totals: dict[str, Any] | None = None  # where the time went (meters.py); None where no step was to be taken


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
        allow_older: bool = False,
        deadline: float | None = None,
        ceiling: Ceiling = UNMEASURED,
        corpus: Corpus | None = None,
    ):
        if resume:
            config = folder.with_origin(out, config)
        self.config, self.policy, self.out, self._goes_on = config, policy, out, resume
        self.warnings, self.deadline, self.ceiling = list(warnings), deadline, ceiling
        loggers.check(config.training.loggers)
        determinism.prepare(config, out)
        told = config.data
        self.corpus = corpus or load_corpus(told.source, told.validation, config.model.vocabulary)
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
        saved = resume and bool(checkpoint.step_folders(out / paths.CHECKPOINTS))
        self.pretrained = self._pretrained() if config.init and not saved else None
        first = None if self.pretrained is None else self.pretrained.weights()
        self.session = open_session(config, policy, device, weights=first)
        determinism.check(self.config, self.session.description.kind)
        self.health = Health(training.rollback)
        origin = None if self.pretrained is None else self.pretrained.record()
        parts = (self.corpus, self.batches, self.session, self.health)
        self.subject = Subject(self.config, policy, *parts, choice=choice, origin=origin)
        begun = open_run(self.subject, out, resume=resume, allow_older=allow_older)
        self.lock, self.start, self._owes_look = begun.lock, begun.step, begun.owes_look
        self.warnings += begun.warnings
        keep = Retention(training.keep_last, training.keep_every, training.keep_best)
        self.saver = Saver(out / paths.CHECKPOINTS, keep, self.start or None)
        self.warnings += unseen(training)
        self.warnings += getattr(self.session, "notes", [])  # what was decided by measurement, or a checkpoint

    def run(self) -> Outcome:
        """Trains to the end, or until someone asks to stop."""
        try:
            if self.start == self.config.training.steps and folder.has_ended(self.out):
                found = evaluate(self.session, self.corpus, self.config)  # nothing is added to its record
                return Outcome(self.out, self.start, True, 0.0, 0.0, found, self.start)
            with Events(self.out / paths.EVENTS) as self.events, self._board() as self.board:
                self.events.listener = self.board.take
                self._announce()
                return self._run()
        finally:
            # What a deadline or a second SIGINT left behind still writes: then the lock ends with the process.
            if not self.saver.is_busy:
                self.lock.release()

    def _run(self) -> Outcome:
        with stop_requests() as stop, StepProgress(self.config.training.steps, start=self.start) as bar:
            self.attend(stop, bar)
            for message in self.warnings:
                self.bar.note(f"warning: {message}")
            self.board.warn = self.keeper.warn
            try:
                return self._run_to_its_end()
            finally:
                if not self.events.retry():
                    number, why = self.events.unwritten, self.events.failure
                    self.bar.note(f"NOT WRITTEN: the last {number} events are lost: {why}")

    def _run_to_its_end(self) -> Outcome:
        try:
            with memory.told(self.session.ran_out, self._ran_out):
                self._train()
            with self.meters.part("saving"):
                saved = self.keeper.save_last(self.tally.step)
        except HalfstepError as error:
            self.keeper.settle()  # what is being written is not lost
            self.events.write(
                "stop",
                step=self.tally.step,
                reason=error.message,
                saved=self.saver.saved_step,
                **self.meters.totals(),
            )
            raise
        except Exception:
            self.keeper.settle()
            raise
        finished = saved and self.last_look is not None
        if not finished:
            self._tell_stop(saved)
        return self._finish(finished)

    def _ran_out(self) -> HalfstepError:
        """The newest checkpoint stands: a step that did not fit may have changed some weights and not others."""
        self.keeper.settle()
        peak, capacity = self.session.memory(), self.session.capacity()
        return memory.in_training(self.config, self.tally.step, peak, capacity, self.saver.saved_step)

    def attend(self, stop: StopRequest, bar: StepProgress) -> None:
        """Sets up what counts, saves and judges while steps are taken; benchmarks take theirs with `_steps`."""
        self.stop, self.bar = stop, bar
        self.tally = self._tally_at(self.start)
        self.meters = Meters(self.config, self.ceiling, self.session, self.tally.watch)
        self.last_look: Evaluation | None = None  # at the last step
        self._unreadable: DataError | None = None
        told = (self.events, bar, self.subject.describe)
        self.keeper = Keeper(self.saver, self.session, self.health, *told, stop, self.deadline)
        self.judge = Judge(self.health, self.batches, self.session, self.keeper, self.tally)

    def _train(self) -> None:
        """All steps, from the start and, after a rollback, from a checkpoint on."""
        total, tally = self.config.training.steps, self.tally
        if self._owes_look and self.start < total and not self._look_again():
            return
        while True:
            try:
                with Prefetch(self._batch, tally.step, total, is_over=self._is_over) as batches:
                    self._steps(batches, self.stop)
                break
            except DataError:
                self._keep_what_there_is()
                raise
            except RollBackError:
                at = self._tally_at(self.keeper.roll_back(tally.step))
                tally.step, tally.launched = at.step, at.launched
                tally.skipped, tally.tokens = at.skipped, at.tokens
        if tally.step == self.start == total:
            self.last_look = self._look_again()  # it was stopped or killed between its last step and its end

    def _is_over(self) -> bool:
        return bool(self.stop.requested)

    def _look_again(self) -> Evaluation | None:
        """The look at the step that a run goes on from, which a signal broke off; None where another does."""
        found = self._validate()
        if found is not None:
            self.keeper.note_look(self.start, found.loss)
        return found

    def _keep_what_there_is(self) -> None:
        """Saves a run that data ends which cannot be read: its own state is sound."""
        if self.tally.step and self.saver.saved_step != self.tally.step:
            self.keeper.save(self.tally.step)
            self.keeper.settle()

    def _batch(self, step: int) -> Tokens:
        """The tokens of the update after `step` updates, past what rollbacks left out."""
        return self.batches.at(step + self.health.shift)

    def _tell_stop(self, saved: bool) -> None:
        """Somebody asked to stop."""
        step, newest, why = self.tally.step, self.saver.saved_step, self.stop.requested
        self.events.write("stop", step=step, reason=why or "stopped", saved=newest, **self.meters.totals())
        self.bar.note(f"stopped by {why} after step {step}; --resume goes on")
        if not saved:
            self.bar.note(f"NOT SAVED in time: --resume goes on after step {newest or 0}")

    def _steps(self, batches: Iterable[Tokens], stop: Any) -> None:
        """Launches step after step; `pending` is the one whose numbers were not read yet."""
        training, pending, self._unreadable = self.config.training, None, None
        self.tally.watch.start(self.tally.step)
        for batch in self._readable(self.meters.fed(batches)):
            result = self.session.step(batch)
            self.tally.launched += 1
            if pending is not None:
                self._record(pending)
            pending = result
            done = self.tally.launched
            last = done == training.steps
            look = done % training.validate_every == 0 or last
            save = done % training.save_every == 0 or last
            if look or save or stop.requested or not self.session.asynchronous:
                self._record(pending)
                pending = None
                found = self._validate() if look else None
                if save:
                    with self.meters.part("saving"):
                        self.keeper.save(done, None if found is None else found.loss)
                if last:
                    self.last_look = found
                if look or save:
                    self.tally.watch.start(self.tally.step)  # looking and saving are not training
            if stop.requested:
                break
        if pending is not None:
            self._record(pending)
        if self._unreadable is not None:
            raise self._unreadable

    def _readable(self, batches: Iterable[Tokens]) -> Iterator[Tokens]:
        """The batches up to one that cannot be read, so that what was launched before it is still counted."""
        try:
            yield from batches
        except DataError as error:
            self._unreadable = error

    def _record(self, result: Any) -> None:
        """Reads a step that is over, and tells of it."""
        tally = self.tally
        numbers = self.session.read(result)
        if numbers["stuck"]:
            self.judge.stop(tally.step + 1, result)
        tally.step += 1
        steps_per_second = tally.watch.read(tally.step)
        tally.tokens += self._tokens_per_step
        tally.skipped += int(numbers["skipped"])
        tally.loss = numbers["loss"]
        speed = self._tokens_per_step * steps_per_second
        peak = self.session.memory()
        training = self.config.training
        applied = tally.step - 1 - (tally.skipped - int(numbers["skipped"]))  # before this one
        rate = factor(
            np.float32(applied),
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
            learning_rate=float(rate) * self.config.optimizer.matrix_rate,
            grad_norm=numbers["grad_norm"],
            scale=numbers["scale"],
            skipped=tally.skipped,
            memory=peak,
            **self.meters.read(result, steps_per_second),
        )
        self.bar.update(
            tally.step,
            loss=numbers["loss"],
            tokens_per_second=speed,
            memory=peak,
            scale=numbers["scale"],
            skipped=tally.skipped,
        )
        self.keeper.tell()
        self.judge.see(tally.step, numbers)

    def _validate(self) -> Evaluation | None:
        stop = self.stop
        with self.meters.part("evaluation"):
            found = evaluate(self.session, self.corpus, self.config, is_over=lambda: stop.requested)
        if stop.requested:
            return None  # whoever asks to stop does not wait for the rest of it
        step = self.tally.step
        self.events.write(
            "validation", step=step, loss=found.loss, bits_per_byte=found.bits_per_byte, tokens=found.tokens
        )
        self.bar.note(f"step {step}: {found}")
        return found

    def _finish(self, finished: bool) -> Outcome:
        found, tally = self.last_look if finished else None, self.tally
        speed = self._tokens_per_step * self.meters.speed()
        if found is not None and self.stop.left(self.deadline) is None:
            artifact.conclude(self.session, self.corpus, self.config, self.out, found, self.events, self.bar)
        elif found is not None and self.config.artifact.format != "none":
            self.keeper.warn(f"a deadline runs, and the artifact is left: `halfstep artifact {self.out}` makes it")
        totals = self.meters.totals()
        if found is not None:
            self.events.write(
                "end",
                step=tally.step,
                seconds=tally.watch.seconds,
                loss=tally.loss,
                validation_loss=found.loss,
                bits_per_byte=found.bits_per_byte,
                tokens_per_second=speed,
                **totals,
            )
        newest = self.saver.saved_step
        return Outcome(self.out, tally.step, finished, tally.watch.seconds, speed, found, newest, totals)

    def _pretrained(self) -> Pretrained:
        """The first weights, from where the configuration says, and what there is to tell of them."""
        config = self.config
        found = open_pretrained(config.init, config.model, config.init_digest)
        self.config = dataclasses.replace(config, init_digest=found.digest)
        if found.layout.name != "halfstep" and self.corpus.bytes_per_token == 1:
            self.warnings.append(
                f"the data are bytes, and the weights of `{config.init}` know the tokens of their own tokenizer; "
                "--set data.source=... names shards of those"
            )
        return found

    def _tally_at(self, step: int) -> Tally:
        return Tally(step, step, step - self.session.applied(), tokens=step * self._tokens_per_step)

    def _board(self) -> loggers.Board:
        gone_on = self.start if self._goes_on else None  # from 0 where it died before its first checkpoint
        return loggers.Board(self.config.training.loggers, self.out, gone_on, self.warnings.append)

    def _announce(self) -> None:
        self.events.write(
            "start",
            **describe_start(self.config, self.policy, self.subject.choice, self.session.description, self.corpus),
            tokens_per_step=self._tokens_per_step,
            resumed_from=self.start or None,
            init=self.subject.origin,
            flops_per_token=flops_per_token(self.config.model),
            ceiling=self.ceiling.record(),
        )
        for message in self.warnings:
            self.events.write("warning", message=message)

    @property
    def _tokens_per_step(self) -> int:
        training = self.config.training
        return training.batch * training.micro_batches * self.config.model.context
