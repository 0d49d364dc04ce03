"""HS1xx: masters, moments, and updates that never arrive."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, define_rule
from halfstep.core.audit.record import Record, Weight, is_narrow

_MASTERS_JAX = (
    "Keep parameters in fp32 and cast them inside the loss function; `halfstep.jax.init` and `make_step` do so."
)


@define_rule(
    "HS101",
    "weights without a master",
    "error",
    shows="The intended updates that were not zero, how many were lost, their share, and the share that arrived.",
    what="The optimizer adds its updates to weights in a format below fp32, and no fp32 master keeps what rounds "
    "away.",
    why="A bf16 weight does not move for an update below 1/512 of it. With Adam at a learning rate of 1e-5, 84 % "
    "of the updates of usual weights vanish.",
    fix="Load or create the model in fp32 and let autocast, or `prepare(model, optimizer, 'bf16-mixed')`, cast it "
    "for computing; `param=fp32:split` keeps the memory of bf16 weights plus 2 bytes per parameter.",
    fix_jax=_MASTERS_JAX,
    needs="",
)
def check_masters(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields a finding for each weight; without a live step a warning, as nobody knows what was lost."""
    for weight in record.weights:
        if weight.trainable and weight.optimizer and is_narrow(weight.stepped) and not weight.stochastic:
            yield _lost_updates(rule, weight)


def _lost_updates(rule: Rule, weight: Weight) -> Finding:
    base = f"`{weight.name}` is stepped in {weight.stepped} by {weight.optimizer}, without an fp32 master"
    counts = weight.updates
    if counts is None or not counts.intended:
        return rule.finding_on_weight(weight, base, "param=fp32", severity="warning", confidence="likely")
    lost = counts.lost / counts.intended
    numbers: dict[str, float] = {"updates": counts.intended, "lost": counts.lost, "lost_share": lost}
    if not counts.exact:
        words = f"{base}: {lost:.1%} of its elements with a nonzero gradient did not change"
    else:
        words = f"{base}: {lost:.1%} of its intended updates were lost"
        if counts.applied_fraction is not None:
            numbers["arrived"] = counts.applied_fraction
            words += f", and {counts.applied_fraction:.1%} of what was intended arrived"
    return rule.finding_on_weight(
        weight,
        words,
        "param=fp32",
        evidence=numbers,
        severity=None if counts.lost else "warning",
        confidence="certain" if counts.exact else "weak",
    )


@define_rule(
    "HS102",
    "lost weight decay",
    "error",
    shows="The decays that were not zero, how many were lost, and their share.",
    what="Weight decay is below half of the last bit of the stored weights, so it does nothing to them.",
    why="Decay takes rate x decay of a weight, often 1e-6 of it; bf16 keeps nothing below 1/512. The run trains "
    "without the regularization that its settings name, and norms of weights grow.",
    fix="Keep trainable weights in fp32 (see HS101).",
    fix_jax=_MASTERS_JAX,
)
def check_decay(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per narrow weight of whose decays more than half were lost."""
    for weight in record.weights:
        counts = weight.updates
        if counts is None or weight.stochastic or not is_narrow(weight.stepped):
            continue
        if 2 * counts.decay_lost <= counts.decay_intended:
            continue
        share = counts.decay_lost / counts.decay_intended
        yield rule.finding_on_weight(
            weight,
            f"{share:.1%} of the weight decay of `{weight.name}` is lost, below half an ulp of {weight.stepped}",
            "param=fp32",
            evidence={"decays": counts.decay_intended, "lost": counts.decay_lost, "lost_share": share},
        )


# Steps: LoRA's A has no gradient in the first, because B is zero, and a warm-up may begin at rate zero.
_ENOUGH = 3


@define_rule(
    "HS103",
    "adapter that never moves",
    "error",
    shows="The steps with a nonzero gradient, the updates intended and lost.",
    what="A trainable adapter still has its first values although it was stepped with nonzero gradients, or no "
    "optimizer holds it.",
    why="A LoRA matrix in bf16 starts at values that are large beside its updates: all of them round away. In "
    "a known case A kept its first values for 84,000 steps.",
    fix="Create adapters in fp32 (PEFT: `autocast_adapter_dtype=True`, its default), and give all of them to the "
    "optimizer.",
    fix_jax="Create adapters in fp32, and give all of them to the optimizer.",
)
def check_adapters(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per adapter weight that stood still."""
    any_stepped = any(weight.optimizer for weight in record.weights)
    for weight in record.weights:
        if weight.kind != "adapter" or not weight.trainable:
            continue
        counts = weight.updates
        if counts and counts.steps >= _ENOUGH and counts.gradient and not counts.moved:
            yield rule.finding_on_weight(
                weight,
                f"`{weight.name}` ({weight.stepped}) was stepped {counts.steps} times with nonzero gradients and "
                "still has its first values",
                evidence={"steps": counts.steps, "lost": counts.lost, "updates": counts.intended},
            )
        elif weight.optimizer is None and record.updates >= _ENOUGH and any_stepped:
            message = f"no optimizer holds `{weight.name}`, which is trainable"
            cause = "tensors that no optimizer holds"
            yield rule.finding_on_weight(weight, message, severity="warning", confidence="likely", cause=cause)


_BLOCKWISE = ("int8", "uint8")  # with a scale per block: a choice that someone made, with an error of its own kind


@define_rule(
    "HS104",
    "moments below fp32",
    "warning",
    shows="The format of each moment, in the message.",
    what="The optimizer keeps its moments in a format below fp32.",
    why="The second moment of Adam changes by 1/1000 of itself in a step: bf16 rounds that to nothing, so it "
    "freezes, and with it the size of every step.",
    fix="Moments follow the format of the weight that they belong to: keep trainable weights in fp32, or use an "
    "optimizer that keeps its own fp32 state, such as `halfstep.torch.AdamW`.",
    fix_jax="Moments follow the dtype of their parameter: keep parameters in fp32, and leave out `mu_dtype`.",
    needs="",
)
def check_moments(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per weight, with the moments that are narrow."""
    for weight in record.weights:
        narrow = {k: fmt for k, fmt in weight.moments.items() if is_narrow(fmt) and fmt not in _BLOCKWISE}
        if narrow:
            formats = ", ".join(f"{name} in {fmt}" for name, fmt in narrow.items())
            message = f"{weight.optimizer or 'the optimizer'} keeps {formats} for `{weight.name}`"
            yield rule.finding_on_weight(weight, message, "moments=fp32")
    for facts in record.checkpoints[-1:] if not record.weights else []:
        for name, fmt in facts.moments.items():
            if is_narrow(fmt) and fmt not in _BLOCKWISE:
                weight_name, _, moment = name.rpartition("/")
                message = f"`{facts.path}` keeps {moment} of `{weight_name}` in {fmt}"
                yield rule.finding(message, weight_name, place=facts.path, cause=f"moments in {fmt}")


_FEW = 16  # elements that show nothing


@define_rule(
    "HS108",
    "average that never moves",
    "error",
    shows="The writes, the elements that are not the weight, and how many of those never changed.",
    what="An average of weights, such as an EMA, is kept in bf16 or fp16: it is written to and does not change.",
    why="An EMA moves by a thousandth of its distance to the weight, far below half of the last bit of bf16: it "
    "stays what it was at the start, and the model that is sampled from or saved was never trained.",
    fix="Keep the average in fp32, and cast a copy of it for use.",
)
def check_averages(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per average most of which stood still."""
    for each in record.averages:
        if each.behind >= _FEW and 2 * each.still > each.behind:
            share = each.still / each.behind
            yield rule.finding(
                f"the average of `{each.name}` in {each.format} was written {each.writes} times, and "
                f"{share:.1%} of what differs from the weight never changed",
                each.name,
                cause=f"averages in {each.format}",
                evidence={"writes": each.writes, "differ": each.behind, "still": each.still, "share": share},
            )


@define_rule(
    "HS106",
    "steps counted below fp32",
    "error",
    shows="The format, and the count where it is known.",
    what="An optimizer counts its steps in bf16 or fp16.",
    why="bf16 has every whole number to 256 only, fp16 to 2048: 256 + 1 is 256 again. From there on the "
    "corrections of Adam's moments, and schedules that read the counter, stand still.",
    fix="Cast parameters and moments, never the whole state: leave `step` in fp32, as torch makes it.",
    needs="",
)
def check_counters(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per counter, of a live optimizer or in a file."""
    for weight in record.weights:
        if is_narrow(weight.counter) and not str(weight.counter).startswith("int"):
            message = f"{weight.optimizer} counts the steps of `{weight.name}` in {weight.counter}"
            yield rule.finding_on_weight(weight, message, cause=f"counters in {weight.counter}")
    for facts in record.checkpoints[-1:]:
        for each in facts.tensors:
            if each.role == "step" and is_narrow(each.format):
                at = f", and is at {each.constant:g}" if each.constant is not None else ""
                message = f"the counter of `{each.name}` is in {each.format}{at}"
                yield rule.finding(message, each.name, place=facts.path, cause=f"counters in {each.format}")


@define_rule(
    "HS107",
    "moments that stand still",
    "error",
    shows="The elements of the moment.",
    what="The second moment of a weight is zero throughout although the first is not; or it did not change "
    "between two files while the first did.",
    why="Squares of gradients underflowed, or their updates round away: Adam then divides by its epsilon, or by a "
    "number that no longer follows the gradients.",
    fix="Keep moments in fp32 (see HS104).",
    needs="a file with moments",
)
def check_still_moments(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per second moment in the newest file."""
    for facts in record.checkpoints[-1:]:
        moments = {(each.name, each.moment): each for each in facts.tensors if each.role == "moment"}
        for (name, moment), second in moments.items():
            first = moments.get((name, "exp_avg"))
            if moment != "exp_avg_sq" or first is None or first.zeros == first.elements:
                continue
            underflowed, stands = second.zeros == second.elements, second.changed == 0 and bool(first.changed)
            if underflowed or stands:
                what = "is zero throughout" if underflowed else f"is that of `{facts.before}`"
                yield rule.finding(
                    f"exp_avg_sq of `{name}` ({second.format}) {what}, and exp_avg is not",
                    name,
                    place=facts.path,
                    cause=f"second moments in {second.format}",
                    evidence={"elements": second.elements},
                )


@define_rule(
    "HS105",
    "trainable weights in fp16",
    "error",
    shows="The format and the optimizer, in the message.",
    what="The optimizer steps weights that are stored in fp16.",
    why="fp16 has 11 bits and nothing below 6e-8: most updates of a usual learning rate round away, and a loss "
    "scaler refuses them (`Attempting to unscale FP16 gradients`).",
    fix="Keep trainable weights in fp32; autocast or `prepare(model, optimizer, 'fp16-mixed')` casts them.",
    fix_jax=_MASTERS_JAX,
    needs="",
)
def check_fp16_weights(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per trainable fp16 weight that has no wider master."""
    for weight in record.weights:
        if weight.trainable and weight.optimizer and weight.stepped == "fp16":
            message = f"`{weight.name}` is trained in fp16 by {weight.optimizer}, without a master in fp32"
            yield rule.finding_on_weight(weight, message, "param=fp32")
