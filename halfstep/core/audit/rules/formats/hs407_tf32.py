"""HS407: fp32 matmuls that are TF32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, first_names
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS407",
    name="fp32 that is TF32",
    severity="warning",
    shows="The matmuls of fp32 tensors.",
    what="Matmuls of fp32 tensors run while the process lets the device round their operands to TF32 or bf16.",
    why="TF32 has 11 bits, as fp16 has: a layer or a router that was kept in fp32 on purpose is not.",
    fix='`torch.set_float32_matmul_precision("highest")`; if TF32 is what you want, accept the finding in '
    "`halfstep-audit.toml`.",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding for all such matmuls."""
    rounds_to = record.switches.get("fp32_matmul")
    if rounds_to not in ("tf32", "bf16"):
        return
    wide = [op for op in record.operations if op.kind in ("matmul", "router") and op.inside == "fp32"]
    wide = [op for op in wide if not op.backward]
    if wide:
        names = list(dict.fromkeys(op.module for op in wide if op.module))
        yield RULE.finding(
            f"fp32 matmuls are {str(rounds_to).upper()}: {first_names(names)}",
            *names,
            place=wide[0].place,
            evidence={"calls": sum(op.count for op in wide)},
        )
