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
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.config.reading import fits_in_memory, parse_json, read_bytes
from halfstep.core.errors import StateError, type_name
from halfstep.core.state_format import Stored
from halfstep.torch.numerics.shards import is_shard, local
from halfstep.torch.parallel.ranks import copies
from halfstep.torch.run import Run
from halfstep.torch.state import DTYPE_NAMES, restored, stored
from halfstep.torch.state import load_weights as load_weights_of
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
            hint="save it in parts: save of halfstep.integrations.parts",
        )
    state, frozen = run.state_dict(), frozen_weights(run)
    tensors = {name: tensor for name, tensor in state["tensors"].items() if name not in frozen}
    table = {"format": FORMAT, **{key: state[key] for key in ("policy", "optimizers", "numbers")}}
    table["frozen"] = sums_of_frozen(run)
    table["groups"] = encode(state["groups"], "group", tensors)
    table["numbers"] = encode(state["numbers"], "number", tensors)
    text = json.dumps(table, sort_keys=True)
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
    if not frozen_later:
        check_frozen(run, table["frozen"], path)
    restore(run, table, tensors | {name: local(weight) for name, weight in frozen.items()})


def load_weights(run: Run, path: Path) -> None:
    """Loads the weights of what `save` wrote, and nothing else."""
    load_trained(run, _read(path)[1])


def load_trained(run: Run, tensors: Mapping[str, Tensor]) -> None:
    """Loads the trained weights of a state; frozen ones stay as they are."""
    load_weights_of(run, {name: local(weight) for name, weight in frozen_weights(run).items()} | dict(tensors))


def restore(run: Run, table: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Loads a state into a run, given its table as a file holds it."""
    groups, numbers = decode(table["groups"], tensors), decode(table["numbers"], tensors)
    # Settings that are tensors, as a learning rate may be, go to the device where this run has them.
    for optimizer, settings in zip(run.optimizers, groups, strict=False):  # other numbers are refused, in words
        for group, given in zip(optimizer.param_groups, settings, strict=False):
            for key, value in given.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    given[key] = value.to(group[key].device)
    run.load_state_dict({**table, "groups": groups, "numbers": numbers, "tensors": tensors})


def frozen_weights(run: Run) -> dict[str, Tensor]:
    """Returns the weights that training leaves alone, by their names in a state; of shards, the shards."""
    named = run.masters.names.items()  # those of the model may be gathered now
    return {f"model.{name}": p for p, name in named if not p.requires_grad and run.masters.is_whole(p)}


def check_frozen(run: Run, sums: Mapping[str, int], path: Path) -> None:
    """Refuses frozen weights that are not those of the run that was saved; all ranks that share them call it."""
    for name, total in sums_of_frozen(run).items():
        if total != sums.get(name, total):
            raise StateError(
                f"the frozen weight `{name.removeprefix('model.')}` is not the one that `{path}` was saved beside",
                hint="load the weights that the run began with, such as the base of its adapters, before the "
                "model is prepared",
            )


def sums_of_frozen(run: Run) -> dict[str, int]:
    """Returns what tells frozen weights from others: sums of their bytes, and of what scales those in 4 bits."""
    scales = {f"model.{name}": total for name, total in sums_of_scales(run.model).items()}
    return sums_of_bytes(frozen_weights(run)) | scales


def sums_of_scales(model: nn.Module) -> dict[str, int]:
    """Returns sums of what bitsandbytes holds beside codes of 4 bits: scales, and how they are meant."""
    return {
        f"{name}.quant_state": sum(map(_sum_of_bytes, scales.as_dict(packed=True).values()))
        for name, scales in scales_of(model)
    }


def scales_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the names of weights that bitsandbytes holds in 4 bits, with its `QuantState` of each."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        # FSDP's parameter is a plain one: the layer still has it.
        if (scales := getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)) is not None:
            yield f"{name}.weight", scales


def sums_of_bytes(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the sum of the bytes of each weight, over all ranks that have a part of it."""
    totals = [_sum_of_bytes(local(weight)) for weight in weights.values()]
    if weights and is_shard(first := next(iter(weights.values()))):
        summed = torch.tensor(totals, device=local(first).device)
        torch.distributed.all_reduce(summed)
        totals = [total // copies([first]) for total in summed.tolist()]
    return dict(zip(weights, totals, strict=True))


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
        # In another order each time: ranks would then gather the state of an optimizer in different orders.
        entries = sorted(deserialize(content), key=itemgetter(0))  # type: ignore[no-untyped-call]
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


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a plain value as JSON holds it; puts tensors and arrays in it among the tensors, by their place."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor | np.ndarray):
        tensors[name] = torch.as_tensor(value)
        return {"tensor" if isinstance(value, Tensor) else "array": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        each = [encode(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]
        return {"tuple": each} if isinstance(value, tuple) else each
    if isinstance(value, dict):
        each = [[encode(key, name, {}), encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        if type(value) is dict and all(isinstance(key, str) for key in value) and not value.keys() & _MARKS.keys():
            return dict(each)
        return {"counter" if isinstance(value, Counter) else "dict": each}
    raise StateError(
        f"`{name}` is {type_name(value)}, which a saved state cannot hold",
        hint="numbers, strings, tensors and arrays can be saved, in lists, tuples and dictionaries; keep anything "
        "else out of what is saved",
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the value that `encode` was given; takes its tensors out of the others."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if isinstance(value, dict) and len(value) == 1 and (mark := next(iter(value))) in _MARKS:
        return _MARKS[mark](value[mark], tensors)
    return {key: decode(item, tensors) for key, item in value.items()} if isinstance(value, dict) else value


def _to_dict(items: Any, tensors: dict[str, Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(item, tensors) for key, item in items}


# How what JSON has no form for is marked, and read back.
_MARKS: Mapping[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "tensor": lambda name, tensors: tensors.pop(name),
    "array": lambda name, tensors: tensors.pop(name).numpy(),
    "float": lambda text, _: float(text),
    "tuple": lambda items, tensors: tuple(decode(items, tensors)),
    "dict": _to_dict,
    "counter": lambda items, tensors: Counter(_to_dict(items, tensors)),
}


def _to_stored(name: str, tensor: Tensor) -> Stored:
    check_stored(name, tensor)
    return stored(tensor)


def check_stored(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that a saved state cannot hold."""
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


def _digest(text: str, arrays: Mapping[str, Stored]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        dtype, shape, data = arrays[name]
        total.update(f"\n{name} {dtype} {list(shape)}\n".encode())
        total.update(data)
    return total.hexdigest()


def _damage_error(path: Path, reason: str) -> StateError:
    return StateError(f"`{path}` is damaged: {reason}", hint="restore it, or resume from an earlier checkpoint")
