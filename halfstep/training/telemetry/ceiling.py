"""The ceiling of a run: the most FLOPs per second that the device does in the policy's `compute` format.

Matmuls are timed (`halfstep.tools.probe`), and the fastest repeat counts: a data sheet's number holds at clocks
that the device does not keep. If only matmuls were affordable that are mostly their launch, the ceiling is
unknown. fp8 operands, which rules give to some matmuls, do not move it: so an fp8 run compares with a bf16 run,
and may exceed it. A resumed run uses the recorded value, unless device or format is another.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import Format
from halfstep.core.policy import Policy

_START = b'{"event": "start"'  # how the line of a start begins (events.py)


@dataclass(frozen=True)
class Ceiling:
    """FLOPs per second, and what was measured; or None, and why nothing was."""

    flops: float | None
    basis: str

    def record(self) -> dict[str, Any]:
        """Returns it as the `start` event holds it."""
        return {"flops": self.flops, "told": self.basis}

    def __str__(self) -> str:
        return f"unknown: {self.basis}" if self.flops is None else in_flops(self.flops)


UNMEASURED = Ceiling(None, "this device was not measured; `halfstep train` measures it")


def recorded(events: Path, device: str, fmt: Format) -> Ceiling | None:
    """Returns the ceiling that an earlier session of the run measured in a format on a device of that name."""
    from halfstep.training.telemetry.events import newest_first  # loads numpy

    if not events.exists():  # a death before the first event, or a copy of the checkpoints alone
        return None
    for start in newest_first(events, _START):
        flops = (start.get("ceiling") or {}).get("flops")
        if isinstance(flops, float) and flops > 0 and start.get("device", {}).get("name") == device:
            with suppress(HalfstepError):  # a policy of another version
                if Policy.parse(str(start.get("policy"))).compute.format == fmt:
                    return Ceiling(flops, str(start["ceiling"].get("told")))
    return None


def in_flops(number: float) -> str:
    """Returns FLOPs per second in the unit that suits them: `745 TFLOP/s`."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if number >= size:
            return f"{number / size:.3g} {letter}FLOP/s"
    return f"{number / 1e6:.3g} MFLOP/s"
