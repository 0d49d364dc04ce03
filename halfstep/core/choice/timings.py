"""Timings of layers that are kept in a file: what one run has timed, the next one on this machine need not.

There is a file for each version of the framework and of our code (core.kept), because both change what is timed:

    {"framework": "torch 2.11.0", "code": "4f0c...", "seconds": {"NVIDIA H200: inputs 2048, ...": [a, b]}}

What could not be timed is not kept: it is tried again. Runs that write at the same time may lose a timing of each
other's, which the next run then makes.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic

from halfstep.core import kept
from halfstep.core.choice.layers import Earlier, Timer, W, narrow_formats
from halfstep.core.precision import Precision


class KeptTimer(Generic[W]):
    """A timer of a backend that looks into the file first, and adds to it what it times."""

    def __init__(self, timer: Timer[W], backend: str, version: Callable[[], str]):
        self.timer, self.backend, self.version = timer, backend, version

    @property
    def path(self) -> Path | None:
        """The file; None if nothing is kept."""
        folder, code = kept.folder(), kept.code_digest(self.backend)
        return None if folder is None else folder / f"layers-{self.backend}-{self.version()}-{code}.json"

    def __call__(self, work: W, precisions: Sequence[Precision]) -> list[float]:
        """Returns the seconds of a layer in each precision, from the file if it has them."""
        path = self.path
        if path is None:
            return self.timer(work, precisions)
        name = f"{_described(work)}, in {_in_words(precisions)}"
        if name in (known := self._read(path)):
            return Earlier(known[name], path)
        seconds = self.timer(work, precisions)
        try:
            self._write(path, {**self._read(path), name: seconds})
        except OSError as error:
            why = f"what layers take cannot be kept for the next run: {error}"
            warnings.warn(f"{why}; {kept.VARIABLE} names another folder, or `{kept.OFF}`", stacklevel=2)
        return seconds

    def _read(self, path: Path) -> dict[str, list[float]]:
        if not path.exists():
            return {}
        seconds: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        return seconds

    def _write(self, path: Path, seconds: dict[str, list[float]]) -> None:
        about = {"framework": f"{self.backend} {self.version()}", "code": kept.code_digest(self.backend)}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps({**about, "seconds": seconds}, indent=1), encoding="utf-8")
        part.replace(path)


def _described(work: Any) -> str:
    parts = (f"{field.name} {getattr(work, field.name)}" for field in fields(work) if field.name != "device")
    return f"{work.place}: {', '.join(parts)}"


def _in_words(precisions: Sequence[Precision]) -> str:
    """Returns the formats of operands for a reader, and a digest of every other field."""
    formats = [narrow_formats(precision) or str(precision.operand.format) for precision in precisions]
    digest = hashlib.sha256(repr(precisions).encode()).hexdigest()
    return f"{', '.join(formats)} ({digest[:12]})"
