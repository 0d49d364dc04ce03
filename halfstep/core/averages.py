"""Exponential moving averages in fp32: average <- average + (1 - decay) (master - average), if applied."""

from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeVar

from halfstep.core.errors import ArgumentError, StateError

T = TypeVar("T")

PREFIX = "average."  # before the name of a parameter in a state: the average of its master


def check_decay(decay: float) -> None:
    """Refuses the decay of an average that averages nothing, or forgets nothing."""
    if not isinstance(decay, Real) or not 0.0 < decay < 1.0:
        raise ArgumentError(
            f"ema={decay!r}: the decay of an average is between 0 and 1",
            hint="0.999 averages over about a thousand updates; omit it to keep no average",
        )


def move_averages(averages: Mapping[str, Any], masters: Mapping[str, Any], share: Any) -> dict[str, Any]:
    """Moves fp32 averages toward fp32 masters; `share` is 1 - decay, or 0 where the update was skipped."""
    return {name: a + share * (masters[name] - a) for name, a in averages.items()}


def to_state(averages: Mapping[str, T] | None) -> dict[str, T]:
    """Returns the averages by their names in a state."""
    return {f"{PREFIX}{name}": average for name, average in (averages or {}).items()}


def pop_from_state(state: dict[str, T], ours: Mapping[str, object] | None) -> dict[str, T]:
    """Removes the averages from a state and returns them; refuses those of a run with other averages."""
    given = {name.removeprefix(PREFIX): state.pop(name) for name in [*state] if name.startswith(PREFIX)}
    if given.keys() != (ours or {}).keys():
        have, has = ("averages", "none") if given else ("no averages", "some")
        raise StateError(
            f"the checkpoint holds {have} of the weights, and the run keeps {has}",
            hint="resume with the training.ema it was saved with",
        )
    return given
