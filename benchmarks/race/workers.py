"""Worker processes: each says hello, then answers one request after the other, in JSON.

An answer with `missing` and a `hint` says that it cannot take part on this machine, one with `failed` that it
tried and could not. The parent waits for an answer no longer than it has time. Whatever a worker prints is kept in
a file, whose last lines explain why a worker died.
"""

import contextlib
import json
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from halfstep.core.errors import HalfstepError

# How long a worker that has no more requests may take to stop before it is killed.
PATIENCE = 10.0
# How many of its last lines an error repeats.
LAST_LINES = 3
_DESCRIPTOR = "HALFSTEP_WORKER_PIPE"

Message = dict[str, Any]


class MissingError(HalfstepError):
    """A worker that cannot take part on this machine."""


class FailedError(HalfstepError):
    """A worker that stopped, or did not answer in time."""


class Worker:
    """A worker process, from the parent's side."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        self._log = log
        self._pipe, theirs = Pipe()
        with log.open("wb") as output, theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, _DESCRIPTOR: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
            )

    def ask(self, request: Message, seconds: float | None = None) -> Message:
        """Returns the answer to a request."""
        with contextlib.suppress(OSError):  # it is gone; `hear` says why
            _send(self._pipe, request)
        return self.hear(seconds)

    def hear(self, seconds: float | None = None) -> Message:
        """Returns the next answer, if it comes within `seconds`."""
        try:
            if not self._pipe.poll(None if seconds is None else max(0.0, seconds)):
                raise FailedError(f"no answer within {seconds:.0f} s", hint="give it more time")
            answer: Message = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise FailedError(f"it stopped with code {self._process.wait()}{self._last_words()}") from None
        for kind, word in ((MissingError, "missing"), (FailedError, "failed")):
            if word in answer:
                raise kind(answer[word], hint=answer.get("hint"))
        return answer

    def dismiss(self) -> None:
        """Says that there are no more requests."""
        self._pipe.close()

    def close(self) -> None:
        """Lets it stop by itself; kills it if it does not."""
        self.dismiss()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.end()

    def end(self) -> None:
        """Kills it."""
        self.dismiss()
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
        return f": {' | '.join(line.strip() for line in lines)}" if lines else ""


def serve(start: Callable[[], tuple[Message, Callable[[Message], Message]]]) -> int:
    """Runs a worker: says the hello that `start` returns, then answers requests with the function it returns."""
    with Connection(int(os.environ.pop(_DESCRIPTOR))) as pipe:
        try:
            hello, respond = start()
            _send(pipe, hello)
            for request in _requests(pipe):
                _send(pipe, respond(request))
        except MissingError as error:
            _send(pipe, {"missing": error.message, "hint": error.hint})
        except HalfstepError as error:
            _send(pipe, {"failed": error.message, "hint": error.hint})
            return 1
        except Exception as error:
            traceback.print_exc()
            _send(pipe, {"failed": _describe(error), "hint": None})
            return 1
    return 0


def _requests(pipe: Connection) -> Iterator[Message]:
    with contextlib.suppress(EOFError, ConnectionResetError):  # there are no more
        while True:
            yield json.loads(pipe.recv_bytes())


def _send(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def _describe(error: Exception) -> str:
    """Returns an error in one line: memory errors have many."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"
