"""One run on torch, as the training loop calls it (config/session.py)."""

import gc
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.config.run import RunConfig
from halfstep.config.session import Compilation, Tokens
from halfstep.config.session import Session as Shell
from halfstep.config.weights import Weights
from halfstep.core.audit.cause import Cause
from halfstep.core.compare.shadow import Shadow
from halfstep.core.observed import LayerInfo, Sample
from halfstep.core.policy import Policy
from halfstep.core.state_format import Snapshot, Stored
from halfstep.torch.convert.apply import adopt, apply
from halfstep.torch.convert.resolve import check_policy, resolve
from halfstep.torch.instruments.monitor import NEVER
from halfstep.torch.measure import devices
from halfstep.torch.model import Decoder, rope_tables
from halfstep.torch.numerics import memory
from halfstep.torch.numerics.attention import UNFUSED
from halfstep.torch.numerics.dtypes import as_device, describe
from halfstep.torch.optim.muon import Muon
from halfstep.torch.optim.optimizers import build_optimizers
from halfstep.torch.parallel.ranks import exclude_from_ddp, from_all_ranks, in_group, num_ranks, share
from halfstep.torch.run import Run
from halfstep.torch.state import Copies, load_state, load_weights, restored, rows_here, state_of, stored, written
from halfstep.torch.timers import start_timers
from halfstep.torch.update.graph import check_graph, why_not_with
from halfstep.torch.update.readback import Readback
from halfstep.torch.update.step import StepResult

version = torch.__version__
COMPILED_BESIDE = ("cuda", "xpu")  # devices whose kernels are compiled by processes beside this one


def num_shards(config: RunConfig) -> int:
    """Returns among how many processes the state of a run is shared."""
    if config.parallel.shard == "none" or not in_group():
        return 1
    return num_ranks() if config.parallel.shard == "full" else local_ranks()


def local_ranks() -> int:
    """Returns how many processes of the job this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks()))


@contextmanager
def _compiler_loaded() -> Iterator[None]:
    """Imports torch's compiler and starts its processes beside what happens meanwhile: both take seconds."""
    thread = Thread(target=_load_compiler)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load_compiler() -> None:
    import_module("torch._inductor.compile_fx")  # and all that it imports
    from torch._inductor.async_compile import maybe_warm_pool

    # What this thread starts inherits its mask. A scheduler sends SIGTERM to every process, the run ends after the
    # step that it is in, and torch would wait for ever for what has ended: they end when this process does.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    maybe_warm_pool()  # until they run, this process compiles kernels one by one


class Session(Shell):
    """A model, its optimizers and a policy on one device."""

    device_memory = memory

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # `memory` is about training alone

    def _open_device(self, device: str | None) -> None:
        config = self.config
        self.device = as_device(device or devices()[0])
        self.description = describe(self.device)  # also refuses a missing device
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # for code that names no device, such as kernels of a library
        torch.set_float32_matmul_precision("highest")  # fp32 is fp32; the run makes others sum in fp32
        if config.training.deterministic:
            _make_deterministic(compiled=bool(config.training.compile))
        if config.training.graph:
            hint = "--set training.graph=false makes every step as always"
            check_graph(why_not_with(self.device, []), hint)
        self._copies, self._readback = Copies(), Readback(self.device)
        torch.manual_seed(config.seed)

    def _build(self, policy: Policy, weights: Weights | None) -> None:
        config, self.policy = self.config, policy
        with torch.device("meta"):  # to draw weights that are given afterwards takes seconds per billion
            self.model = Decoder(config.model)
        self.model.recompute = config.training.recompute_blocks
        self.model.to_empty(device=self.device)
        self.model.cos_TK, self.model.sin_TK = (table.to(self.device) for table in rope_tables(config.model))
        alone, compiled = not in_group(), bool(config.training.compile) and self.device.type in COMPILED_BESIDE
        if alone and compiled and policy.is_measured and not (policy.emulate or config.training.deterministic):
            start_timers()
        if weights is not None:
            with _compiler_loaded() if compiled else nullcontext():
                self.model.set_weights(weights)
        tokens, names = config.training.batch * config.model.context, self.model.module_names()
        self._check_policies(
            policy, lambda later: check_policy(self.model, resolve(self.model, later, names), names=names)
        )
        options: dict[str, Any] = {"tokens": tokens, "compiled": bool(config.training.compile)}
        options |= {"split": alone, "memory": config.training.memory}
        self.conversion = apply(self.model, policy, names, **options)
        if in_group() and (narrow := self.conversion.measured.narrow):  # each process has timed its own device
            self.conversion = adopt(self.model, self.conversion, from_all_ranks(narrow)[0])
        self._ddp: nn.Module | None = None
        run: dict[str, Any] = {"conversion": self.conversion, "seed": config.seed, "ema": config.training.ema}
        run["graph"] = config.training.graph
        if in_group():
            self.run = Run(self.model, [], policy, config.training.clip_norm, **run)
            self._share(config)
            self._optimizers = build_optimizers(self.model, config.optimizer)
            self.run.attach(self._optimizers)
        else:
            self._optimizers = build_optimizers(self.model, config.optimizer)
            self.run = Run(self.model, self._optimizers, policy, config.training.clip_norm, **run)
        loss = self.model.loss if self._ddp is None else partial(self.model.loss, called=self._ddp)
        self._compilation = self.model.choose_compilation(config.training.compile, tokens, alone=alone)
        if self._compilation.how == "block":
            self.model.compile_blocks()
        self._loss = torch.compile(loss) if self._compilation.how == "whole" else loss

    def _release(self) -> None:
        super()._release()
        del self.model, self.conversion, self.run, self._optimizers, self._loss, self._ddp
        gc.collect()  # the model and its run refer to each other

    def _share(self, config: RunConfig) -> None:
        """Shares the model among the processes of a job. DDP sends neither constants nor what gets no gradient."""
        constants = [name for name, _ in self.model.named_buffers()]
        idle = ["blocks.0.attn.value_mix"] if config.model.value_residual else []
        self.model._ddp_params_and_buffers_to_ignore = [*constants, *idle]  # type: ignore[assignment]
        exclude_from_ddp(self.model, self.conversion.reduced_by_run())
        called = share(self.model, list(self.model.blocks), config.parallel.shard, local_ranks())
        self._ddp = None if called is self.model else called

    @property
    def compilation(self) -> Compilation:
        return self._compilation

    @property
    def notes(self) -> list[str]:
        """What was decided by measurement, here or in the run that is resumed; attention that is not fused."""
        measured = self.run.conversion.measured.description  # a state that was loaded may have replaced it
        slow = [f"attention: {how}" for how in self.model.attention_kernels() if how.startswith(UNFUSED)]
        return [*([f"measured: {measured}"] if measured else []), *slow]

    @property
    def outcome(self) -> str:
        return self.run.conversion.measured.outcome

    @property
    def threads(self) -> int | None:
        return torch.get_num_threads() if self.device.type == "cpu" else None

    @property
    def asynchronous(self) -> bool:
        return self.device.type != "cpu"

    def step(self, micro_batches: Tokens) -> StepResult:
        start = self._readback.start()
        rate = None if self.schedule is None else self.schedule(self.run.num_applied, torch)
        momentum = None if self.momentum is None else self.momentum(self.run.num_applied, torch)
        for optimizer in self._optimizers:
            if rate is not None:
                optimizer.set_factor(rate)
            if momentum is not None and isinstance(optimizer, Muon):
                optimizer.set_momentum(momentum)
        result = self.run.step(self._sum_and_count, self._to_device(micro_batches).unbind())
        self._readback.send(result, start)
        return result

    def read(self, result: StepResult) -> dict[str, float]:
        return self._readback.read(result)

    def check(self, result: StepResult, micro_batches: Tokens) -> None:
        self.run.check(result, self._sum_and_count, self._to_device(micro_batches).unbind())

    def device_time(self, result: StepResult) -> tuple[float, float | None] | None:
        return self._readback.device_time(result)

    @property
    def untimed(self) -> str:
        return self._readback.untimed

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tokens], *, averaged: bool = True) -> tuple[float, int]:
        total = torch.zeros((), dtype=torch.float64 if self.device.type != "mps" else torch.float32)
        total, count = total.to(self.device), 0
        averaged = averaged and self.run.averages is not None
        with self.run.evaluation(self.model.module_names()), self.run.averaged() if averaged else nullcontext():
            for batch in batches:
                tokens = self._to_device(batch)
                total += self._loss(tokens[:, :-1], tokens[:, 1:])
                count += batch[:, 1:].size
        return float(total), count

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        window = torch.tensor([tokens[-self.config.model.context :]], device=self.device)
        return self.model.capped(self.model(window)[0, -1]).cpu().numpy()

    def state(self) -> dict[str, Stored]:
        return {name: stored(tensor) for name, tensor in state_of(self.run).items() if not _is_count(name)}

    def snapshot(self) -> Snapshot:
        tensors, rows = written(self.run)
        return self._copies.take({name: t for name, t in tensors.items() if not _is_count(name)}, rows)

    def rows(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        return rows_here(self.run, name, shape)

    def blame(self, micro_batches: Tokens, scale: float | None = None) -> Cause:
        return self.run.blame(self._sum_and_count, self._to_device(micro_batches).unbind(), scale)

    def watch(self, slice: int) -> list[LayerInfo]:
        self._monitor = self.run.monitor(slice=slice, every=NEVER)
        return self._monitor.layers

    def sample(self, micro_batches: Tokens, share: float = 1 / 16) -> dict[str, dict[str, Sample]]:
        return self._monitor.sample(self._sum_and_count, self._to_device(micro_batches[0]), share)

    def shadow(self, micro_batches: Tokens) -> Shadow:
        """Compares the step that these tokens would make with the same step in fp32."""
        return self.run.shadow(self._sum_and_count, self._to_device(micro_batches).unbind())

    def load(self, state: Mapping[str, Stored]) -> None:
        given = {name: restored(record) for name, record in state.items()}
        if "applied" in given:  # every count of an optimizer equals it
            given |= {name: given["applied"].float() for name in state_of(self.run) if _is_count(name)}
        load_state(self.run, given)

    def load_weights(self, state: Mapping[str, Stored]) -> None:
        wanted = ("model.", "remainder.")
        load_weights(self.run, {name: restored(v) for name, v in state.items() if name.startswith(wanted)})

    def _sum_and_count(self, tokens: Tensor) -> tuple[Tensor, float]:
        return self._loss(tokens[:, :-1], tokens[:, 1:]), float(tokens[:, 1:].numel())

    def _to_device(self, tokens: Tokens) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(tokens))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device, torch.int64)


def _is_count(name: str) -> bool:
    return name.startswith("optimizer.") and name.endswith(".step")


def _make_deterministic(*, compiled: bool) -> None:
    torch.use_deterministic_algorithms(True)
    if compiled:
        from torch._inductor import config as inductor

        inductor.deterministic = True  # its environment variable comes too late once torch is imported
    # We read no memory before it is written; filling it would cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
