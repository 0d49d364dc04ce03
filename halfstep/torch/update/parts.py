"""What a run consists of, and the state that its steps change. `Engine` (step.py) adds the verbs."""

import copy
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.core.audit.coverage import Coverage
from halfstep.core.choice import Choice
from halfstep.core.errors import (
    ModelChangedError,
    ParallelError,
    PolicyFitError,
    StateError,
    UnsupportedModelError,
    warn_caller,
)
from halfstep.core.formats import FP32
from halfstep.core.policy import Policy
from halfstep.core.refusal import slow_formats
from halfstep.core.scaling import ScaleState
from halfstep.torch.convert.apply import Applied, allow_layers_in_graph, split_now
from halfstep.torch.convert.known_packages import SHARD_ORDER
from halfstep.torch.convert.resolve import check_supported, resolve
from halfstep.torch.numerics.dtypes import describe, dtype_of
from halfstep.torch.numerics.lowering import CAST, CachedCast
from halfstep.torch.numerics.shards import is_shard
from halfstep.torch.numerics.split.operand import values_of
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.optim.drivers import Driver, GradNorm, StockDriver, check_optimizers, driver_of, held_by
from halfstep.torch.optim.masters import PREPARE_AGAIN, Averages, Masters, cast_error
from halfstep.torch.parallel.ranks import copies, num_ranks, same_as_rank_0, wrappers_of
from halfstep.torch.parallel.sizes import Sent, gradient_traffic, shard_traffic
from halfstep.torch.parallel.wire import averaging_hook
from halfstep.torch.update.accumulation import Accumulation, check_device
from halfstep.torch.update.buffers import Buffers, Contents
from halfstep.torch.update.gradients import UserGradients
from halfstep.torch.update.readback import HostWatch, ScaleWatch
from halfstep.torch.update.switches import Switches

if TYPE_CHECKING:
    from halfstep.torch.parallel.gathered import Sharded

# Weights in the compute format, cast in a few launches for all layers and micro-batches of an update.
#
# A layer that casts its own weight launches a kernel for each weight, bias and micro-batch; at small batches that
# is a large part of the host's time. So layers that run eagerly leave a mark on the parameters they cast
# (lowering.py), and the next `Run.step` casts all marked ones together before its first micro-batch. Compiled
# layers leave no mark: there casts are fused with other work.
#
# Casts live only inside `Run.step`, and not through the last backward pass: with one micro-batch the memory of
# each is free again when its layer is done. A write to a parameter meanwhile (a clamp, averages) makes its cast
# useless; one through `parameter.data`, which torch does not count, must not happen inside a loss function.


class WeightCasts:
    """The casts of the update that is running."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self._listed: list[Tensor] = []
        self._changes = -1  # of marks, when the marked were found
        self._marked: list[tuple[torch.dtype, list[Tensor], list[CachedCast]]] = []  # for each device and dtype
        self._casted: list[tuple[Tensor, CachedCast]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCasts":
        return WeightCasts(copy.deepcopy(self.contents, memo))  # copies of parameters have no marks

    @torch.no_grad()
    def make(self) -> None:
        """Casts every marked parameter."""
        if self._changes != CachedCast.changes or self._listed is not self.contents.parameters:
            self._find()
        for dtype, parameters, marks in self._marked:
            casts = [torch.empty_like(p, dtype=dtype) for p in parameters]
            torch._foreach_copy_(casts, parameters)
            for mark, cast, p in zip(marks, casts, parameters, strict=True):
                mark.hold(cast, p)
            self._casted += zip(parameters, marks, strict=True)

    def _find(self) -> None:
        self._listed, self._changes = self.contents.parameters, CachedCast.changes
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[CachedCast]]] = {}
        for p in self._listed:
            if type(mark := p.__dict__.get(CAST)) is CachedCast:
                parameters, marks = groups.setdefault((p.device, mark.dtype), ([], []))
                parameters.append(p)
                marks.append(mark)
        self._marked = [(dtype, *group) for (_, dtype), group in groups.items()]

    def drop(self) -> None:
        """Forgets the casts; a backward pass that needs one still holds it. An unused one loses its mark."""
        for p, mark in self._casted:
            mark.cast = None
            if not mark.taken:
                p.__dict__.pop(CAST, None)
                self._changes = -1
        self._casted = []

    def unmark(self) -> None:
        """Removes every trace from the parameters."""
        self.drop()
        for p in self.contents.parameters:
            p.__dict__.pop(CAST, None)


class RunParts:
    """A model, its optimizers and a policy, with everything that a step needs. Optimizers may come later."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        policy: Policy,
        clip_norm: float = 0.0,
        *,
        conversion: Applied,
        seed: int = 0,
        ema: float = 0.0,
        choice: Choice | None = None,
        note: str = "",
        warns: bool = False,
    ):
        self.model, self.policy, self.conversion = model, policy, conversion
        self.clip_norm, self.choice = clip_norm, choice  # what `auto` chose and why; None if a policy was named
        self.clipped_by = ""  # whose call says how gradients are clipped, if not `clip_norm`
        self.note = note  # what the name of the policy was read as
        self.optimizers: list[torch.optim.Optimizer] = []
        self.drivers: list[Driver] = []
        self.averages: Averages | None = None
        self.sharded: Sharded | None = None  # by FSDP, after it was prepared
        self.num_copies = 0  # ranks that have the same shard; 0 if parameters are not sharded
        self.found_wrappers: list[weakref.ref[Any]] = []  # DDP modules around the model
        self.skipped: Tensor | None = None  # whether the last update was; None before the first
        self._decay, self._warns, self._seed = ema, warns, seed
        self._index_parameters()
        held = [p for optimizer in optimizers for p in held_by(optimizer)]
        self._reset_on(held[0].device if held else device_of(model))
        self.amaxes = conversion.amaxes
        self.last_coverage: Coverage | None = None  # what `coverage` found last
        self.watching: Any = None  # the monitor, which is called around each backward pass and each update
        self._norm = GradNorm()
        if optimizers:
            self.attach_optimizers(optimizers)

    def _index_parameters(self) -> None:
        """Lists the parameters of the model, and what is kept for them."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        held, remainders = self.conversion.masters, self.conversion.remainders
        self.masters = Masters(names, held, remainders, seed=self._seed, complete=True)
        self._prepared = {p: (p.dtype, p.shape) for p in self.masters.names}
        self._list_parameters()
        self.contents = Contents(self.model)
        self.weight_casts = WeightCasts(self.contents)
        self.casts: WeightCasts | Sharded = self.weight_casts
        self.buffers = Buffers(self.contents)
        self.accumulation = Accumulation(self.policy, self.contents)
        self.user_gradients = UserGradients(self.accumulation, self.masters.names)
        self.hooks = self.masters.watch(self.model)

    def attach_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Takes optimizers that were checked. The model may have been moved since it was prepared."""
        allow_layers_in_graph()
        empty = [name for name, p in self.model.named_parameters() if p.is_meta]
        if empty:
            raise UnsupportedModelError(
                f"`{empty[0]}` is on the meta device and has no numbers ({len(empty)} such parameters)",
                hint="model.to_empty(device=...), load or initialize the weights, then run.attach(optimizers)",
            )
        self.follow_model()
        if self.sharded is None and self.conversion.split_later:
            self.conversion = split_now(self.model, self.conversion)
            self._index_parameters()
        drivers = [driver_of(optimizer, self.masters, self.conversion.moments) for optimizer in optimizers]
        self._check_still_there(drivers)
        self.optimizers, self.drivers = list(optimizers), drivers
        try:
            self._list_parameters()
            self.num_copies = copies(self.parameters)
            self.move_to(self.parameters[0].device)
            self.check_parameters()
            self.masters.check_writes()
            if self.sharded is None and num_ranks() > 1:
                ours = set(self.conversion.reduced_by_run())
                named = [p for p, name in self.masters.names.items() if name in ours]
                same_as_rank_0([*map(values_of, named), *map(self.masters.remainder, self.masters.halves)])
                self.masters.note_writes(self.masters.halves)
        except BaseException:
            self.optimizers, self.drivers = [], []
            self._list_parameters()
            raise
        trained = [p for p in self.parameters if p.requires_grad]
        self.averages = Averages(self.masters, trained, self._decay) if self._decay else None
        self.buffers.remember()
        self._bind()
        self.watch_optimizers()

    def follow_model(self) -> None:
        """Finds the parameters anew if all were replaced since the policy was applied: by shards, or by memory."""
        now, known = dict(self.model.named_parameters()), self.masters.names
        same_names = [*now] == [*known.values()]
        sharded = [is_shard(p) for p in now.values()]
        if any(sharded) and not all(sharded):
            whole = [name for name, p in now.items() if not is_shard(p)]
            raise ParallelError(
                f"`{whole[0]}` is not sharded ({len(whole)} of {len(now)} parameters are not): all are, or none",
                hint="fully_shard(model) after that of its blocks takes the rest; leave out `ignored_params`",
            )
        if same_names and all(p not in known for p in now.values()) and all(sharded):  # as fully_shard leaves them
            from halfstep.torch.parallel.gathered import Sharded  # imports FSDP

            self._index_parameters()
            self._check_shards()
            self.casts = self.sharded = Sharded(self.model, dtype_of(self.policy.reduce))
            self.masters.casts = {g.sharded.sharded_param: g.cast for g in self.sharded.gathers.values()}
        elif same_names and all(p.is_meta for p in known):
            self._index_parameters()

    def make_casts(self) -> None:
        """Casts weights for all micro-batches of an update: those eager layers cast, or shards that travel."""
        self.casts.make()

    def drop_casts(self) -> None:
        """Frees the casts that are left when an update is over."""
        self.casts.drop()

    def set_grad_sync(self, now: bool) -> None:
        """Says before a micro-batch whether several ranks exchange gradients in its backward pass or keep them."""
        if self.sharded is not None:
            self.sharded.set_grad_sync(now)
        else:
            for wrapper in self.wrappers():
                wrapper.require_backward_grad_sync = now  # what its no_sync() sets

    def averages_all(self) -> bool:
        """Whether all gradients are summed beside their parameters and averaged here: DDP has nothing to do."""
        ours = set(self.conversion.reduced_by_run())
        return all(name in ours for p, name in self.masters.names.items() if p.requires_grad)

    def sent(self) -> Sent:
        """Returns how many bytes this rank sends, by formula."""
        if self.sharded is not None:
            return shard_traffic(self.sharded.groups(), self.sharded.format_of, self.policy)
        numbers = sum(p.numel() for p in self.parameters if p.requires_grad)
        return gradient_traffic(numbers, self.policy, num_ranks())

    def wrappers(self) -> list[Any]:
        """Returns the DDP modules around the model, which send what the policy says since they were found."""
        wrappers = [wrapper for ref in self.found_wrappers if (wrapper := ref()) is not None]
        if wrappers or self.averages_all():
            return wrappers
        wrappers = wrappers_of(self.model)
        self.found_wrappers = [*map(weakref.ref, wrappers)]
        if self.policy.reduce != FP32:
            for wrapper in wrappers:
                wrapper.register_comm_hook(None, averaging_hook(dtype_of(self.policy.reduce)))
        return wrappers

    def move_to(self, device: torch.device) -> None:
        """Follows a model that was moved before its run made a step, if its policy means the same there."""
        if device != self.device:
            check_move(self, device)
            self.switches.restore()
            self._reset_on(device)

    def _reset_on(self, device: torch.device) -> None:
        self.device = device
        self.scale_state = self.scalars(self.policy.scale.init())
        self.scale_watch = ScaleWatch(self.policy.scale, device) if self._warns else None
        self.host_watch = HostWatch(device)
        self.num_applied = torch.zeros((), dtype=torch.int32, device=device)  # updates that were not skipped
        self.switches = Switches(device)

    def forget(self) -> None:
        """Drops gradients that were accumulated and not used."""
        self.accumulation.clear()
        self.user_gradients.clear()
        if self.amaxes is not None:
            self.amaxes.forget()

    def scalars(self, given: ScaleState) -> ScaleState:
        """Returns a state of the loss scale as scalars on the run's device."""
        dtypes = (torch.float32, torch.int32, torch.int32, torch.bool)
        pairs = zip(given, dtypes, strict=True)
        return ScaleState(*(torch.tensor(v, dtype=d, device=self.device) for v, d in pairs))

    def check_parameters(self) -> None:
        """Refuses parameters that were added, cast or resized after the policy was applied."""
        if sum(len(g["params"]) for o in self.optimizers for g in o.param_groups) != len(self.parameters):
            check_optimizers(self.optimizers, self.model, narrow=False)
            self._list_parameters()
            self._bind()
        check_device(self.parameters, self.device)
        forms = [(p.dtype, p.shape) for p in self.parameters]
        if forms == self._forms and not any(p.requires_grad for p in self._unheld):
            return
        for p, (dtype, shape) in zip(self.parameters, self._forms, strict=True):
            if p.requires_grad and p.dtype is not dtype:
                raise cast_error(self.masters.names[p], dtype, p.dtype)
            if p.requires_grad and not self._has_master(p):
                raise ModelChangedError(
                    f"`{self.masters.names[p]}` is {p.dtype}, and no master of it is kept",
                    hint="unfreeze or add it before prepare()",
                )
            if p.shape != shape:  # moments have the old shape, and fused kernels walk through memory by either
                raise ModelChangedError(
                    f"`{self.masters.names[p]}` had the shape {tuple(shape)} when the model was prepared, and has "
                    f"{tuple(p.shape)} now",
                    hint=PREPARE_AGAIN,
                )

    def _list_parameters(self) -> None:
        taken = {p for driver in self.drivers for p in driver.parameters}
        self.parameters = [p for p in self.masters.names if p in taken]
        self._forms = [self._prepared[p] for p in self.parameters]
        self._unheld = [p for p in self.parameters if not self._has_master(p)]

    def _check_still_there(self, drivers: Sequence[Driver]) -> None:
        """Refuses parameters that the model did not have when it was prepared."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        new = [p for driver in drivers for p in driver.parameters if p not in self.masters.names]
        if new:
            if "_flat_param" in names[new[0]]:
                raise ParallelError(
                    f"`{names[new[0]]}` is a parameter of FSDP1, which flattens those of the model",
                    hint=f"use FSDP2: {SHARD_ORDER}",
                )
            raise ModelChangedError(
                f"`{names[new[0]]}` is not a parameter that the model was prepared with: it was added or replaced "
                f"since, as FSDP's fully_shard does ({len(new)} such parameters)",
                hint=f"change the model before prepare(); to shard it, {SHARD_ORDER}",
            )

    def _check_shards(self) -> None:
        """Refuses what is not implemented for parameters that FSDP has sharded."""
        placed = [(p.placements, name) for p, name in self.masters.names.items()]  # type: ignore[attr-defined]
        tensor = [name for kinds, name in placed if sum(not kind.is_replicate() for kind in kinds) > 1]
        bases = {base.__name__ for module in self.model.modules() for base in type(module).__mro__}
        if tensor or "FSDPModule" not in bases:
            raise ParallelError(
                f"`{[*tensor, placed[0][1]][0]}` is split by something else than fully_shard: tensor parallelism "
                "is not implemented",
                hint="shard by fully_shard alone, on one mesh of ranks that each have their own data",
            )
        narrow = [name for p, name in self.masters.names.items() if not self.masters.is_whole(p)]
        if narrow:
            raise ParallelError(
                f"`{narrow[0]}` has no fp32 master, and is sharded by FSDP ({len(narrow)} such parameters)",
                hint="hold masters whole, with `param=fp32`: a shard is small, and the wire has its cast",
            )

    def _has_master(self, parameter: Tensor) -> bool:
        """Whether the policy covers a parameter, which it must if that is narrower than fp32."""
        narrow = parameter.dtype in (torch.bfloat16, torch.float16)
        return not narrow or self.masters.names[parameter] in self.masters.held

    def watch_optimizers(self) -> None:
        """Hooks what users may do to optimizers themselves; a copy of an optimizer has no hooks."""
        stock = [driver for driver in self.drivers if isinstance(driver, StockDriver)]
        if any(not self.masters.is_whole(p) for p in self.parameters):
            self.hooks += [d.optimizer.register_load_state_dict_pre_hook(_refuse_load) for d in stock]

    def _bind(self) -> None:
        for driver in self.drivers:
            if isinstance(driver.optimizer, Optimizer):
                compute = self.policy.compute.format
                driver.optimizer.bind(self.masters, self.conversion.moments, compute, emulate=self.policy.emulate)
            driver.cast_moments()


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.get_default_device())


def check_move(run: RunParts, device: torch.device) -> None:
    """Refuses a model that was prepared for one device and moved to another if its policy depends on that."""
    policy, conversion = run.policy, run.conversion
    wanted = [p for each in (policy, policy.evaluation()) for p in resolve(run.model, each).wanted]
    check_supported(wanted, device)
    measured = run.choice is not None or bool(conversion.measured.narrow)
    what = ""
    if measured or any(precision.narrow and not precision.emulate for precision in wanted):
        what = "its precision was measured there" if measured else "whether fp8 runs depends on the device"
    elif conversion.amaxes is not None:
        what = "the amaxes of its delayed operands do not follow"
    if what:
        raise PolicyFitError(
            f"the model was prepared on {run.device} and is on {device} now, and {what}",
            hint="move it to its device before prepare()",
        )
    for message in slow_formats(policy, describe(device)):
        warn_caller(message)


def _refuse_load(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    raise StateError(
        f"{type(optimizer).__name__}.load_state_dict casts moments to the dtype of the parameters, which is bf16",
        hint="run.load_state_dict(run's own state), or run.load_torch_amp(the optimizer's state)",
    )
