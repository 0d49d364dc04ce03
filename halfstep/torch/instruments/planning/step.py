"""One training step of a recipe or of any model, tracked on the meta device.

Two updates are made: the first creates the optimizers' state, the second is like every later one. Two
micro-batches stand for any larger number. The workspace that cuBLAS allocates is added.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.config.run import RunConfig
from halfstep.core.devices import Device
from halfstep.core.errors import FactoryError
from halfstep.core.policy import Policy
from halfstep.core.roles import Operand
from halfstep.core.rules import Rule
from halfstep.torch.convert.apply import apply
from halfstep.torch.instruments.planning.compiled import backend
from halfstep.torch.instruments.planning.stand_in import stand_in
from halfstep.torch.instruments.planning.tracker import MIB, Allocation, Ledger, Tracker, Work, round_up
from halfstep.torch.model import Decoder
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.optim.optimizers import build_optimizers
from halfstep.torch.update.prepare import prepare_as
from halfstep.torch.update.step import Engine

# cuBLAS's workspace: torch's default is 32 MiB from Hopper on, and 8.1 MiB before.
HOPPER, WORKSPACE = 9, {True: 32 * MIB, False: 8 * MIB + 128 * 1024}
# What is traced: the run, its loss function, batches, the model, and how it is compiled (config/session.py).
Made = tuple[Any, Callable[[Any], Any], list[Any], Any, str]
ADAMW_BYTES = 28  # read and written for a number: gradient, two moments twice, master twice


@dataclass(frozen=True)
class Parameter:
    """A parameter, and the bytes per element in which its layer gets it from other ranks."""

    name: str
    shape: tuple[int, ...]
    wire_bytes: int


@dataclass(frozen=True)
class Traced:
    """What one update does."""

    ledger: Ledger
    roles: dict[int, str]  # of what exists between updates
    parameters: tuple[Parameter, ...]
    work: tuple[Work, ...]  # of `micro_batches` passes and one update
    micro_batches: int
    batch: int  # rows of a micro-batch
    vocabulary: int

    @cached_property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of parameters, by which their casts and gradients are recognized."""
        return {parameter.shape for parameter in self.parameters}

    def role(self, key: int, allocation: Allocation) -> str:
        """Returns what an allocation is for."""
        if key in self.roles:
            return self.roles[key]
        if allocation.phase == "setup":
            return "buffers"
        if allocation.phase == "forward" and allocation.shape in self.shapes:
            return "weights"  # their casts
        if allocation.phase != "forward" and allocation.shape in self.shapes:
            return "gradients"
        if key in self.logits:
            return "logits"
        return "workspace" if allocation.phase == "update" or not allocation.shape else "activations"

    @cached_property
    def logits(self) -> set[int]:
        """The allocations of logits, which are as wide as the vocabulary.

        Where a layer takes something as wide, as the MLP of `golf` does, logits are made after the last activation
        of the model's width in a forward pass, and their gradients before the first in a backward pass.
        """
        passes = [
            (key, a.phase, a.shape[-1:])
            for key, a in self.ledger.allocations.items()
            if a.phase in ("forward", "backward") and a.shape not in self.shapes
        ]
        wide = {key for key, _, last in passes if self.vocabulary and last == (self.vocabulary,)}
        matrices = [shape for shape in self.shapes if len(shape) == 2]
        widths = [shape[1:] for shape in matrices if shape[0] == self.vocabulary]
        if not widths or all(shape[1] != self.vocabulary for shape in matrices):
            return wide
        outside: set[int] = set()
        for phase, each in groupby(passes, key=lambda row: row[1]):
            rows = [*each][:: -1 if phase == "forward" else 1]
            outside |= {key for key, _, last in takewhile(lambda row: row[2] not in widths, rows)}
        return wide & outside

    def with_batch(self, batch: int) -> Ledger:
        """Returns the ledger of micro-batches of another size, to which activations are proportional."""
        factor = batch / self.batch
        scaled = {
            key: a._replace(nbytes=round_up(int(a.nbytes * factor)))
            if a.phase in ("forward", "backward") and a.shape not in self.shapes and a.nbytes > 512 * self.batch
            and key not in self.roles
            else a
            for key, a in self.ledger.allocations.items()
        }  # fmt: skip
        return Ledger(scaled, self.ledger.events)


def force_measured(policy: Policy) -> Policy:
    """Returns a policy in which every `measured` matmul is narrow, because nothing can be timed here."""

    def forced(value: Any) -> Any:
        return replace(value, measured=False) if isinstance(value, Operand) else value

    rules = [Rule(each.glob, tuple((role, forced(v)) for role, v in each.changes)) for each in policy.rules]
    return replace(policy, compute=forced(policy.compute), grad=forced(policy.grad), rules=tuple(rules))


def trace_recipe(config: RunConfig, policy: Policy, hardware: Device, *, alone: bool = True) -> Traced:
    """Traces a step of a recipe, with the micro-batches of one process, which may share the run with others."""
    policy, training, settings = force_measured(policy), config.training, config.model

    def make() -> Made:
        model = Decoder(settings)
        model.recompute = training.recompute_blocks
        tokens = training.batch * settings.context
        given: dict[str, Any] = {"compiled": bool(training.compile), "memory": training.memory}
        conversion = apply(model, policy, model.module_names(), tokens=tokens, **given)
        optimizers = build_optimizers(model, config.optimizer)
        options: dict[str, Any] = {"conversion": conversion, "seed": config.seed, "ema": training.ema}
        run = Engine(model, optimizers, policy, training.clip_norm, **options)
        batches = torch.empty(2, training.batch, settings.context + 1, dtype=torch.int64).unbind()
        how = model.choose_compilation(training.compile, tokens, alone=alone).how
        return run, lambda pair: model.loss(pair[:, :-1], pair[:, 1:]), list(batches), model, how

    compiled = bool(training.compile)
    traced = _trace(make, hardware, compiled=compiled, micro_batches=min(2, training.micro_batches))
    return replace(traced, vocabulary=settings.vocabulary)  # learned positions are embeddings too


def trace_factory(
    made: Callable[[], Any], policy: Policy, hardware: Device, *, compiled: bool, memory: str = "fast"
) -> Traced:
    """Traces a step of what a factory returns: model, optimizer, loss_fn, batch."""
    policy = force_measured(policy)

    def make() -> Made:
        model, optimizer, loss_fn, batch = _check_factory(made())
        batch = pytree.tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, batch)
        run = prepare_as(Engine, model, optimizer, policy, memory=memory)
        return run, loss_fn, [batch], model, "whole" if compiled else "no"

    return _trace(make, hardware, compiled=compiled, micro_batches=1)


def _check_factory(made: Any) -> tuple[Any, ...]:
    if not isinstance(made, tuple) or len(made) != 4:
        raise FactoryError(
            "the factory must return model, optimizer, loss_fn, batch", hint="with loss = loss_fn(batch)"
        )
    elsewhere = [name for name, p in made[0].named_parameters() if p.device.type != "meta"]
    if elsewhere:
        raise FactoryError(
            f"the factory made `{elsewhere[0]}` on a device: it would need the memory that is to be planned",
            hint="make the model from its configuration and name no device: it is made on the meta device here",
        )
    return made


def _trace(make: Callable[[], Made], hardware: Device, *, compiled: bool, micro_batches: int) -> Traced:
    tracker = Tracker("meta")
    with warnings.catch_warnings(), stand_in(hardware, tracker.launch, compiled=compiled), tracker:
        warnings.simplefilter("ignore")
        if hardware.kind == "nvidia":
            assert hardware.capability is not None
            tracker.ledger.allocate(WORKSPACE[hardware.capability[0] >= HOPPER], "setup", (-1,))
        with torch.device("meta"):
            run, loss_fn, batches, model, how = make()
        called = loss_fn
        if how == "block":
            model.compile_blocks(backend=backend(tracker), dynamic=False)
        elif how == "whole":
            called = torch.compile(loss_fn, backend=backend(tracker), dynamic=False)

        def loss(batch: Any) -> Any:
            with tracker.during("forward"):
                return called(batch)

        update = run.update
        run.update = tracker.during("update")(update)
        torch.compiler.reset()
        with torch.compiler.set_stance("default") if not compiled else nullcontext():
            for count in (1, micro_batches):
                tracker.work = []
                with tracker.during("backward"):
                    run.step(loss, [batches[i % len(batches)] for i in range(count)])
        roles = _roles(run, tracker)
    groups = [g for o in run.optimizers if isinstance(o, AdamW | torch.optim.Adam) for g in o.param_groups]
    stepped = sum(p.numel() for group in groups for p in group["params"])
    work = (*tracker.work, Work("bytes", "", (), 0, ADAMW_BYTES * stepped, "update"))
    # Ranks gather a matrix in so many bytes per element; fp8 operands are cast where they are used.
    wire = 2 if run.policy.compute.format.bits <= 16 and not run.policy.emulate else 4
    trained = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]
    parameters = tuple(Parameter(name, tuple(p.shape), wire if p.ndim > 1 else 4) for name, p in trained)
    rows = next(t.shape[0] for t in pytree.tree_leaves(batches) if isinstance(t, Tensor))
    vocabulary = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    return Traced(tracker.ledger, roles, parameters, work, micro_batches, rows, vocabulary)


def _roles(run: Engine, tracker: Tracker) -> dict[int, str]:
    """Returns the role of each allocation that outlives an update."""
    states = [dict(state) for optimizer in run.optimizers for state in optimizer.state.values()]
    averages = [] if run.averages is None else run.averages.named().values()
    tensors: dict[str, Iterable[Any]] = {
        "buffers": run.model.buffers(),
        "moments": (value for value in pytree.tree_leaves(states) if isinstance(value, Tensor)),
        "masters": [*averages, *map(run.masters.remainder, run.masters.halves)],
        "weights": run.model.parameters(),
    }
    found = {tracker.key_of(each): role for role, those in tensors.items() for each in those}
    return {key: role for key, role in found.items() if key is not None}
