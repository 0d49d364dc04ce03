"""`prepare(..., memory="lean")`: what the backward pass computes again, in a third-party model.

    LayerNorm, RMSNorm                     of torch.nn, and modules of other packages that are norms by their names
    gelu, silu, mish, square, pow          wherever the model's own code or a module of torch.nn calls them
    x * y of two activations               the gate of a gated MLP
    activations of transformers            those that are written in several operations, such as `gelu_new`

Each keeps its inputs, which torch would keep as well, and its result is not kept where a linear layer or another
of these reads it. Attention, dropout, relu, softmax, convolutions and others stay as they are.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.core.errors import ArgumentError
from halfstep.torch.convert.modules import LayerNorm, Leaf, RMSNorm
from halfstep.torch.convert.plan import Originals
from halfstep.torch.convert.subclass import put_in_front
from halfstep.torch.layers import Norm
from halfstep.torch.model import Decoder
from halfstep.torch.numerics.recompute import recompute_in_backward
from halfstep.torch.numerics.record import update_record

MEMORY = ("fast", "lean")
_LIBRARY = "transformers.activations"
_CALLERS = (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.Mish, nn.TransformerEncoderLayer)


class Recomputed(nn.Module):
    """A module in front of whose class this is computes its result again in the backward pass."""

    def forward(self, *given: Any, **options: Any) -> Any:
        """Returns the module's output."""
        forward = super().forward
        if len(given) != 1 or options or not isinstance(given[0], Tensor):
            return forward(*given, **options)
        if torch.compiler.is_compiling():  # which finds the parameters by itself
            return recompute_in_backward(_without_mode(forward), given[0])
        return recompute_in_backward(
            _with_parameters(self, _without_mode(forward)), given[0], *self._parameters.values()
        )


def _without_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Hides what an activation or a small norm calls from the function mode, which would mark parts of it."""

    def call(x: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(x)

    return call


def _with_parameters(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward as a function of the module's parameters too, so that a hook on one runs once."""

    def call(x: Tensor, *values: Any) -> Any:
        held = dict(module._parameters)
        try:
            module._parameters.update(zip(held, values, strict=True))
            return forward(x)
        finally:
            module._parameters.update(held)

    return call


def check_memory(memory: Any, model: nn.Module) -> None:
    """Refuses what is no way to use memory, and `lean` for a model in which it would change nothing."""
    if memory not in MEMORY:
        raise ArgumentError(f'memory is "{memory}"', hint='memory="fast" or memory="lean"')
    if memory == "lean" and not any(isinstance(m, _CALLERS) or not _is_of_torch(m) for m in model.modules()):
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ArgumentError(
            f'memory="lean" would change nothing: among {", ".join(kinds)} there is no norm over features, and no '
            "activation function whose result is computed again",
            hint='leave it at memory="fast"; torch.utils.checkpoint runs whole parts of a model again',
        )


def save_memory(model: nn.Module, originals: Originals) -> tuple[str, ...]:
    """Makes the modules of a model lean that `plan.convert` made; returns those whose results are not kept."""
    if isinstance(model, Decoder):
        return model.save_memory()
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, Norm | LayerNorm | RMSNorm):
            update_record(module, recomputed=True)
        elif _is_norm(module) or type(module).__module__ == _LIBRARY:
            originals.append((module, type(module), {}))
            module.__class__ = cast(Any, put_in_front)(Recomputed, type(module))
        else:
            continue
        changed.append(name)
    return tuple(changed)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_norm(module: nn.Module) -> bool:
    """Whether a module that runs as written is a norm over features: by its name, with gains and biases alone."""
    held = [*module.parameters()]
    named = "Norm" in type(module).__name__ and not any(True for _ in module.buffers())
    return isinstance(module, Leaf) and named and bool(held) and all(p.dim() == 1 for p in held)
