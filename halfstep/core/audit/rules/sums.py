"""HS3xx: sums over micro-batches, ranks and products."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, define_rule
from halfstep.core.audit.record import Record, group_calls, is_narrow


@define_rule(
    "HS301",
    "accumulation below fp32",
    "warning",
    shows="The backward passes that were summed, and the tensors.",
    what="Gradients of several backward passes are summed in bf16 or fp16.",
    why="Each sum is rounded: in bf16 the relative error is 0.4 % over 8 micro-batches and 2.3 % over 512, where "
    "an fp32 sum has 0.1 %. Dividing the sum does not restore what it lost.",
    fix="Keep trainable weights in fp32 (their gradients are then fp32), or let "
    "`prepare(model, optimizer, 'bf16-mixed')` accumulate in fp32.",
    fix_jax="Sum in fp32: give the loop the fp32 parameter, and cast it inside its body.",
)
def check_accumulation(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per optimizer, and one per loop inside a graph that sums."""
    for op in record.operations:
        if op.kind == "accumulation" and is_narrow(op.inside):
            of = f" of `{op.module}`" if op.module else ""
            message = f"a loop sums gradients{of} in {op.inside}, over {op.count} turns"
            if op.function:
                message = f"{op.function} sums gradients in {op.inside}"
            yield rule.finding_on_operation(op, message, evidence={"passes": op.count})
    passes = [call for call in record.calls_of("backward") if call.numbers.get("micro", 1) > 1]
    for its in group_calls(passes, "target").values():
        narrow = [call for call in its if is_narrow(call.format)]
        if narrow:
            most, tensors = (max(call.numbers.get(key, 0.0) for call in narrow) for key in ("micro", "narrow"))
            yield rule.finding(
                f"gradients of {most:.0f} backward passes are summed in {narrow[0].format}, for {tensors:.0f} "
                "tensors",
                place=narrow[0].place,
                evidence={"passes": most, "tensors": tensors},
            )


@define_rule(
    "HS302",
    "reduction below fp32",
    "warning",
    shows="The calls, or the ranks.",
    what="Gradients are summed over ranks in bf16 or fp16.",
    why="Every addition on the way rounds to 8 or 11 bits, and the more ranks there are, the more is lost; fp16 "
    "overflows as well.",
    fix="Reduce in fp32: `MixedPrecisionPolicy(reduce_dtype=torch.float32)` for FSDP, no compressing "
    "communication hook, and fp32 weights under DDP, which sums in the format of the weights.",
    needs="a live run on several ranks",
    fix_jax="Widen before the sum: `lax.psum(x.astype(jnp.float32), axis)`.",
)
def check_reduction(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per way of reducing, and one per sum inside a graph."""
    for op in record.operations:
        if op.kind == "reduction" and is_narrow(op.inside):
            yield rule.finding_on_operation(op, f"`{op.function}` sums {op.inside} over devices")
    for call in record.calls_of("reduce"):
        if is_narrow(call.format):
            yield rule.finding(
                f"{call.target} sums gradients in {call.format} over {call.numbers.get('ranks', 0):.0f} ranks",
                place=call.place,
                evidence={"ranks": call.numbers.get("ranks", 0)},
            )


@define_rule(
    "HS303",
    "reduced-precision sums allowed",
    "note",
    shows="The switch, in the message.",
    what="Matmuls of bf16 or fp16 tensors may sum parts of their products in that format.",
    why="cuBLAS may split a long sum and add the parts in bf16 or fp16. Torch allows it unless forbidden; in fp16 "
    "the parts can overflow. `allow_fp16_accumulation` sums everything in fp16.",
    fix="`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False`, and the same for fp16.",
    needs="a live run on a GPU",
)
def check_reduced_sums(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per format that is used and may be summed so. Only NVIDIA's and AMD's kernels do it."""
    if record.switches.get("device") != "cuda":
        return
    used = {call.format for call in record.calls_of("autocast")} | {w.format for w in record.weights}
    used |= {op.inside for op in record.operations if op.kind in ("matmul", "attention")}
    if record.switches.get("fp16_sums") and "fp16" in used:
        yield rule.finding(
            "fp16 matmuls sum in fp16: `allow_fp16_accumulation` is on",
            severity="warning",
            fix="`torch.backends.cuda.matmul.allow_fp16_accumulation = False`",
        )
    for name in ("bf16", "fp16"):
        if record.switches.get(f"{name}_reduced_sums") and name in used:
            yield rule.finding(f"{name} matmuls may add parts of a sum in {name}")
