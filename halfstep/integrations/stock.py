"""Folders that Accelerate or transformers' Trainer saved without a policy, continued under one.

    optimizer.bin, optimizer.pt           one process, DDP, and FSDP with FULL_STATE_DICT
    optimizer_0/                          FSDP with SHARDED_STATE_DICT: a folder of torch.distributed.checkpoint
    pytorch_model_fsdp.bin, _fsdp_0/      weights, of FSDP
    model.safetensors                     weights, of one process and DDP; the framework loads what stays whole
    scaler.pt                             the loss scale

Each rank reads the rows that it has. All but safetensors are pickles: only tensors and plain values are read, by a
reader that can call nothing, and what names anything else is refused (training/weights/pickled.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.core.errors import StateError, type_name
from halfstep.core.scaling import DynamicScale
from halfstep.integrations import state
from halfstep.integrations.parts import same_on_all_ranks
from halfstep.torch.numerics.shards import is_shard, shard_like, shard_rows
from halfstep.torch.optim.drivers import held_by
from halfstep.torch.run import Run
from halfstep.training.weights.disk import FORMATS, DiskTensor, rows_of, safetensor
from halfstep.training.weights.pickled import METADATA, read_saved, read_torch
from halfstep.training.weights.safetensors import INDEX, SINGLE, open_folder

SCALER = "scaler.pt"
_DTYPES = {format: getattr(torch, name) for name, format in FORMATS.items() if hasattr(torch, name)}


def take_over(run: Run, folder: Path) -> str:
    """Takes over the state of optimizers and scale, and weights if `has_weights`; returns what it did, in words.

    Returns nothing, and does nothing, if the folder is not one that was saved without a policy.
    """
    if (folder / state.NAME).exists():
        return ""
    with same_on_all_ranks():
        states = [_optimizer_state(run, folder, i) for i in range(len(run.optimizers))]
        found = [each for each in states if each is not None]
        if len(found) < len(states):
            return ""
        dynamic = isinstance(run.policy.scale, DynamicScale) and (folder / SCALER).exists()
        weights = _weights(run, folder) if has_weights(run, folder) else {}
        taken = run.load_torch_amp(found, read_torch(folder / SCALER, strict=True) if dynamic else None)
        if weights:
            state.load_trained(run, weights)
            if run.averages is not None:
                run.averages.restart()
    start = "" if run.averages is None else "; its averages begin here"
    taken = taken.replace("\n", ", ")
    return f"`{folder}` was saved without a policy, and `{run.policy}` continues it: {taken}{start}"


def has_weights(run: Run, folder: Path) -> bool:
    """Whether `take_over` loads the weights: those of FSDP, and all that go to shards."""
    return run.sharded is not None or fsdp_weights(folder) is not None


def _optimizer_state(run: Run, folder: Path, number: int) -> dict[str, Any] | None:
    sharded, whole = folder / f"optimizer_{number}", f"optimizer_{number}" if number else "optimizer"
    files = [file for ending in (".bin", ".pt") if (file := folder / f"{whole}{ending}").exists()]
    if (sharded / METADATA).exists():
        saved = read_saved(sharded).get("optimizer", {})
        groups = saved.get("param_groups", {})
        saved = {"state": saved.get("state", {}), "param_groups": [groups[place] for place in sorted(groups)]}
    elif files:
        saved = read_torch(files[0], strict=True)
    else:
        return None
    if not isinstance(saved, dict) or not saved.keys() >= {"state", "param_groups"}:
        raise StateError(
            f"`{folder}` has a file for an optimizer's state, and none in it", hint="continue from another folder"
        )
    # FSDP names parameters, and others number them; each goes to the rows that this rank has of it.
    order = [key for group in saved["param_groups"] for key in group["params"]]
    held = [*held_by(run.optimizers[number])]
    by_name = all(isinstance(key, str) for key in order)
    of = {run.masters.names[p]: p for p in held} if by_name else dict(zip(order, held, strict=False))
    return {
        "state": {
            key: {what: _plain(value, f"{key}.{what}", of.get(key)) for what, value in values.items()}
            for key, values in saved["state"].items()
        },
        "param_groups": [
            _plain(group, "param_groups") | ({"param_names": group["params"]} if by_name else {})
            for group in saved["param_groups"]
        ],
    }


def fsdp_weights(folder: Path) -> Path | None:
    """Returns the file or the folder of a model's weights that FSDP has saved there, if it has."""
    folders = sorted(path.parent for path in folder.glob(f"pytorch_model_fsdp_*/{METADATA}"))
    files = sorted(folder.glob("pytorch_model_fsdp*.bin"))
    if len(found := folders + files) > 1:
        raise StateError(
            f"`{folder}` has the weights of several models: {', '.join(path.name for path in found)}",
            hint="continue it in a folder that has those of the model that is trained, alone",
        )
    return next(iter(found), None)


def _weights(run: Run, folder: Path) -> dict[str, Tensor]:
    """Returns the weights as a state names them: of shards, the rows of this rank."""
    path = fsdp_weights(folder)
    found: Mapping[str, DiskTensor]
    if path is None:
        if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
            raise StateError(
                f"`{folder}` has no weights that shards can take: neither pytorch_model_fsdp* nor {SINGLE}",
                hint="load them into the model before it is prepared, and save again under a policy",
            )
        found = {name: safetensor(tensor) for name, tensor in open_folder(folder).items()}
    else:
        found = read_saved(path)["model"] if path.is_dir() else read_torch(path, strict=True)
    named = {name: id(p) for name, p in run.model.named_parameters(remove_duplicate=False)}
    shards = {name: p for p, name in run.masters.names.items()}
    buffers = {name for name, _ in run.model.named_buffers()}
    if odd := sorted(found.keys() - named.keys() - buffers):
        raise StateError(
            f"`{folder}` has the weight `{odd[0]}`, which the model lacks ({len(odd)} such weights)",
            hint="prepare the model that was saved",
        )
    for name in named.keys() - found.keys():  # one name of tied weights is saved
        if tied := [other for other in found if named.get(other) == named[name]]:
            found = {**found, name: found[tied[0]]}
    return {f"model.{name}": _read(tensor, name, shards.get(name), rows=True) for name, tensor in found.items()}


def _plain(value: Any, name: str, parameter: Tensor | None = None) -> Any:
    """Returns a value with its tensors read."""
    if isinstance(value, dict):
        return {key: _plain(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(each, name) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _read(value, name, parameter)


def _read(value: Any, name: str, parameter: Tensor | None, *, rows: bool = False) -> Tensor:
    """Returns the numbers of a tensor: of a parameter's shape, spread as it is, or its `rows` alone."""
    if not isinstance(value, DiskTensor) or not value.is_readable or not value.in_order:
        kind = f"a tensor of {value.format}" if isinstance(value, DiskTensor) else type_name(value)
        raise StateError(
            f"`{name}` is {kind} that cannot be taken over",
            hint="plain values and whole floating-point tensors are; load the rest before the model is prepared",
        )
    shards = parameter is not None and is_shard(parameter) and value.shape == tuple(parameter.shape)
    start, stop = shard_rows(parameter)[:2] if shards else (0, value.shape[0] if value.shape else 1)
    shape = (stop - start, *value.shape[1:]) if value.shape else ()
    read = torch.frombuffer(bytearray(rows_of(value, start, stop)), dtype=_DTYPES[value.format]).reshape(shape)
    return shard_like(parameter, read) if shards and not rows else read
