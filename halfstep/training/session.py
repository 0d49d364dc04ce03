"""What a backend offers the training loop: tokens go in as numpy arrays, and numbers come out.

Each of halfstep.torch, .jax and .mlx has a `session` module with a `Session` class of this shape and a `version`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halfstep.config.policy_schedule import check_later
from halfstep.config.run import ParallelConfig, RunConfig
from halfstep.config.weights import Weights
from halfstep.core.audit.cause import Cause
from halfstep.core.compare.shadow import Shadow
from halfstep.core.devices import Device
from halfstep.core.errors import MissingPackageError, how_to_install
from halfstep.core.observed import LayerInfo, Sample
from halfstep.core.policy import Policy
from halfstep.core.state_format import Snapshot, Stored
from halfstep.training import memory
from halfstep.training.schedule import factor, momentum

Tokens = NDArray[np.int32]


class Unread(Protocol):
    """Numbers on their way from the device."""

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns the numbers; waits for the steps they are of, and for none that was launched later."""


class Watched(Protocol):
    """What a session offers the monitor (run/monitor.py).

    None of it changes a bit of an update, nor what a checkpoint holds. Of several ranks each calls all of it, at
    the same steps.
    """

    def watch(self, slice: int) -> Sequence[LayerInfo]:
        """Watches `slice` elements of each layer's tensors from now on; called once, before the first step."""

    def layer_numbers(self) -> Unread:
        """Launches a copy of what the steps so far have counted, and starts again from zero.

        Shape (layers, observed.ROLES, observed.COLUMNS): amax is the largest, the others are sums.
        """

    def weight_numbers(self) -> Unread:
        """Measures the update of the next step, which is launched after this call; read it after that step.

        Shape (layers, 4): norms of weight, gradient (unscaled) and update, on a slice of the layer's weights, and
        the share of its updates that were lost. NaN where a layer has none, and `lost` if the step is skipped.
        """

    def sample(self, micro_batches: Tokens, share: float = 1 / 16) -> Mapping[str, Mapping[str, Sample]]:
        """Runs at most a `share` of a step's tokens again, at least one sequence, with the weights of now.

        Returns the samples by layer and role. Restores random state, gradients and buffers.
        """


class Shadowed(Protocol):
    """What a session on torch offers the monitor besides."""

    def shadow(self, micro_batches: Tokens) -> Shadow:
        """Compares the step that these tokens would make with the same step in fp32; changes nothing."""


class Session(Watched, Protocol):
    """One run on one backend."""

    policy: Policy
    num_devices: int  # of this process, which share each micro-batch

    @property
    def description(self) -> Device:
        """The hardware."""

    @property
    def threads(self) -> int | None:
        """The threads that a CPU divides sums among; None if results do not depend on the thread count."""

    @property
    def asynchronous(self) -> bool:
        """Whether `step` returns before the step is done."""

    def step(self, micro_batches: Tokens) -> Any:
        """Launches one update and returns its result, unread."""

    def read(self, result: Any) -> dict[str, float]:
        """Returns loss, grad_norm, scale, skipped and stuck (both 0 or 1) of a result; waits for its step."""

    def check(self, result: Any, micro_batches: Tokens) -> None:
        """Raises if no loss scale can save the run (`stuck`), naming the first bad tensor of its tokens."""

    def device_time(self, result: Any) -> tuple[float, float | None] | None:
        """Returns (seconds that a step took the device, seconds idle before it), or None; does not wait."""

    @property
    def untimed(self) -> str:
        """Why `device_time` returns None; empty if it does not."""

    def evaluate(self, batches: Iterable[Tokens], *, averaged: bool = True) -> tuple[float, int]:
        """Returns the sum of losses and the number of tokens, with averaged weights if the run keeps them."""

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits of the token after the given ones."""

    def state(self) -> dict[str, Stored]:
        """Returns everything the next step depends on."""

    def snapshot(self) -> Snapshot:
        """Copies the state, for a thread to write while training continues; invalidates the copy before.

        Of processes that share the state, each saves its rows (`Part`); what all have, the first one saves.
        """

    def rows(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the rows of a tensor in a state that this process has, first and end; None if all of it."""

    def blame(self, micro_batches: Tokens, scale: float | None = None) -> Cause:
        """Runs a step again, without effects, and returns what made it not finite, as far as it can tell.

        `scale` is the loss scale that the step used; by default the current one.
        """

    def load(self, state: Mapping[str, Stored]) -> None:
        """Restores a state."""

    def change_policy(self, policy: Policy, *, keep: bool = True) -> None:
        """Trains in another precision from the next step on; called when all steps were read.

        Masters, moments, averages and random state keep every bit; so does the loss scale, if both policies scale
        alike. Layers are not watched until `watch` is called again. Without `keep` a state must be loaded first.
        """

    def applied(self) -> int:
        """Returns how many updates were applied and not skipped; waits for the device."""

    def load_weights(self, state: Mapping[str, Stored]) -> None:
        """Restores only the weights of a state."""

    def memory(self) -> int:
        """Returns the most bytes held so far."""

    def capacity(self) -> int | None:
        """Returns the bytes that the device has, None if unknown."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error means that memory ran out."""


def backend_module(backend: str, name: str) -> Any:
    """Returns a module of a backend; a missing framework says how to install it."""
    try:
        return import_module(f"halfstep.{backend}.{name}")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"backend `{backend}` is not available: there is no module `{error.name}`",
            hint=how_to_install(backend),
        ) from None
    except (ImportError, OSError) as error:  # a library that memory has no room for, or of another machine
        raise MissingPackageError(
            f"backend `{backend}` cannot be imported: {error}",
            hint=f"free some memory; or {how_to_install(backend, '--force-reinstall ')}",
        ) from None


def check_device(config: RunConfig, policy: Policy, device: str | None, *, train: bool = True) -> int | None:
    """Refuses a device that is absent or cannot hold the model; returns how many bytes it has."""
    module = backend_module(config.backend, "session")
    place = module.as_device(device or module.devices()[0])
    module.describe(place)
    capacity: int | None = module.memory.capacity(place)
    memory.check_fits(config, policy, capacity, train=train, shards=module.num_shards(config))
    return capacity


def open_session(
    config: RunConfig,
    policy: Policy,
    device: str | None = None,
    *,
    train: bool = True,
    weights: Weights | None = None,
) -> Session:
    """Opens a session of the configured backend, with the given initial weights or those of its seed."""
    module = backend_module(config.backend, "session")
    if not train:  # weights that do not move have no average
        policy = policy.evaluation().without_training()
        training = replace(config.training, ema=0.0)
        config = replace(config, training=training, parallel=ParallelConfig(), schedule=())
    training, optimizer = config.training, config.optimizer

    def schedule(applied: Any, xp: Any) -> Any:
        return factor(
            applied, steps=training.steps, warmup=training.warmup_steps, warmdown_share=training.warmdown, xp=xp
        )

    def warming(applied: Any, xp: Any) -> Any:
        start, end = optimizer.muon_momentum_start, optimizer.muon_momentum
        return momentum(applied, start=start, end=end, warmup=optimizer.muon_momentum_warmup, xp=xp)

    capacity = check_device(config, policy, device, train=train)
    check_later(config.schedule, lambda later: check_device(config, later, device, train=train))
    warms = train and optimizer.name == "muon" and optimizer.muon_momentum_warmup > 0
    with memory.convert_oom(module.memory.is_out_of_memory, lambda: memory.oom_while_building(config, capacity)):
        session: Session = module.Session(
            config, policy, device, schedule if train else None, weights, momentum=warming if warms else None
        )
    return session


def backend_version(config: RunConfig) -> str:
    """Returns the version of the framework that runs."""
    return str(import_module(f"halfstep.{config.backend}.session").version)
