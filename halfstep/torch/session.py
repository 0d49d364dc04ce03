"""What the training loop calls: one run on torch, in numpy arrays and Python numbers.

`halfstep.training.loop` knows no framework. It opens the session of a backend, hands it micro-batches of tokens,
and reads results when it wants to print them. Each backend has this file with this class.
"""

import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.config.run import OptimizerConfig, RunConfig
from halfstep.config.weights import Weights, initial_weights
from halfstep.core.policy import Policy
from halfstep.core.stored import Stored
from halfstep.torch.apply import apply, set_precision
from halfstep.torch.dtypes import as_device, describe
from halfstep.torch.measure import devices
from halfstep.torch.model import Decoder
from halfstep.torch.muon import Muon
from halfstep.torch.optim import AdamW, Optimizer
from halfstep.torch.state import load_state, load_weights, restored, state_of, stored
from halfstep.torch.step import Run, StepResult

Tokens = NDArray[np.int32]
# (updates applied so far, array namespace) -> what the learning rates are multiplied by, on the device
Schedule = Callable[[Any, Any], Any]

version = torch.__version__


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
        self.description = describe(self.device)  # also refuses a device that is not here
        self._pin_matmuls()
        torch.manual_seed(config.seed)
        self.model = Decoder(config.model)
        self.model.set_weights(initial_weights(config.model, config.seed) if weights is None else weights)
        self.model.to(self.device)
        tokens, names = config.training.batch * config.model.context, self.model.module_names()
        self.converted = apply(self.model, policy, names, tokens=tokens, compiled=config.training.compile)
        measured = self.converted.measured
        self.notes = [] if measured is None else [f"measured: {measured.told}"]
        if measured is not None and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # `memory` is of training
        clip_norm = config.training.clip_norm
        optimizers = build_optimizers(self.model, config.optimizer)
        self.run = Run(self.model, optimizers, policy, clip_norm, applied=self.converted, seed=config.seed)
        self._optimizers = optimizers
        self._loss = torch.compile(self.model.loss) if config.training.compile else self.model.loss

    @property
    def asynchronous(self) -> bool:
        """Whether `step` returns before the step is done."""
        return self.device.type != "cpu"

    def step(self, micro_batches: Tokens) -> StepResult:
        """One update from tokens of shape (micro-batches, batch, context + 1). Waits for nothing."""
        if self.schedule is not None:
            rate = self.schedule(self.run.applied, torch)
            for optimizer in self._optimizers:
                optimizer.set_factor(rate)
        tokens = self._to_device(micro_batches)
        return self.run.step(self._sum_and_count, tokens.unbind())

    def read(self, result: StepResult) -> dict[str, float]:
        """A step's numbers; waits for the device once."""
        names = ("loss", "skipped", "scale", "grad_norm", "stuck")
        values = torch.stack([getattr(result, name).float() for name in names]).tolist()
        read = dict(zip(names, values, strict=True))
        if read.pop("stuck"):
            self.run.check(result)
        return read

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """The sum of losses over batches, and the number of tokens, in the policy's evaluation form."""
        evaluated = self.policy.evaluation()
        if evaluated != self.policy:
            set_precision(self.model, evaluated, self.model.module_names())
        total = torch.zeros((), dtype=torch.float64 if self.device.type != "mps" else torch.float32)
        total, count = total.to(self.device), 0
        for batch in batches:
            tokens = self._to_device(batch)
            total += self._loss(tokens[:, :-1], tokens[:, 1:])
            count += batch[:, 1:].size
        if evaluated != self.policy:
            set_precision(self.model, self.policy, self.model.module_names(), self.converted.measured)
        return float(total), count

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What the model expects after the tokens, one number for each of the vocabulary, after the softcap."""
        window = torch.tensor([tokens[-self.config.model.context :]], device=self.device)
        return self.model.capped(self.model(window)[0, -1]).cpu().numpy()

    def state(self) -> dict[str, Stored]:
        """Everything that the next step depends on."""
        return {name: stored(tensor) for name, tensor in state_of(self.run).items()}

    def load(self, state: Mapping[str, Stored]) -> None:
        """Puts a state back, or refuses it whole."""
        load_state(self.run, {name: restored(record) for name, record in state.items()})

    def load_weights(self, state: Mapping[str, Stored]) -> None:
        """Takes the weights of a state and leaves the rest: for evaluation and sampling."""
        wanted = ("model.", "remainder.")
        load_weights(self.run, {name: restored(v) for name, v in state.items() if name.startswith(wanted)})

    def applied(self) -> int:
        """How many updates were applied, skipped ones left out; waits for the device."""
        return int(self.run.applied)

    def memory(self) -> int:
        """The most bytes held so far: of the device's allocator, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes

    def _sum_and_count(self, tokens: Tensor) -> tuple[Tensor, float]:
        return self._loss(tokens[:, :-1], tokens[:, 1:]), float(tokens[:, 1:].numel())

    def _to_device(self, tokens: Tokens) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(tokens))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device, torch.int64)

    def _pin_matmuls(self) -> None:
        """fp32 is fp32; that bf16 and fp16 matmuls sum in fp32 is seen to by the run."""
        torch.set_float32_matmul_precision("highest")


def build_optimizers(model: Decoder, config: OptimizerConfig) -> list[Optimizer]:
    """AdamW for all, or Muon for the matrices in blocks and AdamW for the rest, of which matrices alone decay."""
    named = list(model.named_parameters())
    built: list[Optimizer] = []
    if config.name == "muon":
        matrices = list(model.matrices())
        built.append(Muon(matrices, lr=config.muon_rate, momentum=config.muon_momentum))
        taken = {name for name, _ in matrices}
        named = [(name, p) for name, p in named if name not in taken]
    matrix = [(name.endswith(".weight") and p.ndim == 2) for name, p in named]
    decaying = [pair for pair, decays in zip(named, matrix, strict=True) if decays]
    steady = [pair for pair, decays in zip(named, matrix, strict=True) if not decays]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decaying, config.weight_decay), (steady, 0.0))
        if params
    ]
    built.append(AdamW(groups, lr=config.rate, betas=config.betas, eps=config.epsilon))
    return built
