"""Processes that answer: each is told something in a line of JSON, and answers in one.

    (start)   ->  {...}                  what it says of itself
    request   ->  {...}
    anything  ->  {"missing", "hint"}    it cannot take part here, and says why
                  {"failed", "hint"}     it tried and could not

An answer is waited for no longer than the time that is left. Whatever a worker writes to stderr is kept in a file,
whose last lines tell why one died without a word.
"""

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.core.errors import HalfstepError

# How long a worker that was asked to stop may take before it is ended.
PATIENCE = 10.0
# So many of its last words are repeated in an error.
LAST_LINES = 3


class MissingError(HalfstepError):
    """A worker that cannot take part on this machine."""


class FailedError(HalfstepError):
    """A worker that stopped, or did not answer in time."""


class Worker:
    """One such process."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        self._log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        # Reading blocks, and a queue can be waited for with a limit. The thread ends with the process.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """The answer to a request."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone; `hear` says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self.hear(seconds)

    def hear(self, seconds: float | None = None) -> dict[str, Any]:
        """The next answer, in at most so many seconds."""
        try:
            line = self._answers.get(timeout=None if seconds is None else max(0.0, seconds))
        except queue.Empty:
            raise FailedError(f"no answer within {seconds:.0f} s", hint="give it more time") from None
        if line is None:
            self._answers.put(None)  # nor will there be another answer
            raise FailedError(f"it stopped with code {self._process.wait()}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        for kind, word in ((MissingError, "missing"), (FailedError, "failed")):
            if word in answer:
                raise kind(answer[word], hint=answer.get("hint"))
        return answer

    def dismiss(self) -> None:
        """Says that there are no more requests."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Lets it stop by itself; one that does not is ended."""
        self.dismiss()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)  # not for ever: a child of the worker may still hold the line

    def end(self) -> None:
        """Ends it now."""
        self._process.kill()
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
        return f": {' | '.join(line.strip() for line in lines)}" if lines else ""
