"""Asking a run to stop: the first signal lets it save and leave, the second ends it.

A step must not be torn in half, so a signal only leaves a mark, and the loop looks at it between steps:

    SIGINT, SIGTERM or SIGHUP    `requested` becomes its name; the loop saves a checkpoint and returns
    SIGINT after that            KeyboardInterrupt, at once

SIGHUP comes when a terminal goes away, as with a lost connection. SIGTERM is what schedulers send before they take
a machine away, often more than once, so a repeated SIGTERM changes nothing. They leave some seconds:
`left(deadline)` says how many there are still, and the loop starts no save that would not end in them. A signal
that was ignored when we came (as under nohup) stays ignored. Python runs handlers in the main thread alone; in any
other thread nothing is installed and `requested` stays None.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class StopRequest:
    """Whether somebody asked the run to stop."""

    requested: str | None = None
    """The name of the first signal that came, as "SIGTERM"."""
    at: float = 0.0
    """When it came, on the clock of time.monotonic()."""

    def left(self, deadline: float | None) -> float | None:
        """The seconds that are left of a deadline that began with the signal; None where there is none."""
        return None if deadline is None or self.requested is None else self.at + deadline - time.monotonic()

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler of the signals."""
        if self.requested is None:
            self.requested, self.at = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turns signals into a request while the block runs, and gives the handlers back after it."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # None is a handler that was not installed from Python and could not be given back.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, request.receive)
        yield request
    finally:
        for number, old in before.items():
            signal.signal(number, old)
