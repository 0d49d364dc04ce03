"""Loss scaling: the law, written once.

fp16 gradients below 6e-8 become zero. Multiplying the loss by S moves every gradient up by S before it is
rounded; the optimizer must see them divided by the same S. The law says what S is, step by step:

    always        inv_scale = 1 / S of the S that was used
    finite        n <- n + 1;  when n = interval:  S <- min(S * growth, ceiling), n <- 0, h <- hysteresis
    not finite    n <- 0, h <- h - 1;  when h = 0 or less:  S <- max(S * backoff, floor)

The caller skips a step whose gradients are not finite under every law: it changes only the scale. One norm serves
the finite check and the clipping: it is finite exactly if every gradient is and none is beyond 1.8e19, which no
step survives. If a backoff is due and S is already at its floor, the state is `stuck`: no scale will help, the run
must stop and name the tensor. S, growth, backoff, floor and ceiling are powers of two, so that scaling and
unscaling change only exponents: bit for bit what would have come without a scale, wherever nothing overflows or
underflows. A static S may be any number; then each gradient is rounded twice more, and a warning says so.

**Micro-batches.** With w_i the weight (tokens) of micro-batch i, l_i its mean loss and g_i the gradient of l_i,
the gradient of the mean over all tokens is sum_i w_i g_i / sum_i w_i. The total is known only after the last
micro-batch, and summing un-normalized losses would multiply fp16 gradients by thousands. So a backward pass sees S
alone, and weights relative to any one micro-batch r enter in the sum: a small first one does not cost S its bits.

    accumulated  G = sum_i (w_i / w_r) S g_i              in the accumulate format, fp32
    gradient       = G * inv_scale * w_r / sum_i w_i      unscaled with the S that was used

The law uses only arithmetic, comparison and `xp.where`: the same code runs on numpy, torch, jax.numpy and mlx.core
arrays, traced or not, and never reads a number from the device.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, final

from halfstep.core.errors import ScaleFloorError, ScaleStateError, ScaleValueError, ScalingError

# Array scalars of the framework in use, and its module of functions.
Scalar = Any
Namespace = Any

# Beyond these, a power of two or its inverse is not a normal fp32 number.
SMALLEST, LARGEST = 2.0**-126, 2.0**126
# A healthy fp16 run keeps its scale above this.
LOW = 1024.0


class ScaleState(NamedTuple):
    """What the law remembers between steps. Saved in checkpoints; lives on the device."""

    scale: Scalar  # fp32: multiply the next loss by this
    good_steps: Scalar  # int32: finite steps since the last change or non-finite step
    tolerance: Scalar  # int32: non-finite steps until the scale backs off
    stuck: Scalar  # bool: a backoff was due at the floor


class Verdict(NamedTuple):
    """The law's answer to one step."""

    inv_scale: Scalar  # multiply this step's gradients by this
    state: ScaleState  # for the next step


class Scale(ABC):
    """A law of scaling. Closed: NoScale, StaticScale and DynamicScale are all there are."""

    word: ClassVar[str]

    @abstractmethod
    def init(self) -> ScaleState:
        """Returns the first state as Python numbers, which a backend turns into its own scalars."""

    def judge(self, state: ScaleState, finite: Scalar, xp: Namespace) -> Verdict:
        """Returns how to unscale the step that used `state`, and the next state. `finite` is a bool scalar."""
        return Verdict(1.0 / state.scale, state)

    def owns(self, state: ScaleState) -> bool:
        """Whether a saved state, as Python numbers, can be this law's."""
        first = float(self.init().scale)
        return bool(state.tolerance == 0 and abs(state.scale - first) <= first * 2.0**-24)


@final
@dataclass(frozen=True)
class NoScale(Scale):
    """The scale is 1. Non-finite steps are still skipped, by the caller."""

    word: ClassVar[str] = "none"

    def init(self) -> ScaleState:
        return ScaleState(1.0, 0, 0, False)


@final
@dataclass(frozen=True)
class StaticScale(Scale):
    """The scale is `value`, whatever happens."""

    word: ClassVar[str] = "static"
    value: float = 65536.0

    def __post_init__(self) -> None:
        if not SMALLEST <= self.value <= LARGEST:
            raise ScaleValueError(
                f"scale value is {self.value:g}; it must be from 2^-126 to 2^126", hint="65536 is usual"
            )

    def init(self) -> ScaleState:
        return ScaleState(self.value, 0, 0, False)


def overflow_hint(where: str, rule: str = "a rule with `compute=fp32`") -> str:
    """Says what helps if gradients are not finite at the scale's floor, by the pass where it begins, if known."""
    return {
        "": f"use bf16, which needs no scale, or {rule} keeps the layers that overflow in range",
        "forward": f"no loss scale reaches the forward pass: use bf16, or {rule} keeps it in range",
        "backward": f"lower `scale=dynamic:floor=` to continue; bf16 needs no scale; {rule} keeps it in fp32",
    }.get(where, "check the batches; use bf16, which needs no scale")


def stuck_error(scale: float, cause: str = "") -> ScalingError:
    """Returns the error of a run that no scale can save; `cause` names the pass, then the tensor, if known."""
    return ScaleFloorError(
        f"gradients are not finite although the loss scale is at its floor, {scale:g}"
        + (f"; {cause}" if cause else ""),
        hint=overflow_hint(cause.partition(":")[0]),
    )


@final
@dataclass(frozen=True)
class DynamicScale(Scale):
    """The scale rises while gradients stay finite and falls when they do not."""

    word: ClassVar[str] = "dynamic"
    init_scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    floor: float = 1.0
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        _check_powers_of_two(self, "init_scale", "growth", "backoff", "floor", "ceiling")
        if not self.growth > 1:
            raise ScaleValueError(f"scale growth is {self.growth:g}; it must be above 1", hint="2 is usual")
        if not self.backoff < 1:
            raise ScaleValueError(f"scale backoff is {self.backoff:g}; it must be below 1", hint="0.5 is usual")
        if not self.floor <= self.init_scale <= self.ceiling:
            raise ScaleValueError(
                f"the scale starts at {self.init_scale:g}, outside its floor {self.floor:g} and ceiling "
                f"{self.ceiling:g}",
                hint="choose floor <= init <= ceiling",
            )
        if self.ceiling * self.growth > LARGEST or self.floor * self.backoff < SMALLEST:
            raise ScaleValueError(
                f"floor {self.floor:g} and ceiling {self.ceiling:g} leave fp32's normal range in one step",
                hint="keep floor * backoff above 2^-126 and ceiling * growth below 2^126",
            )
        for name in ("interval", "hysteresis"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ScaleValueError(f"scale {name} is {getattr(self, name)}; it must be from 1 to 2^31 - 1")

    def init(self) -> ScaleState:
        return ScaleState(self.init_scale, 0, self.hysteresis, False)

    def judge(self, state: ScaleState, finite: Scalar, xp: Namespace) -> Verdict:
        where, scale = xp.where, state.scale

        due = state.good_steps + 1 >= self.interval
        up = scale * self.growth
        grown = where(due, where(up > self.ceiling, self.ceiling, up), scale)

        spent = state.tolerance <= 1
        down = scale * self.backoff
        backed_off = where(spent, where(down < self.floor, self.floor, down), scale)

        following = ScaleState(
            scale=where(finite, grown, backed_off),
            good_steps=where(finite, where(due, 0, state.good_steps + 1), 0),
            tolerance=where(
                finite, where(due, self.hysteresis, state.tolerance), where(spent, 1, state.tolerance - 1)
            ),
            stuck=where(finite, False, spent & (scale <= self.floor)),
        )
        return Verdict(1.0 / scale, following)

    def owns(self, state: ScaleState) -> bool:
        return bool(state.tolerance >= 1)  # it never falls below; other laws have none


def saved_scale(law: Scale, given: Mapping[str, Any]) -> ScaleState | None:
    """Returns the scale in a saved state, or None if it was left out, so that the run's own stays.

    Refuses that of another law: with the 1 of an fp32 run, fp16 would lose its small gradients without a word.
    """
    if "scale.scale" not in given:
        return None
    state = ScaleState(*(given[f"scale.{field}"] for field in ScaleState._fields))
    numbers = ScaleState(float(state.scale), int(state.good_steps), int(state.tolerance), bool(state.stuck))
    if not law.owns(numbers):
        raise ScaleStateError(
            f"the state has a loss scale of {numbers.scale:g}, which `scale={law.word}` does not have: "
            "it was saved under another policy",
            hint="leave its `scale.*` entries out: then the scale starts as this policy's, and all else is loaded",
        )
    return state


class ScaleAlarm:
    """Notices a dynamic scale that is low and falling, once per fall, well before its floor stops the run."""

    def __init__(self, law: Scale):
        self._floor = law.floor if isinstance(law, DynamicScale) else 0.0
        self._low = max(LOW, 4 * self._floor) if self._floor else 0.0
        self._rang = False

    def observe(self, scale: float, *, falling: bool) -> str:
        """Takes the scale that a step used; returns what to tell the user, if anything."""
        if scale > self._low:
            self._rang = False
        if scale > self._low or self._rang or not falling:
            return ""
        self._rang = True
        return (
            f"the loss scale is {scale:g} and falling: gradients overflow fp16 again and again; at its floor, "
            f"{self._floor:g}, the run cannot continue. A lower learning rate may help, and bf16 needs no scale"
        )


LAWS: tuple[type[Scale], ...] = (NoScale, StaticScale, DynamicScale)


def is_power_of_two(value: float) -> bool:
    """Whether multiplying by the number changes only exponents."""
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


def nearest_power(value: float) -> str:
    """Returns the power of two that is nearest to a number, as text."""
    return f"{2.0 ** round(math.log2(value)):g}" if 0 < value < math.inf else "65536"


def _check_powers_of_two(law: Any, *names: str) -> None:
    assert set(names) <= {field.name for field in fields(law)}
    for name in names:
        value = getattr(law, name)
        if not is_power_of_two(value):
            raise ScaleValueError(
                f"scale {name.removesuffix('_scale')} is {value:g}, which is not a power of two: "
                "scaling and unscaling would round every gradient",
                hint=f"use a power of two, such as {nearest_power(value)}",
            )
        if not SMALLEST <= value <= LARGEST:
            raise ScaleValueError(f"scale {name.removesuffix('_scale')} is {value:g}, beyond 2^-126 to 2^126")
