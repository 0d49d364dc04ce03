"""A sharded run's state in a framework's checkpoint: each rank writes its rows, and all of it is whole or absent.

    CHECKPOINT/step-000500/
        state-00001-of-00002.safetensors    the rows of a rank, and its own random states `rank.0.<name>`
        manifest.json                       where rows are, digests; under "halfstep" the run's policy and
                                            settings, and as its "facts" what the framework adds

The folder is one of halfstep.training.checkpoints.parts: any number of ranks loads it, and one process without
FSDP. A save adds a folder, and removes those before it once it is whole; so the newest folder is a whole one,
whenever ranks are killed. The number in its name is that of the updates, or the next one if that is taken.

Frozen weights are not written again, and must be those of the saved run (state.py). Nothing is pickled.
"""

import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.core.errors import HalfstepError, ParallelError, StateError
from halfstep.integrations import state
from halfstep.torch.numerics.shards import local
from halfstep.torch.parallel.ranks import from_all_ranks, in_group, num_ranks
from halfstep.torch.run import Run
from halfstep.torch.state import Copies, restored, rows_here, written
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.parts import save_part
from halfstep.training.checkpoints.tensors import MANIFEST
from halfstep.training.files import os_errors

_OWN = "rank."  # names of what each rank has for itself


def rank() -> int:
    """Returns the number of this process in its group; 0 without one."""
    return dist.get_rank() if in_group() else 0


def newest(folder: Path) -> Path | None:
    """Returns the newest checkpoint that `save` wrote to a folder, or the folder itself if it is one."""
    if (folder / MANIFEST).is_file():
        return folder
    return next(reversed(checkpoint.step_folders(folder)), None)


def save(run: Run, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Writes a sharded run's state, and what a framework adds to it; every rank calls it. Returns the new folder.

    `facts` are plain values, tensors and arrays, in lists, tuples and dictionaries; those of rank 0 are written.
    """
    here, frozen = rank(), state.frozen_weights(run)
    sums = state.sums_of_frozen(run)
    with same_on_all_ranks():
        given, added = run.state_dict(), dict[str, Tensor]()
        tensors, rows = written(run)
        tensors = {n: t for n, t in tensors.items() if n not in frozen and not n.startswith("rng.")}
        table = {"format": state.FORMAT, "frozen": sums}
        table |= {key: given[key] for key in ("policy", "optimizers")}
        table |= {key: state.encode(given[key], key, added) for key in ("groups", "numbers")}
        table["facts"] = state.encode(facts, "facts", added)
        tensors |= added if here == 0 else {}
        tensors |= {f"{_OWN}{here}.{name}": value for name, value in _random_states(given["tensors"]).items()}
        for name, tensor in tensors.items():
            state.check_stored(name, tensor)
        with os_errors(StateError, f"`{folder}` cannot be made", "free space, or save to another folder"):
            folder.mkdir(parents=True, exist_ok=True)
        read = Copies().take(tensors, {name: of for name, of in rows.items() if name in tensors})
    before = checkpoint.step_folders(folder)
    number = max(int(run.num_applied), *(checkpoint.parse_step(path) + 1 for path in before[-1:]), 0)
    number, token = from_all_ranks((number, secrets.token_hex(8)))[0]
    path = save_part(folder, number, read, {"halfstep": table}, rank=here, ranks=num_ranks(), token=token)
    if here == 0:
        for old in before:
            checkpoint.discard(old)
    return path


def load(run: Run, path: Path) -> tuple[Any, Mapping[str, Tensor]]:
    """Restores bit for bit what `save` wrote on any number of ranks, or refuses it.

    Returns the framework's facts, and the random states of this rank; one that the saved run did not have keeps
    its own. They are restored, and may be again, by `restore_random_states`.
    """
    with same_on_all_ranks():
        table, tensors = _read(run, path)
        facts = state.decode(table["facts"], tensors)
        own = {n: tensors.pop(n) for n in [*tensors] if n.startswith(_OWN)}
        mine = f"{_OWN}{rank()}."
        own = {n.removeprefix(mine): t for n, t in own.items() if n.startswith(mine)} or _random_states(_rng(run))
        tensors |= {name: own[name] for name in own.keys() & {"rng.cpu", "rng.cuda"}}
        frozen = {n: p for n, p in state.frozen_weights(run).items() if n in table["frozen"]}
    state.check_frozen(run, table["frozen"], path)
    with same_on_all_ranks():
        state.restore(run, table, tensors | {name: local(weight) for name, weight in frozen.items()})
    restore_random_states(own, run.device)
    return facts, own


def load_weights(run: Run, path: Path) -> Any:
    """Loads the weights of what `save` wrote, and nothing else; returns the framework's facts."""
    with same_on_all_ranks():
        table, tensors = _read(run, path)
        facts = state.decode(table["facts"], tensors)
        state.load_trained(run, tensors)
    return facts


def _read(run: Run, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    manifest = checkpoint.check_complete(path)
    table = manifest.get("halfstep", {})
    if table.get("format") != state.FORMAT:
        raise StateError(
            f"`{path}` is a checkpoint of `halfstep train`, or of another version",
            hint="halfstep train --resume continues it; `halfstep export` writes its weights for other loops",
        )
    arrays, _ = checkpoint.load(path, lambda name, shape: rows_here(run, name, shape), manifest)
    return table, {name: restored(record) for name, record in arrays.items()}


def _rng(run: Run) -> Mapping[str, Tensor]:
    return run.state_dict()["tensors"]  # type: ignore[no-any-return]


def _random_states(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the random states of this process: torch's, which are in a run's state, Python's and numpy's."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        **{name: value for name, value in tensors.items() if name.startswith("rng.")},
        "python": torch.tensor([version, *words]),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), place, has_gauss]),  # type: ignore[union-attr]
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
    }


def restore_random_states(own: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the random states of this process to those that `load` returned."""
    torch.set_rng_state(own["rng.cpu"])
    if "rng.cuda" in own and device.type == "cuda":
        torch.cuda.set_rng_state(own["rng.cuda"], device)
    version, *words = own["python"].tolist()
    random.setstate((version, tuple(words), next(iter(own["python.gauss"].tolist()), None)))
    *keys, place, has_gauss = own["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), place, has_gauss, *own["numpy.gauss"].tolist()))


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Makes an error of one rank an error of all, which would wait for it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    said = None if error is None else error.message if isinstance(error, HalfstepError) else str(error)
    reasons = from_all_ranks(said) if num_ranks() > 1 else []
    if error is not None:
        raise error
    for other, reason in enumerate(reasons):
        if reason is not None:
            raise ParallelError(f"rank {other} failed: {reason}", hint="its own error says what to do")
