"""HS204: the scale changes between a backward pass and the step that uses its gradients."""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Call, Record

RULE = Rule(
    id="HS204",
    name="two scale updates in a step",
    severity="error",
    shows="The steps, and how often the scale changed between two optimizers of one update.",
    what="`scaler.update()` runs between a backward pass and the step that uses its gradients.",
    why="The gradients carry the old scale and are divided by the new one: whenever the scale changes, that step "
    "is wrong by a factor of two. With several optimizers one update each does this.",
    fix="Call `scaler.update()` once, after the last `scaler.step(...)`. Accelerate and Lightning update after "
    "each optimizer: unscale all of them before the first steps (`accelerator.unscale_gradients()`).",
    needs="a live run",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per line that steps with gradients of an older scale."""
    found: dict[str | None, list[Call]] = {}
    scaled: dict[
        str | None, bool
    ] = {}  # optimizers with scaled gradients, and whether the scale was updated since
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
            found.setdefault(call.place, []).append(call)
    for place, calls in found.items():
        yield RULE.finding(
            f"{calls[0].target} steps with gradients from before an update of the scale",
            place=place,
            evidence={"steps": len(calls), "changes of the scale": len(changed)},
        )
