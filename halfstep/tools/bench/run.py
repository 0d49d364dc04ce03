"""The race: how fast recipes train one model, in one run, and the loss they reach.

Each arm is a separate process, which holds its model and waits its turn. So its peak memory is its own, and the
arms are interleaved, one working at a time. Every arm sees the same batches from the same first weights.

    contract    what this side and the workers agree on
    arms/       the recipes, the model they train, and the process of one arm
    workers     processes that answer requests
    race        the turns
    standings   the results: speed, spread, share of the matmul ceiling, memory, held-out loss
    bars        what halfstep promises of the ratios
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from halfstep.core.errors import HalfstepError, did_you_mean
from halfstep.tools.bench.contract import ARMS, CEILING, Setting
from halfstep.tools.bench.race import Race
from halfstep.tools.bench.standings import BenchResult

# The arms that the bars compare, and the strongest stock recipe.
DEFAULT_ARMS = (
    "autocast",
    "casted",
    "accelerate",
    "fabric",
    "autocast-fp16",
    "halfstep",
    "halfstep-stock",
    "halfstep-fp16",
    "halfstep-fp8",
)


def run(
    arms: Sequence[str] | None = None,
    *,
    micro_batches: int = 1,
    rounds: int = 6,
    steps: int = 10,
    layers: int = 12,
    width: int = 768,
    context: int = 1024,
    batch: int = 32,
    vocabulary: int = 50304,
    device: str | None = None,
    compile: bool | None = None,
    source: str = "stdlib",
    seconds: float | None = None,
    seed: int = 0,
    at_once: int = 4,
    log: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Races the arms, in at most `seconds` if given; `log` is called with the progress.

    `at_once` arms start and compile at the same time, and each then holds the memory of a step.
    """
    started = time.monotonic()
    names = checked_arms(arms)
    counts = {"micro_batches": micro_batches, "rounds": rounds, "steps": steps, "at_once": at_once}
    _check(counts | {"layers": layers, "width": width, "context": context, "batch": batch}, seconds, vocabulary)
    if find_spec("torch") is None:
        raise HalfstepError("torch is not installed", hint="pip install 'halfstep[torch]'")
    setting = Setting(
        arm=CEILING,
        device=device,
        layers=layers,
        width=width,
        heads=max(1, width // 64),
        vocabulary=vocabulary,
        context=context,
        batch=batch,
        micro_batches=micro_batches,
        compile=compile,
        seed=seed,
        tokens="",
        held_out="",
    )
    if width % setting.heads:
        raise HalfstepError(f"the width is {width}; it must be a multiple of 64, or below 128")
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        deadline = None if seconds is None else started + seconds
        race = Race(names, setting, Path(folder), rounds, steps, deadline, log, at_once)
        try:
            return race.run(source)
        finally:
            race.close()


def checked_arms(arms: Sequence[str] | None) -> list[str]:
    """Returns the names of arms, each once; refuses unknown names."""
    names = list(dict.fromkeys(arms)) if arms else list(DEFAULT_ARMS)
    for name in names:
        if name not in ARMS:
            raise HalfstepError(f"unknown arm `{name}`; arms are {', '.join(ARMS)}", hint=did_you_mean(name, ARMS))
    return names


def _check(counts: dict[str, int], seconds: float | None, vocabulary: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise HalfstepError(f"`{name.replace('_', '-')}` is {value}; it must be 1 or more")
    if seconds is not None and not 0 < seconds <= 86400:
        raise HalfstepError(f"the limit is {seconds:g} seconds; it must be above 0 and at most 86400")
    if not 256 <= vocabulary <= 65536:
        raise HalfstepError(f"the vocabulary is {vocabulary}; it must be from 256, the bytes, to 65536")
