"""Which gradients were still scaled when a loop used them."""

from collections.abc import Iterator

from halfstep.core.audit.record import Call, CallKind, Record

# A scale is a power of two; gradients that the script divided by it differ from it by rounding alone.
ROUNDING = 0.01


def scaled_calls(record: Record, what: CallKind) -> Iterator[tuple[Call, float]]:
    """Yields the calls that met scaled gradients, with the scale. Gradients that are not finite say nothing."""
    scale = 1.0
    for call in record.calls:
        if call.what == "scale":
            scale = call.numbers.get("scale", scale)
        elif call.what == what and call.numbers.get("scaled") and scale != 1.0:
            divided = call.numbers.get("divided", 1.0)
            finite = divided == divided and not call.numbers.get("nonfinite")
            if finite and abs(divided / scale - 1) > ROUNDING:  # else the script has unscaled them by hand
                yield call, scale


def by_place(calls: Iterator[tuple[Call, float]]) -> dict[str | None, list[tuple[Call, float]]]:
    """Returns calls by the line that made them."""
    found: dict[str | None, list[tuple[Call, float]]] = {}
    for call, scale in calls:
        found.setdefault(call.place, []).append((call, scale))
    return found
