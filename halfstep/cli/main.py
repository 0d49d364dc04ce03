"""The entry point. It imports the commands late, so that Ctrl-C prints one line from the first moment."""

import os
import signal
import sys
import time
from contextlib import nullcontext, suppress

from halfstep import cli

INTERRUPTED = 130  # as in shells: 128 plus the number of the signal


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    _open_closed_streams()
    code = _run(sys.argv[1:] if arguments is None else arguments, alone=True)
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


def _run(arguments: list[str], *, alone: bool = False) -> int:
    """Returns the exit code; `alone` is a process that does nothing else, and so gives signs of life."""
    cli.begun = time.perf_counter()
    try:
        from halfstep.cli.output import signs_of_life

        with signs_of_life() if alone else nullcontext():
            from halfstep.cli import app

            return app.run(arguments)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except MemoryError:
        return _end("error: there is not enough memory", 2)
    except ImportError as error:  # of numpy, whose message is a page long; backends have their own
        reason = str(error).strip().rpartition("\n")[2] or "no reason is given"
        return _end(f"error: {error.name or 'a package'} cannot be imported: {reason}", 2)
    except RecursionError:
        return _end("error: something that was given is nested too deeply to be read", 2)


def _end(words: str, code: int) -> int:
    with suppress(OSError):  # a full disk, or a pipe without a reader
        sys.stderr.write(f"{words}\n")
    return code


def _open_closed_streams() -> None:
    """Gives the null device to streams that are closed (`>&-`): the next file to be opened would be the output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
