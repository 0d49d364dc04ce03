"""The roles of a policy, the values each may have, and how a value is written.

A policy gives a number format to each *role* a tensor can play in training. A value is written as a head
and modifiers, `head:modifier:key=number`, and reads back from what it prints:

    fp32    bf16:stochastic    fp32:split    e4m3:row:delayed    dynamic:init=65536:interval=2000

The kinds of value are dataclasses, and their fields are the grammar: a `bool` field is a flag of the same name,
a `Literal` field a flag named after the value, a number is `key=number`. Defaults are not printed.
"""

from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from halfstep.core import formats
from halfstep.core.errors import HalfstepError, RoleValueError, did_you_mean, one_of
from halfstep.core.formats import FP32, Format
from halfstep.core.scaling import LAWS, DynamicScale, Scale


@dataclass(frozen=True)
class Param:
    """How the optimizer holds its copy of a weight."""

    format: Format
    split: bool = False  # fp32 kept as bf16 plus a 16-bit remainder; matrices only, exact
    stochastic: bool = False  # updates are rounded stochastically instead of to nearest

    def __post_init__(self) -> None:
        if self.split and self.format != FP32:
            raise RoleValueError(
                f"`{self.format}:split` is impossible: only fp32 splits into bf16 and a 16-bit remainder",
                hint="write `fp32:split`, or leave the modifier out",
            )
        if self.stochastic and self.format == FP32:
            raise RoleValueError(
                "`fp32:stochastic` is impossible: an fp32 update is not rounded to anything narrower",
                hint="write `bf16:stochastic`, or leave the modifier out",
            )


@dataclass(frozen=True)
class Operand:
    """The format of matmul operands; how narrow ones are scaled into their range."""

    format: Format
    granularity: Literal["tensor", "row"] = "tensor"  # one scale per tensor, or one per row
    amax: Literal["current", "delayed"] = "current"  # the scale follows this step's amax, or past ones
    measured: bool = False  # only if it is faster, timed when the model is prepared

    def __post_init__(self) -> None:
        given = _modifiers(self)
        if given and not is_narrow(self.format):
            raise RoleValueError(
                f"`{self.format}:{':'.join(given)}` is impossible: {self.format} operands are not scaled, "
                "only formats of 8 bits or less are",
                hint=f"write `{self.format}`, or a narrow format such as `e4m3:{':'.join(given)}`",
            )


@dataclass(frozen=True)
class Accumulator:
    """What a matmul sums its products in."""

    format: Format = FP32
    fast: bool = False  # fp8 forward matmuls may keep fewer bits between tensor-core instructions


@dataclass(frozen=True)
class Evaluation:
    """The compute format of evaluation; None means as in training, with its rules."""

    format: Format | None = None


Value = Format | Param | Operand | Accumulator | Evaluation | Scale | bool


@dataclass(frozen=True)
class Role:
    """One row of the policy table."""

    meaning: str
    kind: type
    allowed: tuple[str, ...] | None = None  # format names; None is any
    reason: str = ""  # why other formats are not allowed
    in_rules: bool = True  # whether a rule may change it for some modules


_ONLY = ("fp32",)
_WIDE = ("fp32", "bf16")
_HALF = ("fp32", "bf16", "fp16")

ROLES: dict[str, Role] = {
    "param": Role(
        "the weight the optimizer owns: the master",
        Param,
        _WIDE,
        "fp16 loses updates below 6e-8 and its gradients cannot be unscaled in place",
    ),
    "compute": Role("matmul operands, activations, residual stream, logits", Operand),
    "matmul": Role("sums inside a matmul", Accumulator, _ONLY, "no backend is asked to sum in less"),
    "grad": Role("gradients of activations", Operand),
    "grad_weight": Role("gradients of weights", Format, _HALF, "weight gradients are summed over a batch"),
    "accumulate": Role(
        "sum of gradients over micro-batches", Format, _WIDE, "a sum in fp16 overflows", in_rules=False
    ),
    "reduce": Role(
        "what ranks send of their gradients; the sum over ranks is fp32",
        Format,
        _WIDE,
        "gradients that are scaled for fp16 overflow when ranks add them",
        in_rules=False,
    ),
    "moments": Role("state of the optimizer", Format, _WIDE, "squared gradients underflow in fp16"),
    "norm": Role("inside normalization; the result is in compute", Format, _HALF, "sums need 16 bits"),
    "softmax": Role("inside softmax and attention; the result is in compute", Format, _HALF, "sums need 16 bits"),
    "loss": Role("the loss, inside and out", Format, _WIDE, "an fp16 loss times 65536 is inf", in_rules=False),
    "router": Role("logits of a mixture's router, inside and out", Format, _ONLY, "ties decide experts"),
    "rope": Role(
        "angles of rotary positions, inside and out",
        Format,
        _ONLY,
        "positions above 256 are not representable in bf16",
    ),
    "buffers": Role("running statistics and tables; integers are never touched", Format, _ONLY, "they add up"),
    "eval": Role(
        "compute of evaluation; `compute` is as in training, a format holds for every module",
        Evaluation,
        _HALF,
        "evaluation needs no narrower format",
        in_rules=False,
    ),
    "export": Role(
        "what `halfstep export`, and Trainer's `save_model`, write a model in; checkpoints are never rounded",
        Format,
        _HALF,
        "libraries that read models read these",
        in_rules=False,
    ),
    "scale": Role("loss scaling", Scale, in_rules=False),
    "emulate": Role("casts are emulated bit for bit in fp32, on any hardware", bool, in_rules=False),
}


def is_narrow(fmt: Format) -> bool:
    """Whether the format is so narrow that values need their own scale to reach it (8 bits or less)."""
    return fmt.bits <= 8


def needs_loss_scale(fmt: Format) -> bool:
    """Whether gradients leave the format's range unless the loss is scaled, as in fp16."""
    return fmt.exponent_bits < 8 and not is_narrow(fmt)


def parse_value(role: str, text: str) -> Value:
    """Reads the value of a role: `parse_value("param", "fp32:split")`."""
    try:
        value = _read(ROLES[role].kind, text.strip())
    except HalfstepError as error:
        raise RoleValueError(f"{role}={text}: {error.message}", hint=error.hint) from None
    check_offered(role, value)
    return value


def check_offered(role: str, value: Value) -> None:
    """Refuses a format that a role cannot have."""
    spec = ROLES[role]
    fmt = value if isinstance(value, Format) else getattr(value, "format", None)
    if spec.allowed is not None and fmt is not None and str(fmt) not in spec.allowed:
        raise RoleValueError(
            f"`{role}={print_value(value)}` is not offered ({spec.reason}); {role} may be {one_of(spec.allowed)}",
            hint=f"write `{role}={spec.allowed[0]}`",
        )


def print_value(value: Value) -> str:
    """Writes a value so that `parse_value` reads the same one back."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Format):
        return value.name
    if isinstance(value, Evaluation):
        return "compute" if value.format is None else value.format.name
    head = value.word if isinstance(value, Scale) else value.format.name
    return ":".join([head, *_modifiers(value)])


def _modifiers(value: Any) -> list[str]:
    words = []
    kind_of_value: Any = type(value)
    for name, key, kind, default in grammar(kind_of_value):
        current = getattr(value, name)
        if current == default:
            continue
        if kind is bool:
            words.append(key)
        elif get_origin(kind) is Literal:
            words.append(current)
        else:
            whole = current == int(current) and abs(current) < 1e16
            words.append(f"{key}={int(current) if whole else current!r}")
    return words


@cache
def grammar(kind: Any) -> tuple[tuple[str, str, Any, Any], ...]:
    """Returns (field, key in the text, type, default) of each modifier of a kind of value."""
    hints = get_type_hints(kind)
    rows = [field for field in fields(kind) if field.name != "format"]
    assert all(field.default is not MISSING for field in rows)
    return tuple((f.name, f.name.removesuffix("_scale"), hints[f.name], f.default) for f in rows)


def _read(kind: type, text: str) -> Value:
    head, *words = [part.strip() for part in text.split(":")]
    if kind is bool:
        if text not in ("true", "false"):
            raise RoleValueError(f"`{text}` is neither `true` nor `false`", hint="write `emulate=true`")
        return text == "true"
    if kind is Format or kind is Evaluation:
        if words:
            raise RoleValueError(f"modifier `{words[0]}` means nothing here; this role takes only a format")
        if kind is Format:
            return formats.parse(head)
        return Evaluation(None if head == "compute" else formats.parse(head))
    if kind is Scale:
        laws = {law.word: law for law in LAWS}
        if head not in laws:
            raise RoleValueError(
                f"unknown loss scaling `{head}`; it may be {one_of(laws)}",
                hint=did_you_mean(head, laws, otherwise=f"fp16 needs `{DynamicScale.word}`, other formats `none`"),
            )
        return laws[head](**_read_modifiers(laws[head], words))
    return kind(format=formats.parse(head), **_read_modifiers(kind, words))  # type: ignore[no-any-return]


def _read_modifiers(kind: type, words: list[str]) -> dict[str, Any]:
    flags: dict[str, tuple[str, Any]] = {}
    numbers: dict[str, tuple[str, type]] = {}
    for name, key, hint, _ in grammar(kind):
        if hint is bool:
            flags[key] = (name, True)
        elif get_origin(hint) is Literal:
            flags |= {word: (name, word) for word in get_args(hint)}
        else:
            numbers[key] = (name, hint)

    values: dict[str, Any] = {}
    for word in words:
        key, equals, number = word.partition("=")
        if equals and key in numbers:
            name, hint = numbers[key]
            value: Any = _read_number(hint, key, number)
        elif not equals and key in flags:
            name, value = flags[key]
        else:
            legal = [*flags, *(f"{key}=..." for key in numbers)]
            names = one_of(legal) if legal else "none"
            raise RoleValueError(
                f"unknown modifier `{word}`; allowed here: {names}", hint=did_you_mean(key, [*flags, *numbers])
            )
        if name in values:
            raise RoleValueError(f"modifier `{word}` contradicts or repeats an earlier one", hint="give it once")
        values[name] = value
    return values


def _read_number(kind: type, key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise RoleValueError(f"`{key}={text}` is not a number") from None
    if kind is not int:
        return number
    if number != number or number in (float("inf"), float("-inf")) or number != int(number):
        raise RoleValueError(f"`{key}={text}` is not a whole number")
    return int(number)
