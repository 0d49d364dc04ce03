"""What each layer could run in: of the formats that a sample tried, the narrowest that loses little.

A format loses little if nothing overflows, at most UNDERFLOW of the numbers become zero, and its noise is at most
twice (ALLOWED dB) that of its own rounding on normally distributed numbers, 6.02 per mantissa bit + 13.5 dB
(core/stats/what_if.py): then its range costs less than its precision does anyway. How much noise training
tolerates is another question, which only a run in that format answers.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.report.history import nested
from halfstep.report.layer_history import ROLES, Event, LayerHistory
from halfstep.report.layers import own_format
from halfstep.report.number_format import number, percent, plain

UNDERFLOW, ALLOWED = 0.01, 3.0
SCALES = ("", "row", "block")  # the simpler first
NONE = "fp32"


@dataclass(frozen=True)
class Choice:
    """The narrowest format that loses little for the numbers of one role in a layer."""

    spec: str
    sqnr: str = ""
    overflow: float = 0.0
    underflow: float = 0.0

    @property
    def details(self) -> str:
        """What the format loses."""
        parts = [self.sqnr, f"{percent(self.underflow)} to zero" if self.underflow > 0 else ""]
        return ", ".join(part for part in parts if part)

    @property
    def bits(self) -> int:
        """The bits of its format."""
        known = own_format(self.spec)
        return known.bits if known else 32


@dataclass(frozen=True)
class LayerChoices:
    """A row of the table: a layer, what it runs in, and what it could."""

    name: str
    kind: str
    now: dict[str, str]  # by role
    choices: dict[str, Choice | None]


@dataclass(frozen=True)
class WhatIf:
    """The table, from the newest sample."""

    step: int
    rows: list[LayerChoices]

    @property
    def roles(self) -> list[str]:
        """The roles that were sampled."""
        return [role for role in ROLES if any(row.choices[role] for row in self.rows)]

    @property
    def summary(self) -> str:
        """How many layers could take which format, by role."""
        sentences = []
        for role in self.roles:
            found = Counter(choice.spec for row in self.rows if (choice := row.choices[role]))
            counted = ", ".join(f"{spec} in {amount}" for spec, amount in found.most_common())
            sentences.append(f"{role.capitalize()}s: {counted}.")
        return " ".join(sentences)


def what_if(history: LayerHistory) -> WhatIf | None:
    """Returns what the layers could run in; None if no sample tried formats."""
    if history.newest is None:
        return None
    rows = []
    for layer in history.layers:
        choices = {role: _narrowest(_tried_formats(history.newest, layer.name, role)) for role in ROLES}
        if any(choices.values()):
            rows.append(LayerChoices(layer.name, layer.kind, layer.formats, choices))
    return WhatIf(int(history.newest["step"]), rows) if rows else None


def as_data(found: WhatIf, newest: Event) -> list[list[Any]]:
    """Returns every number of the table, and of the formats that lost: layer, role, format, dB, shares."""
    lines = []
    for row in found.rows:
        for role in ROLES:
            for spec, lost in _tried_formats(newest, row.name, role).items():
                shares = [number(lost.get(name)) for name in ("sqnr", "overflow", "underflow")]
                known = [share if math.isfinite(share) else None for share in shares]
                lines.append([row.name, role, str(spec), *known])
    return lines


def _tried_formats(sample: Event, layer: str, role: str) -> dict[str, Mapping[str, Any]]:
    """Returns what each format that was tried would have lost."""
    tried = nested(sample, "layers", layer, role, "what_if")
    tables = tried.items() if isinstance(tried, Mapping) else ()
    return {spec: lost for spec, lost in tables if isinstance(lost, Mapping)}


def _narrowest(tables: Mapping[str, Mapping[str, Any]]) -> Choice | None:
    if not tables:
        return None
    for spec in sorted(tables, key=_narrowness):
        lost = tables[spec]
        overflow, underflow = number(lost.get("overflow")), number(lost.get("underflow"))
        sqnr = number(lost.get("sqnr"))
        known = own_format(spec)
        if known is None or overflow > 0 or underflow > UNDERFLOW:
            continue
        exact = bool(lost.get("exact"))
        if exact or sqnr >= 6.02 * known.mantissa_bits + 13.5 - ALLOWED:
            return Choice(spec, "exact" if exact else f"{plain(round(sqnr, 1))} dB", overflow, underflow)
    return Choice(NONE)


def _narrowness(spec: str) -> tuple[int, int, int]:
    """Orders formats: fewer bits, then more precision, then the simpler scale."""
    known, scale = own_format(spec), spec.partition(":")[2]
    if known is None:
        return 99, 0, 0
    return known.bits, -known.mantissa_bits, SCALES.index(scale) if scale in SCALES else len(SCALES)
