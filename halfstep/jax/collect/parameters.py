"""The parameters that someone passes to an audit: any pytree, also with functions and numbers in it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from halfstep.core.errors import HalfstepError
from halfstep.jax.apply import names_of


class Parameters:
    """A pytree by the names of its floating arrays; everything else in it stays as it is."""

    def __init__(self, tree: Any):
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.paths = [path for path, _ in flat]
        self.names = names_of(self.paths)
        self.leaves = [leaf for _, leaf in flat]
        named = zip(self.names, self.leaves, strict=True)
        self.trained: dict[str, Array] = {n: jnp.asarray(leaf) for n, leaf in named if _is_float_array(leaf)}
        if not self.trained:
            raise HalfstepError(
                f"there is nothing to audit: none of the {len(flat)} leaves of the parameters is a floating array",
                hint="pass the parameters of the model, as the loss function takes them",
            )

    def rebuilt(self, trained: Mapping[str, Any]) -> Any:
        """Returns the pytree with other floating arrays."""
        pairs = zip(self.names, self.leaves, strict=True)
        return jax.tree.unflatten(self.treedef, [trained.get(name, leaf) for name, leaf in pairs])

    def bare(self, trained: Mapping[str, Any]) -> Any:
        """Returns the pytree as an optimizer sees it: floating arrays, and None for the rest."""
        return jax.tree.unflatten(self.treedef, [trained.get(name) for name in self.names])

    def read(self, bare: Any) -> dict[str, Any]:
        """Returns the floating arrays of a pytree like `bare`, by name."""
        return dict(zip(self.trained, jax.tree.leaves(bare), strict=True))

    def groups_of(self, state: Any) -> dict[str, dict[str, Array]]:
        """Returns the parts of an optimizer's state that mirror parameters: {part: {parameter: array}}."""
        named = dict(zip(self.paths, self.names, strict=True))
        groups: dict[str, dict[str, Array]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            for start in range(len(path)):
                name = named.get(path[start:], "")
                leads = name in self.trained and jnp.shape(leaf) == self.trained[name].shape
                if leads and _is_float_array(leaf):
                    label = jax.tree_util.keystr(path[:start], simple=True, separator=".")
                    groups.setdefault(label, {})[name] = leaf
                    break
        return groups


def _is_float_array(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and hasattr(leaf, "shape") and jnp.issubdtype(dtype, jnp.floating)
