"""Memory that is not enough: said before the model is made where that can be known, and told with the way out.

What a run holds at the least is known beforehand: the weights, and to train them a gradient and moments of each,
all in the narrowest formats that the policy names. Activations come on top, and their size is not known before.

A backend (`halfstep.<backend>.memory`) says how much its device has, and which errors mean that it was not enough.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from halfstep.config.run import RunConfig
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import Format
from halfstep.core.policy import Policy
from halfstep.core.roles import Param
from halfstep.training.telemetry.progress import in_bytes

# How many moments an optimizer keeps of a weight, at the least: Muon has one of matrices, and two of the rest.
_MOMENTS = {"adamw": 2, "muon": 1}


class OutOfMemoryError(HalfstepError):
    """A device whose memory does not hold what is asked of it."""


def least_bytes(config: RunConfig, policy: Policy, *, train: bool) -> int:
    """What a run holds at the least, activations left out."""
    bits = _bits(policy, "param")
    if train:
        bits += min(_bits(policy, "grad_weight"), _bits(policy, "accumulate"))
        bits += _MOMENTS[config.optimizer.name] * _bits(policy, "moments")
    return config.model.num_parameters * bits // 8


def check_fits(config: RunConfig, policy: Policy, capacity: int | None, *, train: bool) -> None:
    """Refuses a model that a device of this many bytes cannot hold, before it is made."""
    least = least_bytes(config, policy, train=train)
    if capacity is not None and least > capacity:
        holds = "weights, gradients and moments" if train else "weights"
        raise OutOfMemoryError(
            f"the model has {config.model.num_parameters:,} parameters, whose {holds} take {in_bytes(least)}, "
            f"and the device has {in_bytes(capacity)}",
            hint="a smaller model fits: model.layers, model.width, model.vocabulary"
            if train
            else "name a device that has more by --device; `cpu` is always there",
        )


@contextmanager
def told(ran_out: Callable[[BaseException], bool], error: Callable[[], HalfstepError]) -> Iterator[None]:
    """Inside, what a framework raises where memory is not enough becomes an error that says what to do."""
    try:
        yield
    except HalfstepError:
        raise
    except Exception as raised:
        if ran_out(raised):
            raise error() from raised
        raise


def in_training(
    config: RunConfig, step: int, held: int, capacity: int | None, saved: int | None
) -> OutOfMemoryError:
    """Where a step did not fit."""
    has = "" if capacity is None else f" of {in_bytes(capacity)}"
    resume = "" if saved is None else f"; with --resume it goes on after step {saved}"
    return OutOfMemoryError(
        f"the device ran out of memory after step {step}: {in_bytes(held)}{has} were held",
        hint=f"{' or '.join(_ways(config))}{resume}",
    )


def in_scoring(config: RunConfig) -> OutOfMemoryError:
    """Where held-out text did not fit."""
    return OutOfMemoryError(
        f"the device ran out of memory scoring {config.training.batch} sequences at once",
        hint="name a device that has more by --device; `cpu` is always there",
    )


def in_making(config: RunConfig, capacity: int | None) -> OutOfMemoryError:
    """Where the model itself did not fit."""
    has = "" if capacity is None else f", which has {in_bytes(capacity)}"
    return OutOfMemoryError(
        f"the device{has}, ran out of memory while {config.model.num_parameters:,} parameters were put there",
        hint="somebody else may use it; a smaller model fits",
    )


def _ways(config: RunConfig) -> list[str]:
    """What takes less memory and learns from the same data."""
    training = config.training
    ways = []
    if training.batch > 1:
        least = next(divisor for divisor in range(2, training.batch + 1) if training.batch % divisor == 0)
        smaller, more = training.batch // least, training.micro_batches * least
        ways.append(
            f"`--set training.batch={smaller} --set training.micro_batches={more}` makes updates of the same data"
        )
    if not training.recompute_blocks:
        ways.append("`--set training.recompute_blocks=true` keeps fewer activations")
    return ways or ["a shorter model.context or a smaller model fits"]


def _bits(policy: Policy, role: str) -> int:
    """Of the narrowest format that a role has anywhere."""
    said: list[Any] = [getattr(policy, role)]
    said += [value for rule in policy.rules for name, value in rule.changes if name == role]
    return min(_format(value).bits for value in said)


def _format(value: Format | Param) -> Format:
    return value.format if isinstance(value, Param) else value
