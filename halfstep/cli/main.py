"""The entry point. It imports the commands late, so that Ctrl-C prints one line from the first moment."""

import sys
from contextlib import suppress

INTERRUPTED = 130  # as in shells: 128 plus the number of the signal


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    try:
        from halfstep.cli import app

        return app.run(arguments)
    except KeyboardInterrupt:
        with suppress(OSError):  # a full disk, or a pipe without a reader
            sys.stderr.write("interrupted\n")
        return INTERRUPTED
