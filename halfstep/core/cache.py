"""What this machine keeps from one run to the next: the folder, and the timings of layers in it.

The folder is HALFSTEP_CACHE, else `halfstep` in XDG_CACHE_HOME or in ~/.cache. HALFSTEP_CACHE=off keeps and reads
nothing. Everything there can be deleted: it is measured again. What torch and JAX compile is in their own folders.

Timings have a file for each version of the framework and of our code, because both change what is timed:

    {"framework": "torch 2.11.0", "code": "4f0c...", "seconds": {"NVIDIA H200: inputs 2048, ...": [a, b]}}

What could not be timed is not kept, so the next run tries again. Two runs that write at the same time may lose a
timing, which a later run then repeats.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Generic

from halfstep.core.choice.layers import Ahead, Earlier, Job, Timer, W, narrow_formats
from halfstep.core.precision import Precision

VARIABLE, OFF = "HALFSTEP_CACHE", "off"


def folder() -> Path | None:
    """Returns the folder, which need not exist yet; None if nothing is kept."""
    given = os.environ.get(VARIABLE)
    if given:
        return None if given == OFF else Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfstep"


@cache
def code_digest(backend: str) -> str:
    """Returns a digest of the code of core and of a backend: other code computes, and takes, something else.

    Of an empty name it is the digest of all of halfstep.
    """
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted({*(package / "core").rglob("*.py"), *(package / backend).rglob("*.py")}):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class CachedTimer(Generic[W]):
    """Wraps a backend's timer: looks the work up in the file, and adds to the file what had to be timed."""

    def __init__(self, timer: Timer[W], backend: str, version: Callable[[], str]):
        self.timer, self.backend, self.version = timer, backend, version
        self._ahead: dict[Job[W], list[float]] = {}

    @property
    def path(self) -> Path | None:
        """The file; None if nothing is kept."""
        where, code = folder(), code_digest(self.backend)
        return None if where is None else where / f"layers-{self.backend}-{self.version()}-{code}.json"

    def __call__(self, work: W, precisions: Sequence[Precision]) -> list[float]:
        """Returns the seconds of a layer in each precision, from the file if it has them."""
        path = self.path
        if path is None:
            return self._time(work, precisions)
        name = _name(work, precisions)
        if name in (known := self._read(path)):
            return Earlier(known[name], path)
        seconds = self._time(work, precisions)
        try:
            self._write(path, {**self._read(path), name: seconds})
        except OSError as error:
            why = f"what layers take cannot be kept for the next run: {error}"
            warnings.warn(f"{why}; {VARIABLE} names another folder, or `{OFF}`", stacklevel=2)
        return seconds

    def time_ahead(self, several: Callable[[Sequence[Job[W]]], Mapping[Job[W], list[float]]]) -> Ahead[W]:
        """Returns a function that times what the file does not have, by `several`, for the calls that follow."""

        def ahead(jobs: Sequence[Job[W]]) -> None:
            known = {} if self.path is None else self._read(self.path)
            self._ahead = dict(several([job for job in jobs if _name(*job) not in known]))

        return ahead

    def _time(self, work: W, precisions: Sequence[Precision]) -> list[float]:
        wide, narrow = precisions
        return self._ahead.pop((work, (wide, narrow)), []) or self.timer(work, precisions)

    def _read(self, path: Path) -> dict[str, list[float]]:
        if not path.exists():
            return {}
        seconds: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        return seconds

    def _write(self, path: Path, seconds: dict[str, list[float]]) -> None:
        about = {"framework": f"{self.backend} {self.version()}", "code": code_digest(self.backend)}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps({**about, "seconds": seconds}, indent=1), encoding="utf-8")
        part.replace(path)


def _name(work: Any, precisions: Sequence[Precision]) -> str:
    return f"{_describe(work)}, in {_describe_precisions(precisions)}"


def _describe(work: Any) -> str:
    parts = (f"{field.name} {getattr(work, field.name)}" for field in fields(work) if field.name != "device")
    return f"{work.place}: {', '.join(parts)}"


def _describe_precisions(precisions: Sequence[Precision]) -> str:
    """Returns the formats of operands for a reader, and a digest of every other field."""
    formats = [narrow_formats(precision) or str(precision.operand.format) for precision in precisions]
    digest = hashlib.sha256(repr(precisions).encode()).hexdigest()
    return f"{', '.join(formats)} ({digest[:12]})"
