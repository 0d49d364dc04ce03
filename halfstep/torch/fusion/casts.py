"""Casts of a 16-bit number to fp32 and back, with nothing but views in between, which change nothing.

They come from code whose results are in fp32, as those of `addmm` in a model of fp32 are. Beside other elementwise
operations they cost nothing; between two matmuls each is a pass over memory, and the gradient makes the same trip.
"""

from torch import Tensor, fx

from halfstep.torch.fusion.graph import (
    CASTS,
    VIEWS,
    called,
    first_of,
    may_share,
    remove,
    used_elsewhere,
    value_of,
    why_not_moved,
    written_by,
)


def drop_round_trips(graph: fx.Graph) -> None:
    """Replaces each by its views."""
    seen = [tensor for node in graph.nodes for tensor in written_by(node)]  # where shared memory would be noticed
    seen += [tensor for node in graph.output_node().all_input_nodes if (tensor := value_of(node)) is not None]
    for node in [n for n in graph.nodes if called(n) in CASTS]:
        steps, source = [node], first_of(node)
        while source is not None and called(source) in VIEWS | CASTS and _is_wide(source):
            steps.append(source)
            source = first_of(source)
        if source is None or not _changes_nothing(steps, source, seen):
            continue
        made = source
        with graph.inserting_before(node):
            for step in steps[:0:-1]:
                if called(step) in VIEWS:
                    moved = {first_of(step): made}
                    made = graph.node_copy(step, lambda n, moved=moved: moved.get(n, n))  # type: ignore[misc]
        node.replace_all_uses_with(made)
        remove(steps)


def _is_wide(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.is_floating_point() and value.dtype.itemsize > 2


def _changes_nothing(steps: list[fx.Node], source: fx.Node, seen: list[Tensor]) -> bool:
    """Whether numbers stay what they were, nothing uses them on the way, and gradients meet in the same places."""
    narrow, result = value_of(source), value_of(steps[0])
    if narrow is None or result is None or narrow.dtype is not result.dtype or narrow.dtype.itemsize != 2:
        return False
    if set(source.users) != {steps[-1]} or used_elsewhere(steps[1:], steps[0]) is not None:
        return False
    shared = any(may_share(tensor, other) for tensor in seen for other in (narrow, result))
    return not shared and not why_not_moved(source, steps[0], [source])
