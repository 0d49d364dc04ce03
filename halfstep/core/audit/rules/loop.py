"""HS5xx: what the training loop does and hides."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, define_rule
from halfstep.core.audit.record import Record


@define_rule(
    "HS501",
    "NaN hidden by a filter",
    "error",
    shows="The losses that were not finite, of how many, and those that were logged as numbers.",
    what="Losses were NaN or infinite, and the framework's filter replaces them in the log.",
    why="transformers.Trainer writes the mean of earlier losses instead (`logging_nan_inf_filter`, on by "
    "default): the curve looks healthy while updates are lost or weights are NaN.",
    fix="`TrainingArguments(logging_nan_inf_filter=False)`, then look for the cause (HS503).",
)
def check_hidden_nan(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding."""
    bad = sum(loss is None for loss in record.losses)
    if record.switches.get("nan_filter") and bad:
        shown = [loss for loss in record.logged if loss is not None]
        yield rule.finding(
            f"{bad} of {len(record.losses)} losses were not finite; `logging_nan_inf_filter` hides them",
            place=next((call.place for call in record.calls_of("backward")), None),
            evidence={"losses": bad, "of": len(record.losses), "logged as numbers": len(shown)},
        )


ALLOWED = 1  # per backward pass: reading the loss is what everyone does


@define_rule(
    "HS502",
    "host waits for the device",
    "warning",
    shows="The reads per update, and the backward passes.",
    what="The script reads numbers from the device several times per backward pass.",
    why="Each `.item()`, `float(tensor)` or `if tensor` makes the host wait until the device has finished, and "
    "the device then waits for the host: small models lose a third of their speed.",
    fix="Keep sums on the device (`total += loss.detach()`) and read them every so many steps.",
)
def check_host_syncs(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding with all places; on a CPU a note, because nothing waits there."""
    passes = max(1.0, len(record.calls_of("backward")) / max(record.updates, 1))
    total = sum(sync.per_step for sync in record.syncs)
    if total > ALLOWED * passes:
        worst = sorted(record.syncs, key=lambda sync: -sync.per_step)
        device = record.switches.get("device")
        places = ", ".join(f"{sync.what} at {sync.place}" for sync in worst[:4])
        yield rule.finding(
            f"{total / passes:.3g} reads from the device per backward pass: {places}",
            *[sync.place for sync in worst if sync.place],
            place=worst[0].place,
            evidence={"reads per update": total, "backward passes per update": passes},
            severity="note" if device == "cpu" else None,
            confidence="weak" if device == "cpu" else "certain",
        )


@define_rule(
    "HS503",
    "non-finite loss or gradients",
    "error",
    shows="The losses, or the tensors and the update of the first gradient that was not finite.",
    what="The loss was NaN or infinite, or an optimizer stepped with gradients that were.",
    why="One step with a NaN makes the weights NaN for good. A loss that overflows does so in the forward pass: "
    "no loss scale cures it.",
    fix="Skip such updates (`prepare` does under every policy), and find the first operation that overflows: "
    "activations beyond 65504 need bf16, or fp32 for that layer.",
)
def check_nonfinite(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding for losses, and one for the first step with bad gradients."""
    bad = [i for i, loss in enumerate(record.losses) if loss is None]
    passes = record.calls_of("backward")
    if bad:
        yield rule.finding(
            f"{len(bad)} of {len(record.losses)} losses are not finite, the first of them number {bad[0] + 1}",
            place=passes[0].place if passes else None,
            evidence={"losses": len(bad), "first": bad[0] + 1},
        )
    steps = [call for call in record.calls_of("step") if call.numbers.get("nonfinite") and not call.skipped]
    if steps:
        first = steps[0]
        yield rule.finding(
            f"{first.target} steps with gradients that are not finite, of {first.numbers['nonfinite']:.0f} "
            f"tensors, in update {first.update + 1}",
            *first.names,
            place=first.place,
            evidence={"tensors": first.numbers["nonfinite"], "update": first.update + 1, "steps": len(steps)},
        )


@define_rule(
    "HS504",
    "NaN replaced by numbers",
    "error",
    shows="What was not finite, and in how many updates.",
    what="The script replaces NaN and infinities in the loss or in gradients, as `torch.nan_to_num` does, and "
    "steps.",
    why="A NaN says that something overflowed. Where it becomes 0, or the largest number there is, the update "
    "is made of what is left: wrong in size and direction, and no curve shows it. A loss scaler never sees "
    "the overflow.",
    fix="Skip such an update (`torch.amp.GradScaler` and `prepare` do), and find the first operation that "
    "overflows (HS409, HS503).",
)
def check_replaced(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding for losses and one for gradients; a warning if nothing has been replaced yet."""
    losses = record.calls_of("replace")
    if losses:
        bad = [call for call in losses if call.numbers.get("nonfinite")]
        yield rule.finding(
            f"NaN and infinities in the loss are replaced: {len(bad)} of {len(losses)} losses were not finite",
            place=(bad or losses)[0].place,
            severity=None if bad else "warning",
            evidence={"losses": len(bad), "of": len(losses)},
        )
    waiting: dict[str | None, float] = {}  # by optimizer: gradients that were not finite after the last pass
    found = []
    for call in record.calls:
        if call.what == "backward":
            waiting[call.target] = call.numbers.get("nonfinite", 0.0)
        elif call.what == "zero":
            waiting.pop(call.target, None)
        elif call.what == "step" and waiting.pop(call.target, 0.0):
            found += [] if call.skipped or call.numbers.get("nonfinite") else [call]
    if found:
        yield rule.finding(
            f"gradients were not finite after the backward pass, and {found[0].target} stepped with finite "
            f"ones, in {len(found)} updates",
            place=found[0].place,
            evidence={"updates": len(found)},
        )
