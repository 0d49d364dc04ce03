"""The losses that a comparison needs, as our own runs have recorded them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.config.schema import check
from halfstep.core.compare.divergence import Series
from halfstep.core.compare.gaps import CompareInputError
from halfstep.training.paths import EVENTS
from halfstep.training.run.signals import SIGNALS
from halfstep.training.telemetry.events import stream_events

LOSS, HELD_OUT, GRADIENT = "loss", "held-out loss", "gradient norm"
PARTING = (LOSS, GRADIENT)  # how the names of those series begin in which curves may part
ASKED = {"stopped", *(number.name for number in SIGNALS)}  # reasons to stop that say nothing about the training


# What is read of a run's settings.
_CONFIG: dict[str, Any] = {"seed": int, "model": Mapping[str, Any]}


@dataclass(frozen=True)
class Curve:
    """One run: its losses, and what it took. What its record does not say is None."""

    name: str
    seed: int | None
    series: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]  # steps and values; norms as logarithms
    held_out: float | None  # the loss at the last step; infinite if the run diverged
    step: int  # the last
    finished: bool = True
    tokens_per_second: float | None = None
    memory: int | None = None  # the peak, in bytes
    about: Mapping[str, Any] = field(default_factory=dict)  # its `start` event
    problem: str = ""  # why it diverged
    notes: tuple[str, ...] = ()  # on its log


def read_run(folder: Path) -> Curve:
    """Returns what the run in a folder has recorded."""
    start: dict[str, Any] = {}
    end: dict[str, Any] = {}
    layers: list[str] = []
    series: dict[str, dict[int, float]] = {LOSS: {}, HELD_OUT: {}, GRADIENT: {}}
    for event in stream_events(folder / EVENTS):
        kind = event["event"]
        if kind == "start":
            check(_CONFIG, event["config"])
            start, end = event, {}
        elif kind == "step":
            series[LOSS][event["step"]] = _number(event["loss"])
            series[GRADIENT][event["step"]] = _log(event["grad_norm"])
        elif kind == "monitor":
            layers = [layer["name"] for layer in event["layers"]]
        elif kind == "layers":
            for name, norm in zip(layers, event["weight"].get("gradient_norm", ()), strict=False):
                series.setdefault(f"{GRADIENT} of {name}", {})[event["step"]] = _log(norm)
        elif kind == "validation":
            series[HELD_OUT][event["step"]] = _number(event["loss"])
        elif kind in ("stop", "end"):
            end = event
    if not start or not series[LOSS]:
        raise CompareInputError(
            f"`{folder}` has recorded no step", hint="let the run train first, or name another folder"
        )
    last = max(series[LOSS])
    failed = end.get("event") == "stop" and end.get("reason") not in ASKED
    held_out = math.inf if failed else series[HELD_OUT].get(last)
    return Curve(
        str(folder),
        (start.get("config") or {}).get("seed"),
        {name: as_arrays(values) for name, values in series.items() if any(map(math.isfinite, values.values()))},
        math.inf if held_out is not None and not math.isfinite(held_out) else held_out,
        last,
        end.get("event") == "end",
        end.get("tokens_per_second"),
        end.get("memory"),
        start,
        str(end["reason"]) if failed else "",
    )


def as_arrays(values: Mapping[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns steps and their values in the order of the steps: a resumed run has recorded some twice."""
    steps = sorted(values)
    return np.array(steps, dtype=np.int64), np.array([values[step] for step in steps])


def stack_runs(curves: Sequence[Curve], steps: Mapping[str, NDArray[np.int64]]) -> dict[str, Series]:
    """Returns several runs as series with a row for each, at steps that all of them have."""
    found = {}
    for name, wanted in steps.items():
        runs = (curve.series[name] for curve in curves)
        rows = np.array([values[np.searchsorted(at, wanted)] for at, values in runs])
        # The gradients of all layers are of one kind.
        found[name] = Series(wanted, rows, name if name in (LOSS, GRADIENT) else "layers")
    return found


def common_steps(curves: Sequence[Curve]) -> dict[str, NDArray[np.int64]]:
    """Returns for each number that all runs have recorded the steps at which all of them did."""
    shared = set.intersection(*(set(curve.series) for curve in curves))
    found = {}
    for name in sorted(shared, key=lambda name: (name != LOSS, name != HELD_OUT, name != GRADIENT, name)):
        steps = curves[0].series[name][0]
        for curve in curves[1:]:
            steps = np.intersect1d(steps, curve.series[name][0])
        if steps.size:
            found[name] = steps
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _log(norm: float | None) -> float:
    """Returns the logarithm of a norm: seeds multiply it, so that its spread is a factor."""
    return math.log(norm) if norm is not None and 0 < norm < math.inf else math.nan
