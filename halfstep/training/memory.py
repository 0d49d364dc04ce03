"""Running out of memory: refused before the model is built if possible, and reported with a remedy.

The least that a run holds is known beforehand: the weights, and to train them a gradient and moments of each, all
in the narrowest formats that the policy names. Activations come on top. `halfstep.<backend>.memory` knows how much
its device has, and which errors mean that it was not enough.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from halfstep.config.reading import fits_in_memory
from halfstep.config.run import RunConfig
from halfstep.core.errors import HalfstepError
from halfstep.core.host import format_bytes
from halfstep.core.policy import Policy
from halfstep.core.roles import Param

# The fewest moments an optimizer keeps of a weight: Muon has one of matrices, and two of the rest.
_MOMENTS = {"adamw": 2, "muon": 1}
_SMALLER = (
    "a smaller model fits: model.layers, model.width, model.vocabulary; docs/many_gpus.md says how GPUs share one"
)
_OTHER_DEVICE = "choose a device with more memory with --device; `cpu` always works"


class OutOfMemoryError(HalfstepError):
    """A device without enough memory."""


def least_bytes(config: RunConfig, policy: Policy, *, train: bool, shards: int = 1) -> int:
    """Returns the fewest bytes that a device must hold, without activations; weights are whole until sharded."""
    bits = whole = _bits(policy, "param")
    if train:
        bits += min(_bits(policy, "grad_weight"), _bits(policy, "accumulate"))
        bits += _MOMENTS[config.optimizer.name] * _bits(policy, "moments")
    return config.model.num_parameters * max(whole, bits // shards) // 8


def check_fits(config: RunConfig, policy: Policy, capacity: int | None, *, train: bool, shards: int = 1) -> None:
    """Refuses a model or batches that a device of this many bytes cannot hold, before either is made."""
    least = least_bytes(config, policy, train=train, shards=shards)
    if capacity is not None and least > capacity:
        holds = "weights, gradients and moments" if train else "weights"
        holds = f"share of {holds} takes" if shards > 1 else f"{holds} take"
        raise OutOfMemoryError(
            f"the model has {config.model.num_parameters:,} parameters, whose {holds} {format_bytes(least)}, "
            f"and the device has {format_bytes(capacity)}",
            hint=_SMALLER if train else _OTHER_DEVICE,
        )
    tokens = config.training.batch * (config.training.micro_batches if train else 1) * config.model.context
    held = config.training.batch * config.model.context * config.model.width  # embedded, a byte each or more
    if not fits_in_memory(4 * tokens) or (capacity is not None and held > capacity):
        raise OutOfMemoryError(
            f"an update reads {tokens:,} tokens, and memory cannot hold what is computed from them",
            hint="lower training.batch, training.micro_batches or model.context",
        )


@contextmanager
def convert_oom(
    is_out_of_memory: Callable[[BaseException], bool], error: Callable[[], HalfstepError]
) -> Iterator[None]:
    """Turns a framework's out-of-memory error in the block into one that says what to do."""
    try:
        yield
    except HalfstepError:
        raise
    except Exception as raised:
        if is_out_of_memory(raised):
            raise error() from raised
        raise


def oom_while_training(
    config: RunConfig, step: int, held: int, capacity: int | None, saved: int | None
) -> OutOfMemoryError:
    """Returns the error of a step that did not fit."""
    has = "" if capacity is None else f" of {format_bytes(capacity)}"
    resume = "" if saved is None else f"; --resume continues after step {saved}"
    return OutOfMemoryError(
        f"the device ran out of memory after step {step}: {format_bytes(held)}{has} were held",
        hint=f"{' or '.join(_remedies(config))}{resume}",
    )


def oom_while_scoring(config: RunConfig) -> OutOfMemoryError:
    """Returns the error of held-out text that did not fit."""
    return OutOfMemoryError(
        f"the device ran out of memory scoring {config.training.batch} sequences at once", hint=_OTHER_DEVICE
    )


def oom_while_building(config: RunConfig, capacity: int | None) -> OutOfMemoryError:
    """Returns the error of a model that did not fit."""
    has = "" if capacity is None else f", which has {format_bytes(capacity)}"
    return OutOfMemoryError(
        f"the device{has}, ran out of memory while it received {config.model.num_parameters:,} parameters",
        hint="another process may be using it; a smaller model fits",
    )


def _remedies(config: RunConfig) -> list[str]:
    training = config.training
    ways = []
    if training.batch > 1:
        least = next(divisor for divisor in range(2, training.batch + 1) if training.batch % divisor == 0)
        smaller, more = training.batch // least, training.micro_batches * least
        ways.append(
            f"`--set training.batch={smaller} --set training.micro_batches={more}` makes updates of the same data"
        )
    if not training.recompute_blocks:
        if training.memory == "fast" and config.backend != "mlx":
            ways.append("`--set training.memory=lean` keeps fewer activations, at a few percent of the time")
        ways.append("`--set training.recompute_blocks=true` keeps the fewest")
    return ways or ["a shorter model.context or a smaller model fits"]


def _bits(policy: Policy, role: str) -> int:
    values: list[Any] = [getattr(policy, role)]
    values += [value for rule in policy.rules for name, value in rule.changes if name == role]
    return min((value.format if isinstance(value, Param) else value).bits for value in values)
