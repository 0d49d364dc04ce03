"""Where a model keeps its modules and arrays: by name, and with a way to replace each."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from halfstep.core.errors import UnsupportedModelError
from halfstep.mlx.numerics.dtypes import is_floating


class Place(NamedTuple):
    """Where a model keeps an array: `container[key]`, in a module that rules know by `owner`."""

    container: Any
    key: Any
    owner: str
    module: Any

    @property
    def array(self) -> mx.array:
        """The current array."""
        return self.container[self.key]  # type: ignore[no-any-return]

    def put(self, array: mx.array) -> None:
        """Replaces the array."""
        self.container[self.key] = array


def walk(model: Module) -> Iterator[tuple[str, Module]]:
    """Yields every module with its dotted name, in the order of the model; one held twice has its first name."""
    seen: set[int] = set()

    def visit(name: str, value: Any) -> Iterator[tuple[str, Module]]:
        if isinstance(value, Module):
            if id(value) in seen:
                return
            seen.add(id(value))
            yield name, value
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in items:
            yield from visit(f"{name}.{key}" if name else str(key), child)

    yield from visit("", model)


def own_arrays(held: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted name, container, key) of every array that a module, or a dict or list, holds itself."""
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        path = f"{name}.{key}" if name else str(key)
        if isinstance(value, mx.array):
            yield path, held, key
        elif isinstance(value, dict | list) and not isinstance(value, Module):
            yield from own_arrays(value, path)


def arrays(model: dict[str, Any]) -> dict[str, Place]:
    """Returns the place of every array of a model, or of an optimizer's state, by its dotted name."""
    modules = walk(model) if isinstance(model, Module) else [("", None)]
    return {
        path: Place(container, key, name or path, module)
        for name, module in modules
        for path, container, key in own_arrays(model if module is None else module, name)
    }


def trainable(model: Module) -> dict[str, Place]:
    """Returns the places of the parameters to train: floating, and not frozen."""
    flat: dict[str, mx.array] = dict(tree_flatten(model.filter_and_map(Module.trainable_parameter_filter)))
    places = {name: place for name, place in arrays(model).items() if name in flat}
    for name, place in places.items():
        if place.array.dtype in (mx.float64, mx.complex64):
            raise UnsupportedModelError(
                f"`{name}` is {str(place.array.dtype).rpartition('.')[2]}, which no policy has a format for",
                hint="convert it to float32, or freeze it: model.freeze(keys=[...])",
            )
    places = {name: place for name, place in places.items() if is_floating(place.array)}
    if not places:
        raise UnsupportedModelError(
            "the model has no parameters to train", hint="model.unfreeze() makes them trainable"
        )
    return places


def public(name: str) -> bool:
    """Returns whether an array counts as a parameter, by MLX's convention: others begin with an underscore."""
    return not any(segment.startswith("_") for segment in name.split("."))
