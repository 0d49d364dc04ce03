"""events.jsonl: what happened in a run, one JSON object per line, appended and never rewritten.

Every line has `event`, its kind, and `time`, Unix seconds. The kinds and their fields:

    start        halfstep (version), config (table), policy (text), outcome (how many matmuls run in fp8 and
                 why no more do, if that is less than the policy's name says; else empty), compiled ({how: "no",
                 "block" or "whole", why}), choice ({preset, reason} or null), backend ({name, version}), device
                 ({kind, name}), ranks (processes that share the run), parameters, tokens_per_step, resumed_from
                 (or null),
                 schedule ([{from, policy}]: the policies of the run, each from after so many steps on; `policy`
                 is that of the step it starts from),
                 changes ([{step, settings: {name: [before, after]}}]: what was changed where it resumed), init
                 ({path, layout, sha256, notes} or null: the origin of the weights), flops_per_token, ceiling
                 ({"flops": per second or null, "told": what was measured, or why nothing was}), data
                 ({description, digest, train_tokens, validation_tokens, bigram_bits})
    step         step, loss, tokens (so far), seconds (so far), tokens_per_second, learning_rate (of the matrices
                 inside blocks), grad_norm, scale, skipped (steps so far), memory (the most bytes so far, of the
                 process that has most), mfu (1
                 is the ceiling, or null), input_wait (seconds that the loop waited for the batch)
    validation   step, loss, bits_per_byte (or null), tokens
    checkpoint   step, path, seconds (from when it was due until it was complete), waited (of these, how long
                 training stood still), bytes, held_out (the loss of an evaluation at the same step, or null)
    save_failed  step, message; earlier checkpoints are whole, training continues, the next save tries again
    skip         step, loss, grad_norm, in_a_row, scale, where ([{file, offsets}]): gradients were not finite;
                 ranks (the first whose own loss was not finite: `where` is its data) if processes share the run
    not_finite   the same of a step whose loss was not finite and whose gradients were: it was skipped
    low_scale    step, scale, message: the loss scale is low and falling; at its floor the run stops
    spike        step, loss, median, in_a_row, where: a loss above the recent ones by more than training.rollback
    rollback     step (it happened at), to (step of the checkpoint), skipped_data (updates' worth), message
    monitor      step, layers ([{name, kind, formats: {role: format}}]), every, slice: what is watched from here on
    layers       step, since (the numbers are of the steps after this one), activation and gradient (count, amax,
                 overflow, underflow, subnormal), weight (norm, gradient_norm, update_norm, lost: the share of
                 updates that left their weight as it was, or null): lists, parallel to `monitor.layers`
    sample       step, why ("schedule" or "alarm: ..."), layers ({name: {role: {exponents: {exponent: count}, sqnr
                 (dB), headroom (bits), kurtosis, what_if: {format: {sqnr, overflow, underflow}}}}}): of part of a
                 batch, with the weights after the step; roles are activation, gradient and weight
    shadow       step, loss, reference (the loss in fp32), difference, band ([lowest, highest] that noise makes of
                 it), layers ({name: {cosine, norm_ratio, sqnr (dB), band: {cosine (lowest), norm_ratio ([lowest,
                 highest]), sqnr (lowest)}, outside}}: of each layer's gradient; empty if a pass was not finite),
                 noise (its formats), causes (modules that alone lead outside), casts ({module: what its own code
                 casts, and not in fp32}), unwidened ({module: why its code is as narrow in fp32}): before the
                 step's update
    finding      step, and a Finding of halfstep.core.audit: rule, message, where, evidence, ...; once each
    cause        step, pass ("forward", "backward", "reduction" or null), operation, module, micro_batch, rank
                 (each or null), where ([{file, offsets}]), message: the first operation that went wrong
    artifact     path, bytes, limit (or null), over (bytes), loss and bits_per_byte, each _before and _after
    policy       step, policy and outcome (as in `start`): the steps after this one have another policy, by the
                 schedule or a rollback
    warning      message
    stop         step, reason, saved (step of the newest complete checkpoint, or null), and totals
    end          step, seconds, loss, validation_loss, bits_per_byte, tokens_per_second, and totals: where the time
                 of the session went (meters.py): spent, until_first_step (seconds from the start of the command to
                 the end of the session's first step, or null), mfu, busy (or null), busy_unknown (why), memory

`step` counts updates done: the first is 1. Losses are nats per token. A resumed run appends, from a new `start`
on; steps between its `resumed_from` and the kill then occur twice, and the later line counts. JSON has no
infinities and no NaN, so they are the texts "nan", "inf" and "-inf"; a text that is one of these three words gets
an apostrophe in front ("'nan"), and one more if it has some already.

A killed writer can leave one unfinished line at the end: readers skip it and the next writer removes it. An
unreadable line anywhere else is damage, and an error. What a full disk refuses waits in memory, in order, and is
tried again with each event that follows, from the very byte at which the disk gave up.
"""

import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np

from halfstep.config.reading import open_regular
from halfstep.config.schema import Bounds, Count, check
from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.training.files import os_errors

BLOCK = 64 << 10  # bytes that are read at once from the end of a file
MOST_LINE = 1 << 23  # bytes of an event, a sample of 2,000 layers; a longer line is damage


@dataclass(frozen=True)
class SettingsChange:
    """Settings that were changed where a run resumed: what each was, and is since."""

    step: Count
    settings: Mapping[str, tuple[Any, Any]]


_STEP: dict[str, Any] = {"step": Count}
_LOSS: dict[str, Any] = {**_STEP, "loss": float | None, "grad_norm": float | None, "scale": float | None}
_COLUMNS = Mapping[str, tuple[float | None, ...]]
_DONE: dict[str, Any] = {**_STEP, "spent": Mapping[str, float | None] | None, "mfu": float | None}
_DONE |= {"until_first_step": float | None, "tokens_per_second": float | None, "memory": Count | None}
_FIELDS: dict[str, dict[str, Any]] = {
    "start": {
        "config": Mapping[str, Any],
        "policy": str,
        "outcome": str | None,
        "compiled": Mapping[str, str] | None,
        "choice": Mapping[str, str] | None,
        "changes": tuple[SettingsChange, ...],
        "schedule": tuple[Mapping[str, Any], ...],
        "backend": Mapping[str, str],
        "device": Mapping[str, str],
        "ceiling": Mapping[str, Any] | None,
        "data": Mapping[str, Any],
        "init": Mapping[str, Any] | None,
        "parameters": Count,
        "resumed_from": Count | None,
    },
    "step": {
        **_LOSS,
        **dict.fromkeys(("tokens_per_second", "learning_rate", "mfu"), float | None),
        "skipped": Count | None,
        "memory": Count | None,
    },
    "validation": {**_STEP, "loss": float | None, "bits_per_byte": float | None},
    "checkpoint": {**_STEP, "path": str, "held_out": float | None},
    "save_failed": {**_STEP, "message": str},
    **dict.fromkeys(("skip", "not_finite", "spike"), _LOSS),
    "low_scale": {**_STEP, "scale": float, "message": str},
    "rollback": {**_STEP, "to": Count, "message": str},
    "monitor": {**_STEP, "layers": tuple[Mapping[str, Any], ...], "every": Count, "slice": Count},
    "layers": {**_STEP, "since": Count, **dict.fromkeys(("activation", "gradient", "weight"), _COLUMNS)},
    "sample": {**_STEP, "why": str, "layers": Mapping[str, Any]},
    "shadow": {
        **_STEP,
        **dict.fromkeys(("loss", "reference", "difference"), float | None),
        "band": tuple[float, ...],
        "layers": Mapping[str, Mapping[str, Any]],
        "causes": tuple[str, ...],
    },
    "finding": {**_STEP, "rule": str, "message": str},
    "cause": {**_STEP, "pass": str | None, "message": str},
    "policy": {**_STEP, "policy": str, "outcome": str | None},
    "warning": {"message": str},
    "stop": {**_DONE, "reason": str, "saved": Count | None},
    "end": {**_DONE, "seconds": float | None, "loss": float | None, "validation_loss": float | None},
}
_TIME = {"time": Annotated[float, Bounds(at_least=0, below=1e11)]}  # until the year 5138

_WORD = re.compile(r"'*(nan|inf|-inf)")


class EventsError(HalfstepError):
    """An events file that cannot be written or read."""


class Events:
    """The writer of an events file. It is open inside its `with` block; one writer per file."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time):
        self.path = path
        self.failure: OSError | None = None  # why the last try failed; None when all is written
        self.listener: Callable[[Mapping[str, Any]], None] | None = None  # gets each event, as it was given
        self._clock = clock
        self._waiting = b""  # what is not on the disk yet
        self._file: Any = None

    def __enter__(self) -> "Events":
        with _name_write_errors(self.path):
            self._file = os.fdopen(_open(self.path, os.O_CREAT), "ab", buffering=0)
            _remove_torn_line(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self.retry()
        self._file.close()

    def write(self, kind: str, /, **fields: Any) -> None:
        """Appends one event and flushes it; if the disk refuses, it waits for the next try."""
        if taken := {"event", "time"} & fields.keys():
            raise ValueError(f"`{taken.pop()}` is a field of every event and cannot be given")
        line = {"event": kind, "time": self._clock()} | {
            name: _encode(value, f"{kind}.{name}") for name, value in fields.items()
        }
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair, as in an odd file name, has no UTF-8; this makes it JSON's own \ud800.
        self._waiting += text.encode("utf-8", errors="backslashreplace") + b"\n"
        self.retry()
        if self.listener is not None:
            self.listener(fields | {"event": kind, "time": line["time"]})

    def retry(self) -> bool:
        """Tries to write what waits; returns whether nothing waits any more."""
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
            self.failure = None
        except OSError as error:
            self.failure = error
        return self.failure is None

    @property
    def unwritten(self) -> int:
        """How many events are not on the disk."""
        return self._waiting.count(b"\n")


class NoEvents(Events):
    """The events of a process that writes none: rank 0 of its job does."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))

    def __enter__(self) -> "NoEvents":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, kind: str, /, **fields: Any) -> None:
        """Does nothing."""


def check_writable(path: Path) -> None:
    """Refuses early a file that the writer would refuse."""
    if os.path.lexists(path):
        with _name_write_errors(path):
            os.close(_open(path))
            with open_regular(path) as file:
                _last_line(file)


def _name_write_errors(path: Path) -> AbstractContextManager[None]:
    hint = "choose a run folder that can be written with `--out`"
    return os_errors(EventsError, f"events cannot be written to `{path}`", hint)


def _open(path: Path, flags: int = 0) -> int:
    # A link would lead to someone else's file, and a pipe would wait for a reader.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a file, oldest first, without an unfinished last line."""
    return list(stream_events(path))


def stream_events(path: Path, *, skip_damage: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the events of a file one by one, oldest first: all of a long run's would take much memory.

    With `skip_damage`, a damaged line becomes a warning that names it, except before the first event.
    """
    event: dict[str, Any] | None = None
    with os_errors(EventsError, f"events cannot be read from `{path}`"), open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
            if line.endswith(b"\n") or len(line) == MOST_LINE or _is_whole(line):
                event = _parse_or_warn(line, path, number, event if skip_damage else None)
                yield event


class Follower:
    """Reads an events file while it is being written: each call gives the whole lines since the one before.

    A damaged line becomes a warning that names it, except before the first event.
    """

    def __init__(self, path: Path):
        self.path = path
        self.place = 0  # in bytes, after the last line that was read
        self._lines = 0
        self._file: tuple[int, int] | None = None
        self._event: dict[str, Any] | None = None  # the newest

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the events that came since the last call; a line without its end is left to the next."""
        with os_errors(EventsError, f"events cannot be read from `{self.path}`"), open_regular(self.path) as file:
            known = os.fstat(file.fileno())
            if self._file not in (None, (known.st_dev, known.st_ino)) or known.st_size < self.place:
                raise EventsError(f"`{self.path}` was replaced by another file", hint="start again")
            self._file = known.st_dev, known.st_ino
            file.seek(self.place)
            while (line := file.readline(MOST_LINE)).endswith(b"\n") or len(line) == MOST_LINE:
                self._event = _parse_or_warn(line, self.path, self._lines + 1, self._event)
                self._lines, self.place = self._lines + 1, self.place + len(line)
                yield self._event


def line_starts(*kinds: str) -> tuple[bytes, ...]:
    """Returns how the lines of some kinds of events begin, for `newest_first`."""
    return tuple(f'{{"event": "{kind}"'.encode() for kind in kinds)


def newest_first(path: Path, begin: bytes | tuple[bytes, ...] = b"") -> Iterator[dict[str, Any]]:
    """Yields the events of a file, newest first, whose lines begin with `begin`; reads no more than needed.

    Damaged lines are passed over: the checkpoints, and not this record, are what a run resumes from.
    """
    with os_errors(EventsError, f"events cannot be read from `{path}`"), open_regular(path) as file:
        for line in _backwards(file):
            if line.startswith(begin):
                with suppress(EventsError):
                    yield _parse(line)


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file, last first: what follows the last newline, then whole lines."""
    place = file.seek(0, os.SEEK_END)
    rest: list[bytes] = []  # the line that begins before `place`: its blocks, last first
    while place > 0:
        size = min(BLOCK, place)
        place = file.seek(place - size)
        first, *lines = file.read(size).split(b"\n")
        if lines:
            lines[-1] += b"".join(reversed(rest))
            yield from reversed(lines)
            rest = []
        rest.append(first)
        if len(rest) * BLOCK > MOST_LINE + BLOCK:
            return  # no writer wrote it, and it may be endless
    yield b"".join(reversed(rest))


def _parse(line: bytes, path: Path | None = None, number: int = 0) -> dict[str, Any]:
    """Returns the event of a line, the first of which has number 1."""
    try:
        event = _DECODER.decode(line.decode("utf-8", errors="surrogatepass"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError among them
        raise _damage_error(path, number, f"not JSON ({error})") from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise _damage_error(path, number, "not an object with an `event`")
    try:
        # Most lines hold no word that stands for a number; a backslash may spell one.
        if b'nan"' in line or b'inf"' in line or b"\\" in line:
            event = {name: _decode(value) for name, value in event.items()}
        fields = _TIME | _FIELDS.get(event["event"], {})
        check(fields, event)
    except (ConfigError, RecursionError) as error:
        raise _damage_error(path, number, f"not an event ({error})") from None
    if missing := [name for name in ("time", "step") if name in fields and name not in event]:
        raise _damage_error(path, number, f"an event without its {missing[0]}")
    return event


def _parse_or_warn(line: bytes, path: Path, number: int, before: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the event of a line; of a damaged one that follows an event, a warning at that event's time."""
    try:
        return _parse(line, path, number)
    except EventsError as error:
        if before is None:
            raise
        return {"event": "warning", "time": before["time"], "message": f"{error.message}, and was skipped"}


def _damage_error(path: Path | None, number: int, reason: str) -> EventsError:
    return EventsError(
        f"{path}:{number}: this line is {reason}", hint="repair or remove the line by hand; nothing is guessed"
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _small_integer(digits: str) -> int:
    if len(digits) > 300:  # beyond what a float can hold
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


# Built once: that takes as long as a line.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_small_integer)


def _is_whole(line: bytes) -> bool:
    """Whether a line without its newline is an event: a part of an object never parses."""
    try:
        _parse(line)
    except EventsError:
        return False
    return True


def _remove_torn_line(path: Path) -> None:
    with open_regular(path) as file:
        begin = file.seek(_last_line(file))
        tail = file.read(MOST_LINE)
    if not tail:
        return
    with open(path, "r+b") as file:
        if _is_whole(tail):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(begin)


def _last_line(file: BinaryIO) -> int:
    """Returns where the last line begins: after the last newline."""
    if (line := next(_backwards(file), None)) is None:
        raise OSError(errno.EFBIG, f"its last line has more than {MOST_LINE:,} bytes")
    return file.seek(0, os.SEEK_END) - len(line)


def _encode(value: Any, place: str) -> Any:
    """Converts a value to JSON. Device values are refused: writing them would wait for the device."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        return f"'{value}" if _WORD.fullmatch(value) else value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{place} has the key {odd[0]!r}; keys are texts")
        return {key: _encode(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{place} is a {type(value).__name__}; an event holds numbers, texts, lists and tables")


def _decode(value: Any) -> Any:
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value[1:] if value.startswith("'") else float(value)
    if isinstance(value, dict):
        return {name: _decode(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
