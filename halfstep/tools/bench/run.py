"""The race: how fast recipes train one model, in one run, and the loss they reach.

Each arm is a separate process, which holds its model and waits its turn. So its peak memory is its own, and the
arms are interleaved, one working at a time. Every arm sees the same batches from the same first weights.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfstep.core.errors import HalfstepError, did_you_mean, how_to_install
from halfstep.tools.bench.contract import ARMS, CEILING, Options, Setting
from halfstep.tools.bench.race import Race
from halfstep.tools.bench.standings import BenchResult

# The arms that the bars compare, and the strongest stock recipe.
DEFAULT_ARMS = (
    *("autocast", "casted", "accelerate", "fabric", "autocast-fp16"),
    *("halfstep", "halfstep-stock", "halfstep-fp16", "halfstep-fp8"),
)


def run(
    arms: Sequence[str] | None = None,
    *,
    seed: int = 0,
    log: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> BenchResult:
    """Races the arms as the `Options` say; `log` is called with the progress."""
    started, asked = time.monotonic(), Options(**options)
    names = checked_arms(arms)
    _check(asked)
    if find_spec("torch") is None:
        raise HalfstepError("torch is not installed", hint=how_to_install("torch"))
    width, seconds = asked.width, asked.seconds
    heads = max(1, width // 64)
    own: dict[str, Any] = {"arm": CEILING, "heads": heads, "seed": seed, "tokens": "", "held_out": ""}
    shared = {field.name: getattr(asked, field.name) for field in fields(Setting) if field.name not in own}
    setting = Setting(**own, **shared)
    if width % heads:
        raise HalfstepError(f"the width is {width}; it must be a multiple of 64, or below 128")
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        deadline = None if seconds is None else started + seconds
        race = Race(names, setting, Path(folder), asked.rounds, asked.steps, deadline, log, asked.at_once)
        try:
            return race.run(asked.source)
        finally:
            race.close()


def checked_arms(arms: Sequence[str] | None) -> list[str]:
    """Returns the names of arms, each once; refuses unknown names."""
    names = list(dict.fromkeys(arms)) if arms else list(DEFAULT_ARMS)
    for name in names:
        if name not in ARMS:
            raise HalfstepError(f"unknown arm `{name}`; arms are {', '.join(ARMS)}", hint=did_you_mean(name, ARMS))
    return names


def _check(asked: Options) -> None:
    for name in ("micro_batches", "rounds", "steps", "at_once", "layers", "width", "context", "batch"):
        if getattr(asked, name) < 1:
            raise HalfstepError(f"`{name.replace('_', '-')}` is {getattr(asked, name)}; it must be 1 or more")
    if asked.seconds is not None and not 0 < asked.seconds <= 86400:
        raise HalfstepError(f"the limit is {asked.seconds:g} seconds; it must be above 0 and at most 86400")
    if not 256 <= asked.vocabulary <= 65536:
        raise HalfstepError(f"the vocabulary is {asked.vocabulary}; it must be from 256, the bytes, to 65536")
