"""Asking a run to stop: a signal sets a flag that the loop checks between steps, so that none is cut in half.

    SIGINT, SIGTERM or SIGHUP    `requested` becomes its name; the loop saves a checkpoint and returns
    a second SIGINT              KeyboardInterrupt, at once
    any of them after `conclude` SIGINT ends the process, the others change nothing

SIGHUP comes when a terminal goes away. Schedulers send SIGTERM before they take a machine away, often more than
once, so a repeated SIGTERM changes nothing, to the last moment of the process: while Python shuts down it resets
its own handlers to what kills, but not signals that are ignored. A signal that was ignored before (as under nohup)
stays ignored.
In a job of several processes a signal to one of them is `received` there, and `requested` once all of them know,
with the next step (loop.py): they stop after the same one.
Python runs handlers in the main thread alone; in any other thread nothing is installed and `requested` stays None.
"""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Whether the run was asked to stop. Inside its `with` blocks, which may nest, it receives signals."""

    def __init__(self, *, shared: bool = False, deadline: float | None = None) -> None:
        self.shared = shared  # whether other processes must know before it counts
        self.deadline = math.inf if deadline is None else deadline  # seconds after the signal
        self.received = 0  # the number of the first signal that this process received
        self.requested: str | None = None  # the name of the first signal, such as "SIGTERM"
        self.at = 0.0  # when it came, on the clock of time.monotonic()
        self._interrupted = False  # whether a SIGINT came
        self._before: list[dict[int, Any]] = []  # the handlers to restore, one dictionary per `with` block

    @property
    def seconds_left(self) -> float:
        """The seconds left until the deadline, which begins with the signal; infinity without either."""
        return math.inf if self.requested is None else self.at + self.deadline - time.monotonic()

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Handles a signal."""
        if not self.received:
            self.received = number
            if not self.shared:
                self.request(number)
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

    def request(self, number: int) -> None:
        """Makes the run stop because of a signal, unless another one already does."""
        if number and self.requested is None:
            self.requested, self.at = signal.Signals(number).name, time.monotonic()

    def conclude(self) -> None:
        """Keeps signals from changing the outcome, which is known now; this lasts beyond the `with` block."""
        for number in self._before[-1]:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)

    def __enter__(self) -> "StopRequest":
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None is a handler that was not installed from Python and could not be restored.
                if (old := signal.getsignal(number)) not in (None, signal.SIG_IGN):
                    before[number] = old
                    signal.signal(number, self.receive)
        self._before.append(before)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.pop().items():
            if signal.getsignal(number) == self.receive:
                signal.signal(number, old)
