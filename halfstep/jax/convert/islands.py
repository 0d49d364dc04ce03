"""Softmax, norms and losses in a function's own code, found by how values come about, and run in fp32.

A jaxpr has no softmax, only exp, sums and divisions; and in bf16 each of them rounds. So an `exp`, `rsqrt`, `sqrt`
or `log` of a narrow array begins an island, whatever surrounds it:

    backward    what led to it is computed again in fp32, from the island's input: `x - max` before exp; sums,
                squares and the distance from a mean before rsqrt and sqrt. The narrow results are then unused
    forward     results stay fp32, not yet cast, for as long as they are the island's own (table below); they are
                cast where anything else reads them. Conversions inside are dropped

    kind        what it is                             what it stays in, and becomes
    exp         exp(x - max), exp(x)                   masks, constants; its sum is `sum`; exp / sum is `out`
    sum         the sum of those                       constants, 1 / sum; its logarithm is `loss`
    out         softmax                                log(softmax) is `loss`
    stat        rsqrt(mean(x^2) + eps), a deviation    constants, parameters; x * stat is `normed`
    normed      a normalized array                     constants and parameters: its gain and its bias
    loss        a logarithm                            all arithmetic and sums: a loss is fp32 inside and out

An input is widened once, so that the gradients of an island are summed in fp32 and narrowed on the way out.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from halfstep.jax.convert.patterns import is_pick, pick_numbers
from halfstep.jax.convert.values import History, Value, floats_of
from halfstep.jax.jaxpr import LAYOUT, bind_wide, is_conversion, is_float, is_widening, words

_BEGINS = {"exp": "exp", "exp2": "exp", "rsqrt": "stat", "sqrt": "stat", "log": "loss"}
_SCALED = words("mul div add max min neg select_n")
_STATISTIC = words("add sub mul div max min neg abs square integer_pow select_n")
_POINTWISE = words("add sub mul div max min neg abs square integer_pow pow sqrt rsqrt select_n clamp")
_OF_LOSS = _POINTWISE | words("exp exp2 log log1p expm1 logistic tanh reduce_sum reduce_max reduce_min cumsum")


def history_of(eqn: Any, values: Sequence[Value]) -> History | None:
    """Returns how the result of an operation came about, as far as an island could compute it again."""
    if len(eqn.outvars) != 1 or not is_float(eqn.outvars[0]):
        return None
    name, moves = eqn.primitive.name, eqn.primitive.name in LAYOUT or is_conversion(eqn)
    if not moves and name not in _OF_LOSS:
        return None
    through = moves or name in _STATISTIC
    sums = name == "reduce_sum" or (through and any(_comes_from_sums(value) for value in values))
    return History(eqn, tuple(values), sums)


class Island:
    """Computes the inside of islands in fp32, and keeps what it computed for the rest of the function."""

    def __init__(self, widen: Callable[[Value], Array]):
        self._widen = widen
        self._cache: dict[tuple[str, int], tuple[Value, Array]] = {}
        self.recomputed: set[int] = set()  # ids of the equations

    def begin(self, name: str, value: Value) -> tuple[Array, str]:
        """Returns the operand of the operation that begins an island, and the kind of its result."""
        kind = _BEGINS[name]
        return self.recompute("statistic" if kind == "stat" else "shifted", value), kind

    def extend(self, eqn: Any, values: Sequence[Value]) -> tuple[list[Any], str] | None:
        """Returns the inputs of an operation inside an island, and the kind of its result; None outside."""
        floats = floats_of(eqn, values)
        kinds = {value.kind for value in floats if value.kind}
        if not kinds or len(eqn.outvars) != 1 or not is_float(eqn.outvars[0]):
            return None
        settled = all(value.kind or value.free or value.owner is not None for value in floats)
        kind = _kind_of(eqn, kinds, settled)
        return (self._operands("centered" if kind == "normed" else "shifted", eqn, values), kind) if kind else None

    def widen(self, value: Value) -> Array:
        """Returns a value in fp32: unrounded if it is a master or inside an island, else as it was rounded."""
        return self._cached("widened", value, lambda: self._widen(value))

    def recompute(self, form: str, value: Value) -> Array:
        """Computes a value again, in fp32, as far back as `_form_of_operands` says."""
        history = None if value.kind else value.history
        if history is None:
            return self.widen(value)
        eqn, values = history.eqn, history.values
        if form == "shifted" and is_pick(eqn) and values[0].owner is None:
            x, index = values
            return self._cached("picked", value, lambda: pick_numbers(eqn, self.widen(x), x.array, index.array))
        if not (operands := _form_of_operands(form, value, history)):
            return self.widen(value)
        self.recomputed.add(id(eqn))

        def compute() -> Array:
            arrays = self._operands(operands, eqn, values)
            return arrays[0] if is_conversion(eqn) else bind_wide(eqn, arrays)[0]

        return self._cached(form, value, compute)

    def _operands(self, form: str, eqn: Any, values: Sequence[Value]) -> list[Any]:
        pairs = zip(eqn.invars, values, strict=True)
        return [self.recompute(form, value) if is_float(atom) else value.array for atom, value in pairs]

    def _cached(self, form: str, value: Value, compute: Callable[[], Array]) -> Array:
        key = (form, id(value))
        if key not in self._cache:
            self._cache[key] = (value, compute())  # the value too, or its id could be another's
        return self._cache[key][1]


def _form_of_operands(form: str, value: Value, history: History) -> str:
    """Returns the form in which the operands of a value are computed again; empty if it is not of its own form.

    loss         everything, from where its arithmetic begins
    shifted      the operand of exp: x - max, scaled or masked
    peak         a largest number: in fp32 it changes no bit, but leaves no conversions in between
    statistic    the operand of rsqrt or sqrt, if it comes from sums
    centered     what a norm sums or scales: x, x^2, |x|, of x or of x - mean
    """
    eqn, values, name = history.eqn, history.values, history.eqn.primitive.name
    moved, alone = name in LAYOUT and len(values) == 1, _has_one_operand(history)
    if form == "shifted":
        scaled = (name in _SCALED and alone) or _is_picked(value)
        return "peak" if name == "sub" else "shifted" if scaled or moved else ""
    if form == "peak":
        return "" if not _is_peak(value) else "widened" if name == "reduce_max" else "peak"
    if form == "statistic":
        return "" if not history.sums else "centered" if name == "reduce_sum" else "statistic"
    if form == "centered":
        same = name == "mul" and values[0] is values[-1]
        kept = same or moved or is_widening(eqn) or name in ("square", "integer_pow", "abs", "neg")
        if kept or (name in ("mul", "select_n") and alone):
            return "centered"
        return "statistic" if name == "sub" and any(map(_comes_from_sums, values)) else ""
    return form if form == "loss" else ""


def _has_one_operand(history: History) -> bool:
    """Returns whether all operands but one are constants, masks or tables."""
    pairs = zip(history.eqn.invars, history.values, strict=True)
    return sum(is_float(atom) and not value.free for atom, value in pairs) == 1


def _is_peak(value: Value) -> bool:
    """Returns whether a value is the largest of an axis, perhaps moved, and at least some constant."""
    if value.kind or value.history is None:
        return False
    name, values = value.history.eqn.primitive.name, value.history.values
    if name == "reduce_max":
        return True
    moved = name in LAYOUT and len(values) == 1
    bounded = name in ("max", "select_n") and _has_one_operand(value.history)
    return (moved or bounded) and any(map(_is_peak, values))


def _is_picked(value: Value) -> bool:
    """Returns whether a value is picked from rows, by an index for each, and perhaps moved."""
    if value.kind or value.history is None or value.history.eqn.primitive.name not in LAYOUT:
        return False
    return is_pick(value.history.eqn) or _is_picked(value.history.values[0])


def _comes_from_sums(value: Value) -> bool:
    """Returns whether a value comes from sums by arithmetic, as the statistics of a norm do."""
    return not value.kind and value.history is not None and value.history.sums


def _kind_of(eqn: Any, kinds: set[str], settled: bool) -> str:
    """Returns the kind of a result by those of its operands, empty where an island ends.

    `settled`: all other operands are constants, parameters, or computed from neither activations nor parameters.
    """
    name, only = eqn.primitive.name, next(iter(kinds)) if len(kinds) == 1 else ""
    if name in LAYOUT or is_conversion(eqn):
        return only if settled else ""
    if name in ("log", "log1p"):
        return "loss"
    if "loss" in kinds:
        return ("exp" if name in ("exp", "exp2") else "loss") if name in _OF_LOSS else ""
    if name == "reduce_sum":
        return {"exp": "sum", "sum": "sum", "stat": "stat"}.get(only, "")
    if kinds == {"exp", "sum"}:
        return "out" if name in ("mul", "div") else ""
    if only == "stat" and not settled:
        return "normed" if name in ("mul", "div") else ""
    if kinds == {"normed", "stat"}:
        return "normed" if name in ("mul", "div") else ""
    if name not in _POINTWISE or not settled or only == "out":
        return ""
    return only
