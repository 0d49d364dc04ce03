"""Where `halfstep` begins: the commands (app.py) are imported where Ctrl-C is a word and no traceback."""

import os
import sys
from contextlib import suppress

INTERRUPTED = 130  # as shells have it: 128 and the number of the signal


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and leaves with its exit code."""
    hold_descriptors()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs the command line; the exit code comes back."""
    try:
        from halfstep.cli import app

        return app.run(arguments)
    except KeyboardInterrupt:
        return interrupted()


def interrupted() -> int:
    """Says that somebody pressed Ctrl-C; the exit code of it."""
    with suppress(OSError, ValueError, AttributeError):  # full, closed, or none
        sys.stderr.write("interrupted\n")
    return INTERRUPTED


def hold_descriptors() -> None:
    """Opens the null device in place of standard streams that are closed.

    The next file to be opened would get the number of one, and with it what libraries write to that number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
            os.set_inheritable(number, True)
