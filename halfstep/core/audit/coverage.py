"""How each function in a model's own code runs: what `run.coverage`, and on JAX `step.coverage`, return."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfstep.core.errors import warn_renamed

IN_COMPUTE = "it is in compute already"


class Row(NamedTuple):
    """A function that one module called; on JAX, where no parameter names a module, one line of the code."""

    function: str
    module: str
    how: Literal["covered", "unchanged"]
    why: str
    calls: int = 1


@dataclass(frozen=True)
class Coverage:
    """The functions that one pass called."""

    rows: tuple[Row, ...]

    @property
    def uncovered(self) -> tuple[Row, ...]:
        """The functions that no role of the policy covers and that are not in compute anyway."""
        return tuple(row for row in self.rows if row.how == "unchanged" and not row.why.startswith(IN_COMPUTE))

    @property
    def missed(self) -> tuple[Row, ...]:
        """The older name of `uncovered`."""
        warn_renamed("missed", "uncovered")
        return self.uncovered

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.how, row.function, row.why), []).append(row)
        return "\n".join(
            f"  {sum(row.calls for row in rows)} {function} ({some([row.module for row in rows])}): {how}, {why}"
            for (how, function, why), rows in sorted(groups.items(), reverse=True)
        )


def some(names: Sequence[str], shown: int = 3) -> str:
    """Returns the first of some names, and the number of the others."""
    return ", ".join(names[:shown]) + (f", and {len(names) - shown} more" if len(names) > shown else "")
