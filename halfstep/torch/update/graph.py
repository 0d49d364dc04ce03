"""The whole step of a run as one CUDA graph: forward and backward passes, norm, clipping, update, loss scale.

At small batches the host takes longer to launch a step than the device to compute it. A graph is launched at once.
What it holds is what the device did while it was captured: addresses, and every number that Python knew. So

    kept static     micro-batches, learning rates, a momentum on the device and the loss scale are copied to where
                    the graph reads them before each replay; what a step returns is copied from where it writes
    noticed         shapes, the loss function, settings of optimizers, frozen parameters, modes of modules, and
                    where parameters and states lie: a step that differs in one of them has a graph of its own
    refused         what cannot be captured, or would be wrong when it is replayed (`why_not`)

The first step of a kind is made as always, on the stream of the captures: it compiles kernels and makes states.
The second is captured, which computes nothing, and replayed, as is every one after it. The bits are those of a
step without a graph. Graphs share their memory: nothing but what they return outlives a replay.

Not noticed, as in every CUDA graph: Python that runs in the loss function or in hooks and changes something else
than tensors, and globals that it reads. They are seen once.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.core.errors import CudaGraphError, HalfstepError
from halfstep.core.scaling import ScaleState
from halfstep.torch.kernels import CAPTURED
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.optim.drivers import label
from halfstep.torch.optim.muon import Muon
from halfstep.torch.parallel.ranks import num_ranks
from halfstep.torch.update.parts import RunParts

MOST = 8  # kinds of steps; beyond, they are no longer a few that repeat
PLAIN = "prepare(..., graph=False) makes every step as always"
# The parts of what a step depends on besides numbers on the device, as an error names them.
PARTS = (
    "the shapes of micro-batches",
    "the loss function",
    "settings of optimizers",
    "which parameters are trained",
    "train() and eval() of modules",
)
Key = tuple[Any, ...]
LossFn = Callable[[Any], Any]
Step = Callable[[LossFn, list[Any]], Any]  # makes an update, and returns a dataclass of scalars on the device


class CudaGraphs:
    """Captures work on the device and replays it."""

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def warm(self) -> Iterator[None]:
        """Inside, work is queued on the stream of the captures."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns what replays the work, which is not done yet."""
        graph = torch.cuda.CUDAGraph()
        # relaxed: kernels of ours send addresses from pinned memory. Waiting for the device fails in every mode.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="relaxed"):
            work()
        return graph.replay


@dataclass
class _Graph:
    """A captured step."""

    replay: Callable[[], None]
    batches: list[Tensor]  # that it reads
    scalars: list[tuple[Tensor, Callable[[], Any]]]  # rates and momenta that it reads, and what returns each
    result: Any  # that it writes
    held: list[Any]  # what it reads or writes by address


class StepGraph:
    """The graphs of a run's steps."""

    def __init__(self, run: RunParts, plain_step: Step, graphs: Callable[[torch.device], Any] = CudaGraphs):
        self.run, self._plain_step, self._make = run, plain_step, graphs
        self._graphs: Any = None
        self._captured: dict[Key, _Graph] = {}
        self._seen: dict[Key, None] = {}
        self._places: list[int] = []
        self._scale: ScaleState | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepGraph":
        return StepGraph(memo[id(self.run)], copy.deepcopy(self._plain_step, memo), self._make)

    def step(self, loss_fn: LossFn, batches: list[Any]) -> tuple[Any, bool]:
        """Makes one update, as `Run.step` does; returns also whether it was replayed."""
        run = self.run
        check_graph(why_not(run))
        leaves, form = pytree.tree_flatten(batches)
        tensors = _check_leaves(leaves, run.device)
        key = self._key(loss_fn, leaves, form)
        if (places := self._places_now()) != self._places:  # a state was loaded, or the policy changed
            self._captured.clear()
            self._seen.clear()
            self._places, self._graphs = places, None  # torch captures nothing into a pool whose graphs are gone
        if self._graphs is None:
            self._graphs = self._make(run.device)
        if key not in self._seen:
            self._note_kind(key)
            return self._warm(loss_fn, batches), False
        run.check_parameters()
        run.masters.check_writes()
        if key not in self._captured:
            self._captured[key] = self._capture(loss_fn, tensors, leaves, form)
        return self._replay(self._captured[key], tensors), True

    def _note_kind(self, key: Key) -> None:
        if len(self._seen) == MOST:
            last = [*self._seen][-1]
            differ = [part for part, now, then in zip(PARTS, key, last, strict=True) if now != then]
            raise CudaGraphError(
                f"steps differ too often for CUDA graphs, which repeat one: {MOST} kinds were seen, and "
                f"{' and '.join(differ)} changed again",
                hint=f"pad micro-batches to a few shapes and pass the same loss function; or {PLAIN}",
            )
        self._seen[key] = None

    def _warm(self, loss_fn: LossFn, batches: list[Any]) -> Any:
        buffers = self.run.buffers
        with self._graphs.warm():
            buffers.were_written = False
            result = self._plain_step(loss_fn, batches)
        if buffers.were_written:
            raise CudaGraphError(
                "the step cannot be a CUDA graph: the model writes to its buffers, which a skipped step restores",
                hint=f"the update before this error was made. {PLAIN}",
            )
        self._places = self._places_now()  # states that this step has made
        return result

    def _capture(self, loss_fn: LossFn, tensors: Sequence[Tensor], leaves: Sequence[Any], form: Any) -> _Graph:
        run, scale = self.run, self._static_scale()
        tensors_read = [_empty_like(t).copy_(t) for t in tensors]
        fed = iter(tensors_read)
        batches = pytree.tree_unflatten([next(fed) if isinstance(x, Tensor) else x for x in leaves], form)
        ours: list[Optimizer] = run.optimizers  # type: ignore[assignment]
        rates = [(o, g, torch.empty((), device=run.device)) for o in ours for g in o.param_groups]
        muons = [o for o in ours if isinstance(o, Muon) and isinstance(o.momentum_now, Tensor)]
        momenta = [(o, torch.empty((), device=run.device), o.momentum_now) for o in muons]
        results: list[Any] = []

        def work() -> None:
            # Copies: the scale that was used is the static one, which gets its next value now.
            results.append(_clone_result(self._plain_step(loss_fn, batches)))
            for now, then in zip(scale, run.scale_state, strict=True):
                now.copy_(then)

        for optimizer in ours:
            optimizer.rates = {id(group): rate for other, group, rate in rates if other is optimizer}
        for muon, static, _ in momenta:
            muon.set_momentum(static)
        watch, run.scale_watch = run.scale_watch, None  # it reads the device, which no capture allows
        held: list[Any] = []
        try:
            with CAPTURED.capturing(held):
                replay = self._graphs.capture(work)
        except HalfstepError:
            raise
        except Exception as error:
            self._graphs = None  # its stream may be left in the middle
            raise CudaGraphError(
                f"the step cannot be captured as a CUDA graph: {str(error).partition(chr(10))[0]}",
                hint=f"nothing in it may wait for the device, such as .item() or a decision by a number. {PLAIN}",
            ) from error
        finally:
            run.scale_state, run.scale_watch = scale, watch
            for optimizer in ours:
                optimizer.rates = None
            for muon, _, given in momenta:
                muon.set_momentum(given)
        held += [loss_fn, run._norm.kernel, *(table for o in ours for table in o.tables())]
        scalars: list[tuple[Tensor, Callable[[], Any]]] = [(rate, partial(o.rate_of, g)) for o, g, rate in rates]
        scalars += [(static, partial(getattr, muon, "momentum_now")) for muon, static, _ in momenta]
        return _Graph(replay, tensors_read, scalars, results[0], held)

    @torch.no_grad()
    def _replay(self, graph: _Graph, tensors: Sequence[Tensor]) -> Any:
        self._static_scale()
        for static, given in zip(graph.batches, tensors, strict=True):
            static.copy_(given, non_blocking=True)
        for scalar, current in graph.scalars:
            scalar.copy_(current())
        graph.replay()
        CAPTURED.note_replay()
        return _clone_result(graph.result)

    def _static_scale(self) -> ScaleState:
        """Puts the run's loss scale where every graph reads it, and writes it."""
        run = self.run
        if self._scale is None:
            self._scale = ScaleState(*(value.clone() for value in run.scale_state))
        for static, now in zip(self._scale, run.scale_state, strict=True):
            if static is not now:
                static.copy_(now)
        run.scale_state = self._scale
        return self._scale

    def _key(self, loss_fn: LossFn, leaves: Sequence[Any], form: Any) -> Key:
        run = self.run
        looks = tuple((x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in leaves)
        settings = tuple(_settings(o) for o in run.optimizers)
        trained = tuple(p.requires_grad for p in run.contents.parameters)
        modes = tuple(m.training for m in run.contents.modules)
        return (str(form), looks), _identity(loss_fn), (run.clip_norm, settings), trained, modes

    def _places_now(self) -> list[int]:
        """Returns where everything lies that a step reads and writes, and does not make itself."""
        run = self.run
        run.contents.refresh()
        tensors = [*run.contents.parameters, *run.masters.remainders.values(), run.num_applied]
        tensors += [b for named in run.contents.buffer_dicts for b in named.values() if b is not None]
        tensors += [] if run.averages is None else run.averages.values
        states = [state for o in run.optimizers for state in o.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [id(run.policy), *(tensor.data_ptr() for tensor in tensors)]


def why_not(run: RunParts) -> str:
    """Returns why a run's steps cannot be graphs; empty if they can."""
    hooks = [(o, o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks) for o in run.optimizers]
    hooked = [o for o, before, after in hooks if max(len(before), len(after)) > 1]  # one is the run's own
    reasons = {
        "several processes exchange gradients within it": num_ranks() > 1 or run.sharded is not None,
        "a monitor is on, which sends numbers to the host within a step": run.watching is not None,
        "operands with delayed scales leave it by hooks of autograd": run.amaxes is not None,
        "".join(f"{label(o)} has hooks around its step, which a graph does not call" for o in hooked[:1]): hooked,
    }
    here = next((reason for reason, holds in reasons.items() if holds), "")
    return why_not_with(run.device, run.optimizers) or here


def why_not_with(device: torch.device, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Returns why steps on a device by such optimizers cannot be graphs, before there is a run."""
    if not has_graphs(device):
        return f"the model is on {device}, and only an NVIDIA GPU has them"
    others = [o for o in optimizers if not isinstance(o, Optimizer)]
    why = "may hold its learning rate on the host; halfstep's AdamW does not"
    return f"{label(others[0])} {why}" if others else ""


def check_graph(why: str, hint: str = PLAIN) -> None:
    """Refuses a graph for a reason, if there is one."""
    if why:
        raise CudaGraphError(f"the step cannot be a CUDA graph: {why}", hint=hint)


def has_graphs(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda"


def _settings(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Returns the numbers of an optimizer's groups that are not on the device."""
    groups: list[Any] = []
    for group in optimizer.param_groups:
        kept = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")}
        groups.append((len(group["params"]), str(sorted(kept.items()))))
    return (*groups, isinstance(optimizer, Muon) and isinstance(optimizer.momentum_now, Tensor))


class _Same:
    """An object as a part of a key, equal to itself alone. The key keeps it: a new one would get its place."""

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


def _identity(function: Any) -> tuple[Any, ...]:
    """Returns what a function is: a lambda that is made anew at each step is the same one if it sees the same."""
    if isinstance(function, MethodType):
        return (_Same(function.__self__), *_identity(function.__func__))
    if not isinstance(function, FunctionType):
        return (_Same(function),)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    seen = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return (function.__code__, *(x if isinstance(x, int | float | str | None) else _Same(x) for x in seen))


def _check_leaves(leaves: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Returns the tensors of micro-batches; refuses what cannot be copied to where a graph reads."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    for tensor in tensors:
        if tensor.device != device:
            raise CudaGraphError(
                f"a micro-batch is on {tensor.device}, and a CUDA graph reads it on {device}",
                hint=f"move it there first, .to(device, non_blocking=True); or {PLAIN}",
            )
    for other in leaves:
        if not isinstance(other, Tensor | int | float | str | None):
            raise CudaGraphError(
                f"a micro-batch holds a {type(other).__name__}, which a CUDA graph would see once",
                hint=f"pass tensors, numbers and text, in lists, tuples and dictionaries; or {PLAIN}",
            )
    return tensors


def _empty_like(tensor: Tensor) -> Tensor:
    """Returns memory for a tensor, with its strides: kernels are chosen by them."""
    if 0 in tensor.stride():  # expanded: several elements in one place cannot be written to
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _clone_result(result: Any) -> Any:
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return replace(result, **{name: value.clone() for name, value in values.items() if value is not None})
