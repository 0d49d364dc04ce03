"""Hooks on what surrounds the updates: autocast, sums over ranks, saving and loading, waiting for the device."""

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from halfstep.core.audit.record import CheckpointFacts
from halfstep.torch.instruments.collect.log import TrainingLog
from halfstep.torch.instruments.collect.patches import Patches
from halfstep.torch.instruments.collect.tensors import format_name, is_library, is_narrow, local, name_of
from halfstep.torch.instruments.collect.weights import moments_of

# Methods that make the host wait for a tensor. On a CPU nothing waits, but the script may run on a GPU tomorrow.
SYNCS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
MOVES = ("cpu", "numpy", "tolist")  # these do not wait for a tensor on the host
# Names of torch's own communication hooks, and the format that they send.
COMPRESSED = {"fp16_compress": "fp16", "bf16_compress": "bf16"}
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")  # torch 2.13 has renamed it
SCALER_KEYS = {"scale", "growth_factor", "backoff_factor"}


def install(log: TrainingLog, patches: Patches) -> None:
    """Installs the hooks."""
    hooks = SystemHooks(log)
    patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", hooks.autocast)
    patches.wrap(DistributedDataParallel, "__init__", hooks.wrap_ddp)
    patches.wrap(DistributedDataParallel, "register_comm_hook", hooks.register_comm_hook)
    if dist.is_available():
        owners = [dist, dist.distributed_c10d]
        patches.wrap_everywhere(owners, "all_reduce", hooks.all_reduce)
        for name in SCATTERS:
            if hasattr(dist, name):
                patches.wrap_everywhere(owners, name, hooks.reduce_scatter)
    patches.wrap_everywhere([torch, torch.serialization], "save", hooks.save)
    patches.wrap(torch.optim.Optimizer, "load_state_dict", hooks.load_optimizer)
    patches.wrap(torch.nn.Module, "load_state_dict", hooks.load_model)
    for name in SYNCS:
        patches.wrap(Tensor, name, partial(hooks.wait, name))


class SystemHooks:
    """Logs each kind of event once: what a line does again and again is one event. Waits are counted."""

    def __init__(self, log: TrainingLog):
        self.log = log
        self.known: set[tuple[Any, ...]] = set()

    def _log_once(self, what: str, format: str, target: str, **numbers: float) -> None:
        if (what, format, target) not in self.known:
            self.known.add((what, format, target))
            self.log.add_call(what, target, format=format, numbers=numbers)

    def autocast(self, original: Any, region: Any) -> Any:
        """Logs that an autocast region is entered."""
        if region._enabled:
            if not torch.is_autocast_enabled(region.device):  # inside another one, the casts of that stay
                self.log.regions += 1
            self._log_once("autocast", format_name(region.fast_dtype), region.device)
        return original(region)

    def wrap_ddp(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        """Logs the format in which DDP sums gradients: that of the weights, unless another is asked for."""
        original(ddp, *args, **kwargs)
        if ddp.process_group is None or ddp.process_group.size() == 1:
            return
        asked = getattr(ddp.mixed_precision, "reduce_dtype", None)
        formats = {format_name(asked or p.dtype) for p in ddp.module.parameters() if p.requires_grad}
        for each in sorted(formats):
            self._log_once("reduce", each, "DistributedDataParallel", ranks=ddp.process_group.size())

    def register_comm_hook(self, original: Any, ddp: Any, state: Any, hook: Any) -> Any:
        """Logs that a communication hook compresses the gradients that DDP sums."""
        name = getattr(hook, "__name__", type(hook).__name__)
        sent = next((sent for part, sent in COMPRESSED.items() if part in name), None)
        if sent is None:
            self.log.unseen[f"what the communication hook `{name}` sends"] = None
        else:
            self._log_once("reduce", sent, name, ranks=dist.get_world_size())
        return original(ddp, state, hook)

    def all_reduce(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs that gradients are summed over ranks; other tensors do not matter."""
        if isinstance(tensor, Tensor) and dist.get_world_size() > 1 and self._is_gradient(tensor):
            self._log_once("reduce", format_name(tensor.dtype), "all_reduce", ranks=dist.get_world_size())
        return original(tensor, *args, **kwargs)

    def reduce_scatter(self, original: Any, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs that gradients are summed and distributed over ranks, as FSDP does."""
        if isinstance(input, Tensor) and dist.get_world_size() > 1 and input.is_floating_point():
            self._log_once("reduce", format_name(input.dtype), "reduce_scatter", ranks=dist.get_world_size())
        return original(output, input, *args, **kwargs)

    def _is_gradient(self, tensor: Tensor) -> bool:
        """Whether a tensor is a gradient, or has the size of one, or of all, in a narrower format than theirs."""
        storage = local(tensor).untyped_storage().data_ptr()
        for optimizer in self.log.optimizers:
            grads = [local(p.grad) for p in self.log.summed_in(optimizer) if p.grad is not None]
            if any(grad.untyped_storage().data_ptr() == storage for grad in grads):
                return True
            sizes = {grad.numel() for grad in grads} | {sum(grad.numel() for grad in grads)}
            if is_narrow(tensor.dtype) and not self.log.in_backward and tensor.numel() in sizes - {0, 1}:
                return True
        return False

    def save(self, original: Any, thing: Any, to: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs whether what is saved holds the state of an optimizer and of a scaler."""
        state = _dict_with(thing, {"state", "param_groups"}) or {}
        moments = {str(i): format_name(each.dtype) for i, each in enumerate(_moments(state.get("state", {})))}
        scaler = _dict_with(thing, SCALER_KEYS) is not None
        self.log.saves.append(CheckpointFacts(str(to), moments=moments, scaler=scaler))
        with self.log.library_call():
            return original(thing, to, *args, **kwargs)

    def load_optimizer(self, original: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs whether loading an optimizer's state casts its moments to a narrower format."""
        before = [each.dtype for each in _moments(state.get("state", {}))]
        result = original(optimizer, state, *args, **kwargs)
        after = [each.dtype for each in _moments(optimizer.state)]
        narrowed = sum(_is_narrower(new, old) for old, new in zip(before, after, strict=False))
        self.log.add_call("load", "moments", numbers={"narrowed": float(narrowed)})
        return result

    def load_model(self, original: Any, module: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Logs whether the weights that a model loads were rounded before they were saved."""
        own = dict(module.named_parameters())
        rounded = sum(
            _is_narrower(each.dtype, own[name].dtype)
            for name, each in state.items()
            if name in own and isinstance(each, Tensor)
        )
        self.log.add_call("load", "weights", numbers={"rounded": float(rounded)})
        return original(module, state, *args, **kwargs)

    def wait(self, name: str, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Counts per update how often a line of the user's waits for a tensor."""
        log = self.log
        if not log.library_depth and not (name in MOVES and tensor.device.type == "cpu"):
            frame = sys._getframe(3)  # beyond this one, the guard and the wrapper
            if not is_library(frame.f_code.co_filename):
                counts = log.syncs.setdefault((name_of(frame), name.strip("_")), [])
                counts += [0] * (log.updates + 1 - len(counts))
                counts[-1] += 1
        return original(tensor, *args, **kwargs)


def _is_narrower(new: torch.dtype, old: torch.dtype) -> bool:
    return new.is_floating_point and old.is_floating_point and new.itemsize < old.itemsize


def _moments(state: Any) -> list[Tensor]:
    return [value for held in state.values() for _, value in moments_of(held)]


def _dict_with(thing: Any, keys: set[str], depth: int = 3) -> Any:
    """Returns the first nested dictionary with these keys in what is saved, or None."""
    if not isinstance(thing, dict) or not depth:
        return None
    if keys <= thing.keys():
        return thing
    return next((found for each in thing.values() if (found := _dict_with(each, keys, depth - 1))), None)
