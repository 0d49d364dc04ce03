"""Chooses a precision from measurements, with the reason.

"Supported" in a data sheet means that an instruction exists, not that it pays: some devices claim bf16 and run it
hundreds of times slower than fp32. So the same work is timed in each format at the same shapes (a matmul, or a
block of the model forward and backward):

    gain(format) = fastest time in fp32 / fastest time in the format,   at the largest shape both were timed at

Other work of the machine only ever adds time, so the fastest of several turns is the best estimate. It is still
wrong if every turn of fp32 was disturbed. So a format pays only if both had ROUNDS turns, and if the format's
median, too, is ahead of the fastest fp32.

bf16 is chosen if it pays, by at least MIN_GAIN. fp16 is chosen if bf16 does not pay and fp16 does, or if fp16 is
faster than bf16 by FP16_MARGIN, to be worth its scale and skipped steps. Otherwise fp32. fp8 is never chosen here:
whether it pays depends on each layer, which is measured when a model is prepared (layers.py).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from halfstep.core.formats import BF16, FP16, FP32, Format

# Matmuls are about 0.6 of a step's time on a fast accelerator, less elsewhere, and timings on a busy machine
# vary by 5 %: a smaller gain makes no difference to a run.
MIN_GAIN = 1.1
FP16_MARGIN = 1.25
ROUNDS = 9

Shape = tuple[int, int, int]
Work = Literal["matmuls", "training steps of a block"]


@dataclass(frozen=True)
class Support:
    """Whether a device runs a format, and why (not)."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Timing:
    """The seconds that work of shape (m, k) by (k, n) took in a format, several times."""

    format: Format
    shape: Shape
    seconds: tuple[float, ...]
    work: Work = "matmuls"

    @property
    def typical(self) -> float:
        """The median: one slow repeat on a shared machine does not move it."""
        return median(self.seconds)

    @property
    def flops(self) -> float:
        """Floating-point operations per second, of matmuls."""
        return self._operations / self.typical

    @property
    def peak(self) -> float:
        """The same of the fastest repeat: what the device can do while nothing else slows it."""
        return self._operations / min(self.seconds)

    @property
    def _operations(self) -> int:
        assert self.work == "matmuls"
        m, k, n = self.shape
        return 2 * m * k * n


@dataclass(frozen=True)
class Gain:
    """How much faster (above 1) or slower (below) a format is than fp32."""

    format: Format
    shape: Shape
    fp32_seconds: float
    seconds: float
    work: Work = "matmuls"
    cut_short: bool = False  # fp32 was timed at a larger shape, which this format was too slow for
    typical: float = 0.0  # the median in the format; `seconds` is the fastest
    rounds: int = ROUNDS  # how often both were timed

    @property
    def ratio(self) -> float:
        """Time in fp32 over time in the format."""
        return self.fp32_seconds / self.seconds

    @property
    def pays(self) -> bool:
        """Whether it is worth leaving fp32 for, however busy the machine was."""
        return self.rounds >= ROUNDS and self.least >= MIN_GAIN

    @property
    def least(self) -> float:
        """The ratio by the format's median time, where `ratio` takes its fastest."""
        return self.fp32_seconds / max(self.typical, self.seconds)

    def __str__(self) -> str:
        speed = f"{self.ratio:.3g}x faster" if self.ratio >= 1 else f"{1 / self.ratio:.3g}x slower"
        if self.cut_short and self.ratio < 1:
            speed = f"at least {speed}"
        m, k, n = self.shape
        times = f"{_time(self.seconds)} against {_time(self.fp32_seconds)}"
        return f"{self.format} {self.work} are {speed} than fp32 ({times} at {m}x{k}x{n})"


@dataclass(frozen=True)
class Choice:
    """A preset, why it was chosen, and the gains that were compared."""

    preset: str
    reason: str
    gains: tuple[Gain, ...] = ()

    def __str__(self) -> str:
        return f"{self.preset}: {self.reason}"


def gain(timings: Iterable[Timing], fmt: Format) -> Gain | None:
    """Returns the gain at the largest shape that both were timed at, if any; a block counts before a matmul."""
    by_key = {(timing.format, timing.work, timing.shape): timing for timing in timings}
    common = [key for key in by_key if key[0] == fmt and (FP32, *key[1:]) in by_key]
    if not common:
        return None
    _, work, shape = max(common, key=lambda key: (key[1] != "matmuls", math.prod(key[2])))
    cut_short = any(key[:2] == (FP32, work) and math.prod(key[2]) > math.prod(shape) for key in by_key)
    fp32, ours = by_key[FP32, work, shape], by_key[fmt, work, shape]
    rounds = min(len(fp32.seconds), len(ours.seconds))
    return Gain(fmt, shape, min(fp32.seconds), min(ours.seconds), work, cut_short, ours.typical, rounds)


def choose(timings: Sequence[Timing], supported: Mapping[Format, Support]) -> Choice:
    """Returns the preset to train with on the device that was timed."""
    gains = {fmt: gain(timings, fmt) for fmt in (BF16, FP16) if supported.get(fmt, _UNKNOWN)}
    known = tuple(known for known in gains.values() if known is not None)
    bf16, fp16 = gains.get(BF16), gains.get(FP16)

    if fp16 is not None and fp16.pays:
        if bf16 is None or not bf16.pays:
            return Choice("fp16-mixed", f"{fp16}, and {_why_not(BF16, bf16, supported)}", known)
        if fp16.least >= FP16_MARGIN * bf16.ratio:
            return Choice("fp16-mixed", f"{fp16}, more than {FP16_MARGIN}x ahead: {bf16}", known)
    if bf16 is not None and bf16.pays:
        return Choice("bf16-mixed", f"{bf16}, and bf16 has fp32's range, so no loss scale is needed", known)
    lost = [_why_not(fmt, gains.get(fmt), supported) for fmt in (BF16, FP16)]
    return Choice("fp32", f"{lost[0]}; {lost[1]}", known)


_UNKNOWN = Support(False, "nothing is known about it on this device")


def _why_not(fmt: Format, measured: Gain | None, supported: Mapping[Format, Support]) -> str:
    if measured is not None:
        return f"{measured}{_doubt(measured)}"
    support = supported.get(fmt, _UNKNOWN)
    return f"{fmt} was not timed" if support else f"{fmt} is not supported: {support.reason}"


def _doubt(measured: Gain) -> str:
    if measured.ratio < 1:
        return ""
    if measured.ratio < MIN_GAIN:
        return f", short of the {MIN_GAIN}x that pays for its casts"
    if measured.rounds < ROUNDS:
        return f", but there was time for {measured.rounds} of the {ROUNDS} turns that prove it"
    return ", but only in its fastest turns: other work disturbed the timing"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
