"""What Accelerate may not decide beside a policy: precision, sharding, and how gradients are exchanged."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import AutocastKwargs, DDPCommunicationHookType, GradScalerKwargs

from halfstep.core.errors import AutocastError, HalfstepError, ParallelError
from halfstep.torch.update.switches import fp32_is_fp32

# Arguments that decide about precision or gradients, with the name of the feature and the launcher's variable.
_SHARDING = {
    "deepspeed_plugin": ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"),
    "deepspeed_plugins": ("DeepSpeed", ""),
    "megatron_lm_plugin": ("Megatron-LM", "ACCELERATE_USE_MEGATRON_LM"),
    "parallelism_config": ("ParallelismConfig", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    "torch_tp_plugin": ("tensor parallelism", ""),
}


def refuse_precision(given: Any = None) -> None:
    """Refuses a second opinion on precision beside the policy: an argument, or the launcher's variable."""
    if given is not None and str(given) != "no":
        raise AutocastError(
            f'mixed_precision="{given}" beside policy=: both would cast',
            hint="drop mixed_precision: the policy says it",
        )
    if (launched := os.environ.get("ACCELERATE_MIXED_PRECISION")) not in (None, "", "no"):
        raise AutocastError(
            f"Accelerate was launched with mixed_precision {launched} (ACCELERATE_MIXED_PRECISION) beside policy=",
            hint="launch with --mixed_precision no, or set it to no in `accelerate config`",
        )


def refuse_sharding(given: dict[str, Any]) -> None:
    """Refuses arguments of an Accelerator that take parameters, gradients or precision away from a policy."""
    for name, (what, variable) in _SHARDING.items():
        if given.get(name) is not None:
            raise sharding_error(f"{name} ({what})")
        if variable and os.environ.get(variable, "false").lower() == "true":
            raise sharding_error(f"{what}, which the launcher has set ({variable}),")
    for handler in given.get("kwargs_handlers") or ():
        hook = getattr(handler, "comm_hook", DDPCommunicationHookType.NO)
        if hook != DDPCommunicationHookType.NO:
            raise ParallelError(
                f"comm_hook={hook.value}: processes would exchange gradients by it, and not as the policy says",
                hint="omit it: gradients are summed in the format of the role `reduce`, fp32",
            )
        recipe = type(handler).__name__.endswith("RecipeKwargs")
        if recipe or isinstance(handler, AutocastKwargs | GradScalerKwargs):
            raise AutocastError(
                f"{type(handler).__name__} would do nothing beside policy=: there is no autocast and no scaler",
                hint="omit it; the policy names formats and the loss scale, such as `fp16-mixed,scale=...`",
            )


def sharding_error(what: str) -> HalfstepError:
    """Returns the refusal of a way to shard."""
    return ParallelError(
        f"{what} beside policy= is not implemented: it keeps parameters and gradients in its own form",
        hint="train on one device, with DDP or with FSDP2, or leave precision to it and drop policy=",
    )


@contextmanager
def preserve_fp32_matmuls() -> Iterator[None]:
    """Keeps torch's setting for fp32 matmuls: Accelerate allows TF32 if a model is compiled in fp32."""
    kept = fp32_is_fp32()
    try:
        yield
    finally:
        if kept and not fp32_is_fp32():
            torch.set_float32_matmul_precision("highest")
