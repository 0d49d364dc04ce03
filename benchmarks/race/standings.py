"""The results of a race. With t_r the seconds of a step in round r:

    speed     tokens per step / median_r t_r
    spread    (max_r t_r - min_r t_r) / median_r t_r
    share     speed x FLOPs per token / median of what an 8192^3 bf16 matmul reached in the same rounds
    memory    the largest peak of the rounds
    held_out  the mean loss, after the last round, on text that no arm has seen

A ratio of two arms is that of their medians. Ratios of one run compare; times of different days do not.
"""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.race.contract import Setting

BASELINE = "autocast"
# Fields of a setting that only tell a worker where its data is.
_PRIVATE = ("arm", "tokens", "held_out")


@dataclass(frozen=True)
class ArmResult:
    """What one arm did, or why it did not run."""

    name: str
    words: str
    ours: bool
    versions: dict[str, str] = field(default_factory=dict)
    compiled: bool = False
    ready_seconds: float = 0.0  # to start, compile and train the first steps
    seconds: tuple[float, ...] = ()  # per step, round by round
    losses: tuple[float, ...] = ()  # of every update, timed or not
    memory: int | None = None  # bytes, the peak of what the arm allocated; None if that is not counted
    held_out: float | None = None
    syncs: int | None = None  # how often a step waits for the device
    kernels: tuple[str, ...] = ()  # of attention
    profile: dict[str, float] = field(default_factory=dict)  # milliseconds of a step's kernels, longest first
    summary: str = ""
    missing: str = ""
    failed: str = ""
    hint: str | None = None

    @property
    def raced(self) -> bool:
        """Whether it was timed to the end."""
        return bool(self.seconds) and not self.failed

    @property
    def typical(self) -> float:
        """Seconds per step."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The distance of the slowest round from the fastest, over the median."""
        return (max(self.seconds) - min(self.seconds)) / self.typical


@dataclass(frozen=True)
class BenchResult:
    """The race."""

    setting: Setting
    device: str
    kind: str
    data: str
    arms: tuple[ArmResult, ...]
    ceiling: tuple[float, ...]  # FLOP/s, round by round
    rounds: int
    steps: int
    stopped: str  # why it stopped before all rounds were done, or empty

    @property
    def raced(self) -> list[ArmResult]:
        """The arms that have times, the fastest first."""
        return sorted((arm for arm in self.arms if arm.raced), key=lambda arm: arm.typical)

    @property
    def baseline(self) -> ArmResult | None:
        """What ratios compare with: the usual recipe, or the slowest arm if that did not run."""
        raced = self.raced
        return next((arm for arm in raced if arm.name == BASELINE), raced[-1] if raced else None)

    def arm(self, name: str) -> ArmResult | None:
        """Returns an arm that has times, by its name."""
        return next((arm for arm in self.arms if arm.name == name and arm.raced), None)

    def speed(self, arm: ArmResult) -> float:
        """Returns tokens per second."""
        return self.setting.tokens_per_step() / arm.typical

    def share(self, arm: ArmResult) -> float | None:
        """Returns the share of the matmul ceiling that was reached in the same run."""
        if not self.ceiling:
            return None
        return self.speed(arm) * self.setting.flops_per_token() / median(self.ceiling)

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as data."""
        setting = {key: value for key, value in asdict(self.setting).items() if key not in _PRIVATE}
        return {
            "setting": setting,
            "tokens_per_step": self.setting.tokens_per_step(),
            "flops_per_token": self.setting.flops_per_token(),
            "device": self.device,
            "data": self.data,
            "rounds": self.rounds,
            "steps": self.steps,
            "stopped": self.stopped,
            "ceiling_flops": list(self.ceiling),
            "arms": [self._arm_data(arm) for arm in self.arms],
        }

    def _arm_data(self, arm: ArmResult) -> dict[str, Any]:
        data = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(arm).items()}
        base = self.baseline
        if not arm.raced or base is None:
            return data
        return data | {
            "typical_seconds": arm.typical,
            "spread": arm.spread,
            "tokens_per_second": self.speed(arm),
            "share_of_ceiling": self.share(arm),
            "times_baseline": base.typical / arm.typical,
            "memory_of_baseline": arm.memory / base.memory if arm.memory and base.memory else None,
        }
