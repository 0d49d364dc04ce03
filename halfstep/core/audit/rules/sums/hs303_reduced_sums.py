"""HS303: matmuls may sum in less than fp32."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS303",
    name="reduced-precision sums allowed",
    severity="note",
    shows="The switch, in the message.",
    what="Matmuls of bf16 or fp16 tensors may sum parts of their products in that format.",
    why="cuBLAS may split a long sum and add the parts in bf16 or fp16. Torch allows it unless forbidden; in fp16 "
    "the parts can overflow. `allow_fp16_accumulation` sums everything in fp16.",
    fix="`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False`, and the same for fp16.",
    needs="a live run on a GPU",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per format that is used and may be summed so. Only NVIDIA's and AMD's kernels do it."""
    if record.switches.get("device") != "cuda":
        return
    used = {call.format for call in record.calls_of("autocast")} | {w.format for w in record.weights}
    used |= {op.inside for op in record.operations if op.kind in ("matmul", "attention")}
    if record.switches.get("fp16_sums") and "fp16" in used:
        yield RULE.finding(
            "fp16 matmuls sum in fp16: `allow_fp16_accumulation` is on",
            severity="warning",
            fix="`torch.backends.cuda.matmul.allow_fp16_accumulation = False`",
        )
    for name in ("bf16", "fp16"):
        if record.switches.get(f"{name}_reduced_sums") and name in used:
            yield RULE.finding(f"{name} matmuls may add parts of a sum in {name}")
