"""Hooks on what some loops do: autocast, sums over ranks, saving and loading, and waiting for the device."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from halfstep.core.audit.record import CheckpointFacts
from halfstep.torch.collect.patches import Patches
from halfstep.torch.collect.places import is_library, name_of
from halfstep.torch.collect.seen import Seen, params_of
from halfstep.torch.collect.weights import format_name
from halfstep.torch.shards import local

# What makes the host wait for a tensor. On a CPU nothing waits, but the same script may run on a GPU tomorrow.
SYNCS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
MOVES = ("cpu", "numpy", "tolist")  # of a tensor on the host these wait for nothing
# Names of torch's own communication hooks, and the format that they send.
COMPRESSED = {"fp16_compress": "fp16", "bf16_compress": "bf16"}
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")  # torch 2.13 has renamed it
SCALER_KEYS = {"scale", "growth_factor", "backoff_factor"}


def install(seen: Seen, patches: Patches) -> None:
    """Installs them."""
    hooks = OtherHooks(seen)
    patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", hooks.autocast)
    patches.wrap(DistributedDataParallel, "__init__", hooks.wrapped)
    patches.wrap(DistributedDataParallel, "register_comm_hook", hooks.compressed)
    if dist.is_available():
        owners = [dist, dist.distributed_c10d]
        patches.wrap_everywhere(owners, "all_reduce", hooks.reduced)
        for name in SCATTERS:
            if hasattr(dist, name):
                patches.wrap_everywhere(owners, name, hooks.scattered)
    patches.wrap_everywhere([torch, torch.serialization], "save", hooks.saved)
    patches.wrap(torch.optim.Optimizer, "load_state_dict", hooks.loaded)
    patches.wrap(torch.nn.Module, "load_state_dict", hooks.filled)
    for name in SYNCS:
        patches.wrap(Tensor, name, SyncHook(seen, name))


class OtherHooks:
    """Writes them down; a line that does the same again and again is written once."""

    def __init__(self, seen: Seen):
        self.seen = seen
        self.known: set[tuple[Any, ...]] = set()

    def _once(self, what: str, format: str, target: str | None = None, **numbers: float) -> None:
        if (what, format, target) not in self.known:
            self.known.add((what, format, target))
            self.seen.call(what, target, format=format, numbers=numbers)

    def autocast(self, original: Any, region: Any) -> Any:
        """Enters an autocast region."""
        if region._enabled:
            if not torch.is_autocast_enabled(region.device):  # inside another one, the casts of that stay
                self.seen.regions += 1
            self._once("autocast", format_name(region.fast_dtype), region.device)
        return original(region)

    def wrapped(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        """Wraps a model with DDP, which sums gradients in the format of the weights, or in the one asked for."""
        original(ddp, *args, **kwargs)
        if ddp.process_group is None or ddp.process_group.size() == 1:
            return
        asked = getattr(ddp.mixed_precision, "reduce_dtype", None)
        formats = {format_name(asked or p.dtype) for p in ddp.module.parameters() if p.requires_grad}
        for each in sorted(formats):
            self._once("reduce", each, "DistributedDataParallel", ranks=ddp.process_group.size())

    def compressed(self, original: Any, ddp: Any, state: Any, hook: Any) -> Any:
        """Gives DDP another way to sum gradients."""
        name = getattr(hook, "__name__", type(hook).__name__)
        for part, sent in COMPRESSED.items():
            if part in name:
                self._once("reduce", sent, name, ranks=dist.get_world_size())
                break
        else:
            self.seen.unseen[f"what the communication hook `{name}` sends"] = None
        return original(ddp, state, hook)

    def reduced(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Sums a tensor over ranks; only gradients matter."""
        if isinstance(tensor, Tensor) and dist.get_world_size() > 1 and self._is_gradient(tensor):
            self._once("reduce", format_name(tensor.dtype), "all_reduce", ranks=dist.get_world_size())
        return original(tensor, *args, **kwargs)

    def scattered(self, original: Any, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Sums and shares gradients, as FSDP does."""
        if isinstance(input, Tensor) and dist.get_world_size() > 1 and input.is_floating_point():
            self._once("reduce", format_name(input.dtype), "reduce_scatter", ranks=dist.get_world_size())
        return original(output, input, *args, **kwargs)

    def _is_gradient(self, tensor: Tensor) -> bool:
        storage = local(tensor).untyped_storage().data_ptr()
        return any(
            p.grad is not None and local(p.grad).untyped_storage().data_ptr() == storage
            for optimizer in self.seen.optimizers
            for p in params_of(optimizer)
        )

    def saved(self, original: Any, thing: Any, to: Any, *args: Any, **kwargs: Any) -> Any:
        """Saves something: whether the state of an optimizer and of a scaler is in it."""
        state = _found(thing, {"state", "param_groups"}) or {}
        moments = {str(i): format_name(each.dtype) for i, each in enumerate(_moments(state.get("state", {})))}
        facts = CheckpointFacts(str(to), moments=moments, scaler=_found(thing, SCALER_KEYS) is not None)
        self.seen.saves.append(facts)
        numbers = {"optimizer": float(bool(moments)), "scaler": float(bool(facts.scaler))}
        self.seen.call("save", numbers=numbers)
        with self.seen.quiet():
            return original(thing, to, *args, **kwargs)

    def loaded(self, original: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads the state of an optimizer, which may cast its moments to the format of the weights."""
        before = [each.dtype for each in _moments(state.get("state", {}))]
        result = original(optimizer, state, *args, **kwargs)
        after = [each.dtype for each in _moments(optimizer.state)]
        narrowed = sum(_is_narrower(new, old) for old, new in zip(before, after, strict=False))
        self.seen.call("load", "moments", numbers={"narrowed": float(narrowed)})
        return result

    def filled(self, original: Any, module: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads the weights of a model, which may have been rounded before they were saved."""
        own = dict(module.named_parameters())
        rounded = sum(
            _is_narrower(each.dtype, own[name].dtype)
            for name, each in state.items()
            if name in own and isinstance(each, Tensor)
        )
        self.seen.call("load", "weights", numbers={"rounded": float(rounded)})
        return original(module, state, *args, **kwargs)


def _is_narrower(new: torch.dtype, old: torch.dtype) -> bool:
    return new.is_floating_point and old.is_floating_point and new.itemsize < old.itemsize


def _moments(state: Any) -> list[Tensor]:
    each = [value for its in state.values() if isinstance(its, dict) for value in its.values()]
    return [value for value in each if isinstance(value, Tensor) and value.ndim and value.is_floating_point()]


def _found(thing: Any, keys: set[str], depth: int = 3) -> Any:
    """Returns the dictionary with these keys somewhere in what is saved, or None."""
    if not isinstance(thing, dict) or not depth:
        return None
    if keys <= thing.keys():
        return thing
    return next((found for each in thing.values() if (found := _found(each, keys, depth - 1))), None)


class SyncHook:
    """Counts how often the user's own lines wait for a tensor, by update."""

    def __init__(self, seen: Seen, name: str):
        self.seen, self.name = seen, name

    def __call__(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Waits."""
        seen = self.seen
        if not seen.inside and not (self.name in MOVES and tensor.device.type == "cpu"):
            frame = sys._getframe(2)  # beyond this one and the wrapper
            if not is_library(frame.f_code.co_filename):
                counts = seen.syncs.setdefault((name_of(frame), self.name.strip("_")), [])
                counts += [0] * (seen.updates + 1 - len(counts))
                counts[-1] += 1
        return original(tensor, *args, **kwargs)
