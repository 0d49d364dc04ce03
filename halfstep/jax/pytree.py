"""A pytree by the names of its leaves.

A leaf's name is its path, parts joined by dots: dictionary keys, attribute names and indices alike, so a nested
dictionary, a flat one keyed `blocks.0.attn.q.weight`, a Flax state and an Equinox module read the same.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path

from halfstep.core.errors import UnsupportedModelError, UnsupportedOptimizerError, type_name

# Holds a single array and is not a module: the leaf of a Flax nnx variable.
_BOX = jax.tree_util.GetAttrKey("value")


class NamedTree:
    """A pytree by the names of its leaves: which are trained, and how to replace them."""

    def __init__(self, tree: Any):
        flat, self.treedef = tree_flatten_with_path(tree)
        self.paths = [path for path, _ in flat]
        self.names = names_of(self.paths)
        self.values = dict(zip(self.names, (leaf for _, leaf in flat), strict=True))
        self.trained: dict[str, Any] = {}

    def rebuild(self, trained: Mapping[str, Any]) -> Any:
        """Returns the pytree with other trained leaves."""
        return jax.tree.unflatten(self.treedef, [trained.get(name, leaf) for name, leaf in self.values.items()])

    def bare(self, trained: Mapping[str, Any]) -> Any:
        """Returns the pytree of trained leaves alone, as an optimizer sees it, with None for all others."""
        return jax.tree.unflatten(self.treedef, [trained.get(name) for name in self.names])

    def read(self, bare: Any) -> dict[str, Any]:
        """Returns the trained leaves of a pytree of the structure of `bare`, by name."""
        return dict(zip(self.trained, jax.tree.leaves(bare), strict=True))

    def moments_of(self, opt_state: Any) -> list[str | None]:
        """Returns the parameter that each leaf of an optimizer's state is a moment of, by its path and shape."""
        return [name for _, name, _ in self._mirrors(opt_state)]

    def map_moments(self, convert: Callable[[str, Any], Any], opt_state: Any) -> Any:
        """Returns an optimizer's state with `convert(parameter, moment)` for each moment."""
        flat, treedef = jax.tree.flatten(opt_state)
        pairs = zip(self.moments_of(opt_state), flat, strict=True)
        return jax.tree.unflatten(treedef, [x if name is None else convert(name, x) for name, x in pairs])

    def groups_of(self, opt_state: Any) -> dict[str, dict[str, Any]]:
        """Returns the parts of an optimizer's state that mirror parameters: {part: {parameter: array}}."""
        groups: dict[str, dict[str, Any]] = {}
        for part, name, leaf in self._mirrors(opt_state):
            if name is not None:
                groups.setdefault(keystr(part, simple=True, separator="."), {})[name] = leaf
        return groups

    def _mirrors(self, opt_state: Any) -> Iterator[tuple[tuple[Any, ...], str | None, Any]]:
        """Yields (the path in front, the parameter whose path follows it, the leaf) for each leaf of a state."""
        names = dict(zip(self.paths, self.names, strict=True))
        for path, leaf in tree_leaves_with_path(opt_state):
            floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            for start in range(len(path) + 1):
                name = names.get(path[start:], "")
                if floating and name in self.trained and jnp.shape(leaf) == jnp.shape(self.trained[name]):
                    yield path[:start], name, leaf
                    break
            else:
                yield path, None, leaf


def check_transform(optimizer: Any) -> None:
    """Refuses what is not an optax transform of pytrees."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UnsupportedOptimizerError(
            f"the optimizer is {type_name(optimizer)}, not an optax transform",
            hint="for example optax.adamw(1e-3)",
        )


def names_of(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Returns the name of each leaf; two leaves with one name are an error."""
    siblings = Counter(path[:-1] for path in paths)
    names = []
    for path in paths:
        boxed = len(path) > 1 and path[-1] == _BOX and siblings[path[:-1]] == 1
        names.append(keystr(path[:-1] if boxed else path, simple=True, separator=".") or "params")
    [(name, count)] = Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise UnsupportedModelError(
            f"{count} leaves of the parameters are named `{name}`: a key with a dot reads like a nested one",
            hint="rename one of them",
        )
    return names
