"""HS405: running statistics and tables of rotary positions that were cast."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.narrow import is_narrow
from halfstep.core.audit.record import Buffer, Record

RULE = Rule(
    id="HS405",
    name="buffers below fp32",
    severity="error",
    shows="The format, and what it was before, in the message.",
    what="Running statistics, or the frequencies of rotary positions, are stored in bf16 or fp16; "
    "`model.to(torch.bfloat16)` casts them with the weights.",
    why="A frequency with 8 bits is off by up to 0.4 %, so at position 4096 its angle is off by up to 16 radians; "
    "and a running mean in bf16 stops moving once its updates are below 1/512 of it.",
    fix="Cast parameters alone, or restore these buffers after the cast: `module.inv_freq = inv_freq_fp32`.",
    needs="a model",
)
# Of a table of sines and cosines only the values are rounded, the angles are not.
_TABLES = ("cos", "sin", "cis")


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per buffer."""
    for buffer in record.buffers:
        if buffer.kind != "other" and is_narrow(buffer.format):
            yield _finding(buffer)


def _finding(buffer: Buffer) -> Finding:
    table = buffer.kind == "rope" and any(part in buffer.name.rpartition(".")[2].lower() for part in _TABLES)
    content = "a table of rotary positions" if table else "running statistics"
    if buffer.kind == "rope" and not table:
        content = "the frequencies of rotary positions"
    was = f"; it was {buffer.was}" if buffer.was else ""
    return RULE.finding(
        f"`{buffer.name}`, {content}, is in {buffer.format}{was}",
        buffer.name,
        place=buffer.place,
        severity="warning" if table else None,
        confidence="likely" if table else "certain",
    )
