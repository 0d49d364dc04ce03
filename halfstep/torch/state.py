"""Model, optimizers, scale and random state as flat {name: tensor}, and back, bit for bit.

Names are those of core.state_format, and

    remainder.<parameter>                   the int16 half of a split master; `model.<parameter>` is its bf16 half
    average.<parameter>                     the fp32 average of a master, if the run keeps averages
    amax.<layer>                            the history by which its delayed operands are scaled (fp8/delayed.py)
    narrow.<layer>                          1 if a measured layer is narrow, 0 if it stayed wide
    narrow.<layer>:loss                     the same of the loss computed with it, if that was measured apart

Loading checks names, shapes and dtypes before it changes anything. torch's own optimizers create their state at
the first step, so a fresh one may lack it; its formats are checked against the policy's.

**Shards.** Under FSDP2 a state has this rank's rows, in plain tensors, never in classes of torch.distributed.
Whole tensors may be loaded too: each rank takes its rows. Masters that are split elsewhere are whole there (fp32
shards): loading joins and splits them, exactly.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.core import state_format
from halfstep.core.averages import to_state
from halfstep.core.errors import StateError, type_name
from halfstep.core.formats import FP32
from halfstep.core.scaling import ScaleState, saved_scale
from halfstep.core.state_format import Description, Part, Snapshot, Stored, check_same, find_dtype
from halfstep.torch.convert.apply import adopt
from halfstep.torch.convert.fp8_choice import OF_LOSS
from halfstep.torch.numerics.cast import join, split
from halfstep.torch.numerics.dtypes import dtype_of
from halfstep.torch.numerics.shards import ShardRows, is_first_copy, is_shard, local, shard_like, shard_rows
from halfstep.torch.numerics.split.operand import values_of
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.optim.drivers import held_by, is_moment, label
from halfstep.torch.parallel.ranks import in_group
from halfstep.torch.update.parts import RunParts

DTYPE_NAMES = {getattr(torch, kind): name for kind, name in state_format.DTYPE_NAMES.items()}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def state_of(run: RunParts) -> dict[str, Tensor]:
    """Returns every tensor that the next step depends on: the live ones, not copies; of shards, the local rows."""
    run.masters.check_writes()
    return {name: local(tensor) for name, tensor in _live(run).items()}


def written(run: RunParts) -> tuple[dict[str, Tensor], dict[str, ShardRows]]:
    """Returns what this rank writes to a checkpoint, and which of it are rows of tensors that ranks share.

    The first copy of each shard is written, and by rank 0 what all ranks have.
    """
    run.masters.check_writes()
    is_first = not in_group() or dist.get_rank() == 0
    live = {n: t for n, t in _live(run).items() if (is_first_copy(t) if is_shard(t) else is_first)}
    return {n: local(t) for n, t in live.items()}, {n: shard_rows(t) for n, t in live.items() if is_shard(t)}


def rows_here(run: RunParts, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns which rows of a tensor in a state this rank has, given its whole shape; None if all of it."""
    kind, _, rest = name.partition(".")
    shard = _shards(run).get(rest.partition(".")[2].rpartition(".")[0] if kind == "optimizer" else rest)
    return None if shard is None or tuple(shard.shape) != shape else shard_rows(shard)[:2]


def _live(run: RunParts) -> dict[str, Tensor]:
    state = {f"model.{name}": values_of(p) for name, p in _parameters(run).items()}
    state |= {f"model.{name}": buffer for name, buffer in _buffers(run)}
    state |= {f"remainder.{name}": lo for name, lo in run.masters.remainders.items()}
    if run.averages is not None:
        state |= to_state(run.averages.named())
    if run.amaxes is not None:
        state |= {f"amax.{name}": history for name, history in run.amaxes.named().items()}
    narrow = run.conversion.measured.narrow  # a resumed run must not measure again
    state |= {f"narrow.{name}": torch.tensor(flag, dtype=torch.uint8) for name, flag in narrow.items()}
    for name, value in _entries(run):
        if isinstance(value, Tensor):
            state[name] = value
    state |= {f"scale.{field}": value for field, value in run.scale_state._asdict().items()}
    state["applied"] = run.num_applied
    state["rng.cpu"] = torch.get_rng_state()
    if run.device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(run.device)
    return state


@torch.no_grad()
def load_state(run: RunParts, given: Mapping[str, Tensor]) -> None:
    """Restores a state. One of another model, optimizer or precision is refused entirely."""
    if run.sharded is not None:
        run.sharded.reshard()  # or gathered weights would be those of before
    state, given = {name: local(tensor) for name, tensor in _live(run).items()}, _as_held(run, given)
    _check_amax(run, given)
    lazy = tuple(f"optimizer.{i}." for i, o in enumerate(run.optimizers) if not isinstance(o, Optimizer))
    fixed = [{n: t for n, t in side.items() if not n.startswith(lazy)} for side in (state, given)]
    # The random state of a device that the run did not use, or no longer has, did not affect its results.
    # Nor did the loss of a layer that was not measured apart: it ran in the precision of the layer.
    of_loss = [n for side in fixed for n in side if n.startswith("narrow.") and n.endswith(OF_LOSS)]
    check_same(*(_describe(side) for side in fixed), optional=["rng.cuda", *of_loss])
    scale = saved_scale(run.policy.scale, given)
    entries = _check_entries(run, {n: t for n, t in given.items() if lazy and n.startswith(lazy)})
    for name in fixed[0]:
        if not name.startswith(("rng.", "scale.", "narrow.")):  # an earlier StepResult may still hold the scale
            state[name].copy_(given[name])
    run.masters.note_writes([*run.masters.names])
    for optimizer, values in entries.items():
        for p in held_by(optimizer):
            optimizer.state.pop(p, None)
        for (p, key), value in values.items():
            optimizer.state[p][key] = value
    if scale is not None:
        run.scale_state = ScaleState(*(value.to(run.device, copy=True) for value in scale))
    before = run.conversion.measured.narrow
    if (narrow := {name: bool(given.get(f"narrow.{name}", False)) for name in before}) != before:
        run.conversion = adopt(run.model, run.conversion, narrow)
    run.buffers.remember()
    run.forget()
    torch.set_rng_state(given["rng.cpu"].cpu())
    if run.device.type == "cuda" and "rng.cuda" in given:
        torch.cuda.set_rng_state(given["rng.cuda"].cpu(), run.device)


@torch.no_grad()
def load_weights(run: RunParts, given: Mapping[str, Tensor]) -> None:
    """Loads the weights of a state, whatever form its masters had, in the form of this run's masters."""
    wide, hint = dict[Tensor, Tensor](), "load it with the model it was saved with"
    if run.sharded is not None:
        run.sharded.reshard()
    given = _as_held(run, given)
    for name, p in _parameters(run).items():
        if f"model.{name}" not in given:
            raise StateError(f"the state has no `model.{name}`", hint=hint)
        hi, lo = given[f"model.{name}"], given.get(f"remainder.{name}")
        wide[p] = (hi.float() if lo is None else join(hi, lo)).to(p.device)
        if hi.shape != local(p).shape:
            raise StateError(
                f"`{name}` has the shape {tuple(hi.shape)} in the state and {tuple(p.shape)} in the model",
                hint=hint,
            )
    values = [shard_like(p, value) if is_shard(p) else value for p, value in wide.items()]
    run.masters.assign([*wide], values, run.num_applied)
    for name, buffer in _buffers(run):
        if f"model.{name}" in given:
            buffer.copy_(given[f"model.{name}"])
    run.buffers.remember()


def to_dict(run: RunParts) -> dict[str, Any]:
    """Returns a state with its policy and the optimizers' settings, in plain Python values and tensors."""
    numbers = {name: value for name, value in _entries(run) if not isinstance(value, Tensor)}
    left_out = ("params", "param_names")
    groups = [optimizer.param_groups for optimizer in run.optimizers]
    settings = [[{k: v for k, v in group.items() if k not in left_out} for group in each] for each in groups]
    fixed = {"policy": str(run.policy), "optimizers": [label(o) for o in run.optimizers], "groups": settings}
    rows = {"rows": {name: list(shard_rows(p)) for name, p in shards.items()}} if (shards := _shards(run)) else {}
    return {**fixed, **rows, "numbers": numbers, "tensors": state_of(run)}


def from_dict(run: RunParts, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Restores what `to_dict` returned, here or on all ranks of a sharded run, or refuses it entirely."""
    given = saved if isinstance(saved, Mapping) else _join_ranks(saved)
    held = given if isinstance(given, Mapping) else {}
    missing = {"policy", "optimizers", "groups", "numbers", "tensors"} - held.keys()
    if missing:
        raise StateError(
            f"{type_name(given)} was given, not a state of a run: it has no `{sorted(missing)[0]}`",
            hint="run.state_dict() returns one; run.load_torch_amp takes the state of a torch optimizer",
        )
    if given["policy"] != str(run.policy):
        raise StateError(
            f"the state has the policy `{given['policy']}`, and this run has `{run.policy}`",
            hint=f'prepare(model, optimizer, "{given["policy"]}"); or change the precision with load_state of '
            'halfstep.torch.state, which takes state["tensors"] without `scale.*`; or load_weights(run, tensors)',
        )
    if given.get("rows", {}) not in ({}, {name: list(shard_rows(p)) for name, p in _shards(run).items()}):
        raise StateError(
            "the state has other rows of the weights than this rank: it was saved by another rank, or by another "
            "number of ranks",
            hint="give load_state_dict the list of what every rank saved, by rank: any number of ranks loads "
            "it; or load what the same rank of as many ranks saved",
        )
    kinds = [label(optimizer) for optimizer in run.optimizers]
    shapes = [[len(groups) for groups in given["groups"]], [len(o.param_groups) for o in run.optimizers]]
    if [k.partition(" ")[0] for k in given["optimizers"]] != [k.partition(" ")[0] for k in kinds]:
        raise StateError(
            f"the state is from {', '.join(given['optimizers'])}, and this run has {', '.join(kinds)}",
            hint="prepare the run with the optimizers it was saved with, in the same order",
        )
    if shapes[0] != shapes[1]:
        raise StateError(
            f"the state has {shapes[0]} groups of parameters, and this run has {shapes[1]}",
            hint="create the same groups, including those that were added later, before loading",
        )
    load_state(run, given["tensors"])
    names = {name: p for p, name in run.masters.names.items()}
    for name, value in given["numbers"].items():
        optimizer, parameter, key = _place(run, name)
        optimizer.state[names[parameter]][key] = value
    for optimizer, groups in zip(run.optimizers, given["groups"], strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)


def _join_ranks(given: Any) -> Any:
    """Returns the state of a whole run from those of its ranks; a rank that had a random state gets it back."""
    if not isinstance(given, list | tuple):
        return given
    if not given or any("rows" not in each or "tensors" not in each for each in given):
        raise StateError(
            "a list was given, and not every entry is the state of a rank of a sharded run",
            hint="[torch.load(f'rank{r}.pt', weights_only=True) for r in range(ranks)], each of run.state_dict()",
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in given[0]["tensors"].items():
        kind, _, rest = name.partition(".")
        owner = rest.partition(".")[2].rpartition(".")[0] if kind == "optimizer" else rest
        if (rows := given[0]["rows"].get(owner)) is None or tensor.ndim == 0:
            tensors[name] = tensor
            continue
        pieces = {each["rows"][owner][0]: each["tensors"][name] for each in given if len(each["tensors"][name])}
        tensors[name] = torch.cat([pieces[start] for start in sorted(pieces)])
        if len(tensors[name]) != rows[2]:
            raise StateError(
                f"`{name}` has {rows[2]} rows, and the states that were given have {len(tensors[name])} of them",
                hint="give the states of all ranks that saved, each once",
            )
    rank = dist.get_rank() if in_group() else 0
    own = given[rank]["tensors"] if rank < len(given) else {"rng.cpu": torch.get_rng_state()}
    tensors |= {name: tensor for name, tensor in own.items() if name.startswith("rng.")}
    return {**given[0], "rows": {}, "tensors": tensors}


class Copies:
    """Copies of a state in host memory that is reused; from a GPU they are pinned, and nothing waits for them."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor], rows: Mapping[str, ShardRows] | None = None) -> Snapshot:
        """Launches the copies, over those of the previous snapshot. `rows` are of tensors that ranks share."""
        parts = dict(rows or {})
        for name, tensor in state.items():
            held = self._held.get(name)
            if held is None or (held.dtype, held.shape) != (tensor.dtype, tensor.shape):
                held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._held[name] = held
            held.copy_(tensor, non_blocking=tensor.is_cuda)
        # On the stream of their own device: an event of another one would not wait for the copies.
        devices = {tensor.device for tensor in state.values() if tensor.is_cuda}
        ready = [torch.cuda.current_stream(device).record_event() for device in devices]

        def read() -> dict[str, Stored]:
            for event in ready:
                event.synchronize()
            made = {name: _bytes_of(self._held[name]) for name in state}
            return made | {name: Part(made[name], start, total) for name, (start, _, total) in parts.items()}

        return read


def _bytes_of(tensor: Tensor) -> Stored:
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), flat.data)


def stored(tensor: Tensor) -> Stored:
    """Returns a tensor's bytes, little-endian, with its dtype and shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().tobytes())


def restored(record: Stored) -> Tensor:
    """Returns the tensor that `stored` wrote."""
    name, shape, data = record
    dtype = find_dtype(name, _DTYPES)
    if not data:
        return torch.empty(shape, dtype=dtype)
    writable = isinstance(data, memoryview) and not data.readonly  # then the tensor is a view of it
    return torch.frombuffer(data if writable else bytearray(data), dtype=dtype).reshape(shape)


def _parameters(run: RunParts) -> dict[str, Tensor]:
    """Returns the parameters by name: of a sharded model the shards, even while FSDP has weights gathered."""
    return dict(run.model.named_parameters()) if run.sharded is None else _shards(run)


def _shards(run: RunParts) -> dict[str, Tensor]:
    return {} if run.sharded is None else {name: p for p, name in run.masters.names.items()}


def _as_held(run: RunParts, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state as this rank holds it: its rows of tensors that ranks share, masters whole or in halves."""
    held = dict(given)
    for name, tensor in given.items():
        if rows := rows_here(run, name, tuple(tensor.shape)):
            held[name] = tensor[rows[0] : rows[1]]
    for name in _shards(run):
        if f"remainder.{name}" in held and f"model.{name}" in held:
            held[f"model.{name}"] = join(held[f"model.{name}"], held.pop(f"remainder.{name}"))
    for name in run.masters.remainders:
        whole = held.get(f"model.{name}")
        if f"remainder.{name}" not in held and whole is not None and whole.dtype == torch.float32:
            held[f"model.{name}"], held[f"remainder.{name}"] = split(whole)
    return held


def _check_amax(run: RunParts, given: Mapping[str, Tensor]) -> None:
    missing = [] if run.amaxes is None else [name for name in run.amaxes.layers if f"amax.{name}" not in given]
    if missing:
        raise StateError(
            f"the state has no amax history of `{missing[0]}` ({len(missing)} layers lack theirs), by which its "
            "delayed operands are scaled",
            hint="resume a run with `delayed`, omit `delayed` from the policy, or load only the weights: "
            "load_weights(run, tensors) of halfstep.torch.state",
        )


def _buffers(run: RunParts) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in run.model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}".lstrip("."), buffer


def _entries(run: RunParts) -> Iterator[tuple[str, Any]]:
    for index, optimizer in enumerate(run.optimizers):
        if isinstance(optimizer, Optimizer):
            optimizer.start()
        for p in held_by(optimizer):
            for key, value in optimizer.state.get(p, {}).items():
                yield f"optimizer.{index}.{run.masters.names[p]}.{key}", value


def _place(run: RunParts, name: str) -> tuple[torch.optim.Optimizer, str, str]:
    _, index, rest = name.split(".", 2)
    parameter, _, key = rest.rpartition(".")
    return run.optimizers[int(index)], parameter, key


def _check_entries(
    run: RunParts, given: Mapping[str, Tensor]
) -> dict[torch.optim.Optimizer, dict[tuple[Tensor, str], Tensor]]:
    entries = {o: {} for o in run.optimizers if not isinstance(o, Optimizer)}  # type: ignore[var-annotated]
    names = {name: p for p, name in run.masters.names.items()}
    for name, value in given.items():
        optimizer, parameter, key = _place(run, name)
        p = names.get(parameter)
        if p is None or p not in set(held_by(optimizer)):
            raise StateError(
                f"the checkpoint is from another run: {label(optimizer)} has no `{parameter}`",
                hint="resume with the model and optimizer it was saved with",
            )
        held = optimizer.state.get(p, {}).get(key)
        wanted = held.dtype if isinstance(held, Tensor) else value.dtype
        if is_moment(local(p), value):
            wanted = dtype_of(run.conversion.moments.get(parameter, FP32))
        if value.dtype != wanted:
            ours = {name: (DTYPE_NAMES.get(wanted, str(wanted)), tuple(value.shape))}
            check_same(ours, _describe({name: value}))
        placed = value.to(_device(optimizer, p, key, held), copy=True)
        entries[optimizer][p, key] = shard_like(p, placed) if is_shard(p) and value.ndim else placed
    return entries


def _device(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, held: Any) -> torch.device:
    """Returns where a piece of state belongs: counts that the host reads are on the host."""
    if isinstance(held, Tensor):
        return held.device
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if on_host else parameter.device


def _describe(state: Mapping[str, Tensor]) -> dict[str, Description]:
    return {name: (DTYPE_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in state.items()}
