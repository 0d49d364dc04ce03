"""Modules of `mlx.nn` that cast: the classes that replace those of a model.

MLX has no hooks, so `apply` changes `module.__class__`: arrays stay where they are, under their names, and
printing the model shows what it now is. Linear, Embedding and the like replace one class of mlx.nn; `Around` is
mixed into the class of any other module that holds arrays, `Code` into that of modules that hold none,
`Whole` into that of the model itself.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers import activations, normalization, positional_encoding, transformer
from mlx.nn.layers import embedding as embeddings
from mlx.nn.layers import linear as linears
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from halfstep.core.formats import Format
from halfstep.mlx.convert.places import own_arrays
from halfstep.mlx.convert.scope import map_floats, scope
from halfstep.mlx.layers import (
    Held,
    Layer,
    Matmul,
    Streams,
    cast_input,
    check_stream_dtype,
    embedding,
    layer_norm,
    linear,
    rms_norm,
    to_compute,
    with_weight_grad_format,
)
from halfstep.mlx.numerics.dtypes import is_floating
from halfstep.mlx.numerics.lowering import Casts, casts_of


class Linear(Matmul, linears.Linear):
    """`nn.Linear` as the casted matmul."""

    _repr_template = "{p.operand.format} operands{emulated}"

    def __call__(self, x: mx.array) -> mx.array:
        return linear(self.check_activation_dtype(x), self.weight, self.get("bias"), self.casts)


class Embedding(Layer, embeddings.Embedding):
    """`nn.Embedding`: rows of the master, cast to compute; as a tied head, the casted matmul."""

    _repr_template = "{p.compute} out"

    def __call__(self, x: mx.array) -> mx.array:
        return embedding(self.weight, x, self.casts)

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns the logits of a tied head."""
        return linear(self.check_activation_dtype(x), self.weight, None, self.casts)


class RMSNorm(Layer, normalization.RMSNorm):
    """`nn.RMSNorm` as an island."""

    _repr_template = "{p.norm} inside, {p.compute} out"

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(self.check_activation_dtype(x), self.weight, self.casts, self.eps)


class LayerNorm(Layer, normalization.LayerNorm):
    """`nn.LayerNorm` as an island."""

    _repr_template = "{p.norm} inside, {p.compute} out"

    def __call__(self, x: mx.array) -> mx.array:
        return layer_norm(
            self.check_activation_dtype(x), self.get("weight"), self.get("bias"), self.casts, self.eps
        )


class MultiHeadAttention(Layer, transformer.MultiHeadAttention):
    """`nn.MultiHeadAttention` with scores and softmax in fp32; its projections are Linear layers themselves."""

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any = None) -> mx.array:
        q, k, v = self.query_proj(queries), self.key_proj(keys), self.value_proj(values)
        q, k, v = (mx.unflatten(t, -1, (self.num_heads, -1)).swapaxes(1, 2).astype(mx.float32) for t in (q, k, v))
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
        return self.out_proj(to_compute(y.swapaxes(1, 2).flatten(-2), self.casts))


KINDS: dict[type, type] = {
    linears.Linear: Linear,
    embeddings.Embedding: Embedding,
    normalization.RMSNorm: RMSNorm,
    normalization.LayerNorm: LayerNorm,
    transformer.MultiHeadAttention: MultiHeadAttention,
}
# Modules that run unchanged, in the format of a role.
ISLANDS: dict[type, str] = {
    normalization.GroupNorm: "norm",
    normalization.BatchNorm: "norm",
    normalization.InstanceNorm: "norm",
    activations.Softmax: "softmax",
    activations.LogSoftmax: "softmax",
    activations.Softmin: "softmax",
    positional_encoding.RoPE: "rope",
    positional_encoding.SinusoidalPositionalEncoding: "rope",
}


def own_parameters(module: Module) -> list[tuple[Any, Any]]:
    """Returns (container, key) of the floating arrays that a module holds itself, without private ones."""
    return [
        (container, key)
        for _, container, key in own_arrays(module)
        if is_floating(container[key]) and not str(key).startswith("_")
    ]


class Setting(NamedTuple):
    """What a class that is mixed in knows of its module."""

    name: str
    casts: Casts
    streams: Streams


def mix_in(mixin: type, own: type) -> type:
    """Returns the class of a module with `Around`, `Code` or `Whole` mixed in."""
    role = {"halfstep_role": ISLANDS[own]} if own in ISLANDS else {}
    return type(own.__name__, (mixin, own), {"__module__": own.__module__, "__doc__": own.__doc__, **role})


class Around(Held):
    """Mixed into the class of a module that holds arrays: casts them, and inputs and outputs, around the call.

    A module that holds others passes its inputs on: a mask or a table among them may be meant to be fp32.
    """

    halfstep: Setting
    halfstep_role = ""  # of an island

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        setting, role = self.halfstep, self.halfstep_role
        fmt, precision = self._format_inside(), setting.casts.precision
        inside = casts_of(replace(precision, compute=fmt, grad=fmt)) if role else setting.casts
        leaf = not tree_flatten(self.children(), is_leaf=Module.is_module)
        if leaf:
            if role != "rope" and args and isinstance(args[0], mx.array):
                check_stream_dtype(args[0], setting.casts, setting.name, setting.streams)
            args, kwargs = map_floats(lambda x: cast_input(x, inside), (args, kwargs))
        held = [(container, key, container[key]) for container, key in own_parameters(self)]
        cast = [to_compute(with_weight_grad_format(array, setting.casts), inside) for _, _, array in held]
        for (container, key, _), array in zip(held, cast, strict=True):
            container[key] = array
        try:
            with scope(None if role else setting.casts, setting.name):
                out = super().__call__(*args, **kwargs)
        finally:
            for (container, key, array), given in zip(held, cast, strict=True):
                # What the call replaced, such as running statistics, stays replaced.
                container[key] = array if container[key] is given else container[key].astype(array.dtype)
        return map_floats(lambda x: to_compute(x, setting.casts), out) if leaf else out

    def _extra_repr(self) -> str:
        return ", ".join(filter(None, [super()._extra_repr(), f"{self._format_inside()} inside"]))

    def _format_inside(self) -> Format:
        fmt: Format = getattr(self.halfstep.casts.precision, self.halfstep_role or "compute")
        return fmt


class Code(Held):
    """Mixed into the class of a module that holds no arrays: third-party code, or a container of other modules."""

    halfstep: Setting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with scope(self.halfstep.casts, self.halfstep.name):
            return super().__call__(*args, **kwargs)


class Borders(NamedTuple):
    """How a model's inputs and outputs are cast."""

    inputs: Casts
    outputs: Casts
    cast_inputs: bool


class Whole(Held):
    """Mixed into the class of the model itself: floating inputs in compute, outputs in the loss format."""

    halfstep_model: Borders

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        borders = self.halfstep_model
        if borders.cast_inputs:
            args, kwargs = map_floats(lambda x: cast_input(x, borders.inputs), (args, kwargs))
        masters = self.halfstep_masters
        whole = masters.swap_in() if masters is not None and masters.remainders else nullcontext()
        with scope(borders.inputs, "the model"), whole:
            y = super().__call__(*args, **kwargs)
        return map_floats(lambda x: to_compute(x, borders.outputs), y)
