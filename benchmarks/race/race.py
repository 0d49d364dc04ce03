"""The race: how fast recipes train one model, in one run, and the loss they reach.

Each arm is a separate process, which holds its model and waits its turn. So its peak memory is its own, and the
arms are interleaved, one working at a time. Every arm sees the same batches from the same first weights.

Arms start and compile several at a time, which is the longest part, and train alone: round by round, the order
reversed each time. An arm that cannot take part, or fails, is taken out with its reason, and the others continue.
The race stops only after a round, when all have had the same number of turns, so their losses compare.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.race.contract import ARMS, CEILING, WARM_STEPS, Options, Setting
from benchmarks.race.standings import ArmResult, BenchResult
from benchmarks.race.workers import FailedError, MissingError, Worker
from halfstep.core.errors import MissingPackageError, OptionError, did_you_mean, how_to_install

# The arms that the bars compare, and the strongest stock recipe.
DEFAULT_ARMS = (
    *("autocast", "casted", "accelerate", "fabric", "autocast-fp16"),
    *("halfstep", "halfstep-stock", "halfstep-fp16", "halfstep-fp8"),
)
VALIDATION_SHARE, HELD_OUT_WINDOWS = 0.1, 64
# About what the last answer of an arm takes, with its evaluation; this much of the time is kept free.
FINISH_SECONDS = 3.0
# A turn that began in time may end this much late; an arm that takes longer hangs.
GRACE = 30.0
# The share of the time in which arms must be ready: one that compiles for long must not cost others their turns.
READY_SHARE = 0.8


def run(
    arms: Sequence[str] | None = None,
    *,
    seed: int = 0,
    log: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> BenchResult:
    """Races the arms as the `Options` say; `log` is called with the progress."""
    started, asked = time.monotonic(), Options(**options)
    names = checked_arms(arms)
    _check(asked)
    if find_spec("torch") is None:
        raise MissingPackageError("torch is not installed", hint=how_to_install("torch"))
    width, seconds = asked.width, asked.seconds
    heads = max(1, width // 64)
    own: dict[str, Any] = {"arm": CEILING, "heads": heads, "seed": seed, "tokens": "", "held_out": ""}
    shared = {field.name: getattr(asked, field.name) for field in fields(Setting) if field.name not in own}
    setting = Setting(**own, **shared)
    if width % heads:
        raise OptionError(f"the width is {width}; it must be a multiple of 64, or below 128")
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        deadline = None if seconds is None else started + seconds
        race = Race(names, setting, Path(folder), asked.rounds, asked.steps, deadline, log, asked.at_once)
        try:
            return race.run(asked.source)
        finally:
            race.close()


def checked_arms(arms: Sequence[str] | None) -> list[str]:
    """Returns the names of arms, each once; refuses unknown names."""
    names = list(dict.fromkeys(arms)) if arms else list(DEFAULT_ARMS)
    for name in names:
        if name not in ARMS:
            raise OptionError(f"unknown arm `{name}`; arms are {', '.join(ARMS)}", hint=did_you_mean(name, ARMS))
    return names


def _check(asked: Options) -> None:
    for name in ("micro_batches", "rounds", "steps", "at_once", "layers", "width", "context", "batch"):
        if getattr(asked, name) < 1:
            raise OptionError(f"`{name.replace('_', '-')}` is {getattr(asked, name)}; it must be 1 or more")
    if asked.seconds is not None and not 0 < asked.seconds <= 86400:
        raise OptionError(f"the limit is {asked.seconds:g} seconds; it must be above 0 and at most 86400")
    if not 256 <= asked.vocabulary <= 65536:
        raise OptionError(f"the vocabulary is {asked.vocabulary}; it must be from 256, the bytes, to 65536")


def command(setting: Setting) -> list[str]:
    """Returns the command that starts the process of an arm."""
    return [sys.executable, "-m", "benchmarks.race.arm_worker", json.dumps(asdict(setting))]


class Race:
    """The workers, their results so far, and the time that is left."""

    def __init__(
        self,
        names: Sequence[str],
        setting: Setting,
        folder: Path,
        rounds: int,
        steps: int,
        deadline: float | None,
        log: Callable[[str], None],
        at_once: int = 1,
    ):
        self.setting, self.folder, self.rounds, self.steps = setting, folder, rounds, steps
        self.at_once = at_once
        self.deadline, self.log = deadline, log
        now = time.monotonic()
        self.ready_by = None if deadline is None else now + READY_SHARE * (deadline - now)
        self.standings = {n: ArmResult(n, ARMS[n].words, ARMS[n].ours) for n in names}
        self.workers: dict[str, Worker] = {}
        self.ceiling: list[float] = []
        self.round_seconds = 0.0

    def run(self, source: str) -> BenchResult:
        """Writes the data, starts the workers, runs the rounds and scores held-out text."""
        hello = self._start(CEILING)
        self.log(f"{hello['device']}, torch {hello['versions']['torch']}")
        data = self._write_data(source)
        self.log(data)
        self._warm()
        done, stopped = 0, ""
        while done < self.rounds and not stopped:
            if not self._racing() or not self._time_for_a_round():
                stopped = f"after {done} of {self.rounds} rounds: " + (
                    "the time is up" if self._racing() else "no arm is left"
                )
                self.log(f"stopped {stopped}")
                break
            self._round(done)
            done += 1
        for name in self._racing():
            self._finish(name)
        return BenchResult(
            self.setting,
            hello["device"],
            hello["kind"],
            data,
            tuple(self.standings.values()),
            tuple(self.ceiling),
            done,
            self.steps,
            stopped,
        )

    def close(self) -> None:
        """Stops every worker."""
        for worker in self.workers.values():
            worker.dismiss()
        for worker in self.workers.values():
            worker.close()

    def _start(self, name: str) -> dict[str, Any]:
        threads = max(1, (os.cpu_count() or 1) // self.at_once)
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        left = _until(self.ready_by)
        if left is not None and left <= 0:
            raise FailedError("the time was up before it could start")
        worker = Worker(command(replace(self.setting, arm=name)), self.folder / f"{name}.log", environment)
        self.workers[name] = worker
        return worker.hear(left)

    def _write_data(self, source: str) -> str:
        """Writes the tokens of every update and the held-out text into files that all workers read."""
        import numpy as np

        from halfstep.training.data.batches import Batches, validation_readers
        from halfstep.training.data.load import load_corpus

        s = self.setting
        corpus = load_corpus(source, VALIDATION_SHARE, s.vocabulary)
        batches = Batches(
            corpus.train, context=s.context, batch=s.batch, micro_batches=s.micro_batches, seed=s.seed
        )
        updates = WARM_STEPS + self.rounds * (self.steps + 1)
        tokens = np.stack([batches.at(step) for step in range(updates)]).astype(np.uint16)
        readers = validation_readers(
            corpus.validation, context=s.context, batch=s.batch, limit_tokens=HELD_OUT_WINDOWS * s.context
        )
        held_out = np.concatenate([read() for read in readers]).astype(np.uint16)
        self.setting = replace(
            s, tokens=str(self.folder / "tokens.npy"), held_out=str(self.folder / "held_out.npy")
        )
        np.save(self.setting.tokens, tokens)
        np.save(self.setting.held_out, held_out)
        return corpus.description

    def _warm(self) -> None:
        tokens, steps = self.setting.tokens_per_step(), WARM_STEPS - 1
        self.log(f"{', '.join(self.standings)}: each starts with {steps} steps of {tokens:,} tokens, not timed")
        pool = ThreadPoolExecutor(self.at_once)
        try:
            list(pool.map(self._warm_one, self.standings))
        except BaseException:  # Ctrl-C: start no more workers, and do not wait for those that compile
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in list(self.workers.values()):
                worker.end()
            raise
        pool.shutdown()

    def _warm_one(self, name: str) -> None:
        started = time.monotonic()

        def start() -> None:
            hello = self._start(name)
            self._note(name, versions=hello["versions"], compiled=hello["compiled"])
            answer = self.workers[name].ask({"do": "train", "steps": WARM_STEPS - 1}, _until(self.ready_by))
            self._note(name, losses=tuple(answer["losses"]), ready_seconds=time.monotonic() - started)

        if self._try(name, start):
            self.log(f"{name}: ready after {time.monotonic() - started:.0f} s")

    def _round(self, number: int) -> None:
        started = time.monotonic()
        names = [*([CEILING] if CEILING in self.workers else []), *self._racing()]
        for name in names if number % 2 == 0 else names[::-1]:
            self._try(name, partial(self._turn, name))
        self.round_seconds = time.monotonic() - started
        self.log(f"round {number + 1} of {self.rounds}: {self.round_seconds:.0f} s")

    def _turn(self, name: str) -> None:
        left = self._left()
        limit = None if left is None else max(0.0, left) + GRACE
        answer = self.workers[name].ask({"do": "train", "steps": self.steps}, limit)
        if name == CEILING:
            self.ceiling.append(answer["flops"])
            return
        arm = self.standings[name]
        self._note(
            name,
            seconds=(*arm.seconds, answer["seconds"]),
            losses=(*arm.losses, *answer["losses"]),
            memory=max(arm.memory or 0, answer["memory"]) if answer["memory"] else None,
        )

    def _finish(self, name: str) -> None:
        def finish() -> None:
            answer = self.workers[name].ask({"do": "finish"})
            self._note(
                name,
                held_out=answer["held_out"],
                summary=answer["summary"],
                syncs=answer.get("syncs"),
                kernels=tuple(answer.get("kernels", ())),
                profile=answer.get("profile", {}),
            )

        if self.standings[name].seconds:
            self._try(name, finish)

    def _try(self, name: str, action: Callable[[], None]) -> bool:
        """Runs the action; if it fails, takes the arm out of the race with the reason."""
        try:
            action()
        except MissingError as error:
            self._note(name, missing=error.message, hint=error.hint)
            self.log(f"{name}: {error}")
        except FailedError as error:
            self._note(name, failed=error.message, hint=error.hint)
            self.log(f"{name}: {error}")
            if worker := self.workers.pop(name, None):
                worker.end()
        else:
            return True
        return False

    def _note(self, name: str, **facts: Any) -> None:
        if name in self.standings:  # the ceiling has none
            self.standings[name] = replace(self.standings[name], **facts)

    def _racing(self) -> list[str]:
        return [name for name, arm in self.standings.items() if not arm.missing and not arm.failed]

    def _left(self) -> float | None:
        return _until(self.deadline)

    def _time_for_a_round(self) -> bool:
        """Whether another round like the last would end in time, and the evaluations after it."""
        left = self._left()
        return left is None or left > self.round_seconds + FINISH_SECONDS * len(self._racing())


def _until(moment: float | None) -> float | None:
    return None if moment is None else moment - time.monotonic()
