"""HS408: fp8 that was asked for and did not run."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS408",
    name="fp8 that did not run",
    severity="error",
    shows="The layers that multiplied fp8 numbers: none.",
    what="The script asked for fp8, and no layer multiplied fp8 numbers.",
    why="Training systems continue in bf16 after a line in a log if a library, a device or a shape does not fit.",
    fix="Read why the layers were not converted (sizes must be multiples of 16, the GPU needs fp8); "
    "`halfstep train --policy fp8-mixed` refuses instead.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding, with who asked."""
    asked, layers = record.switches.get("fp8_asked"), record.switches.get("fp8_layers")
    if asked and layers == 0:
        yield RULE.finding(f"{asked} asked for fp8, and no layer runs in it", evidence={"layers": 0})
