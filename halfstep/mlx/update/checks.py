"""Checks of what users hand to `prepare` and `step`."""

import os
import shutil
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from halfstep.config.model import model_like
from halfstep.core.arrays.measure import decide_once
from halfstep.core.choice import Choice
from halfstep.core.errors import (
    AlreadyPreparedError,
    ArgumentError,
    AutoPolicyError,
    LossError,
    LossFormatError,
    MissingPackageError,
    RunStateError,
    UnsupportedTransformError,
    type_name,
)
from halfstep.core.policy import Policy
from halfstep.mlx import measure
from halfstep.mlx.numerics.dtypes import dtype_of, is_floating, kind_of

_PAIR = "return the mean loss alone, or (losses.sum(), mask.sum())"


def resolve_compile(asked: bool | None) -> bool:
    """Returns whether to compile the step: None means where it pays. Refuses what MLX would silently not do."""
    on_cpu = mx.default_device().type == mx.cpu
    if not asked:
        return asked is None and not on_cpu
    if os.environ.get("MLX_DISABLE_COMPILE"):
        raise ArgumentError(
            "compile=True, but MLX_DISABLE_COMPILE is set", hint="unset it, or leave `compile` out"
        )
    if on_cpu and shutil.which("g++") is None:
        raise MissingPackageError(
            "compile=True, but there is no g++: without it MLX runs uncompiled on a CPU, and says nothing",
            hint="install g++ (Debian: apt install g++; macOS: xcode-select --install), or leave `compile` out",
        )
    return True


def check_parts(model: Any, optimizer: Any) -> None:
    """Refuses what is not a model and an optimizer of MLX."""
    for word, given, kind in (("model", model, Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            where = "mlx.nn" if kind is Module else "mlx.optimizers"
            raise ArgumentError(
                f"the {word} is {type_name(given)}, not an `{where}.{kind.__name__}`",
                hint="prepare(model, optimizer, policy); optimizer = mlx.optimizers.AdamW(3e-4)",
            )
    if "update" in vars(optimizer):
        raise AlreadyPreparedError(
            f"the optimizer, {type_name(optimizer)}, belongs to another run",
            hint="give each model its own: mlx.optimizers.AdamW(3e-4); or run.unprepare() gives this one back",
        )


def measured_choice(model: Module, tokens: int, *, alone: bool = True) -> Choice:
    """Returns what `auto` means for a model: what is fastest on this device, by a block as wide as its layers."""
    if not alone:
        raise AutoPolicyError(
            "`auto` is measured in each process, and two of them could choose differently",
            hint="`halfstep probe` measures; name what it chooses",
        )
    parameters: Any = tree_flatten(model.parameters())
    return decide_once(
        measure, kind_of(mx.default_device()), model_like(array.shape for _, array in parameters), tokens
    )


def check_untraced(*trees: Any) -> None:
    """Launches arrays without waiting, or refuses those that mx.compile or another transformation traces."""
    try:
        mx.async_eval(*trees)
    except ValueError as error:
        if "transformation" not in str(error):
            raise
        raise UnsupportedTransformError(
            "a step inside mx.compile, mx.vmap or mx.grad of your own would be traced, and neither masters nor "
            "the loss scale would change",
            hint="prepare(..., compile=True) compiles the whole step; call run.step, or run.value_and_grad and "
            "run.update, from plain Python. Code that only calls the model may be compiled",
        ) from error


def check_weight(weight: Any) -> mx.array:
    """Returns the weight of a loss in fp32, or refuses what is not one number of tokens."""
    if isinstance(weight, mx.array):
        if weight.ndim:
            raise LossError(
                f"the weight of a loss has the shape {weight.shape}; it must be one number", hint=_PAIR
            )
    elif isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
        given = type_name(weight) if isinstance(weight, dict | tuple | list) else repr(weight)
        raise LossError(f"weight={given}: it is a number of tokens, 0 or more", hint=_PAIR)
    return mx.array(weight).astype(mx.float32)


def check_loss(loss: Any, policy: Policy) -> mx.array:
    """Returns the loss, or refuses one that is not a floating scalar in the policy's loss format."""
    if not is_floating(loss) or loss.ndim:
        given = f"a {type(loss).__name__}"
        if isinstance(loss, mx.array):
            given = f"{loss.dtype} of shape {loss.shape}"
        raise LossError(
            f"the loss function returned {given}; a loss is one floating scalar",
            hint="return its mean, without .item(), or (sum, count)",
        )
    wanted = mx.float32 if policy.emulate else dtype_of(policy.loss)
    if loss.dtype.size < wanted.size:
        raise LossFormatError(
            f"the loss is {loss.dtype}, but the policy says loss={policy.loss}",
            hint="the model's outputs are widened when you call it; widen what the loss takes from its parts with "
            "logits.astype(mx.float32)",
        )
    return loss


def refuse_update(model: Module, gradients: Any) -> None:
    """Takes the place of `optimizer.update` while a run has the optimizer."""
    raise RunStateError(
        "optimizer.update steps without masters, the loss scale and the check for what is not finite",
        hint="loss, grads = run.value_and_grad(loss_fn)(batch); run.update(grads); or run.step(loss_fn, [batch]); "
        "run.unprepare() gives the optimizer back",
    )
