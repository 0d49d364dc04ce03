"""HS4xx: the formats that operations and buffers have."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, define_rule, first_names
from halfstep.core.audit.record import Operation, OperationKind, Record, is_narrow


@define_rule(
    "HS401",
    "norm below fp32",
    "error",
    what="A norm takes its mean or its square root in bf16 or fp16, or it alone has gains in that format.",
    why="Eight bits of a mean square are off by up to 0.4 %, in every layer and in the same direction for a whole "
    "row. The norms of torch itself sum in fp32 whatever they are given; hand-written ones do what they say.",
    fix="Widen the input first and narrow the result: `norm(x.float()).to(x.dtype)`, with gains in fp32; or use "
    "`torch.nn.RMSNorm`.",
    fix_jax="Widen first and narrow the result: `norm(x.astype(jnp.float32)).astype(x.dtype)`; Flax's norms "
    "do so unless `force_float32_reductions=False`.",
)
def check_norms(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per norm."""
    norms = _forward(record, "norm")
    narrow_gains = {op.module for op in norms if len(op.inputs) > 1 and all(map(is_narrow, op.inputs))}
    # A model that is bf16 throughout is what HS101 is about; one norm that differs from the rest is an accident.
    accident = 0 < len(narrow_gains) < len({op.module for op in norms}) / 2
    named: set[str] = set()  # one finding is enough for the parts of a norm
    for op in _narrow(record, "norm"):
        if op.module not in named:
            message = f"{_name(op)} computes in {op.inside}" + (f" (`{op.function}`)" if op.function else "")
            named.update({op.module} - {""})
            yield rule.finding_on_operation(op, message, "norm=fp32")
    for op in norms:
        if accident and op.module in narrow_gains - named:
            named.add(op.module)
            message = f"{_name(op)} has gains in {op.inputs[-1]}; most norms of the model have them in fp32"
            cause = f"norms with gains in {op.inputs[-1]}"
            unsure = {"severity": "warning", "confidence": "likely", "cause": cause}
            yield rule.finding_on_operation(op, message, "norm=fp32", **unsure)


def _name(op: Operation) -> str:
    return f"the norm `{op.module}`" if op.module else "a norm"


@define_rule(
    "HS402",
    "softmax below fp32",
    "error",
    what="A softmax is summed in bf16 or fp16, or its logarithms are rounded to it.",
    why="Exponentials that are rounded before they are summed do not add up to one, and a log-probability of -10 "
    "has steps of 0.06 in bf16. `F.softmax` itself sums in fp32 whatever it is given, and so does attention.",
    fix="Use `F.softmax(x, -1, dtype=torch.float32)` or `F.log_softmax(x.float(), -1)`.",
    fix_jax="Widen first: `jax.nn.softmax(x.astype(jnp.float32))`.",
)
def check_softmax(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per module and function."""
    for op in _narrow(record, "softmax"):
        where = f" in `{op.module}`" if op.module else ""
        message = f"a softmax{where} computes in {op.inside} ({op.function or 'softmax'})"
        yield rule.finding_on_operation(op, message, "softmax=fp32")


@define_rule(
    "HS403",
    "router below fp32",
    "warning",
    what="The logits by which a mixture chooses its experts are computed in bf16 or fp16.",
    why="Two logits that differ by less than 0.4 % become equal, and the order of the experts, not the numbers, "
    "decides where a token goes.",
    fix="Compute the router in fp32, outside autocast: `F.linear(x.float(), router.weight.float())`.",
    fix_jax="Multiply in fp32: `x.astype(jnp.float32) @ router`, with an fp32 router.",
)
def check_router(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per router."""
    for op in _narrow(record, "router"):
        message = f"the router `{op.module}` computes its logits in {op.inside}"
        yield rule.finding_on_operation(op, message, "router=fp32")


@define_rule(
    "HS404",
    "loss below fp32",
    "error",
    what="The loss is computed or returned in bf16 or fp16.",
    why="A loss of 10 has steps of 0.06 in bf16, so a curve shows stairs and small gains vanish; in fp16 a loss "
    "times its scale of 65536 is infinite.",
    fix="Widen what goes into it: `F.cross_entropy(logits.float(), target)`.",
    fix_jax="Widen what goes into it: `logits.astype(jnp.float32)`.",
)
def check_loss(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per loss function; if there is none, one for the narrow loss that backward was given."""
    losses = _narrow(record, "loss")
    for op in [op for op in losses if op.function] or losses[:1]:
        what = f"`{op.function}` computes" if op.function else "backward starts from a loss"
        yield rule.finding_on_operation(op, f"{what} in {op.inside}")


# Of a table of sines and cosines only the values are rounded, the angles are not.
_TABLES = ("cos", "sin", "cis")


@define_rule(
    "HS405",
    "buffers below fp32",
    "error",
    shows="The format, in the message.",
    what="Running statistics, or the frequencies of rotary positions, are stored in bf16 or fp16; "
    "`model.to(torch.bfloat16)` casts them with the weights.",
    why="A frequency with 8 bits is off by up to 0.4 %, so at position 4096 its angle is off by up to 16 radians; "
    "and a running mean in bf16 stops moving once its updates are below 1/512 of it.",
    fix="Cast parameters alone, or restore these buffers after the cast: `module.inv_freq = inv_freq_fp32`.",
    needs="a model",
)
def check_buffers(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per buffer."""
    for buffer in record.buffers:
        if buffer.kind == "other" or not is_narrow(buffer.format):
            continue
        last = buffer.name.rpartition(".")[2].lower()
        content, table = "running statistics", False
        if buffer.kind == "rope":
            table = any(part in last for part in _TABLES)
            content = "tables of rotary positions" if table else "frequencies of rotary positions"
        yield rule.finding(
            f"`{buffer.name}`, {content}, is in {buffer.format}",
            buffer.name,
            severity="warning" if table else None,
            confidence="likely" if table else "certain",
            cause=f"{content} in {buffer.format}",
        )


_PRODUCTS = ("matmul", "attention")


@define_rule(
    "HS406",
    "silent promotion to fp32",
    "warning",
    shows="The matmuls that ran in fp32.",
    what="In a model that computes in bf16 or fp16, an fp32 tensor (a mask, a table, the gain of a norm) meets an "
    "activation, the result is fp32, and matmuls after it run in fp32.",
    why="These matmuls cost several times as much, and their activations twice the memory, without anyone asking.",
    fix="Cast the result back where the two meet: `(x * table).to(x.dtype)`.",
    fix_jax="Cast the result back where the two meet: `(x * table).astype(x.dtype)`.",
)
def check_promotion(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per place of promotion, if most matmuls are narrow or have a narrow operand."""
    forward = _forward(record)
    products = [op for op in forward if op.kind in _PRODUCTS]
    narrow = sum(op.count for op in products if is_narrow(op.inside) or any(map(is_narrow, op.inputs)))
    promoted = [op for op in products if op.promoted]
    if not promoted or 2 * narrow <= sum(op.count for op in products):
        return
    before = forward[: forward.index(promoted[0])]
    source = next((op.module for op in reversed(before) if op.promoted and op.kind not in _PRODUCTS), "")
    for place in dict.fromkeys(op.place for op in promoted):
        those = [op for op in promoted if op.place == place]
        names = list(dict.fromkeys(op.module for op in those if op.module))
        given = f"`{source}` was given narrow numbers and returned fp32"
        cause = given if source else "an fp32 tensor met a narrow one"
        yield rule.finding(
            f"fp32 operands reach the matmuls of {first_names(names)}: {cause}",
            *dict.fromkeys([source, *names] if source else names),
            place=place,
            evidence={"calls": sum(op.count for op in those)},
        )


@define_rule(
    "HS407",
    "fp32 that is TF32",
    "warning",
    shows="The matmuls of fp32 tensors.",
    what="Matmuls of fp32 tensors run while the process lets the device round their operands to TF32 or bf16.",
    why="TF32 has 11 bits, as fp16 has: a layer or a router that was kept in fp32 on purpose is not.",
    fix='`torch.set_float32_matmul_precision("highest")`; if TF32 is what you want, accept the finding in '
    "`halfstep-audit.toml`.",
    fix_jax='`jax.config.update("jax_default_matmul_precision", "highest")`, or ignore the rule.',
)
def check_tf32(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding for all such matmuls."""
    rounds_to = record.switches.get("fp32_matmul")
    if rounds_to not in ("tf32", "bf16"):
        return
    wide = [op for op in _forward(record, "matmul", "router") if op.inside == "fp32"]
    if wide:
        names = list(dict.fromkeys(op.module for op in wide if op.module))
        yield rule.finding(
            f"fp32 matmuls are {str(rounds_to).upper()}: {first_names(names)}",
            *names,
            place=wide[0].place,
            evidence={"calls": sum(op.count for op in wide)},
        )


@define_rule(
    "HS408",
    "fp8 that did not run",
    "error",
    shows="The layers that multiplied fp8 numbers: none.",
    what="The script asked for fp8, and no layer multiplied fp8 numbers.",
    why="Training systems continue in bf16 after a line in a log if a library, a device or a shape does not fit.",
    fix="Read why the layers were not converted (sizes must be multiples of 16, the GPU needs fp8); "
    "`halfstep train --policy fp8-mixed` refuses instead.",
)
def check_fp8(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding, with who asked."""
    asked, layers = record.switches.get("fp8_asked"), record.switches.get("fp8_layers")
    if asked and layers == 0:
        yield rule.finding(f"{asked} asked for fp8, and no layer runs in it", evidence={"layers": 0})


@define_rule(
    "HS409",
    "activations overflow",
    "error",
    shows="The elements that overflowed, of how many, and their share.",
    what="An operation was given finite numbers and returned infinities or NaN.",
    why="Nothing in fp16 is above 65504. A loss scale acts on gradients alone, so no scale helps: every update is "
    "skipped, and the scale falls to zero.",
    fix="Run this layer in bf16 or fp32, which have the range.",
)
def check_overflow(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per operation; what comes after it was given infinities and is not one."""
    for op in _forward(record):
        if op.overflow:
            what = f"`{op.function}`" if op.function else f"a {op.kind}"
            at = f" in `{op.module}`" if op.module else ""
            format = op.outputs[0] if op.outputs else "its format"
            share = op.overflow / op.elements if op.elements else 0.0
            yield rule.finding_on_operation(
                op,
                f"activations overflow {format}: {what}{at} made {op.overflow} of {op.elements} numbers infinite "
                "or NaN out of finite ones",
                "compute=fp32",
                evidence={"overflow": op.overflow, "elements": op.elements, "share": share},
            )


# Half of the numbers is no accident of the tail of a distribution.
UNDERFLOW_SHARE = 0.5


@define_rule(
    "HS410",
    "gradients underflow",
    "error",
    shows="The elements that underflowed, of how many, their share, and the largest gradient.",
    what="Most of a layer's activation gradients are zero or have lost nearly all of their bits, because they are "
    "below the smallest numbers of their format.",
    why="fp16 has nothing below 6e-8, and less than 4 bits below 1e-6. What is zero here trains nothing before "
    "this layer.",
    fix="Scale the loss (`torch.amp.GradScaler`, `fp16-mixed`); if one layer alone is that small, run it in bf16 "
    "or fp32.",
    fix_jax="Scale the loss, as `fp16-mixed` does, and pass your own scale to the audit as "
    "`loss_scale`; if one layer alone is that small, run it in bf16 or fp32.",
)
def check_underflow(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per layer."""
    for op in record.operations:
        if op.backward and op.elements and op.underflow >= UNDERFLOW_SHARE * op.elements:
            share = op.underflow / op.elements
            format = op.outputs[0] if op.outputs else "its format"
            numbers: dict[str, float] = {"underflow": op.underflow, "elements": op.elements, "share": share}
            if op.amax is not None:
                numbers["amax"] = op.amax
            yield rule.finding_on_operation(
                op,
                f"gradients underflow {format}: {share:.0%} of those of what `{op.module}` returns are too small",
                "compute=fp32",
                evidence=numbers,
                confidence="likely",
            )


@define_rule(
    "HS411",
    "backward of an fp32 region in bf16",
    "warning",
    what="A region with autocast off is compiled inside one with autocast on: its matmuls are fp32 forward, and "
    "their gradients are computed in bf16 or fp16.",
    why="torch.compile traces the backward pass with the autocast that the compiled function was called in. What "
    "was kept in fp32 on purpose, such as a router, is trained by rounded gradients.",
    fix='`torch._functorch.config.backward_pass_autocast = "off"` before compiling, or leave the layer out of the '
    "compiled function.",
)
def check_backward(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per layer."""
    wide = {op.module for op in _forward(record) if op.inside == "fp32"}
    for op in record.operations:
        if op.backward and is_narrow(op.inside) and op.module in wide:
            message = f"`{op.module}` is fp32 forward, and its gradients are computed in {op.inside}"
            yield rule.finding_on_operation(op, message)


@define_rule(
    "HS412",
    "positions below fp32",
    "error",
    shows="The positions that were rounded, or that are more than 2 apart, and their share.",
    what="Positions are counted in bf16 or fp16 and become integers: `ones_like(x[..., 0]).cumsum(1).long()`; "
    "or sine and cosine are taken of positions or timesteps that were bf16 or fp16 (a warning).",
    why="bf16 has every whole number to 256 only, fp16 to 2048. Beyond, tokens share positions: of 1024, half are "
    "left; from 65,536 on, 512 are one. The loss still falls.",
    fix="Count in integers: `torch.arange(length, device=x.device)`, or `mask.long().cumsum(1)`. Keep timesteps "
    'in fp32, and multiply angles outside autocast, which rounds them: `torch.autocast("cuda", enabled=False)`.',
)
def check_positions(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per module and function."""
    for op in _forward(record, "positions"):
        if op.rounded:
            at = f" in `{op.module}`" if op.module else ""
            evidence = {"rounded": op.rounded, "elements": op.elements, "share": op.rounded / max(op.elements, 1)}
            some = f"{op.rounded} of {op.elements}"
            if op.function in ("sin", "cos"):
                message = (
                    f"`{op.function}`{at} is taken of {op.inside} numbers, of which {some} are more than 2 apart"
                )
                unsure = {"severity": "warning", "confidence": "likely"}
                yield rule.finding_on_operation(op, message, evidence=evidence, **unsure)
            else:
                message = f"`{op.function}`{at} counts in {op.inside}, which rounds {some} positions"
                yield rule.finding_on_operation(op, message, evidence=evidence)


def _narrow(record: Record, kind: OperationKind) -> list[Operation]:
    """Returns the operations of the forward pass that compute below fp32."""
    return [op for op in _forward(record, kind) if is_narrow(op.inside)]


def _forward(record: Record, *kinds: OperationKind) -> list[Operation]:
    """Returns the operations of the forward pass, of some kinds or of all."""
    return [op for op in record.operations if not op.backward and (not kinds or op.kind in kinds)]
