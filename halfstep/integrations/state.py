"""A run's state beside a framework's checkpoint: one safetensors file, whole or absent, back bit for bit.

    CHECKPOINT/halfstep.safetensors
        tensors                 those of halfstep.torch.state; `group.<i>.<j>.<setting>`, where that is a tensor
        metadata["halfstep"]    {"format": 1, "policy", "optimizers", "groups", "numbers", "frozen"} as JSON
        metadata["digest"]      SHA-256 of all of it

It holds everything that the next step changes, masters and moments included, so that a framework's own files of
weights may be in whatever format it likes. Frozen weights, such as the base of a LoRA, are not written again: the
framework brings them back, and the sum of their bytes says whether they are the same.

Nothing is unpickled. A state of another policy, model or optimizer is refused by name, as `Run.load_state_dict`
does, before anything changes.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.config.reading import fits_in_memory, parse_json, read_bytes
from halfstep.core.errors import StateError
from halfstep.core.scaling import DynamicScale
from halfstep.core.state_format import Stored
from halfstep.torch.run import Run
from halfstep.torch.state import DTYPE_NAMES, restored, stored
from halfstep.training.checkpoints.tensors import write_tensors
from halfstep.training.files import PARTIAL, flush, os_errors

NAME = "halfstep.safetensors"
FORMAT = 1
_KEYS = {"format", "policy", "optimizers", "groups", "numbers", "frozen"}


def save(run: Run, path: str | Path) -> None:
    """Writes everything the next step changes; `path` is the file, usually CHECKPOINT/halfstep.safetensors."""
    path = Path(path)
    if run.sharded is not None:
        raise StateError(
            f"`{path}` is one file, and each rank has its own rows of a sharded run's state",
            hint="save and load it in parts: save_part of halfstep.training.checkpoints.parts",
        )
    state, frozen = run.state_dict(), frozen_weights(run)
    tensors = {name: tensor for name, tensor in state["tensors"].items() if name not in frozen}
    table = {"format": FORMAT, **{key: state[key] for key in ("policy", "optimizers", "numbers")}}
    table["frozen"] = {name: _sum_of_bytes(weight) for name, weight in frozen.items()}
    table["groups"] = _map_settings(_encode, state["groups"], tensors)
    try:
        text = json.dumps(table, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"`{path}` cannot hold a setting or state of an optimizer: {error}",
            hint="numbers, strings, lists and tensors can be saved; keep anything else out of its groups",
        ) from None
    arrays = {name: _to_stored(name, tensor) for name, tensor in tensors.items()}
    metadata = {"halfstep": text, "digest": _digest(text, arrays)}
    partial = path.with_name(path.name + PARTIAL)
    try:
        with os_errors(StateError, f"`{path}` cannot be written", "free space, or save to another folder"):
            partial.unlink(missing_ok=True)  # left by a kill
            write_tensors(partial, arrays, metadata)
            os.replace(partial, path)
            flush(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load(run: Run, path: str | Path, *, frozen_later: bool = False) -> None:
    """Restores bit for bit what `save` wrote, or refuses it entirely.

    Frozen weights must be those of the saved run, unless the framework loads them later.
    """
    path = Path(path)
    table, tensors = _read(path)
    frozen = {name: weight for name, weight in frozen_weights(run).items() if name in table["frozen"]}
    for name, weight in {} if frozen_later else frozen.items():
        if _sum_of_bytes(weight) != table["frozen"][name]:
            raise StateError(
                f"the frozen weight `{name.removeprefix('model.')}` is not the one that `{path}` was saved beside",
                hint="load the weights that the run began with, such as the base of its adapters, before the "
                "model is prepared",
            )
    tensors |= frozen
    groups = _map_settings(_decode, table["groups"], tensors)
    for name in [name for name in tensors if name.startswith("group.")]:
        del tensors[name]
    # Settings that are tensors, as a learning rate may be, go to the device where this run has them.
    for optimizer, settings in zip(run.optimizers, groups, strict=False):  # other numbers are refused, in words
        for group, given in zip(optimizer.param_groups, settings, strict=False):
            for key, value in given.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    given[key] = value.to(group[key].device)
    run.load_state_dict({**table, "groups": groups, "tensors": tensors})


def frozen_weights(run: Run) -> dict[str, Tensor]:
    """Returns the weights that training leaves alone, by their names in a state."""
    named = run.model.named_parameters()
    return {f"model.{name}": p for name, p in named if not p.requires_grad and run.masters.is_whole(p)}


def _sum_of_bytes(tensor: Tensor) -> int:
    return int(tensor.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, deserialize

    try:
        size = path.stat().st_size
        if not fits_in_memory(2 * size):
            raise StateError(f"loading `{path}` takes twice its {size:,} bytes of memory")
        content = read_bytes(path)
    except FileNotFoundError:
        raise StateError(
            f"there is no `{path}`",
            hint="the checkpoint was saved without a policy, or not completely: load its weights into the model "
            "before it is prepared, or resume from another checkpoint",
        ) from None
    except OSError as error:
        raise StateError(f"`{path}` cannot be read: {error.strerror or error}") from None
    try:
        entries = deserialize(content)  # type: ignore[no-untyped-call]
        (length,) = struct.unpack_from("<Q", content)
        metadata = parse_json(content[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, ValueError, struct.error) as error:
        raise _damage_error(path, f"it does not read as safetensors ({error})") from None
    if "halfstep" not in metadata:
        raise StateError(
            f"`{path}` is not a state of a run: its metadata has no `halfstep`",
            hint=f"{NAME} in a checkpoint's folder is one; weights are loaded before the model is prepared",
        )
    arrays = {name: Stored(entry["dtype"], tuple(entry["shape"]), entry["data"]) for name, entry in entries}
    if _digest(metadata["halfstep"], arrays) != metadata.get("digest"):
        raise _damage_error(path, "its digest is not the one that was written")
    table = parse_json(metadata["halfstep"])
    if table["format"] != FORMAT or table.keys() != _KEYS:
        raise StateError(
            f"`{path}` has format {table['format']!r}, this halfstep reads format {FORMAT}",
            hint="load it with the halfstep that wrote it; if that is newer, update yours",
        )
    return table, {name: restored(record) for name, record in arrays.items()}


def _map_settings(convert: Callable[..., Any], groups: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the settings of each optimizer's groups, converted; each has a name among the tensors."""
    return [
        [
            {key: convert(value, f"group.{i}.{j}.{key}", tensors) for key, value in group.items()}
            for j, group in enumerate(settings)
        ]
        for i, settings in enumerate(groups)
    ]


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a setting as JSON holds it; a tensor is put among the tensors, under `name`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    return {"tuple": list(value)} if isinstance(value, tuple) else value


def _decode(value: Any, name: str, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict) and value.keys() == {"tensor"}:
        return tensors[name]
    return tuple(value["tuple"]) if isinstance(value, dict) and value.keys() == {"tuple"} else value


def _to_stored(name: str, tensor: Tensor) -> Stored:
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise StateError(
            f"`{name}` is of the class {type(tensor).__name__}, whose form a saved state cannot hold",
            hint="choose an optimizer whose state is plain tensors; `moments=bf16` in the policy halves AdamW's",
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise StateError(
            f"`{name}` is held in {tensor.dtype}, which a saved state cannot hold",
            hint=f"held may be {', '.join(str(dtype) for dtype in DTYPE_NAMES)}; if it can be computed again, "
            "register the buffer with persistent=False",
        )
    return stored(tensor)


def _digest(text: str, arrays: Mapping[str, Stored]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        dtype, shape, data = arrays[name]
        total.update(f"\n{name} {dtype} {list(shape)}\n".encode())
        total.update(data)
    return total.hexdigest()


def _damage_error(path: Path, reason: str) -> StateError:
    return StateError(f"`{path}` is damaged: {reason}", hint="restore it, or resume from an earlier checkpoint")


def take_over(run: Run, folder: Path, optimizers: Sequence[Path], scaler: str) -> str:
    """Takes over what a framework saved without a policy, and describes it; empty if that is not what it saved."""
    if (folder / NAME).exists() or not all(path.exists() for path in optimizers):
        return ""
    dynamic = isinstance(run.policy.scale, DynamicScale) and (folder / scaler).exists()
    states = [torch.load(path, map_location="cpu", weights_only=True) for path in optimizers]
    taken = run.load_torch_amp(states, torch.load(folder / scaler, weights_only=True) if dynamic else None)
    start = "" if run.averages is None else "; its averages begin here"
    taken = taken.replace("\n", ", ")
    return f"`{folder}` was saved without a policy, and `{run.policy}` continues it: {taken}{start}"
