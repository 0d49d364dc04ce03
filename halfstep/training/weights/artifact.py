"""A finished model in int8 and zlib, loaded back and scored before anyone relies on it.

    matrices        int8, with one fp16 scale per row:  w ~ q * scale,  q = round(w / scale),  |q| <= 127
    everything else fp16, to nearest: gains, factors, mixes, some 20,000 numbers of `golf`

The scale is the row's largest magnitude over 127, rounded **up** to fp16, and q uses the scale that is stored. So
nothing is clipped and no weight is off by more than half of its scale.

The file runs no code when it is read. It is, in this order:

    8 bytes      HSINT8Z and the version, 2
    32 bytes     SHA-256 of all that follows
    8 bytes      length of the safetensors file, little-endian
    the rest     that file, compressed by zlib at level 9: `<parameter>` in I8 or F16, `<parameter>.scale` in F16,
                 and under `halfstep` of its metadata, in JSON, the run it is from (step, policy, settings and
                 data, and which of its weights), so that it can be evaluated and sampled from
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.config.model import ModelConfig, Shape, parameter_shapes
from halfstep.config.reading import fits_in_memory, open_regular, parse_json, read_bytes
from halfstep.config.run import RunConfig
from halfstep.config.schema import Count, build
from halfstep.config.session import Session
from halfstep.config.weights import Weights
from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import Stored, widen
from halfstep.training import memory, paths
from halfstep.training.checkpoints.checkpoint import Loaded
from halfstep.training.data.corpus import Corpus
from halfstep.training.evaluation import Evaluation, evaluate
from halfstep.training.files import os_errors, write_whole

NAME = "model.int8z"
MAGIC, VERSION = b"HSINT8Z", 2
HEADER_BYTES = 8 + 32 + 8
SCALE = ".scale"
LEVELS = 127
FP16_MAX = 65504.0
# What a run writes itself, and may not have written yet.
RUN_FILES = (paths.CONFIG, paths.EVENTS, paths.REPORT, paths.LOCK, paths.LOGGERS)

Floats = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]


class ArtifactError(HalfstepError):
    """An artifact that cannot be written or read."""


class DamagedArtifactError(ArtifactError):
    """A file that is not an artifact, or whose content is not what was written."""


@dataclass(frozen=True)
class OriginData:
    """The data that the weights were trained on."""

    digest: str
    description: str
    bytes_per_token: float | None
    held_out_digest: str | None = None


@dataclass(frozen=True)
class Origin:
    """What an artifact records of its run, as the manifest of a checkpoint does."""

    step: Count
    policy: str
    config: RunConfig
    data: OriginData
    weights: Literal["model", "ema"]


class Decoded(NamedTuple):
    """What an artifact holds."""

    model: ModelConfig
    weights: dict[str, Floats]
    origin: dict[str, Any]  # a table that `Origin` describes


@dataclass(frozen=True)
class Scored:
    """An artifact, and the held-out loss before and after."""

    path: Path
    bytes: int
    limit: int  # 0 is none
    before: Evaluation
    after: Evaluation

    @property
    def over(self) -> int:
        """By how many bytes it is too large; 0 if it fits."""
        return max(0, self.bytes - self.limit) if self.limit else 0

    def record(self) -> dict[str, Any]:
        """Returns it as events and JSON have it."""
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "limit": self.limit or None,
            "over": self.over,
            "loss_before": self.before.loss,
            "loss_after": self.after.loss,
            "bits_per_byte_before": self.before.bits_per_byte,
            "bits_per_byte_after": self.after.bits_per_byte,
        }

    def __str__(self) -> str:
        size = f"artifact `{self.path}`: {self.bytes:,} bytes"
        if self.limit:
            size += f" of {self.limit:,}, "
            size += f"OVER by {self.over:,}" if self.over else f"{self.limit - self.bytes:,} to spare"
        if self.before.bits_per_byte is not None and self.after.bits_per_byte is not None:
            return f"{size}; bits per byte {self.before.bits_per_byte:.4f} -> {self.after.bits_per_byte:.4f}"
        return f"{size}; held-out loss {self.before.loss:.4f} -> {self.after.loss:.4f}"


def describe_origin(manifest: Mapping[str, Any], step: int, weights: str) -> dict[str, Any]:
    """Returns what an artifact records of its run, from the manifest of its checkpoint."""
    keys = ("digest", "description", "bytes_per_token", "held_out_digest")
    data = {key: manifest["data"].get(key) for key in keys}
    known = {"policy": manifest["policy"], "config": manifest["config"], "data": data}
    return {"step": step, **known, "weights": weights}


def encode(weights: Weights, origin: Mapping[str, Any]) -> bytes:
    """Returns the bytes of an artifact."""
    from safetensors.numpy import save

    arrays: Arrays = {}
    for name, value in weights:
        arrays |= _to_narrow(name, value)
    # One entry: safetensors writes several in any order.
    plain = save(arrays, {"halfstep": json.dumps(origin, sort_keys=True)})
    rest = len(plain).to_bytes(8, "little") + zlib.compress(plain, 9)
    return MAGIC + bytes([VERSION]) + hashlib.sha256(rest).digest() + rest


def decode(data: bytes, name: str = "artifact") -> Decoded:
    """Returns the model, its weights in fp32 and its origin; refuses what is damaged or not an artifact."""
    plain = _read_payload(data, name)
    model, arrays, origin = _parse(plain, name)
    weights = {}
    for parameter, shape in parameter_shapes(model).items():
        value = arrays[parameter].astype(np.float32)
        if _is_matrix(parameter, shape):
            value *= arrays[parameter + SCALE].astype(np.float32)[:, None]  # exact: 7 bits times 11
        weights[parameter] = value
    return Decoded(model, weights, origin)


def load_artifact(path: Path) -> Loaded:
    """Returns an artifact as if it were a checkpoint of whole weights, whose manifest is its origin."""
    _, weights, origin = read_artifact(path)
    arrays = {f"model.{name}": Stored("F32", x.shape, x.tobytes()) for name, x in weights.items()}
    return Loaded(path, arrays, origin)


def read_artifact(path: Path) -> Decoded:
    """Reads and decodes the artifact at a path."""
    with os_errors(DamagedArtifactError, f"`{path}` cannot be read"):
        data = read_bytes(path)
    return decode(data, str(path))


def masters(state: Mapping[str, Stored], model: ModelConfig, *, averaged: bool) -> Iterator[tuple[str, Floats]]:
    """Yields the weights in a session's state, or their averages, in fp32."""
    for name in parameter_shapes(model):
        key = f"average.{name}" if averaged else f"model.{name}"
        if key not in state:
            raise ArtifactError(
                f"the state holds no `{key}`, which the model of its settings has",
                hint="the settings were changed after it was saved: name another checkpoint",
            )
        held = state[key]
        rest = None if averaged else state.get(f"remainder.{name}")
        yield name, widen(held, rest)


def check_place(path: Path, run: Path) -> None:
    """Refuses to overwrite anything but an artifact: a run may have no other copy of it."""
    hint = "name another file with --out"
    where, home, saved = (Path(os.path.realpath(each)) for each in (path, run, run / paths.CHECKPOINTS))
    if where in [home / name for name in RUN_FILES] or saved in where.parents:
        raise ArtifactError(f"`{path}` belongs to the run itself", hint=hint)
    if path.is_dir():
        raise ArtifactError(f"`{path}` is a folder", hint=hint)
    if path.exists() and path.stat().st_size and not is_artifact(path):
        raise ArtifactError(f"`{path}` exists, and is not an artifact", hint=f"{hint}, or move it away")
    if path.parent != run and not path.parent.is_dir():
        raise ArtifactError(
            f"`{path}` cannot be written: there is no folder `{path.parent}`", hint=f"make it, or {hint}"
        )


def is_artifact(path: Path) -> bool:
    """Whether a file begins like an artifact, of any version."""
    if not path.is_file():
        return False  # reading a pipe would block
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def score(
    session: Session,
    corpus: Corpus,
    config: RunConfig,
    path: Path,
    before: Evaluation,
    weights: Iterable[tuple[str, Floats]],
    origin: Mapping[str, Any],
) -> Scored:
    """Writes weights as an artifact, and evaluates what is read back; the session gets its own state back."""
    with os_errors(ArtifactError, f"`{path}` cannot be written"):
        write_whole(path, encode(weights, origin))
    state = session.state()
    session.load_weights(load_artifact(path).arrays)
    try:
        after = evaluate(session, corpus, config, averaged=False)
    finally:
        session.load(state)
    return Scored(path, path.stat().st_size, config.artifact.limit, before, after)


def write_artifact(
    session: Session,
    corpus: Corpus,
    config: RunConfig,
    out: Path,
    before: Evaluation,
    origin: Mapping[str, Any],
    events: Any,
    bar: Any,
) -> None:
    """Writes and scores the artifact that a recipe asks for, at the end of a run; too large is a warning."""
    if config.artifact.format == "none":
        return
    weights = masters(session.state(), config.model, averaged=origin["weights"] == "ema")
    try:
        with memory.convert_oom(session.is_out_of_memory, lambda: memory.oom_while_scoring(config)):
            scored = score(session, corpus, config, out / NAME, before, weights, origin)
        events.write("artifact", **{**scored.record(), "path": NAME})
        bar.note(str(scored))
        if not scored.over:
            return
        size, over, limit = scored.bytes, scored.over, scored.limit
        warning = f"the artifact has {size:,} bytes, {over:,} more than artifact.limit {limit:,}"
    except HalfstepError as error:  # the checkpoint is there: the run keeps its worth
        warning = f"there is no artifact: {error.message}"
    events.write("warning", message=warning)
    bar.note(f"warning: {warning}")


def _to_narrow(name: str, value: Floats) -> Arrays:
    if not np.isfinite(value).all():
        raise ArtifactError(f"`{name}` holds numbers that are not finite", hint="use an earlier checkpoint")
    if not _is_matrix(name, value.shape):
        if value.size and np.abs(value).max() > FP16_MAX:
            raise ArtifactError(
                f"`{name}` holds {np.abs(value).max():g}, and fp16 ends at {FP16_MAX:g}",
                hint="a factor that large has diverged: use an earlier checkpoint",
            )
        return {name: value.astype("<f2")}
    numbers, scale = quantize(value)
    if not np.isfinite(scale).all():
        raise ArtifactError(f"a row of `{name}` has numbers beyond {LEVELS * FP16_MAX:g}")
    return {name: numbers, name + SCALE: scale}


def quantize(matrix: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Returns the nearest multiples of each row's scale, and the scales."""
    amax = np.abs(matrix.astype(np.float64)).max(axis=1)
    with np.errstate(over="ignore"):
        nearest = (amax / LEVELS).astype("<f2")
        below = nearest.astype(np.float64) * LEVELS < amax
        scale = np.where(below, np.nextafter(nearest, np.float16(np.inf)), nearest).astype("<f2")
    divisor = np.where(scale > 0, scale.astype(np.float64), 1.0)  # a row of zeros has no scale
    return np.rint(matrix / divisor[:, None]).astype(np.int8), scale


def _is_matrix(name: str, shape: Shape) -> bool:
    return name.endswith(".weight") and len(shape) == 2


def _read_payload(data: bytes, name: str) -> bytes:
    if data[:7] != MAGIC:
        raise DamagedArtifactError(
            f"`{name}` is not an artifact of halfstep", hint="`halfstep artifact RUN` writes one"
        )
    if len(data) < HEADER_BYTES:
        raise _damage_error(name, f"is truncated: it has {len(data)} bytes")
    if data[7] != VERSION:
        raise DamagedArtifactError(
            f"`{name}` is an artifact of version {data[7]}, and this halfstep reads version {VERSION}",
            hint="write it again with `halfstep artifact RUN`, or update halfstep",
        )
    if hashlib.sha256(data[40:]).digest() != data[8:40]:
        raise _damage_error(name, "is damaged: its digest is not its own")
    length = int.from_bytes(data[40:48], "little")
    if not fits_in_memory(length):  # a few bytes can stand for many
        raise DamagedArtifactError(f"`{name}` holds {length:,} bytes, more than this machine has memory for")
    try:
        opened = zlib.decompressobj()
        plain = opened.decompress(data[HEADER_BYTES:], length + 1)
    except (zlib.error, OverflowError) as error:
        raise _damage_error(name, f"is damaged: {error}") from None
    if len(plain) != length or not opened.eof or opened.unused_data:
        raise _damage_error(name, f"is damaged: it does not hold {length} bytes")
    return plain


def _damage_error(name: str, what: str) -> DamagedArtifactError:
    return DamagedArtifactError(f"`{name}` {what}", hint="write or fetch it again")


def _parse(plain: bytes, name: str) -> tuple[ModelConfig, Arrays, dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        header = parse_json(plain[8 : 8 + int.from_bytes(plain[:8], "little")])
        origin = parse_json(header["__metadata__"]["halfstep"])
        model = build(Origin, origin).config.model
        arrays = load(plain)
    except (SafetensorError, HalfstepError, ValueError, KeyError, TypeError) as error:
        raise DamagedArtifactError(f"`{name}` cannot be read: {error}", hint="write it again") from None
    if {key: (array.dtype.str[1:], array.shape) for key, array in arrays.items()} != _expected_tensors(model):
        raise DamagedArtifactError(
            f"`{name}` does not hold the tensors of the model it describes", hint="write it again"
        )
    return model, arrays, origin


def _expected_tensors(model: ModelConfig) -> dict[str, tuple[str, Shape]]:
    stored: dict[str, tuple[str, Shape]] = {}
    for name, shape in parameter_shapes(model).items():
        matrix = _is_matrix(name, shape)
        stored |= {name: ("i1" if matrix else "f2", shape)} | ({name + SCALE: ("f2", shape[:1])} if matrix else {})
    return stored
