"""The checkpoint of a job whose ranks share its state: each writes its rows, and it is whole or absent for all.

    every rank   step-000500.partial-TOKEN/state-00002-of-00004.safetensors, flushed, then a note beside it:
                 state-00002-of-00004.json, with its SHA-256, its size and its rows; or why it could not be written
    rank 0       waits for the notes of all, writes the manifest, removes the notes, flushes, renames the folder
    others       wait until that folder has another name: `step-000500`, or with `.failed` at its end

Files are how ranks tell each other, because the threads that write must not take part in collectives, which the
training threads of all ranks use at the same time. A folder is listed again each time: on NFS that asks the
server, while a name that was not there would be remembered as absent. `TOKEN` is of one save of one job: what a
killed job left in its folder never becomes part of a checkpoint, and the next save removes it.

A rank that cannot write makes the save fail for all, with its number in the error; earlier checkpoints stay.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfstep.config.reading import MOST_TABLE, parse_json, read_bytes
from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import Part, Snapshot, Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import (
    CheckpointError,
    CheckpointWriteError,
    describe_file,
    write_tensors,
)
from halfstep.training.files import write_whole

PATIENCE = 600.0  # seconds that a rank waits for the others
GLANCE = 0.05  # seconds between two listings of a folder


def save_part(
    folder: Path, step: int, read: Snapshot, meta: Mapping[str, Any], *, rank: int, ranks: int, token: str
) -> Path:
    """Writes this rank's part of a checkpoint; returns the folder once all ranks have written theirs.

    `read` returns what this rank is to write: its own rows (`Part`), and whole tensors that no other rank writes.
    `token` is the same on all ranks, and another one for each save. The manifest is that of rank 0.
    """
    target = folder / f"step-{step:06d}"
    partial = target.with_name(f"{target.name}.partial-{token}")
    try:
        with checkpoint.name_write_errors(target):
            checkpoint.open_folder(folder, target)
            if rank == 0:
                checkpoint.remove_leftovers(folder, besides=partial.name)
            os.makedirs(partial, exist_ok=True)
            _write_part(partial, read(), rank, ranks)
    except Exception as error:
        if rank == 0:
            _give_up(partial)
        elif folder.is_dir() and _failed_folder(partial).name in os.listdir(folder):
            raise _given_up_error(partial, target) from None
        else:
            _publish_failure(partial, rank, ranks, error)
        raise
    if rank > 0:
        return _wait_for_rank_0(partial, target)
    try:
        with checkpoint.name_write_errors(target):
            notes = _wait_for_notes(partial, target, ranks)
            tensors = _merge_tables(notes, target)
            files = {f"{name}.safetensors": note["file"] for name, note in notes.items() if note["file"]}
            for name in notes:
                (partial / f"{name}.json").unlink()
            own = {"format": checkpoint.FORMAT_OF_PARTS, "step": step, "files": files, "tensors": tensors}
            checkpoint.put_in_place(partial, target, checkpoint.write_manifest(partial, own, meta))
    except Exception:
        _give_up(partial)
        raise
    return target


def part_name(rank: int, ranks: int) -> str:
    """Returns the name of a rank's files, without their endings."""
    return f"state-{rank + 1:05d}-of-{ranks:05d}"


def _write_part(partial: Path, arrays: Mapping[str, Stored], rank: int, ranks: int) -> None:
    file = partial / f"{part_name(rank, ranks)}.safetensors"
    tensors = checkpoint.table(arrays)
    for name, record in arrays.items():
        if isinstance(record, Part):
            tensors[name]["rows"] = record.rows
    described = None
    if arrays:
        write_tensors(file, arrays)
        described = describe_file(file, just_written=True)
    _publish_note(partial, rank, ranks, {"file": described, "tensors": tensors})


def _publish_note(partial: Path, rank: int, ranks: int, note: Mapping[str, Any]) -> None:
    write_whole(partial / f"{part_name(rank, ranks)}.json", json.dumps(note).encode())


def _publish_failure(partial: Path, rank: int, ranks: int, error: Exception) -> None:
    """Tells rank 0 why this rank writes no part; on a full disk, the unfinished part makes room for the note."""
    with suppress(OSError):  # a disk that takes nothing at all: rank 0 will name the rank that was silent
        (partial / f"{part_name(rank, ranks)}.safetensors").unlink(missing_ok=True)
        reason = error.message if isinstance(error, HalfstepError) else str(error) or "no memory left"
        _publish_note(partial, rank, ranks, {"error": reason})


def _wait_for_notes(partial: Path, target: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """Waits for the notes of all ranks and returns them; refuses them as soon as one reports an error."""
    notes: dict[str, dict[str, Any]] = {}
    names, over = [part_name(rank, ranks) for rank in range(ranks)], time.monotonic() + PATIENCE
    while True:
        there = set(os.listdir(partial))
        for rank, name in enumerate(names):
            if name in notes or f"{name}.json" not in there:
                continue
            note = notes[name] = parse_json(read_bytes(partial / f"{name}.json", MOST_TABLE))
            if "error" in note:
                raise CheckpointWriteError(
                    f"checkpoint `{target}` cannot be written: rank {rank} failed: {note['error']}",
                    hint="earlier checkpoints are untouched; the next save tries again",
                )
            if note["file"] and f"{name}.safetensors" not in there:
                raise CheckpointWriteError(
                    f"checkpoint `{target}` cannot be written: rank 0 does not see what rank {rank} wrote to it",
                    hint="let all machines write to one folder, on a disk that they share, with `--out`",
                )
        if not (missing := [rank for rank, name in enumerate(names) if name not in notes]):
            return {name: notes[name] for name in names}
        if time.monotonic() > over:
            raise CheckpointWriteError(
                f"checkpoint `{target}` cannot be written: rank {missing[0]} has written nothing for "
                f"{PATIENCE:.0f} seconds",
                hint="see whether its machine can still write to the folder; the next save tries again",
            )
        time.sleep(GLANCE)


def _merge_tables(notes: Mapping[str, Mapping[str, Any]], target: Path) -> dict[str, dict[str, Any]]:
    """Returns the manifest's table: the whole shape of each tensor, and where its rows are."""
    tensors: dict[str, dict[str, Any]] = {}
    for part, note in notes.items():
        file = f"{part}.safetensors"
        for name, here in note["tensors"].items():
            if "rows" not in here:
                if name in tensors:
                    raise _ill_fitting_error(target, name)
                tensors[name] = {"dtype": here["dtype"], "shape": here["shape"], "file": file}
                continue
            start, total = here["rows"]
            whole = {"dtype": here["dtype"], "shape": [total, *here["shape"][1:]]}
            entry = tensors.setdefault(name, {**whole, "rows": {}})
            if "rows" not in entry or {**entry, "rows": 0} != {**whole, "rows": 0}:
                raise _ill_fitting_error(target, name)
            entry["rows"][file] = [start, start + here["shape"][0]]
    for name, entry in tensors.items():
        ranges, rows = checkpoint.rows_in_files(entry).values(), checkpoint.num_rows(entry["shape"])
        if not checkpoint.cover_all_rows(ranges, rows):
            raise _ill_fitting_error(target, name)
    return tensors


def _wait_for_rank_0(partial: Path, target: Path) -> Path:
    """Waits until rank 0 has named the checkpoint, or given it up."""
    over = time.monotonic() + 2 * PATIENCE  # rank 0 may wait for another one, and says which
    while partial.name in (there := set(os.listdir(target.parent))) and _failed_folder(partial).name not in there:
        if time.monotonic() > over:
            raise CheckpointWriteError(
                f"checkpoint `{target}` was not completed by rank 0 for {2 * PATIENCE:.0f} seconds",
                hint="the error of rank 0 says why; the next save tries again",
            )
        time.sleep(GLANCE)
    if _failed_folder(partial).name in there or target.name not in there:
        raise _given_up_error(partial, target)
    return target


def _given_up_error(partial: Path, target: Path) -> CheckpointError:
    shutil.rmtree(partial, ignore_errors=True)  # this rank may have made it after it was given up
    return CheckpointWriteError(
        f"checkpoint `{target}` was given up by rank 0", hint="its error says why; the next save tries again"
    )


def _failed_folder(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.failed")


def _give_up(partial: Path) -> None:
    """Tells the other ranks that there will be no checkpoint, and frees the space."""
    with suppress(OSError):
        os.rename(partial, _failed_folder(partial))
        for entry in _failed_folder(partial).iterdir():
            entry.unlink()


def _ill_fitting_error(target: Path, name: str) -> CheckpointError:
    return CheckpointWriteError(
        f"checkpoint `{target}` cannot be written: the rows of `{name}` that ranks wrote do not make one tensor",
        hint="give all ranks the same model, policy and sharding",
    )
