"""The numbers of watched layers (core.observed), by name: what a monitor prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.core.observed import COLUMNS, ROLES, WEIGHT_COLUMNS, LayerInfo
from halfstep.core.stats.tensors import headroom_bits


@dataclass(frozen=True)
class LayerNumbers:
    """The numbers of one layer, of the steps since the copy before."""

    layer: LayerInfo
    activation: dict[str, float]  # by core.observed.COLUMNS
    gradient: dict[str, float]  # the same, times the loss scale, as the backward pass has it
    weight: dict[str, float]  # by WEIGHT_COLUMNS, of the last update; NaN where there is nothing to say

    def headroom(self, role: str) -> float:
        """Returns the bits between the largest magnitude and the format's; NaN if nothing was seen."""
        return headroom_bits(getattr(self, role)["amax"], self.layer.format(role))

    def share(self, role: str, column: str) -> float:
        """Returns a count as a share of the elements that were looked at; NaN if none was."""
        numbers = getattr(self, role)
        return numbers[column] / numbers["count"] if numbers["count"] else float("nan")


def name_numbers(layers: Sequence[LayerInfo], numbers: NDArray[Any], weights: NDArray[Any]) -> list[LayerNumbers]:
    """Returns the numbers (layers, ROLES, COLUMNS) and (layers, WEIGHT_COLUMNS) by layer and name."""
    rows = []
    for info, row, weight in zip(layers, numbers, weights, strict=True):
        roles = {role: dict(zip(COLUMNS, map(float, row[i]), strict=True)) for i, role in enumerate(ROLES)}
        of_weight = dict(zip(WEIGHT_COLUMNS, map(float, weight), strict=True))
        rows.append(LayerNumbers(info, **roles, weight=of_weight))
    return rows


def table(numbers: list[LayerNumbers]) -> list[str]:
    """Returns the layers as lines of text: lost updates first, then the least headroom."""
    if not numbers:
        return []

    def order(row: LayerNumbers) -> tuple[float, float]:
        lost = np.nan_to_num(row.weight["lost"], nan=0.0)
        return -round(float(lost), 3), float(np.nan_to_num(row.headroom("activation"), nan=np.inf))

    width = max(len(row.layer.name) for row in numbers)
    lines = [f"{'layer':<{width}}  format  headroom  overflow  underflow  gradient  underflow  updates lost"]
    for row in sorted(numbers, key=order):
        shares = [row.share("activation", c) for c in ("overflow", "underflow")]
        lines.append(
            f"{row.layer.name:<{width}}  {row.layer.format('activation')!s:<6}  "
            f"{_bits(row.headroom('activation'))}  "
            f"{_percent(shares[0], 8)}  {_percent(shares[1], 9)}  {_bits(row.headroom('gradient'))}  "
            f"{_percent(row.share('gradient', 'underflow'), 9)}  {_percent(row.weight['lost'], 12)}"
        )
    return lines


def _bits(number: float) -> str:
    return f"{'-':>8}" if np.isnan(number) else f"{number:>5.1f} b".rjust(8)


def _percent(number: float, width: int) -> str:
    return "-".rjust(width) if np.isnan(number) else f"{number:.2%}".rjust(width)
