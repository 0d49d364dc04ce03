"""What each backend offers the training loop: tokens go in as numpy arrays, and numbers come out.

halfstep.torch, .jax and .mlx each have a module `session` with a subclass of `Session`; of torch and MLX, several
processes may train one run, which talk by the `Host` in their module `parallel.job`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from halfstep.config.model import reach
from halfstep.config.policy_schedule import check_later
from halfstep.config.run import RunConfig
from halfstep.config.weights import Weights, carry_over, initial_weights
from halfstep.core.audit.cause import Cause
from halfstep.core.devices import Device
from halfstep.core.observed import LayerInfo, Sample
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_reach
from halfstep.core.state_format import Snapshot, Stored

Tokens = NDArray[np.int32]
Schedule = Callable[[Any, Any], Any]
"""(updates applied so far, array namespace) -> what the learning rates are multiplied by, on the device."""


NOT_ASKED, SAYS_SO = "training.compile is false", "training.compile says so"


class Compilation(NamedTuple):
    """How the step of a session is compiled, and why so."""

    how: Literal["no", "block", "whole"]
    why: str

    def __str__(self) -> str:
        words = {"no": "not compiled", "block": "compiled block by block", "whole": "compiled as one graph"}
        return f"{words[self.how]}: {self.why}"


class Unread(Protocol):
    """Numbers on their way from the device."""

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns the numbers; waits for the steps they are of, and for none that was launched later."""


class Session(ABC):
    """One run on one backend: a model, its optimizers and a policy.

    What the monitor calls, `watch` and what follows it, changes no bit of an update, nor what a checkpoint holds.
    Of several ranks each calls all of it, at the same steps.
    """

    device_memory: Any  # the backend's numerics/memory.py
    num_devices = 1  # of this process, which share each micro-batch
    device: Any
    description: Device  # the hardware
    policy: Policy
    run: Any
    _monitor: Any

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        device: str | None = None,
        schedule: Schedule | None = None,
        weights: Weights | None = None,
        momentum: Schedule | None = None,
    ):
        self.config, self.schedule, self.momentum = config, schedule, momentum
        self._open_device(device)
        self._build(policy, initial_weights(config.model, config.seed) if weights is None else weights)

    @abstractmethod
    def _open_device(self, device: str | None) -> None:
        """Sets the device and its description, and seeds what the framework draws; refuses an absent device."""

    @abstractmethod
    def _build(self, policy: Policy, weights: Weights | None) -> None:
        """Makes the model, the optimizers and the run; without weights, for a state to be loaded."""

    def _release(self) -> None:
        """Drops what belongs to the policy so far, where the device's memory would hold it twice."""
        self._monitor = None

    def _check_policies(self, policy: Policy, check: Callable[[Policy], object]) -> None:
        """Refuses a policy with a rule that changes nothing, and a later one with such a rule or by `check`."""
        names = reach(self.config.model)
        check_reach(policy, names)
        check_later(self.config.schedule, check)
        check_later(self.config.schedule, lambda later: check_reach(later, names))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Inside, arrays are made on the device of the session."""
        return nullcontext()

    @property
    def notes(self) -> list[str]:
        """What was decided by measurement, here or in the run that is resumed."""
        return []

    @property
    def outcome(self) -> str:
        """How many matmuls run narrow and why no more do, if that is less than the policy's name says."""
        return ""

    @property
    def compilation(self) -> Compilation:
        """How the step is compiled, and why so."""
        backend, asked = self.config.backend, self.config.training.compile
        if asked or backend == "jax":
            return Compilation("whole", f"{backend} compiles a step as a whole")
        return Compilation("no", NOT_ASKED)

    @property
    @abstractmethod
    def threads(self) -> int | None:
        """The threads that a CPU divides sums among; None if results do not depend on the thread count."""

    @property
    @abstractmethod
    def asynchronous(self) -> bool:
        """Whether `step` returns before the step is done."""

    @abstractmethod
    def step(self, micro_batches: Tokens) -> Any:
        """Launches one update of tokens (micro-batches, batch, context + 1) and returns its result, unread."""

    @abstractmethod
    def read(self, result: Any) -> dict[str, float]:
        """Returns loss, grad_norm, scale, skipped and stuck (both 0 or 1) of a result; waits for its step."""

    @abstractmethod
    def check(self, result: Any, micro_batches: Tokens) -> None:
        """Raises if no loss scale can save the run (`stuck`), naming the first bad tensor of its tokens."""

    def device_time(self, result: Any) -> tuple[float, float | None] | None:
        """Returns (seconds that a step took the device, seconds idle before it), or None; does not wait."""
        return None

    @property
    @abstractmethod
    def untimed(self) -> str:
        """Why `device_time` returns None; empty if it does not."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Tokens], *, averaged: bool = True) -> tuple[float, int]:
        """Returns the sum of losses and the number of tokens, with averaged weights if the run keeps them."""

    @abstractmethod
    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits of the token after the given ones, after the softcap."""

    @abstractmethod
    def state(self) -> dict[str, Stored]:
        """Returns everything the next step depends on."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Copies the state, for a thread to write while training continues; invalidates the copy before.

        Of processes that share the state, each saves its rows (`Part`); what all have, the first one saves.
        """

    def rows(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the rows of a tensor in a state that this process has, first and end; None if all of it."""
        return None

    @abstractmethod
    def blame(self, micro_batches: Tokens, scale: float | None = None) -> Cause:
        """Runs a step again, without effects, and returns what made it not finite, as far as it can tell.

        `scale` is the loss scale that the step used; by default the current one.
        """

    @abstractmethod
    def load(self, state: Mapping[str, Stored]) -> None:
        """Restores a state, or refuses it whole."""

    @abstractmethod
    def load_weights(self, state: Mapping[str, Stored]) -> None:
        """Restores only the weights of a state."""

    def change_policy(self, policy: Policy, *, keep: bool = True) -> None:
        """Trains in another precision from the next step on; called when all steps were read.

        Masters, moments, averages and random state keep every bit; so does the loss scale, if both policies scale
        alike. Everything is built anew around them. Layers are not watched until `watch` is called again. Without
        `keep` a state must be loaded first.
        """
        before, state = self.policy, self.state() if keep else {}
        self._release()
        self._build(policy, None)
        if keep:
            self.load(carry_over(state, self.state(), before, policy, self.config.model))

    def applied(self) -> int:
        """Returns how many updates were applied and not skipped; waits for the device."""
        return int(self.run.num_applied)

    def memory(self) -> int:
        """Returns the most bytes held so far: by the device's allocator, or by the process on a CPU."""
        return int(self.device_memory.peak(self.device))

    def capacity(self) -> int | None:
        """Returns the bytes that the device has, None if unknown."""
        size: int | None = self.device_memory.capacity(self.device)
        return size

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error means that memory ran out."""
        return bool(self.device_memory.is_out_of_memory(error))

    @abstractmethod
    def watch(self, slice: int) -> Sequence[LayerInfo]:
        """Watches `slice` elements of each layer's tensors from now on; called once, before the first step."""

    def layer_numbers(self) -> Unread:
        """Launches a copy of what the steps so far have counted, and starts again from zero.

        Shape (layers, observed.ROLES, observed.COLUMNS): amax is the largest, the others are sums.
        """
        with self._on_device():
            numbers: Unread = self._monitor.layer_numbers()
        return numbers

    def weight_numbers(self) -> Unread:
        """Measures the update of the next step, which is launched after this call; read it after that step.

        Shape (layers, 4): norms of weight, gradient (unscaled) and update, on a slice of the layer's weights, and
        the share of its updates that were lost. NaN where a layer has none, and `lost` if the step is skipped.
        """
        numbers: Unread = self._monitor.weight_numbers()
        return numbers

    @abstractmethod
    def sample(self, micro_batches: Tokens, share: float = 1 / 16) -> Mapping[str, Mapping[str, Sample]]:
        """Runs at most a `share` of a step's tokens again, at least one sequence, with the weights of now.

        Returns the samples by layer and role. Restores random state, gradients and buffers.
        """


class Host(ABC):
    """This process among those of its job, and how they talk to each other."""

    backend: str
    launcher: str  # what started the processes
    has_notes = False  # whether ranks can read each other's notes
    rank: int
    ranks: int

    @abstractmethod
    def connect(self, device: str | None, timeout: float) -> str:
        """Makes sessions train with the other processes; returns the device of this one."""

    @abstractmethod
    def broadcast(self, text: str | None) -> str:
        """Returns what rank 0 passes."""

    @abstractmethod
    def gather(self, text: str) -> list[str]:
        """Returns the text of each rank."""

    @abstractmethod
    def exchange(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the numbers of each rank."""

    @abstractmethod
    def note(self, key: str, text: str) -> None:
        """Leaves a text of this rank, for all if they can read it."""

    def notes(self, key: str) -> list[str | None]:
        """Returns the texts that ranks left; None of those that left none. Does not wait."""
        return [None] * self.ranks

    def claim(self, key: str) -> bool:
        """Whether this rank is the first to ask, for all it knows."""
        return True

    def has_lost(self, error: BaseException) -> bool:
        """Whether an error means that another process is gone or does not answer, and does not say so itself."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Makes sessions train alone."""
