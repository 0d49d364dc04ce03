"""HS2xx: the loss scale."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from halfstep.core.audit.finding import Finding, Rule, define_rule
from halfstep.core.audit.record import BY_HAND, Call, CallKind, Record, group_calls, is_narrow


@define_rule(
    "HS201",
    "loss scaler with bf16",
    "warning",
    shows="How many losses were scaled, and how many updates were skipped.",
    what="A GradScaler scales the loss of a training in bf16.",
    why="bf16 has the range of fp32, so there is nothing to scale. The scaler still looks at every gradient, "
    "makes the host wait at each step, and skips updates when the scale itself overflows.",
    fix="Leave the scaler out, or make it with `enabled=False`; it belongs to fp16.",
)
def check_scaler_with_bf16(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per scaler, if nothing computes in fp16."""
    used = {call.format for call in record.calls_of("autocast")} | {w.format for w in record.weights}
    used |= {op.inside for op in record.operations}
    if "fp16" in used or "bf16" not in used:
        return
    skipped = sum(call.skipped for call in record.calls_of("step"))
    for scaler, calls in _scalers(record).items():
        yield rule.finding(
            f"{scaler} scales losses that are computed in bf16",
            place=calls[0].place,
            evidence={"scaled": len(calls), "skipped": skipped},
        )


@define_rule(
    "HS202",
    "clip before unscale",
    "error",
    shows="How many clips came too early, the scale, and the norm that was clipped.",
    what="Gradients are clipped while they still carry the loss scale.",
    why="The norm is too large by the scale, so that every update is clipped, to a length that falls when the "
    "scale grows: a limit of 1.0 under a scale of 65536 is one of 0.000015.",
    fix="Call `scaler.unscale_(optimizer)` before the clip; in Accelerate, `accelerator.clip_grad_norm_`.",
)
def check_clipping(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per line that clips."""
    for place, calls in _calls_on_scaled_gradients(record, "clip").items():
        call, scale = calls[0]
        yield rule.finding(
            f"gradients of {call.target} are clipped at {scale:g} times their size",
            place=place,
            evidence={"clips": len(calls), "scale": scale, "norm": call.numbers.get("norm", 0.0)},
        )
    yield from _clips_by_hand(rule, record)


def _clips_by_hand(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields a finding per optimizer whose gradients the script limits by itself before they are unscaled.

    It divides them by a number that changes, and what is left has the same norm, or the same largest number, in
    every update. What is divided by a number of tokens has not.
    """
    scales = [call.numbers["scale"] for call in record.calls_of("scale") if "scale" in call.numbers]
    for optimizer, calls in group_calls(record.calls_of("unscale"), "target").items():
        its = [call.numbers for call in calls if 1 + _ROUNDING < call.numbers.get("divided", 1.0) < float("inf")]
        factors, sizes = [each["divided"] for each in its], [(each["norm"], each["largest"]) for each in its]
        same = any(_spread(column) < _ROUNDING for column in zip(*sizes, strict=True))
        if len(its) > 1 and same and _spread(factors) > _ROUNDING:
            yield rule.finding(
                f"the script limits the gradients of {optimizer} by itself, to a norm of {its[0]['norm']:.3g}, "
                "before they are unscaled",
                place=calls[0].place,
                evidence={"clips": len(its), "scale": scales[-1] if scales else 1.0, "norm": its[0]["norm"]},
            )


def _spread(values: Iterable[float]) -> float:
    known = [*values]
    return max(known) / max(min(known), 1e-300) - 1


_FIX_BY_HAND = (
    "Divide every gradient by the scale after the backward pass, before clipping and the step: "
    "`p.grad.div_(scale)`; or let a `torch.amp.GradScaler` scale and unscale."
)


@define_rule(
    "HS203",
    "never unscaled",
    "error",
    shows="How many steps took scaled gradients, and the scale.",
    what="An optimizer steps with the gradients of a scaled loss, and nobody has divided them by the scale.",
    why="SGD makes steps that are too large by the scale. Adam hides it until the scale changes, but its epsilon "
    "and a clipping mean nothing, and gradients that are not finite reach the weights.",
    fix="Step with `scaler.step(optimizer)` instead of `optimizer.step()`.",
)
def check_unscaling(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per line that steps so."""
    for place, calls in _calls_on_scaled_gradients(record, "step").items():
        call, scale = calls[0]
        by_hand = any(each.target == BY_HAND for each in record.calls_of("scale"))
        yield rule.finding(
            f"{call.target} steps with gradients of {scale:g} times their size",
            place=place,
            evidence={"steps": len(calls), "scale": scale},
            fix=_FIX_BY_HAND if by_hand else None,
        )


@define_rule(
    "HS204",
    "two scale updates in a step",
    "error",
    shows="The steps, and how often the scale changed between two optimizers of one update.",
    what="`scaler.update()` runs between a backward pass and the step that uses its gradients.",
    why="The gradients carry the old scale and are divided by the new one: whenever the scale changes, that step "
    "is wrong by a factor of two. With several optimizers one update each does this.",
    fix="Call `scaler.update()` once, after the last `scaler.step(...)`. Accelerate and Lightning update after "
    "each optimizer: unscale all of them before the first steps (`accelerator.unscale_gradients()`).",
)
def check_updates_between(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per line that steps with gradients of an older scale."""
    late: list[Call] = []
    # The optimizers with scaled gradients, and whether the scale was updated since.
    scaled: dict[str | None, bool] = {}
    changed: list[Call] = []
    for call in record.calls:
        if call.what == "backward" and call.numbers.get("scaled"):
            scaled.setdefault(call.target, False)
        elif call.what == "update":
            scaled = dict.fromkeys(scaled, True)
            changed += [call] if call.numbers.get("before") != call.numbers.get("after") else []
        elif call.what == "zero":
            scaled.pop(call.target, None)
        elif call.what in ("unscale", "step") and scaled.pop(call.target, False):
            late.append(call)
    for place, calls in group_calls(late, "place").items():
        yield rule.finding(
            f"{calls[0].target} steps with gradients from before an update of the scale",
            place=place,
            evidence={"steps": len(calls), "changes of the scale": len(changed)},
        )


@define_rule(
    "HS205",
    "scale never updated",
    "error",
    shows="The updates, and the scale that stayed.",
    what="A loss is scaled in update after update, and `scaler.update()` is never called.",
    why="The scale stays at its first value: too large, and every step overflows; too small, and gradients "
    "vanish. `scaler.step` refuses its second call.",
    fix="Call `scaler.update()` at the end of each update.",
)
def check_scale_updates(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per scaler."""
    updated = {call.target for call in record.calls_of("update")}
    for scaler, calls in _scalers(record).items():
        updates = len({call.update for call in calls})
        if updates > 1 and scaler not in updated:
            yield rule.finding(
                f"{scaler} has scaled the losses of {updates} updates and was never updated",
                place=calls[0].place,
                evidence={"updates": updates, "scale": calls[-1].numbers.get("scale", 0.0)},
            )


IN_A_ROW = 8  # a scaler that looks for its first scale, from 65536, seldom needs more


@define_rule(
    "HS206",
    "scale falls towards 0",
    "error",
    shows="The first scale, the last, and how often it fell.",
    what="The loss scale falls update after update, and the scaler has no floor.",
    why="A scale below 1 cannot be meant: what overflows does so in the forward pass, and no scale cures that. "
    "Each of these updates is skipped; after some hundred the scale is exactly 0, without an error.",
    fix="Find what is not finite (`halfstep train` names it; so does HS503): often activations beyond 65504, "
    "which bf16 can hold. `prepare(model, optimizer, 'fp16-mixed')` has a floor and stops there.",
)
def check_falling_scale(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per scaler whose scale is below 1 and fell, or has fallen many times in a row."""
    for scaler, updates in group_calls(record.calls_of("update"), "target").items():
        its = [call for call in updates if "after" in call.numbers]
        fell = [call.numbers["after"] < call.numbers["before"] for call in its]
        run = next((i for i, each in enumerate(reversed(fell)) if not each), len(fell))
        last = its[-1].numbers["after"] if its else 1.0
        if (last < 1 and any(fell)) or run >= IN_A_ROW:
            yield rule.finding(
                f"the scale of {scaler} fell {sum(fell)} times in {len(its)} updates, to {last:g}",
                place=its[-1].place,
                evidence={"scale": last, "first": its[0].numbers["before"], "falls": sum(fell)},
                confidence="certain" if last < 1 else "likely",
            )


@define_rule(
    "HS207",
    "schedule steps on skipped updates",
    "warning",
    shows="The skipped updates that the schedule counted.",
    what="A learning-rate schedule advances on updates that the loss scaler skipped.",
    why="Warmup and decay run ahead of the weights; a scaler that looks for its first scale skips most of a short "
    "warmup.",
    fix="Step the schedule only if the scale did not fall: `before = scaler.get_scale(); scaler.update(); "
    "if scaler.get_scale() >= before: schedule.step()`. `run.scheduler_step(schedule)` of halfstep does it.",
)
def check_schedule(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per line that steps a schedule."""
    skipped: dict[str | None, bool] = {}
    early: list[Call] = []
    for call in record.calls:
        if call.what == "step":
            skipped[call.target] = call.skipped
        elif call.what == "schedule" and skipped.pop(call.target, False):
            early.append(call)
    for place, calls in group_calls(early, "place").items():
        yield rule.finding(
            f"the schedule of {calls[0].target} advances on {len(calls)} skipped updates",
            place=place,
            evidence={"skipped": len(calls), "updates": record.updates},
        )


@define_rule(
    "HS208",
    "updates inside one autocast region",
    "error",
    shows="The steps inside one region.",
    what="An optimizer makes several steps inside one autocast region.",
    why="Autocast casts each weight once per region and keeps the result: after the first step the forward passes "
    "still use the old weights.",
    fix="Enter the region for the forward pass and the loss only, anew in each iteration; step outside.",
)
def check_autocast_region(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per optimizer."""
    steps = [call for call in record.calls_of("step") if not call.skipped]
    for optimizer, calls in group_calls(steps, "target").items():
        regions = [call.numbers.get("region", 0.0) for call in calls]
        stale = sum(a == b != 0 for a, b in pairwise(regions))
        if stale:
            yield rule.finding(
                f"{optimizer} makes {stale + 1} steps inside one autocast region",
                place=calls[0].place,
                evidence={"steps": stale + 1},
            )


def _scalers(record: Record) -> dict[str | None, list[Call]]:
    """Returns what each loss scaler has scaled; what the script itself multiplies is left out."""
    return group_calls([call for call in record.calls_of("scale") if call.target != BY_HAND], "target")


# A scale is a power of two; gradients that the script divided by it differ from it by rounding alone.
_ROUNDING = 0.01


def _calls_on_scaled_gradients(record: Record, what: CallKind) -> dict[str | None, list[tuple[Call, float]]]:
    """Returns the calls whose gradients still carried the scale, each with that scale, by the line that made them.

    Gradients that are not finite do not show whether they were divided: other updates of the same line do.
    """
    scale, found = 1.0, dict[str | None, list[tuple[Call, float]]]()
    unclear: dict[str | None, list[tuple[Call, float]]] = {}
    narrow, by_hand = _computes_narrow(record), False
    for call in record.calls:
        if call.what == "scale":
            by_hand = call.target == BY_HAND
            scale = call.numbers.get("scale", scale) if narrow or not by_hand else 1.0
        elif call.what == what and call.numbers.get("scaled") and scale != 1.0 and call.update < record.updates:
            divided = call.numbers.get("divided", 1.0)
            if divided != divided or call.numbers.get("nonfinite"):
                unclear.setdefault(call.place, []).append((call, scale))
            elif by_hand and divided > 1 + _ROUNDING:  # by more than the scale, or by a part that comes later
                continue
            elif abs(divided / scale - 1) > _ROUNDING:  # else the script has unscaled them by hand
                found.setdefault(call.place, []).append((call, scale))
    return {place: calls + unclear.get(place, []) for place, calls in found.items()}


def _computes_narrow(record: Record) -> bool:
    """Whether anything is computed below fp32: otherwise a factor of the loss is no loss scale."""
    formats = {call.format for call in record.calls_of("autocast")} | {each.format for each in record.weights}
    return any(is_narrow(fmt) for fmt in formats)
