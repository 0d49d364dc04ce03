"""What a race must show: bounds on the speed and the peak memory of our arms over theirs.

The bars hold for a GPT-2 of 124 million parameters on one NVIDIA GPU; those of fp8 also for a width of WIDE and
more, where fp8 must be faster and not only as fast. For another size or device they are refused. A bar whose two
arms did not both run is not checked, and says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.race.standings import BenchResult
from halfstep.core.errors import OptionError

GPT2 = {"layers": 12, "width": 768, "context": 1024, "vocabulary": 50304}
# From this width on a model counts as wide: with 24 layers it has 1.3 billion parameters.
WIDE = 2048


@dataclass(frozen=True)
class Bar:
    """A bound on the ratio of two arms."""

    ours: str
    theirs: str
    what: Literal["speed", "memory"]
    bound: float
    only_at: int | None = None  # the number of micro-batches it holds for; None: any
    wide: bool = False  # it holds for wide models, and not for GPT-2

    def __str__(self) -> str:
        sign = "at least" if self.what == "speed" else "at most"
        return f"{self.what} of {self.ours} over {self.theirs}, {sign} {self.bound:g}"


BARS = (
    Bar("halfstep", "autocast", "speed", 1.04),
    Bar("halfstep-stock", "autocast", "speed", 1.02, only_at=1),
    Bar("halfstep", "autocast", "memory", 0.92, only_at=1),
    Bar("halfstep-stock", "autocast", "memory", 0.92, only_at=1),
    Bar("halfstep-fp16", "autocast-fp16", "speed", 1.0),
    Bar("halfstep-fp8", "halfstep", "speed", 1.0),
    Bar("halfstep-fp8", "halfstep", "speed", 1.15, wide=True),
    *(
        Bar(ours, peer, "speed", 1.0)
        for peer in ("accelerate", "fabric")
        for ours in ("halfstep", "halfstep-stock")
    ),
)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a bar: `reached` is None if it could not be checked, for the reason in `why`."""

    bar: Bar
    ratio: float | None = None
    reached: bool | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as data."""
        return {"bar": str(self.bar), "ratio": self.ratio, "reached": self.reached, "why": self.why}


def check_applicable(arms: Sequence[str], device: str | None, sizes: dict[str, int]) -> None:
    """Refuses a race to which no bar applies, before it runs."""
    wide = sizes["width"] >= WIDE
    for name, value in GPT2.items():
        if sizes[name] != value and not wide:
            raise OptionError(
                f"the bars are for GPT-2 124M, whose {name} is {value}, and it is {sizes[name]} here",
                hint=f"leave --bars out, or the sizes; those of fp8 are also for a width of {WIDE} and more",
            )
    if device is not None and device.partition(":")[0] != "cuda":
        raise OptionError(
            f"the bars are for one NVIDIA GPU, and the device is `{device}`", hint="leave --bars out"
        )
    bars = [bar for bar in BARS if bar.wide == wide]
    if not any(bar.ours in arms and bar.theirs in arms for bar in bars):
        raise OptionError(
            f"no bar compares any two of {', '.join(arms)}" + (f" at a width of {WIDE}" if wide else ""),
            hint="leave --arms out: the default has them all",
        )


def judge(result: BenchResult) -> tuple[Verdict, ...]:
    """Returns the verdict on each bar that compares two arms of the race."""
    entered = {arm.name for arm in result.arms}
    return tuple(
        _judge(bar, result)
        for bar in BARS
        if bar.wide == (result.setting.width >= WIDE)
        and {bar.ours, bar.theirs} <= entered
        and bar.only_at in (None, result.setting.micro_batches)
    )


def _judge(bar: Bar, result: BenchResult) -> Verdict:
    ours, theirs = result.arm(bar.ours), result.arm(bar.theirs)
    if ours is None or theirs is None:
        absent = next(arm for arm in result.arms if arm.name in (bar.ours, bar.theirs) and not arm.raced)
        return Verdict(bar, why=f"{absent.name}: {absent.missing or absent.failed or 'it was not timed'}")
    if bar.what == "speed":
        ratio = theirs.typical / ours.typical
        return Verdict(bar, ratio, ratio >= bar.bound)
    if not ours.memory or not theirs.memory:
        return Verdict(bar, why="memory is not counted on this device")
    ratio = ours.memory / theirs.memory
    return Verdict(bar, ratio, ratio <= bar.bound)
