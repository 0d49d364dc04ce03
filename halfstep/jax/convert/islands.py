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

from halfstep.jax.convert.patterns import Pick, pick_numbers
from halfstep.jax.convert.values import History, Value
from halfstep.jax.jaxpr import LAYOUT, bind_wide, is_conversion, is_float, words

_BEGINS = {"exp": "exp", "exp2": "exp", "rsqrt": "stat", "sqrt": "stat", "log": "loss"}
_SCALED = words("mul div add max min neg select_n")
_STATISTIC = words("add sub mul div max min neg abs square integer_pow select_n")
_POINTWISE = words("add sub mul div max min neg abs square integer_pow pow sqrt rsqrt select_n clamp")
_OF_LOSS = _POINTWISE | words("exp exp2 log log1p expm1 logistic tanh reduce_sum reduce_max reduce_min cumsum")


def history_of(eqn: Any, values: Sequence[Value]) -> History | None:
    """Returns how the result of an operation came about, as far as an island could compute it again."""
    if len(eqn.outvars) != 1 or not is_float(eqn.outvars[0]):
        return None
    name = eqn.primitive.name
    if not (name in _OF_LOSS or name in LAYOUT or is_conversion(eqn)):
        return None
    through = name in _STATISTIC or name in LAYOUT or is_conversion(eqn)
    sums = name == "reduce_sum" or (through and any(_comes_from_sums(value) for value in values))
    return History(eqn, tuple(values), sums)


class Island:
    """Computes the inside of islands in fp32, and keeps what it computed for the rest of the function."""

    def __init__(self, widen: Callable[[Value], Array]):
        self._widen = widen
        self._cache: dict[tuple[str, int], tuple[Value, Array]] = {}

    def begin(self, name: str, value: Value) -> tuple[Array, str]:
        """Returns the operand of the operation that begins an island, and the kind of its result."""
        kind = _BEGINS[name]
        return (self._statistic if kind == "stat" else self._shifted)(value), kind

    def extend(self, eqn: Any, values: Sequence[Value]) -> tuple[list[Any], str] | None:
        """Returns the inputs of an operation inside an island, and the kind of its result; None outside."""
        floats = [value for atom, value in zip(eqn.invars, values, strict=True) if is_float(atom)]
        kinds = {value.kind for value in floats if value.kind}
        if not kinds or len(eqn.outvars) != 1 or not is_float(eqn.outvars[0]):
            return None
        settled = all(value.kind or value.free or value.owner is not None for value in floats)
        kind = _kind_of(eqn, kinds, settled)
        if not kind:
            return None
        pull = self._centered if kind == "normed" else self._shifted
        pairs = zip(eqn.invars, values, strict=True)
        return [pull(value) if is_float(atom) else value.array for atom, value in pairs], kind

    def widened(self, value: Value) -> Array:
        """Returns a value in fp32: unrounded if it is a master or inside an island, else as it was rounded."""
        return self._cached("widened", value, lambda: self._widen(value))

    def loss(self, value: Value) -> Array:
        """Computes a loss again, from where its arithmetic begins."""
        if value.kind or value.history is None:
            return self.widened(value)
        return self._recompute("loss", value, self.loss)

    def _shifted(self, value: Value) -> Array:
        """Computes the operand of exp again: x - max, scaled or masked."""
        if value.kind or value.history is None:
            return self.widened(value)
        name, values = value.history.eqn.primitive.name, value.history.values
        if name == "sub":
            return self._recompute("shifted", value, self._peak)
        if (pick := Pick.of(value.history.eqn)) is not None and values[0].owner is None:
            logits, indices = values
            return self._cached(
                "picked", value, lambda: pick_numbers(self.widened(logits), logits.array, indices.array, pick)
            )
        scaled = (name in _SCALED and _has_one_operand(value.history)) or _is_picked(value)
        if scaled or (name in LAYOUT and len(values) == 1):
            return self._recompute("shifted", value, self._shifted)
        return self.widened(value)

    def _peak(self, value: Value) -> Array:
        """Computes a largest number again, in fp32, which changes no bit, but leaves no conversions in between."""
        if not _is_peak(value):
            return self.widened(value)
        assert value.history is not None
        of_all = value.history.eqn.primitive.name == "reduce_max"
        return self._recompute("peak", value, self.widened if of_all else self._peak)

    def _statistic(self, value: Value) -> Array:
        """Computes the operand of rsqrt or sqrt again, if it comes from sums."""
        if value.history is None or not _comes_from_sums(value):
            return self.widened(value)
        of_sum = value.history.eqn.primitive.name == "reduce_sum"
        return self._recompute("statistic", value, self._centered if of_sum else self._statistic)

    def _centered(self, value: Value) -> Array:
        """Computes what a norm sums or scales again: x, x^2, |x|, of x or of x - mean."""
        if value.kind or value.history is None:
            return self.widened(value)
        eqn, values = value.history.eqn, value.history.values
        name = eqn.primitive.name
        same = name == "mul" and values[0] is values[-1]
        masked = name in ("mul", "select_n") and _has_one_operand(value.history)
        to_wide = is_conversion(eqn) and eqn.invars[0].aval.dtype.itemsize < eqn.outvars[0].aval.dtype.itemsize
        moved = name in LAYOUT and len(values) == 1
        if same or masked or to_wide or moved or name in ("square", "integer_pow", "abs", "neg"):
            return self._recompute("centered", value, self._centered)
        if name == "sub" and any(_comes_from_sums(each) for each in values):
            return self._recompute("centered", value, self._statistic)
        return self.widened(value)

    def _recompute(self, form: str, value: Value, pull: Callable[[Value], Array]) -> Array:
        assert value.history is not None
        eqn, values = value.history.eqn, value.history.values

        def compute() -> Array:
            arrays = [pull(v) if is_float(a) else v.array for a, v in zip(eqn.invars, values, strict=True)]
            return arrays[0] if is_conversion(eqn) else bind_wide(eqn, arrays)[0]

        return self._cached(form, value, compute)

    def _cached(self, form: str, value: Value, compute: Callable[[], Array]) -> Array:
        key = (form, id(value))
        if key not in self._cache:
            self._cache[key] = (value, compute())  # the value too, or its id could be another's
        return self._cache[key][1]


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
    return Pick.of(value.history.eqn) is not None or _is_picked(value.history.values[0])


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
