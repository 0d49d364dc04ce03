"""Times several layers in processes of their own, which compile at the same time and time one after the other.

    this process              a process for each layer (python -m halfstep.torch.timers)
    start_timers      ---->   imports torch and its compiler
    (layer, precisions) ->    compiles both passes, and launches none of their kernels
                      <----   None, once it is compiled
    None              ---->   tunes, warms up and times: nothing else runs on the device meanwhile
                      <----   seconds

Each message is pickled; a text in place of an answer is why there is none. Such a layer is timed in this process.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from halfstep.core.choice.layers import BUDGET
from halfstep.core.precision import Precision
from halfstep.torch import fusion
from halfstep.torch.measure import LayerWork, time_layer
from halfstep.torch.numerics.compile_cache import allow_in_graph, keep_compiled
from halfstep.torch.numerics.dtypes import ROWS_INTO_FP32
from halfstep.torch.numerics.matmul import linear_in_graph

Job = tuple[LayerWork, tuple[Precision, Precision]]
FEWEST = 3  # layers that are worth starting processes, which takes as long as compiling one or two
MOST_SIZES = 5  # of the layers of our decoder: q and o, k and v, up and gate, down, the head
_started: list["Timer"] = []


class Timer:
    """A process that times one layer."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        # It compiles with one thread: the others are as many processes as there are layers.
        own = {"PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "halfstep.torch.timers"],
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def send(self, message: Any) -> None:
        """Sends a message, unless the process has ended."""
        try:
            pickle.dump(message, cast(Any, self.process.stdin))
            cast(Any, self.process.stdin).flush()
        except OSError:
            pass  # `receive` says so

    def receive(self) -> Any:
        """Waits for an answer."""
        try:
            return pickle.load(cast(Any, self.process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError):
            return "its process has ended"

    def end(self) -> None:
        """Ends the process, and waits until its memory is free."""
        self.process.kill()
        self.process.communicate()


def start_timers(count: int = MOST_SIZES) -> None:
    """Starts processes that are needed soon."""
    _started.extend(Timer() for _ in range(count - len(_started)))


def end_timers() -> None:
    """Ends those that were not needed."""
    while _started:
        _started.pop().end()


def time_together(jobs: Sequence[Job]) -> list[list[float] | str]:
    """Returns the seconds that each layer takes in its precisions, as `time_layer` does; or why there are none."""
    start_timers(len(jobs))
    timers = [_started.pop() for _ in jobs]
    late = [threading.Timer(BUDGET, timer.process.kill) for timer in timers]
    for each in late:
        each.start()
    try:
        for timer, (work, precisions) in zip(timers, jobs, strict=True):
            timer.send((_settings(), work, precisions))
        failures = [timer.receive() for timer in timers]
        found: list[list[float] | str] = []
        for timer, failure in zip(timers, failures, strict=True):
            timer.send(None)
            found.append(failure or timer.receive())
            timer.end()
        return found
    finally:
        for timer, each in zip(timers, late, strict=True):
            each.cancel()
            timer.end()


def time_ahead(jobs: Sequence[Job]) -> dict[Job, list[float]]:
    """Times those layers that are compiled for a GPU, if they are several. The others are timed one by one."""
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    todo = [job for job in jobs if job[0].compiled and job[0].device.type == "cuda"]
    try:
        if len(todo) < FEWEST or not alone or torch.are_deterministic_algorithms_enabled():
            return {}
        found = zip(todo, time_together(todo), strict=True)
        return {job: seconds for job, seconds in found if isinstance(seconds, list)}
    finally:
        end_timers()


def _settings() -> tuple[bytes | None, dict[str, bool]]:
    """Returns what is set in this process and changes what is compiled: torch's own settings, and our findings."""
    inductor = sys.modules.get("torch._inductor.config")
    return None if inductor is None else cast(Any, inductor).save_config(), dict(ROWS_INTO_FP32)


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Inside, kernels that torch compiles are not launched: they are tuned when nothing else runs."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launch = CachingAutotuner.run
    CachingAutotuner.run = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachingAutotuner.run = launch  # type: ignore[method-assign]


def answer() -> None:
    """Times the layer that the process which started this one asks for."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no answer

    def reply(message: Any) -> None:
        pickle.dump(message, replies)
        replies.flush()

    import torch._inductor.compile_fx  # takes seconds, in which the other process does not need it yet

    try:
        (config, rows), work, precisions = pickle.load(sys.stdin.buffer)
    except EOFError:
        return  # nothing was to be timed
    ROWS_INTO_FP32.update(rows)
    if config is not None:
        torch._inductor.config.load_config(config)
    torch._inductor.config.compile_threads = 1
    keep_compiled()
    allow_in_graph(linear_in_graph)
    fusion.install()

    def wait(runs: Sequence[Any]) -> None:
        with _launching_nothing():
            for run in runs:
                run(1)
        reply(None)
        pickle.load(sys.stdin.buffer)

    try:
        reply(time_layer(work, precisions, before=wait))
    except Exception as error:
        reply(str(error) or type(error).__name__)


if __name__ == "__main__":
    answer()
