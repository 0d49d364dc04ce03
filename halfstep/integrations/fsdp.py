"""FSDP2 inside Accelerate under a policy: what its plugin may say, and how a model is sharded and compiled.

Accelerate shards a model in `Accelerator._prepare_fsdp2`, which never calls `prepare_model`. The policy comes
before that, as FSDP2 replaces parameters, and the optimizers are attached to their run after it. Two things that
Accelerate does on the way would change what the policy was given, and are done here:

    activation checkpointing   around the `forward` of each layer, where Accelerate puts a module around the layer:
                               names of parameters stay, in rules and in checkpoints. The recomputation draws the
                               same dropout
    compilation                after sharding, so that the model in front is what FSDP2 has sharded

A checkpoint is that of parts.py. What Accelerate holds besides (schedulers, data, registered objects) is in it
too; its own files, which are pickled, are not written.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.other import compile_regions_fsdp2
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from halfstep.core.errors import ArgumentError, ParallelError, StateError
from halfstep.integrations import parts
from halfstep.torch.run import Run


def plugin_of(
    given: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> FullyShardedDataParallelPlugin | None:
    """Returns the plugin that was given or that the launcher asks for; refuses what a policy cannot train by.

    `settings` are those of a plugin that a framework will make.
    """
    plugin: FullyShardedDataParallelPlugin | None = given.get("fsdp_plugin")
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if plugin is None and (settings or launched):
        plugin = AcceleratorState._shared_state.get("fsdp_plugin")
        if plugin is None:
            settings = settings or {}
            _check_version(settings.get("fsdp_version", int(os.environ.get("FSDP_VERSION", "1"))))
            plugin = FullyShardedDataParallelPlugin(**settings)
    if plugin is not None:
        _check(plugin)
    return plugin


def check_parallelism(config: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Refuses what splits more than shards and their copies."""
    if config is None:
        return
    others = [f"{name}={size}" for name, size in config._sizes.items() if size > 1 and not name.startswith("dp_")]
    if others:
        raise ParallelError(
            f"ParallelismConfig({', '.join(others)}) beside policy= is not implemented: it splits layers or rows",
            hint="ParallelismConfig(dp_replicate_size=..., dp_shard_size=...), with an FSDP2 plugin",
        )
    if plugin is None or not config.dp_shard_enabled:
        raise ParallelError(
            "ParallelismConfig beside policy= is for copies of shards (HSDP), and there are no shards",
            hint="an FSDP2 plugin and dp_shard_size > 1; or omit it, and processes train by DDP",
        )


def _check_version(version: int) -> None:
    if version != 2:
        raise ParallelError(
            "FSDP1 beside policy= is not implemented: it flattens parameters, and a policy names them",
            hint="FullyShardedDataParallelPlugin(fsdp_version=2), or `--fsdp_version 2` for accelerate launch",
        )


def _check(plugin: FullyShardedDataParallelPlugin) -> None:
    _check_version(plugin.fsdp_version)
    if plugin.mixed_precision_policy is not None:
        raise ParallelError(
            "mixed_precision_policy= beside policy= would round gradients before they are reduced",
            hint="omit it: weights travel in the policy's compute format, and gradients are reduced in fp32",
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ParallelError(
            "cpu_offload=True beside policy= is not implemented: masters would be elsewhere than gradients",
            hint="omit it; activation_checkpointing=True and `moments=bf16` in the policy save memory",
        )
    if plugin.ignored_modules is not None:
        raise ParallelError(
            "ignored_modules= beside policy= is not implemented: all parameters are sharded, or none",
            hint="omit it; small parameters cost little when they are sharded",
        )


def check_parameters(model: nn.Module) -> None:
    """Refuses a base in 4 bits that Accelerate would leave whole on each rank."""
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            raise ParallelError(
                f"`{name}` is held in {p.dtype}, and FSDP2 shards floating-point weights alone: Accelerate would "
                "leave it whole on each rank",
                hint="BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16) holds the same 4 bits in a dtype "
                "that is sharded",
            )


def use(
    accelerator: accelerate.Accelerator,
    plugin: FullyShardedDataParallelPlugin | None,
    config: ParallelismConfig | None = None,
) -> None:
    """Has processes shard; on CPUs Accelerate ignores its plugin, and trains by DDP without a word."""
    state = accelerator.state
    if plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = plugin
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if config is not None:  # which Accelerate's own __init__ refuses on CPUs
        state.parallelism_config, state.device_mesh = config, config.get_device_mesh(accelerator.device.type)
        config._validate_accelerator(accelerator)


@contextmanager
def left_to_us(state: AcceleratorState) -> Iterator[None]:
    """Inside, Accelerate shards a model and does neither checkpoint its activations nor compile it."""
    plugin, dynamo = state.fsdp_plugin, state.dynamo_plugin
    before = plugin.activation_checkpointing, dynamo.backend
    plugin.activation_checkpointing, dynamo.backend = False, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.activation_checkpointing, dynamo.backend = before


def checkpoint_layers(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    """Lets the layers that will be sharded one by one compute their activations again in the backward pass."""
    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    is_layer = fsdp2_prepare_auto_wrap_policy(plugin, model)
    layers = [m for m in model.modules() if m is not model and is_layer(m)] if is_layer else []
    if not layers:
        raise ParallelError(
            "activation_checkpointing=True, and no layer of the model is one to checkpoint",
            hint='name the class of a layer: auto_wrap_policy="transformer_based_wrap", '
            'transformer_cls_names_to_wrap=["Block"]',
        )
    function = _offloaded if plugin.activation_checkpointing_offload else checkpoint
    for layer in layers:
        layer.forward = partial(function, layer.forward, use_reentrant=False)


def _offloaded(*given: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(*given, **options)


def compiled(state: AcceleratorState, model: nn.Module) -> nn.Module:
    """Returns a sharded model compiled as Accelerate is configured to: whole, or its repeated blocks each."""
    dynamo = state.dynamo_plugin
    if dynamo.backend == DynamoBackend.NO or hasattr(model, "_orig_mod"):
        return model
    if dynamo.use_regional_compilation:
        return compile_regions_fsdp2(model, **dynamo.to_kwargs())
    return torch.compile(model, **dynamo.to_kwargs())  # type: ignore[return-value]


def save_state(accelerator: Any, run: Run, folder: str | None) -> str:
    """Does what `Accelerator.save_state` does, without pickles; what it removes, it removes after the save."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        folder = os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        if parts.newest(Path(folder)) is not None:
            raise ArgumentError(
                f"`{folder}` has a checkpoint already",
                hint="accelerator.load_state() continues from the newest, with the next number; or choose another "
                "project_dir",
            )
    elif folder is None:
        raise ArgumentError("save_state() was given no folder", hint='accelerator.save_state("checkpoint")')
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, [], folder)
    held = _holders(accelerator)
    facts = {what: [each.state_dict() for each in holders] for what, holders in held.items()}
    parts.save(run, Path(folder), {**facts, "step": accelerator.step})
    project.iteration += 1
    if project.automatic_checkpoint_naming and accelerator.is_main_process and project.total_limit is not None:
        for old in _named_folders(Path(folder).parent)[: -project.total_limit]:
            shutil.rmtree(old)
    return folder


def newest_of(accelerator: Any) -> Path | None:
    """Returns the newest whole checkpoint that `save_state` has named; the next one has the number after it."""
    folders = _named_folders(Path(accelerator.project_dir, "checkpoints"))
    whole = [folder for folder in folders if parts.newest(folder) is not None]
    if whole:
        accelerator.project_configuration.iteration = _number(whole[-1]) + 1
    return next(reversed(whole), None)


def _named_folders(parent: Path) -> list[Path]:
    entries = parent.iterdir() if parent.is_dir() else []
    return sorted((entry for entry in entries if re.fullmatch(r"checkpoint_\d+", entry.name)), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint_"))


def load_state(accelerator: Any, run: Run, path: Path) -> None:
    """Restores what `save_state` wrote."""
    for hook in accelerator._load_model_state_pre_hook.values():
        if hook != accelerator._load:
            hook([], str(path))
    facts, _ = parts.load(run, path)
    for what, holders in _holders(accelerator).items():
        if len(holders) != len(facts[what]):
            raise StateError(
                f"`{path}` has the state of {len(facts[what])} {what}, and this Accelerator has {len(holders)}",
                hint="prepare, or register for checkpointing, what the saved run had, in the same order",
            )
        for each, given in zip(holders, facts[what], strict=True):
            each.load_state_dict(given)
    accelerator.step = facts["step"]


def _holders(accelerator: Any) -> dict[str, list[Any]]:
    """Returns what has a state of its own besides the run."""
    loaders = [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]
    return {"schedulers": accelerator._schedulers, "loaders": loaders, "objects": accelerator._custom_objects}
