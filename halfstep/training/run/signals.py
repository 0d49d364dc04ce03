"""Asking a run to stop: a signal sets a mark that the loop checks between steps, which must not be torn in half.

    SIGINT, SIGTERM or SIGHUP    `requested` becomes its name; the loop saves a checkpoint and returns
    SIGINT after that            KeyboardInterrupt, at once

SIGHUP comes when a terminal goes away. Schedulers send SIGTERM before they take a machine away, often more than
once, so a repeated SIGTERM changes nothing. A signal that was ignored before (as under nohup) stays ignored.
Python runs handlers in the main thread alone; in any other thread nothing is installed and `requested` stays None.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Whether somebody asked the run to stop. Inside its `with` block it receives signals."""

    def __init__(self) -> None:
        self.requested: str | None = None  # the name of the first signal, such as "SIGTERM"
        self.at = 0.0  # when it came, on the clock of time.monotonic()
        self._before: dict[int, Any] = {}  # the handlers to restore

    def left(self, deadline: float | None) -> float | None:
        """Returns the seconds left of a deadline that began with the signal; None if there is none."""
        return None if deadline is None or self.requested is None else self.at + deadline - time.monotonic()

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Handles a signal."""
        if self.requested is None:
            self.requested, self.at = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None is a handler that was not installed from Python and could not be restored.
                if (old := signal.getsignal(number)) not in (None, signal.SIG_IGN):
                    self._before[number] = old
                    signal.signal(number, self.receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)
