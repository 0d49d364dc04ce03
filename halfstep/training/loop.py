"""The training loop: when to step, evaluate, save and stop.

On an asynchronous device, step k is launched before the numbers of step k - 1 are read, so that the device has
work while the host prints: reading waits for a step that is over, never for the one that runs.

Everything that decides an update (weights, moments, scale, random state, position in the data) is in the
checkpoint, and the data is a function of (seed, step): a resumed run continues as if it had never stopped.

    run/opening         data, session and folder, or the checkpoint of a run; the lock is held until `run` returns
    run/health          counts bad steps; run/response continues, rolls back or stops
    run/checkpointing   decides when to save and reports it; a thread writes (checkpoints/writer)
    run/monitor         decides when layers are looked at, and records it
"""

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.config.run import RunConfig
from halfstep.config.session import Tokens
from halfstep.core.choice import Choice
from halfstep.core.choice.layers import with_outcome
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.training import memory
from halfstep.training.checkpoints.writer import Retention, Saver
from halfstep.training.data.batches import Prefetch
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.types import DataError
from halfstep.training.evaluation import Evaluation, evaluate
from halfstep.training.job import Job
from halfstep.training.paths import CHECKPOINTS, EVENTS
from halfstep.training.run.checkpointing import Checkpointer, NullSaver
from halfstep.training.run.monitor import Monitor
from halfstep.training.run.opening import open_parts
from halfstep.training.run.response import Responder, RollBackError
from halfstep.training.run.resume import Opened
from halfstep.training.run.signals import StopRequest
from halfstep.training.schedule import build_schedule
from halfstep.training.telemetry import loggers
from halfstep.training.telemetry.events import Events, NoEvents
from halfstep.training.telemetry.meters import UNMEASURED, Ceiling, Meters, Tally
from halfstep.training.telemetry.progress import StepProgress, drop_refusals
from halfstep.training.weights import artifact


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    step: int
    finished: bool
    seconds: float
    tokens_per_second: float  # after the first step
    held_out: Evaluation | None  # None if it was stopped: stopping does not wait for an evaluation
    saved: int | None  # the step of the newest complete checkpoint
    totals: dict[str, Any] | None = None  # where the time went (meters.py); None if no step was left to take


class Loop:
    """One run, from its folder to its outcome. `opened` is the run to resume; without it a new one begins."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        out: Path,
        *,
        opened: Opened | None = None,
        choice: Choice | None = None,
        device: str | None = None,
        warnings: Iterable[str] = (),
        deadline: float | None = None,
        ceiling: Ceiling = UNMEASURED,
        corpus: Corpus | None = None,
        job: Job | None = None,
        begun: float | None = None,
        progress: Callable[..., StepProgress] = StepProgress,
    ):
        self._begun = time.perf_counter() if begun is None else begun  # when the command was started
        self.job, self._progress = job or Job(), progress
        self.out, self.policy, self.ceiling = out, policy, ceiling
        parts = open_parts(
            config,
            policy,
            out,
            self.job,
            opened=opened,
            choice=choice,
            device=device,
            corpus=corpus,
            warnings=warnings,
        )
        self.lock, self.start, self.warnings = parts.lock, parts.start, parts.warnings
        context, self.pretrained = parts.context, parts.pretrained
        self.context, self.config, self.schedule = context, context.config, context.schedule
        self.corpus, self.batches = context.corpus, context.batches
        self.session, self.health = context.session, context.health
        self._evaluation_pending = opened is not None and opened.is_evaluation_pending()
        self._finished_before = opened is not None and opened.has_ended and self.start == config.training.steps
        self._unreadable: DataError | None = None
        self.last_evaluation: Evaluation | None = None  # at the last step
        self._memory = 0  # the most that another rank has held
        self._measured = self.session.policy  # whose compute format the ceiling is of
        # A run that died before its first checkpoint resumes from step 0.
        self.stop = StopRequest(shared=self.job.ranks > 1, deadline=deadline)
        self._open_outputs(resumed_from=None if opened is None else self.start)

    def _open_outputs(self, resumed_from: int | None) -> None:
        """Opens what records, shows, saves and watches the run."""
        config, owner = self.config, self.job.owner
        silent = None if owner else drop_refusals(None)
        self.bar = self._progress(config.training.steps, start=self.start, stream=silent)
        self._gather_warnings()
        self.tally = self._tally_at(self.start)
        devices = self.job.ranks * self.session.num_devices
        of_run = (config, self.ceiling, self.session, self.tally.watch)
        self.meters = Meters(*of_run, devices=devices, begun=self._begun)
        self.events = Events(self.out / EVENTS) if owner else NoEvents()
        watching = (self.session, self.meters, self.job, self.events, self.bar.note)
        self.monitor = Monitor(config, *watching, changes_after=self.schedule.changes_after)
        names = config.training.loggers if owner else ()
        self.board = loggers.Board(names, self.out, resumed_from, self.warnings.append)
        keep = Retention(config.training.keep_last, config.training.keep_every, config.training.keep_best)
        self.saver = self._make_saver(keep)
        watched = (self.session, self.health, self.events, self.bar)
        calls = (self.context.describe, self.context.load)
        self.checkpointer = Checkpointer(self.saver, *watched, *calls, self.stop, self.job)
        about = (self.health, self.batches, self.session, self.checkpointer, self.tally)
        searched = self.meters if config.monitor.on else None
        self.responder = Responder(*about, job=self.job, meters=searched)

    def _gather_warnings(self) -> None:
        """Adds the warnings that only other ranks have to those of rank 0."""
        for rank, others in enumerate(self.job.gather(self.warnings, "collecting warnings")):
            new = [f"rank {rank}: {message}" for message in others if message not in self.warnings]
            self.warnings += new if rank and self.job.owner else []

    def _make_saver(self, keep: Retention) -> Saver:
        """Returns the saver: rank 0 writes a state that all ranks have; each writes its part of a shared one."""
        job, about = self.job, (self.out / CHECKPOINTS, keep, self.start or None)
        if job.is_sharded:
            token = job.broadcast(secrets.token_hex(8) if job.owner else None)
            return Saver(*about, rank=job.rank, ranks=job.ranks, token=token)
        return Saver(*about) if job.owner else NullSaver(*about)

    def run(self) -> Outcome:
        """Trains to the end, or until someone asks to stop."""
        try:
            if self._finished_before:
                self._print_warnings()
                about = (self.session, self.corpus, self.config)
                held_out = evaluate(*about, is_over=self._is_over_anywhere, job=self.job)
                known = None if self.stop.requested else held_out  # nothing is added to its record
                return Outcome(self.out, self.start, True, 0.0, 0.0, known, self.start)
            with self.events, self.board:
                self.events.listener = self.board.log_event
                self._announce()
                self.monitor.start(self.start)
                self.board.warn = self.checkpointer.warn
                with self.stop, self.bar:
                    return self._run()
        finally:
            # What a deadline or a second SIGINT left behind still writes: then the lock ends with the process.
            if not self.saver.is_busy:
                self.lock.release()

    def _run(self) -> Outcome:
        self.meters.start()
        self._print_warnings()
        try:
            with memory.convert_oom(self.session.is_out_of_memory, self._oom_error):
                self._train()
            self.job.set_activity("saving the last step", timed=False)
            with self.meters.part("saving"):
                saved = self.checkpointer.save_last(self.tally.step)
        except HalfstepError as error:
            self.checkpointer.wait()  # a checkpoint that is being written is not lost
            self._write_stop(error.message)
            raise
        except Exception:
            self.checkpointer.wait()
            raise
        else:
            finished = saved and self.last_evaluation is not None
            if not finished:
                self._report_stop(saved)
            return self._finish(finished)
        finally:
            if not self.events.retry():
                number, why = self.events.unwritten, self.events.failure
                self.bar.note(f"NOT WRITTEN: the last {number} events are lost: {why}")

    def _print_warnings(self) -> None:
        if self.session.outcome:
            self.bar.note(f"precision {with_outcome(self.session.policy, self.session.outcome)}")
        for message in self.warnings:
            self.bar.note(f"warning: {message}")

    def _oom_error(self) -> HalfstepError:
        """Returns the error of a step that did not fit. It may have changed some weights: nothing is saved."""
        self.checkpointer.wait()
        peak, capacity = self.session.memory(), self.session.capacity()
        return memory.oom_while_training(self.config, self.tally.step, peak, capacity, self.saver.saved_step)

    def _train(self) -> None:
        total, tally = self.config.training.steps, self.tally
        if self._evaluation_pending and self.start < total and not self._evaluate_start():
            return
        while True:
            try:
                with Prefetch(self.responder.tokens_after, tally.step, total, is_over=self._is_over) as batches:
                    self._steps(batches)
                break
            except DataError:  # the training state is still valid
                if tally.step and self.saver.saved_step != tally.step:
                    self.checkpointer.save(tally.step)
                    self.checkpointer.wait()
                raise
            except RollBackError:
                before = self.session.policy
                at = self._tally_at(self.checkpointer.roll_back(tally.step))
                tally.step, tally.launched = at.step, at.launched
                tally.skipped, tally.tokens = at.skipped, at.tokens
                if self.session.policy == before:
                    self.monitor.roll_back(tally.step)
                else:
                    self._announce_policy()
        if tally.step == self.start == total:
            # It was stopped or killed between its last step and its end.
            self.last_evaluation = self._evaluate_start()

    def _is_over(self) -> bool:
        return bool(self.stop.requested)

    def _is_over_anywhere(self) -> bool:
        """Whether a signal came to any rank: all of them ask at the same batch, and get the same answer."""
        if not self._is_over() and self.job.ranks > 1:
            self.job.set_activity(f"evaluating after step {self.tally.step}")
            self._adopt_signal(self.job.exchange(self.stop.received))
        return self._is_over()

    def _adopt_signal(self, rows: list[tuple[int, ...]]) -> None:
        """Takes over a signal that any rank has received."""
        self.stop.request(next((number for number, *_ in rows if number), 0))

    def _evaluate_start(self) -> Evaluation | None:
        """Evaluates the step to resume from, which a signal had interrupted; None if another signal does."""
        if (held_out := self._evaluate()) is not None:
            self.checkpointer.note_held_out(self.start, held_out.loss)
        return held_out

    def _report_stop(self, saved: bool) -> None:
        step, newest, why = self.tally.step, self.saver.saved_step, self.stop.requested
        self._write_stop(why or "stopped")
        self.bar.note(f"stopped by {why} after step {step}; --resume continues")
        if not saved:
            self.bar.note(f"NOT SAVED in time: --resume continues after step {newest or 0}")

    def _write_stop(self, reason: str) -> None:
        totals, saved = self.meters.totals(), self.saver.saved_step
        self.events.write("stop", step=self.tally.step, reason=reason, saved=saved, **totals)

    def _steps(self, batches: Iterable[Tokens]) -> None:
        """Launches step after step; `pending` is the one whose numbers were not read yet."""
        pending, self._unreadable = None, None
        if not self.tally.watch.seconds and self.session.compilation.how != "no":
            self.bar.note(f"the first step is {self.session.compilation}")
        self.tally.watch.start(self.tally.step)
        for batch in self._until_unreadable(self.meters.timed_batches(batches)):
            self._follow_schedule()
            if self.monitor.shadow_due(self.tally.launched + 1):
                if pending is not None:
                    self._record(pending)
                    pending = None
                self.monitor.shadow(self.tally.launched + 1, batch)
                self.tally.watch.start(self.tally.step)
            self.job.set_activity(f"step {self.tally.launched + 1}", timed=self.meters.steps > 0)
            with self.monitor.observe_step(self.tally.launched + 1):
                result = self.session.step(batch)
            self.tally.launched += 1
            if pending is not None:
                self._record(pending)
            pending = result
            # The first is read when it is done, so that its time has no part of the second.
            due = self._pauses_after(self.tally.launched) or not self.meters.steps
            if due or not self.session.asynchronous or self.stop.requested:
                self._record(pending)
                pending = None
                self._pause(self.tally.launched, batch)
            if self.stop.requested:
                break
        if pending is not None:
            self._record(pending)
        if self._unreadable is not None:
            raise self._unreadable

    def _follow_schedule(self) -> None:
        """Changes the policy if the next step has another; all steps before it were read."""
        policy = self.schedule.of_step(self.tally.launched + 1)
        if policy == self.session.policy:
            return
        self.job.set_activity(f"changing the policy after step {self.tally.launched}", timed=False)
        self.session.change_policy(policy)
        self._announce_policy()
        self.tally.watch.start(self.tally.step)  # none of it is time spent training

    def _announce_policy(self) -> None:
        """Makes what watches the run follow the policy that runs now."""
        step, policy = self.tally.launched, self.session.policy
        self.events.write("policy", step=step, policy=str(policy), outcome=self.session.outcome)
        name = with_outcome(policy, self.session.outcome)
        self.bar.note(f"after step {step} the policy is `{name}`: masters and moments are kept bit for bit")
        for note in self.session.notes:  # what was decided by measurement
            self.bar.note(note)
        self.monitor.change_policy(step)
        self.responder.change_policy(policy)
        self.meters.ceiling = self.ceiling
        if policy.compute.format != self._measured.compute.format:
            self.meters.ceiling = Ceiling(None, f"it was measured in {self._measured.compute.format}")

    def _evaluates_after(self, step: int) -> bool:
        training = self.config.training
        return step % training.validate_every == 0 or step == training.steps

    def _saves_after(self, step: int) -> bool:
        training = self.config.training
        return step % training.save_every == 0 or step == training.steps

    def _pauses_after(self, step: int) -> bool:
        """Whether a step has to be done before the next is launched."""
        due = self._evaluates_after(step) or self._saves_after(step) or bool(self.monitor.sample_due(step))
        return due or self.schedule.changes_after(step)

    def _pause(self, step: int, batch: Tokens) -> None:
        """Evaluates, saves and samples after a step that is done, where each is due."""
        held_out = self._evaluate() if self._evaluates_after(step) else None
        if self._saves_after(step):
            self.job.set_activity(f"saving step {step}", timed=False)
            with self.meters.part("saving"):
                self.checkpointer.save(step, None if held_out is None else held_out.loss)
        if step == self.config.training.steps:
            self.last_evaluation = held_out
        why = "" if self.stop.requested else self.monitor.sample_due(step)
        if why:
            self.monitor.sample(step, batch, why)
        if why or self._evaluates_after(step) or self._saves_after(step):
            self.tally.watch.start(self.tally.step)  # none of it is time spent training

    def _until_unreadable(self, batches: Iterable[Tokens]) -> Iterator[Tokens]:
        """Yields batches up to one that cannot be read, so that what was launched before it still counts.

        Ranks tell each other whether they have their tokens before any of them launches the step, which needs all.
        """
        iterator = iter(batches)
        while True:
            batch, step = None, self.tally.launched + 1
            try:
                self.job.set_activity(f"reading its data for step {step}")
                batch = next(iterator, None)
            except DataError as error:
                self._unreadable = error
            if not self._all_ranks_have_data(batch, step):
                return
            assert batch is not None
            yield batch

    def _all_ranks_have_data(self, batch: Tokens | None, step: int) -> bool:
        if self.job.ranks == 1:
            return batch is not None
        self.job.set_activity(f"waiting for all ranks to have the data of step {step}")
        state = (self.stop.received, batch is None, self._unreadable is not None, self.session.memory())
        rows = self.job.exchange(*map(int, state))
        self._adopt_signal(rows)
        self._memory = max(row[3] for row in rows)
        if any(failed for _, _, failed, _ in rows):
            error = self._unreadable
            said = self.job.gather(error and [error.message, error.hint], "reporting data that cannot be read")
            rank, (message, hint) = next((rank, each) for rank, each in enumerate(said) if each)
            self._unreadable = DataError(f"rank {rank}: {message}", hint=hint)
        return not any(ended for _, ended, _, _ in rows)

    def _record(self, result: Any) -> None:
        tally = self.tally
        self.job.set_activity(
            f"waiting for its device to finish step {tally.step + 1}", timed=self.meters.steps > 0
        )
        numbers = self.session.read(result)
        if numbers["stuck"]:
            self.responder.stop(tally.step + 1, result)
        rate = build_schedule(self.config.training)(np.float32(tally.step - tally.skipped), np)
        tally.step += 1
        steps_per_second = tally.watch.read(tally.step)
        tally.tokens += self._tokens_per_step
        tally.skipped += int(numbers["skipped"])
        tally.loss = numbers["loss"]
        shown: dict[str, Any] = {key: numbers[key] for key in ("loss", "scale")}
        shown |= {"tokens_per_second": self._tokens_per_step * steps_per_second}
        shown |= {"memory": max(self.session.memory(), self._memory), "skipped": tally.skipped}
        self.events.write(
            "step",
            step=tally.step,
            tokens=tally.tokens,
            seconds=tally.watch.seconds,
            learning_rate=float(rate) * self.config.optimizer.matrix_rate,
            grad_norm=numbers["grad_norm"],
            **shown,
            **self.meters.read(result, steps_per_second),
        )
        if self.meters.steps == 1:
            self.bar.note(f"the first step was done {self.meters.until_first_step:.1f} s after the start")
        self.bar.update(tally.step, **shown)
        self.checkpointer.report()
        self.monitor.read(tally.step, numbers)
        self.responder.check(tally.step, numbers)

    def _evaluate(self) -> Evaluation | None:
        """Evaluates the model and reports it; None if a signal came, because stopping does not wait for it."""
        with self.meters.part("evaluation"):
            about = (self.session, self.corpus, self.config)
            held_out = evaluate(*about, is_over=self._is_over_anywhere, job=self.job)
        if self.stop.requested:
            return None
        loss, bits, tokens = held_out.loss, held_out.bits_per_byte, held_out.tokens
        self.events.write("validation", step=self.tally.step, loss=loss, bits_per_byte=bits, tokens=tokens)
        self.bar.note(f"step {self.tally.step}: {held_out}")
        return held_out

    def _finish(self, finished: bool) -> Outcome:
        held_out, tally = self.last_evaluation if finished else None, self.tally
        speed = self._tokens_per_step * self.meters.speed()
        if not self.job.owner:
            pass
        elif held_out is not None and self.stop.seconds_left == math.inf:
            weights = "ema" if self.config.training.ema else "model"
            origin = artifact.describe_origin(self.context.describe(tally.step, None), tally.step, weights)
            about = (self.session, self.corpus, self.config, self.out)
            artifact.write_artifact(*about, held_out, origin, self.events, self.bar)
        elif held_out is not None and self.config.artifact.format != "none":
            self.checkpointer.warn(
                f"the artifact was skipped because of the deadline: `halfstep artifact {self.out}` makes it"
            )
        totals = self.meters.totals()
        if held_out is not None:
            done = {"step": tally.step, "seconds": tally.watch.seconds, "tokens_per_second": speed}
            scores = {"validation_loss": held_out.loss, "bits_per_byte": held_out.bits_per_byte}
            self.events.write("end", **done, loss=tally.loss, **scores, **totals)
        newest = self.saver.saved_step
        return Outcome(self.out, tally.step, finished, tally.watch.seconds, speed, held_out, newest, totals)

    def _tally_at(self, step: int) -> Tally:
        return Tally(step, step, step - self.session.applied(), tokens=step * self._tokens_per_step)

    def _announce(self) -> None:
        here = {"tokens_per_step": self._tokens_per_step, "resumed_from": self.start or None}
        self.events.write("start", **self.context.describe_start(), **here, ceiling=self.ceiling.record())
        for message in self.warnings:
            self.events.write("warning", message=message)

    @property
    def _tokens_per_step(self) -> int:
        training = self.config.training
        return training.batch * training.micro_batches * self.config.model.context
