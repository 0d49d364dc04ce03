"""The entry point. It imports the commands late, so that Ctrl-C prints one line from the first moment."""

import signal
import sys
from contextlib import suppress

INTERRUPTED = 130  # as in shells: 128 plus the number of the signal


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    code = _run(sys.argv[1:] if arguments is None else arguments)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of the interpreter's shutdown
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs the command line in a process that continues after it, with its own handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return _run(arguments)
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def _run(arguments: list[str]) -> int:
    try:
        from halfstep.cli import app

        return app.run(arguments)
    except KeyboardInterrupt:
        with suppress(OSError):  # a full disk, or a pipe without a reader
            sys.stderr.write("interrupted\n")
        return INTERRUPTED
