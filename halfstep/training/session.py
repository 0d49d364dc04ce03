"""What a backend offers the training loop, and how to open it.

Each of halfstep.torch, .jax and .mlx has a `session` module with a `Session` class of this shape and a `version`.
It takes tokens as numpy arrays and gives numbers; nothing above it knows a framework.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halfstep.config.run import RunConfig
from halfstep.config.weights import Weights
from halfstep.core.devices import Device
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.core.stored import Stored
from halfstep.training.schedule import factor

Tokens = NDArray[np.int32]


class Session(Protocol):
    """One run on one backend."""

    policy: Policy

    @property
    def description(self) -> Device:
        """The hardware."""

    @property
    def asynchronous(self) -> bool:
        """Whether `step` returns before the step is done."""

    def step(self, micro_batches: Tokens) -> Any:
        """Launches one update and returns its result, unread."""

    def read(self, result: Any) -> dict[str, float]:
        """A result's loss, grad_norm, scale and skipped (0 or 1); raises if the run cannot go on."""

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """The sum of losses, and the number of tokens."""

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What the model expects after the tokens, one number for each of the vocabulary."""

    def state(self) -> dict[str, Stored]:
        """Everything the next step depends on."""

    def load(self, state: Mapping[str, Stored]) -> None:
        """Puts a state back."""

    def applied(self) -> int:
        """How many updates were applied, skipped ones left out; waits for the device."""

    def load_weights(self, state: Mapping[str, Stored]) -> None:
        """Takes the weights of a state alone."""

    def memory(self) -> int:
        """The most bytes held so far."""


def open_session(
    config: RunConfig,
    policy: Policy,
    device: str | None = None,
    *,
    train: bool = True,
    weights: Weights | None = None,
) -> Session:
    """The session of the configured backend, with the given first weights or those of its seed.

    A missing framework says how to install it.
    """
    try:
        module = import_module(f"halfstep.{config.backend}.session")
    except ModuleNotFoundError as error:
        raise HalfstepError(
            f"backend `{config.backend}` is not available: there is no module `{error.name}`",
            hint=f"pip install 'halfstep[{config.backend}]'",
        ) from None
    training = config.training

    def schedule(applied: Any, xp: Any) -> Any:
        return factor(
            applied,
            steps=training.steps,
            warmup=training.warmup_steps,
            warmdown_share=training.warmdown,
            xp=xp,
        )

    session: Session = module.Session(config, policy, device, schedule if train else None, weights)
    return session


def backend_version(config: RunConfig) -> str:
    """The version of the framework that runs."""
    return str(import_module(f"halfstep.{config.backend}.session").version)
