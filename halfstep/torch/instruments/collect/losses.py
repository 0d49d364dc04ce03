"""What a script does to its loss before the backward pass: a factor, and NaN that is replaced.

Both are in the last nodes of the autograd graph, whatever the script calls them: `loss * 1024` is a node
`MulBackward0` that keeps 1024, `torch.nan_to_num(loss)` one that keeps the loss as it was.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST = 1024.0  # a factor of less may be the size of a batch, or the weight of a loss
DEPTH = 6  # nodes from the end
_PASSED = ("ToCopy", "Alias", "View", "Squeeze", "Unsqueeze", "Reshape")


class Root(NamedTuple):
    """The end of a loss."""

    factor: float = 1.0
    replaced: Tensor | None = None  # the loss before its NaN and infinities were replaced


def root_of(loss: Any, gradient: Any = None) -> Root:
    """Returns what was done last to a loss. `gradient` is what the backward pass begins with, by default 1."""
    factor, replaced = _number(gradient) or 1.0, None
    node: Any = loss.grad_fn if isinstance(loss, Tensor) else None
    for _ in range(DEPTH):
        name = "" if node is None else node.name()
        if name in ("MulBackward0", "DivBackward0"):
            kept = [_number(getattr(node, f"_saved_{each}", None)) for each in ("other", "self")]
            number = next((each for each in kept if each), None)
            if number is None:
                break
            factor = factor * number if name.startswith("Mul") else factor / number
        elif name == "NanToNumBackward0":
            replaced = node._saved_self
        elif not name.startswith(_PASSED):
            break
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return Root(factor, replaced)


def is_scale(factor: float) -> bool:
    """Whether a factor is a loss scale: a large power of two."""
    return factor >= LEAST and float(factor).hex().startswith("0x1.0000000000000p")


def _number(value: Any) -> float | None:
    """Returns a number on the host; reading one from a device would wait for it."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad:
        with torch.no_grad():
            return float(value.detach())
    return None
