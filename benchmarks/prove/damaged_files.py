"""Damages the files of a checkpoint in every way, and checks that loading notices; kills.py runs it."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from halfstep.core.state_format import Stored
from halfstep.training.checkpoints.checkpoint import load, load_newest
from halfstep.training.checkpoints.tensors import CheckpointError

Case = tuple[str, Callable[[], object]]


def damages(path: Path, other: Path) -> Iterator[Case]:
    """Yields ways to damage a checkpoint. `other` is a checkpoint of another step of the same run."""
    state, manifest = path / "state.safetensors", path / "manifest.json"
    good = {file: file.read_bytes() for file in (state, manifest)}
    header = 8 + int.from_bytes(good[state][:8], "little")
    table = json.loads(good[state][8:header])
    spans = sorted((header + low, header + high) for low, high in (e["data_offsets"] for e in table.values()))

    def flip(file: Path, place: int, bit: int) -> Callable[[], object]:
        bad = bytearray(good[file])
        bad[place] ^= 1 << bit
        return lambda: file.write_bytes(bad)

    def write(file: Path, content: bytes) -> Callable[[], object]:
        return lambda: file.write_bytes(content)

    for place in range(header):
        yield ("flipped: header", flip(state, place, place % 8))
    for low, high in spans:
        for place in sorted({low, (low + high) // 2, high - 1}) if high > low else []:
            yield ("flipped: tensor", flip(state, place, place % 8))
    for place in range(len(good[manifest])):
        yield ("flipped: manifest", flip(manifest, place, place % 7))
    for size in sorted(
        {0, 1, 7, 8, 9, header - 1, header, *(high for _, high in spans[:-1]), len(good[state]) - 1}
    ):
        yield ("cut: state", write(state, good[state][:size]))
    for size in range(0, len(good[manifest]) - 1, 97):
        yield ("cut: manifest", write(manifest, good[manifest][:size]))
    for file in (state, manifest):
        yield ("lengthened", write(file, good[file] + b"0"))
        yield ("zeroed", write(file, bytes(len(good[file]))))
        yield ("missing", file.unlink)
        yield ("exchanged: file of another step", write(file, (other / file.name).read_bytes()))
    yield ("exchanged: both files", lambda: [f.write_bytes((other / f.name).read_bytes()) for f in good])
    yield ("missing", lambda: [f.unlink() for f in good])
    sizes: dict[int, tuple[int, int]] = {}
    for low, high in spans:
        before = sizes.get(high - low)
        sizes[high - low] = (low, high)
        if before is not None and good[state][low:high] != good[state][slice(*before)]:
            mixed = bytearray(good[state])
            mixed[low:high], mixed[slice(*before)] = good[state][slice(*before)], good[state][low:high]
            yield ("exchanged: tensors", write(state, bytes(mixed)))


def damage(older: Path, path: Path, copy: Path) -> dict[str, object]:
    """Damages a copy of a checkpoint in every way; counts what loading refused, and lists what it missed."""
    for one in (older, path):
        shutil.copytree(one, copy / one.name)
    path = copy / path.name
    arrays, manifest = load(path)
    whole = {file: file.read_bytes() for file in path.iterdir()}
    found, same, missed = Counter[str](), Counter[str](), list[str]()
    for kind, act in damages(path, copy / older.name):
        act()
        try:
            again, description = load(path)
            if description == manifest and _equal(again, arrays):
                same[kind] += 1  # a 1e-05 that became a 1E-05, a space that became a tab
            else:
                missed.append(kind)
        except CheckpointError as error:
            found[kind] += 1
            if path.name not in error.message:
                missed.append(f"{kind}: {error.message} does not name the checkpoint")
        for file, content in whole.items():
            if not file.exists() or file.read_bytes() != content:
                file.write_bytes(content)
    (path / "state.safetensors").write_bytes(b"")
    with contextlib.suppress(CheckpointError):
        load_newest(copy)
        missed.append("a damaged newest checkpoint was skipped without permission")
    taken = load_newest(copy, allow_older=True)
    if taken is None or taken.manifest["step"] != int(older.name.removeprefix("step-")):
        missed.append("the checkpoint before it was not used although that was allowed")
    return {"found": dict(found), "same": dict(same), "faults": missed}


def _equal(one: dict[str, Stored], other: dict[str, Stored]) -> bool:
    return one.keys() == other.keys() and all(bytes(one[n].data) == bytes(other[n].data) for n in one)
