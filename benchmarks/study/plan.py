"""Reads `plan.toml`: the registered rows, and how each of their runs is trained."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.race.seeds import LIBRARIES, Setting

PLAN = Path(__file__).with_name("plan.toml")
# What `--try` trains instead: a minute on a CPU, and no result.
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 256, "batch": 2, "steps": 30}
TINY |= {"held_out": 4, "device": "cpu"}


@dataclass(frozen=True)
class Arm:
    """What is trained: a policy or a library's recipe, and what it costs."""

    policy: str
    seconds: float  # of one run at 124M
    compile: float = 30.0
    memory: str = "fast"
    optimizer: str = "adamw"
    fewer: float = 0.0  # the share of steps that is left out
    nudge: int = 0
    rounded: bool = False


@dataclass(frozen=True)
class Row:
    """One question: does an arm learn what its reference learns?"""

    name: str
    title: str
    arm: str
    against: str
    size: str
    margin: str  # a share of the reference's loss, or of what the reference gains
    pairs: tuple[int, ...]  # at which it is judged
    metric: str = "held_out"  # of averaged weights; held_out_last: of the last ones
    paired: bool = True
    seeds: tuple[int, ...] = ()  # if they are not the first ones

    @property
    def tier(self) -> str:
        """The family of rows whose number is corrected for."""
        return self.name[0]

    @property
    def share(self) -> float:
        """The margin as a share, and of what `margin` says."""
        return float(self.margin.partition("%")[0]) / 100

    def seeds_of(self, pairs: int) -> tuple[int, ...]:
        """Returns the seeds of that many pairs."""
        return self.seeds or tuple(range(pairs))


@dataclass(frozen=True)
class Plan:
    """All that was registered."""

    rows: tuple[Row, ...]
    arms: dict[str, Arm]
    sizes: dict[str, dict[str, Any]]
    times: dict[str, float]
    texts: dict[str, dict[str, str]]
    base: dict[str, str]
    is_try: bool = False

    def choose(self, names: Sequence[str]) -> list[Row]:
        """Returns the rows of some names or tiers, in registered order; all of them without names."""
        known = {row.name for row in self.rows} | {row.tier for row in self.rows}
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(
                f"there is no row `{unknown[0]}`; the rows are {', '.join(r.name for r in self.rows)}"
            )
        return [row for row in self.rows if not names or {row.name, row.tier} & {*names}]

    def setting(self, size: str, arm: str, device: str = "cuda", base: str = "") -> Setting:
        """Returns how the runs of an arm are trained."""
        given, chosen = {**self.sizes[size]}, self.arms[arm]
        given |= {"device": device} | (TINY if self.is_try else {})
        given["steps"] = round(given["steps"] * (1 - chosen.fewer))
        given["init"] = base if given.pop("init", False) else ""
        del given["text"]
        own = {name: getattr(chosen, name) for name in ("memory", "optimizer", "nudge", "rounded")}
        return Setting(**given, **own)

    def policy(self, arm: str, device: str) -> str:
        """Returns the policy of an arm; emulated on a CPU, which has few of the formats."""
        policy = self.arms[arm].policy
        emulated = device == "cpu" and policy != "fp32" and policy not in LIBRARIES
        return f"{policy},emulate=true" if emulated else policy

    def seconds(self, size: str, arm: str, runs: int) -> float:
        """Returns what that many runs of an arm cost on one H200."""
        return runs * self.arms[arm].seconds * self.times[size] + (self.arms[arm].compile if runs else 0.0)

    def cost(self, row: Row, pairs: int = 0) -> float:
        """Returns what a row costs if nothing of it is there; by default up to its first look."""
        return sum(self.seconds(row.size, arm, pairs or row.pairs[0]) for arm in (row.arm, row.against))


def read_plan(*, is_try: bool = False) -> Plan:
    """Returns the plan; `is_try` makes everything tiny, only to show that it runs."""
    given = tomllib.loads(PLAN.read_text(encoding="utf-8"))
    sizes: dict[str, dict[str, Any]] = {}
    for name, size in given["size"].items():
        sizes[name] = {**sizes[size.pop("like")], **size} if "like" in size else size
    rows = [row for table in given["row"] for row in _expand(table)]
    if is_try:
        rows = [replace(row, pairs=(2,), seeds=row.seeds[:2]) for row in rows]
    arms = {name: Arm(**arm) for name, arm in given["arm"].items()}
    return Plan(tuple(rows), arms, sizes, given["times"], given["text"], given["base"], is_try)


def _expand(table: dict[str, Any]) -> list[Row]:
    """Returns the rows of a table: several if it names `arms`, each two of which are compared."""
    pairs = tuple(table.pop("pairs"))
    if "arms" not in table:
        return [Row(**table, pairs=pairs)]
    arms, halves, name = table.pop("arms"), table.pop("halves"), table.pop("name")
    both = [(two, half) for half in halves for two in combinations(arms, 2)]
    return [
        Row(**table, name=f"{name}{i}", arm=arm, against=against, pairs=pairs, seeds=tuple(half))
        for i, ((against, arm), half) in enumerate(both, 1)
    ]
