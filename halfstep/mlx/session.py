"""What the training loop calls: one run on MLX, in numpy arrays and Python numbers.

`halfstep.training.loop` knows no framework. It opens the session of a backend, hands it micro-batches of tokens,
and reads results when it wants to print them. Each backend has this file with this class.
"""

import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.optimizers import MultiOptimizer
from numpy.typing import NDArray

from halfstep.config.run import OptimizerConfig, RunConfig
from halfstep.config.weights import Weights, initial_weights
from halfstep.core.policy import Policy
from halfstep.core.stored import Stored
from halfstep.mlx.apply import apply, set_precision
from halfstep.mlx.dtypes import as_device, describe
from halfstep.mlx.measure import devices
from halfstep.mlx.model import Decoder
from halfstep.mlx.optim import AdamW, Muon, Optimizer
from halfstep.mlx.state import load_state, load_weights, restored, state_of, stored
from halfstep.mlx.step import Run, StepResult, to_compile

Tokens = NDArray[np.int32]
# (updates applied so far, array namespace) -> what the learning rates are multiplied by, on the device
Schedule = Callable[[Any, Any], Any]

version: str = mx.__version__  # type: ignore[attr-defined]


class Session:
    """A model, its optimizers and a policy on one device."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        device: str | None = None,
        schedule: Schedule | None = None,
        weights: Weights | None = None,
    ):
        self.config = config
        self.schedule = schedule
        self.policy = policy
        self.device = as_device(device or devices()[0])
        self.description = describe(self.device)
        with mx.stream(self.device):
            mx.random.seed(config.seed)
            self.model = Decoder(config.model)
            self.model.set_weights(initial_weights(config.model, config.seed) if weights is None else weights)
            self.converted = apply(self.model, policy, self.model.module_names())
            optimizer = build_optimizers(self.model, config.optimizer, policy)
            self.run = Run(
                self.model,
                optimizer,
                self.converted,
                config.training.clip_norm,
                seed=config.seed,
                compile=to_compile(config.training.compile),
            )
        self._rates = [optimizer.learning_rate for optimizer in self.run.optimizers]

    @property
    def asynchronous(self) -> bool:
        """Whether `step` returns before the step is done. On a CPU MLX queues little before it waits."""
        return self.device.type != mx.cpu

    def step(self, micro_batches: Tokens) -> StepResult:
        """One update from tokens of shape (micro-batches, batch, context + 1). Waits for nothing."""
        with mx.stream(self.device):
            if self.schedule is not None:
                factor = self.schedule(self.run.applied, mx)
                for optimizer, rate in zip(self.run.optimizers, self._rates, strict=True):
                    optimizer.learning_rate = rate * factor
            return self.run.step(_sum_and_count, [mx.array(tokens) for tokens in micro_batches])

    def read(self, result: StepResult) -> dict[str, float]:
        """A step's numbers; waits for the device once."""
        names = ("loss", "skipped", "scale", "grad_norm", "stuck")
        values = np.array(mx.stack([getattr(result, name).astype(mx.float32) for name in names]))
        read = dict(zip(names, values.tolist(), strict=True))
        if read.pop("stuck"):
            self.run.check(result)
        return read

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """The sum of losses over batches, and the number of tokens, in the policy's evaluation form."""
        evaluated = self.policy.evaluation()
        losses: list[mx.array] = []
        count = 0
        with mx.stream(self.device):
            if evaluated != self.policy:
                set_precision(self.model, evaluated, self.model.module_names())
            try:
                with self.run.masters.in_use():
                    for batch in batches:
                        loss, tokens = _sum_and_count(self.model, mx.array(batch))
                        mx.async_eval(loss)
                        losses.append(loss)
                        count += int(tokens)
            finally:
                if evaluated != self.policy:
                    set_precision(self.model, self.policy, self.model.module_names())
        return sum(float(np.array(loss)) for loss in losses), count

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What the model expects after the tokens, one number for each of the vocabulary, after the softcap."""
        with mx.stream(self.device), self.run.masters.in_use():
            window = mx.array([list(tokens[-self.config.model.context :])])
            return np.array(self.model.capped(self.model(window)[0, -1]))

    def state(self) -> dict[str, Stored]:
        """Everything that the next step depends on."""
        return {name: stored(array) for name, array in state_of(self.run).items()}

    def load(self, state: Mapping[str, Stored]) -> None:
        """Puts a state back, or refuses it whole."""
        with mx.stream(self.device):
            load_state(self.run, {name: restored(record) for name, record in state.items()})

    def load_weights(self, state: Mapping[str, Stored]) -> None:
        """Takes the weights of a state and leaves the rest: for evaluation and sampling."""
        weights = {k: restored(v) for k, v in state.items() if k.startswith(("model.", "remainder."))}
        with mx.stream(self.device):
            load_weights(self.run, weights)

    def applied(self) -> int:
        """How many updates were applied, skipped ones left out; waits for the device."""
        return int(np.array(self.run.applied))

    def memory(self) -> int:
        """The most bytes held so far: of the device's allocator, or of the process on a CPU."""
        if self.device.type == mx.gpu:
            return mx.get_peak_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def build_optimizers(model: Decoder, config: OptimizerConfig, policy: Policy) -> Optimizer:
    """AdamW for all, or Muon for the matrices in blocks and AdamW for the rest, of which matrices alone decay."""
    matrices = {name for name, _ in model.matrices()} if config.name == "muon" else set()
    rest = {name: array for name, array in model.named_parameters() if name not in matrices}
    decaying = {name for name, array in rest.items() if name.endswith(".weight") and array.ndim == 2}
    built: list[tuple[set[str], Optimizer]] = []
    if matrices:
        muon = Muon(config.muon_rate, config.muon_momentum, 0.0, policy.compute.format, policy.emulate)
        built.append((matrices, muon))
    for names, decay in ((decaying, config.weight_decay), (rest.keys() - decaying, 0.0)):
        if names:
            built.append((names, AdamW(config.rate, config.betas, config.epsilon, decay)))
    filters = [lambda name, _, names=names: name in names for names, _ in built[:-1]]
    return MultiOptimizer([optimizer for _, optimizer in built], filters)


def _sum_and_count(model: Any, tokens: mx.array) -> tuple[mx.array, float]:
    return model.loss(tokens[:, :-1], tokens[:, 1:]), float(tokens[:, 1:].size)
