"""One run on MLX, as the training loop calls it (config/session.py)."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.optimizers import MultiOptimizer
from numpy.typing import NDArray

from halfstep.config.groups import moments, parameter_groups
from halfstep.config.run import OptimizerConfig, RunConfig
from halfstep.config.session import Session as Shell
from halfstep.config.session import Tokens
from halfstep.config.weights import Weights
from halfstep.core.audit.cause import Cause
from halfstep.core.averages import pop_from_state
from halfstep.core.observed import LayerInfo, Sample
from halfstep.core.policy import Policy
from halfstep.core.state_format import Snapshot, Stored
from halfstep.mlx.convert.apply import apply, check_policy
from halfstep.mlx.instruments.monitor import NEVER
from halfstep.mlx.measure import devices
from halfstep.mlx.model import Decoder
from halfstep.mlx.numerics import memory
from halfstep.mlx.numerics.dtypes import as_device, describe
from halfstep.mlx.optim.optimizers import AdamW, Muon, Optimizer
from halfstep.mlx.parallel.job import ranks_of_job
from halfstep.mlx.run import Run
from halfstep.mlx.state import load_weights, restored, stored
from halfstep.mlx.update.checks import resolve_compile
from halfstep.mlx.update.step import StepResult

version: str = mx.__version__  # type: ignore[attr-defined]


def num_shards(config: RunConfig) -> int:
    """Returns among how many processes the state of a run is shared: here each holds all of it."""
    return 1


class Session(Shell):
    """A model, its optimizers and a policy on one device."""

    device_memory = memory
    threads = None  # a kernel of MLX runs on one CPU thread
    untimed = "MLX times no steps on the device"

    def _open_device(self, device: str | None) -> None:
        self.device = as_device(device or devices()[0])
        self.description = describe(self.device)
        mx.random.seed(self.config.seed)

    def _on_device(self) -> AbstractContextManager[Any]:
        return mx.stream(self.device)

    def _build(self, policy: Policy, weights: Weights | None) -> None:
        config, self.policy = self.config, policy
        with self._on_device():
            self.model = Decoder(config.model)
            self.model.recompute = config.training.recompute_blocks
            if weights is not None:
                self.model.set_weights(weights)
            names = self.model.module_names()
            self._check_policies(policy, lambda later: check_policy(self.model, later, names))
            self.conversion = apply(self.model, policy, names)
            optimizer = build_optimizers(self.model, config.optimizer)
            self.run = Run(
                self.model,
                optimizer,
                self.conversion,
                config.training.clip_norm,
                seed=config.seed,
                ema=config.training.ema,
                compile=resolve_compile(bool(config.training.compile)),
                ranks=None if self.schedule is None else ranks_of_job(),  # to evaluate, one is enough
            )
        self._moments = names_in_state(config)
        self._rates = [optimizer.learning_rate for optimizer in self.run.optimizers]

    @property
    def asynchronous(self) -> bool:
        return self.device.type != mx.cpu  # on a CPU MLX queues little before it waits

    def step(self, micro_batches: Tokens) -> StepResult:
        with self._on_device():
            if self.schedule is not None:
                factor = self.schedule(self.run.num_applied, mx)
                for optimizer, rate in zip(self.run.optimizers, self._rates, strict=True):
                    optimizer.learning_rate = rate * factor
            if self.momentum is not None:
                for optimizer in self.run.optimizers:
                    if isinstance(optimizer, Muon):
                        optimizer.momentum = self.momentum(self.run.num_applied, mx)
            return self.run.step(_sum_and_count, [mx.array(tokens) for tokens in micro_batches])

    def read(self, result: StepResult) -> dict[str, float]:
        """Reads a step's numbers back; waits for that step. Computing here would queue after the next one."""
        names = ["loss", "skipped", "scale", "grad_norm", "stuck"] + ["bad_rank"] * (result.bad_rank is not None)
        return {name: float(getattr(result, name).item()) for name in names}

    def check(self, result: StepResult, micro_batches: Tokens) -> None:
        with self._on_device():
            self.run.check(result, _sum_and_count, [mx.array(tokens) for tokens in micro_batches])

    def evaluate(self, batches: Iterable[Tokens], *, averaged: bool = True) -> tuple[float, int]:
        losses: list[mx.array] = []
        count, averaged = 0, averaged and self.run.averages is not None
        used = self.run.averaged() if averaged else nullcontext()
        formats = self.run.evaluation(self.model.module_names())
        with self._on_device(), used, formats, self.run.masters.swap_in():
            for batch in batches:
                loss, tokens = _sum_and_count(self.model, mx.array(batch))
                mx.async_eval(loss)
                losses.append(loss)
                count += int(tokens)
        return sum(float(np.array(loss)) for loss in losses), count

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        with self._on_device(), self.run.masters.swap_in():
            window = mx.array([list(tokens[-self.config.model.context :])])
            return np.array(self.model.capped(self.model(window)[0, -1]))

    def state(self) -> dict[str, Stored]:
        arrays = self.run.state_dict()
        kept = {n: a for n, a in arrays.items() if n in self._moments or not n.startswith("optimizer.")}
        return {self._moments.get(name, name): stored(array) for name, array in kept.items()}

    def snapshot(self) -> Snapshot:
        """Copies the state at once: host and device share their memory, and one thread evaluates."""
        copies: dict[str, Stored] = dict(self.state())
        return lambda: copies

    def blame(self, micro_batches: Tokens, scale: float | None = None) -> Cause:
        with self._on_device():
            return self.run.blame(_sum_and_count, [mx.array(tokens) for tokens in micro_batches], scale)

    def watch(self, slice: int) -> list[LayerInfo]:
        with self._on_device():
            self._monitor = self.run.monitor(NEVER, slice)
        return self._monitor.layers

    def sample(self, micro_batches: Tokens, share: float = 1 / 16) -> dict[str, dict[str, Sample]]:
        with self._on_device():
            rows = mx.array(micro_batches.reshape(-1, micro_batches.shape[-1]))
            return self._monitor.sample(_sum_and_count, rows, share)

    def load(self, state: Mapping[str, Stored]) -> None:
        with self._on_device():
            given = {name: restored(record) for name, record in state.items()}
            pop_from_state(dict(given), self.run.ema)  # says which setting differs
            ours = {self._moments.get(name, name): name for name in self.run.state_dict()}
            self.run.load_state_dict(
                self._of_optimizers(given) | {ours.get(n, n): array for n, array in given.items()}
            )

    def _of_optimizers(self, given: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Returns what MLX's optimizers hold besides moments: counts, all of them `applied`, and rates."""
        live = self.run.state_dict()
        others = {n: a for n, a in live.items() if n.startswith("optimizer.") and n not in self._moments}
        applied = given.get("applied", live["applied"])
        return {n: applied.astype(a.dtype) if n.endswith(".step") else a for n, a in others.items()}

    def load_weights(self, state: Mapping[str, Stored]) -> None:
        weights = {k: restored(v) for k, v in state.items() if k.startswith(("model.", "remainder."))}
        with self._on_device():
            load_weights(self.run.masters, weights)


def build_optimizers(model: Decoder, config: OptimizerConfig) -> Optimizer:
    """Returns Muon for the matrices in blocks if the recipe says so, and AdamW for the rest, one per group."""
    built: list[Optimizer] = []
    groups = parameter_groups(model.config, config)
    for group in groups:
        if group.muon:
            built.append(Muon(group.rate, config.muon_momentum, group.weight_decay))
        else:
            built.append(AdamW(group.rate, config.betas, config.epsilon, group.weight_decay))
    filters = [lambda name, _, names=set(group.names): name in names for group in groups[:-1]]
    return MultiOptimizer(built, filters)


def names_in_state(config: RunConfig) -> dict[str, str]:
    """Returns the moments of `build_optimizers` by their names in the state, with those that a checkpoint has."""
    mlx_names = {"exp_avg": "m", "exp_avg_sq": "v", "momentum": "momentum"}
    named = moments(config.model, config.optimizer).items()
    return {f"optimizer.{group}.{parameter}.{mlx_names[kind]}": name for name, (group, parameter, kind) in named}


def _sum_and_count(model: Any, tokens: mx.array) -> tuple[mx.array, float]:
    return model.loss(tokens[:, :-1], tokens[:, 1:]), float(tokens[:, 1:].size)
