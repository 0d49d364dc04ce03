"""Which layer an operation belongs to. A jaxpr has no modules, so the names come from what there is:

a parameter among its inputs      the module that owns it
name scopes, as Flax opens them   the module whose path they end with
neither                           the nearest layer: for a norm the one after it, for others the one before
"""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from halfstep.config.model import owner
from halfstep.jax.collect.graph import Node, Value, search_ahead, search_back
from halfstep.jax.functions.primitives import PRODUCT

_TRANSFORMS = re.compile(r"\w+\(|\)")


class Names:
    """Names the layer of any node, given the names of all parameters."""

    def __init__(self, parameters: Iterable[str]):
        self.modules = {owner(name) for name in parameters}
        parents = {module.rpartition(".")[0] for module in self.modules}
        self.known = self.modules | parents - {""}

    def of(self, node: Node, *, ahead: bool = False) -> str:
        """Returns the name of the layer, or an empty one."""
        if node.weights:
            return owner(node.weights[0])
        return self._by_scope(node.scope) or (self._ahead(node) if ahead else "") or self._back(node)

    def _by_scope(self, scope: str) -> str:
        path = [part for part in re.split(r"[/.]", _TRANSFORMS.sub("", scope)) if part]
        for start in range(len(path)):
            end = ".".join(path[start:])
            alike = [name for name in self.known if name == end or name.endswith(f".{end}")]
            if len(alike) == 1:
                return alike[0]
        return ""

    def _ahead(self, node: Node) -> str:
        """Returns the layer that takes the result: of a norm its own gain, or else the matmul after it."""
        for value in node.outputs:
            for found in search_ahead(value, lambda node: bool(node.weights), past=_is_small):
                if not found.is_backward:
                    name = owner(found.weights[0])
                    return name if found.name not in PRODUCT else f"norm before {name}"
        return ""

    def _back(self, node: Node) -> str:
        """Returns the layer that the inputs come from; of several, what they share."""
        owners: list[str] = []
        values: Sequence[Value] = node.inputs
        for value in values:
            found = search_back(value, lambda node: bool(node.weights), past=lambda node: True)
            nearest = [owner(each.weights[0]) for each in found[:4]]
            owners += [name for name in nearest if name not in owners]
        return shared(owners)


def shared(names: Sequence[str]) -> str:
    """Returns the innermost module that holds all of these; the first of them, if there is none."""
    if len(names) < 2:
        return names[0] if names else ""
    columns = zip(*(name.split(".") for name in names), strict=False)
    parts = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    return ".".join(parts) or names[0]


def _is_small(node: Node) -> bool:
    return node.name not in PRODUCT
