"""Masters: the fp32 numbers that parameters stand for, whatever form they are held in; and their averages.

    fp32          the parameter is its own master
    fp32:split    `parameter.data` is the nearest bf16, which matmuls use, beside an int16 remainder (core.split)
    bf16          no master: the parameter is widened, updated and rounded back, to nearest or stochastically,
                  with random bits that depend on (seed, update, parameter, element) and so agree on every replica
    emulated      bf16 numbers in fp32 tensors, rounded back in the same way

**Any optimizer.** torch's change `parameter.data` in place and in its own dtype: on the bf16 half of a split
master they would lose the remainder. Inside `open`, `parameter.data` is the fp32 master, so any optimizer makes
the update it makes in fp32, bit for bit; the parameter, its gradient and its hooks stay. It costs 4 bytes per
number meanwhile, and two passes over the memory: on CUDA compiled, all tensors in one function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from halfstep.core.averages import check_decay
from halfstep.core.errors import ModelChangedError
from halfstep.core.formats import BF16, FP16, FP32, Format
from halfstep.core.philox import tensor_id
from halfstep.core.roles import Param
from halfstep.torch.numerics.cast import carried, join, quantize, random_bits, split
from halfstep.torch.numerics.shards import ShardCast
from halfstep.torch.numerics.split.operand import values_of
from halfstep.torch.numerics.split.writes import DATA, accept_write, check_write, note_writes, unwritten

PREPARE_AGAIN = "run.unprepare(), change the model, make a new optimizer for it, and prepare both"
BY_DTYPE = {torch.float32: Param(FP32), torch.bfloat16: Param(BF16), torch.float16: Param(FP16)}
# Read of hundreds of tensors per update, without a Python call for each list.
_DTYPE = attrgetter("dtype")
_SMALL = 2**16  # numbers: below, a conversion costs more in calls than in arithmetic
_MOST_LAYOUTS = 64  # a mixture of experts may update another list of parameters at each step


def cast_error(name: str, was: torch.dtype, now: torch.dtype) -> ModelChangedError:
    """Returns the error for a parameter that was cast after a policy was applied to its model."""
    return ModelChangedError(
        f"`{name}` was {was} when the model was prepared, and is {now} now: the model was cast, as by .half(), "
        ".float() or .to(dtype)",
        hint="the policy casts by itself, and what a cast has rounded is lost: leave the dtype as it is; load the "
        "weights again, and prepare the model again",
    )


class Layout(NamedTuple):
    """How each parameter of a list is held."""

    parameters: list[Tensor]
    dtypes: list[torch.dtype]
    remainders: list[Tensor | None]  # of split masters
    split: list[int]  # positions of split masters
    rounded: list[int]  # positions of parameters without a master, which are rounded back


class Masters:
    """How the parameters of a run are held, by name; converts them to fp32 and back."""

    def __init__(
        self,
        names: Mapping[Tensor, str],
        held: Mapping[str, Param] | None = None,
        remainders: Mapping[str, Tensor] | None = None,
        *,
        seed: int = 0,
        complete: bool = False,
    ):
        self.names, self.held = dict(names), dict(held or {})
        # Whether a parameter that is not in `held` has no master and stays unchanged, such as a frozen one.
        self.complete = complete
        # The tensors themselves: layers that need the whole master join it from the same remainder.
        self.remainders = dict(remainders or {})
        # Of shards whose cast travels: an optimizer may write both at once.
        self.casts: dict[Tensor, ShardCast] = {}
        self.seed = seed
        self.halves = [p for p, name in self.names.items() if name in self.remainders]
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def of(self, parameter: Tensor) -> Param:
        """Returns how a parameter is held; by its dtype if no policy covers it."""
        known = self.held.get(self.names.get(parameter, ""))
        return known or BY_DTYPE.get(parameter.dtype, BY_DTYPE[torch.float32])

    def is_whole(self, parameter: Tensor) -> bool:
        """Whether the parameter is its own master. So is one of a dtype that no policy has a format for."""
        if parameter.dtype not in BY_DTYPE or (self.complete and self.names.get(parameter) not in self.held):
            return True
        # Also by the format: an emulated bf16 master is carried in fp32 and must be rounded back.
        return parameter.dtype == torch.float32 and self.of(parameter).format == FP32

    def is_split(self, parameter: Tensor) -> bool:
        """Whether the parameter is the bf16 half of a split master."""
        return self.names.get(parameter, "") in self.remainders

    def remainder(self, half: Tensor) -> Tensor:
        """Returns what the bf16 half of a split master leaves out."""
        return self.remainders[self.names[half]]

    def layout(self, parameters: Sequence[Tensor]) -> Layout:
        """Returns how each parameter is held; remembered for lists that come again, as in every step."""
        key, dtypes = tuple(map(id, parameters)), [*map(_DTYPE, parameters)]
        known = self._layouts.get(key)
        if known is not None and known.dtypes == dtypes and all(map(is_, known.parameters, parameters)):
            return known
        remainders = [self.remainders.get(self.names.get(p, "")) for p in parameters]
        split = [i for i, lo in enumerate(remainders) if lo is not None]
        rounded = [i for i, p in enumerate(parameters) if remainders[i] is None and not self.is_whole(p)]
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[key] = Layout([*parameters], dtypes, remainders, split, rounded)
        return self._layouts[key]

    def check_writes(self) -> None:
        """Refuses split masters whose bf16 half was written to or resized by other code."""
        if unwritten(self.halves):
            return
        self._check_shapes()
        for p in self.halves:
            data = DATA.__get__(p)
            if p.dtype not in (torch.bfloat16, torch.float32) or (
                p.dtype is torch.float32 and torch.equal(data, data.bfloat16().float())
            ):
                raise cast_error(self.names[p], torch.bfloat16, p.dtype)
            check_write(p, self.names[p])

    def accept_writes(self) -> None:
        """Takes what other code wrote to the bf16 half of a split master as its new value."""
        self._check_shapes()
        for p in self.halves:
            accept_write(p)

    def _check_shapes(self) -> None:
        for p in self.halves:
            lo = self.remainders[self.names[p]]
            if p.shape != lo.shape:
                raise ModelChangedError(
                    f"`{self.names[p]}` had the shape {tuple(lo.shape)} when the model was prepared, and has "
                    f"{tuple(p.shape)} now: the remainder of its split master has the first shape",
                    hint="prepare the model after resizing it; this copy has already been rounded to bf16",
                )

    @torch.no_grad()
    def wide(self, parameters: Sequence[Tensor], layout: Layout | None = None) -> list[Tensor]:
        """Returns the masters in fp32: the parameter itself if it is whole, else a new tensor."""
        layout, masters = layout or self.layout(parameters), list(parameters)
        if layout.split:
            halves = [values_of(parameters[i]) for i in layout.split]
            joined = _apply_to_all(_join, halves, [layout.remainders[i] for i in layout.split])
            for i, w in zip(layout.split, joined, strict=True):
                masters[i] = w
        for i in layout.rounded:
            # A copy also if the dtype is fp32: what is rounded back must not be the parameter.
            masters[i] = parameters[i].detach().to(torch.float32, copy=True)
        return masters

    @torch.no_grad()
    def put(
        self,
        parameters: Sequence[Tensor],
        wide: Sequence[Tensor],
        counts: Sequence[Tensor],
        layout: Layout | None = None,
    ) -> None:
        """Stores fp32 masters as they are held; whole ones stay. `counts` number the updates, for rounding."""
        layout = layout or self.layout(parameters)
        for i in layout.rounded:
            self._round_back(parameters[i], wide[i], counts[i])
        if layout.split:
            rows = [(values_of(parameters[i]), layout.remainders[i], wide[i]) for i in layout.split]
            _apply_to_all(_split, *map(list, zip(*rows, strict=True)))
            note_writes([parameters[i] for i in layout.split])

    def note_writes(self, parameters: Sequence[Tensor]) -> None:
        """Records that the last write to each split master also wrote its remainder."""
        note_writes([parameters[i] for i in self.layout(parameters).split])

    def assign(self, parameters: Sequence[Tensor], values: Sequence[Tensor], count: Tensor) -> None:
        """Sets masters to fp32 values, whatever form they are held in."""
        for p, value in zip(parameters, values, strict=True):
            if self.is_whole(p):
                p.detach().copy_(value)
        self.put(parameters, values, [count] * len(parameters))

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks `load_state_dict` to round weights as they are held; split masters do so by themselves."""
        handles = []
        for module in model.modules():
            own = module.named_parameters(recurse=False)
            narrow = {key: p for key, p in own if not self.is_whole(p) and not self.is_split(p)}
            if narrow:
                handles.append(module.register_load_state_dict_pre_hook(self._loader(narrow)))
        return handles

    @contextmanager
    def open(self, parameters: Sequence[Tensor], count: Tensor) -> Iterator[None]:
        """Inside, `parameter.data` is the fp32 master. An error inside leaves everything unchanged."""
        layout = self.layout(parameters)
        narrow = [p for i in (*layout.split, *layout.rounded) if (p := parameters[i]).requires_grad]
        if not narrow:
            yield
            return
        held = swap_data(narrow, self.wide(narrow))
        try:
            yield
        except BaseException:
            swap_data(narrow, held)
            self.note_writes(narrow)
            raise
        wide = swap_data(narrow, held)  # an optimizer may have replaced the tensor
        self.put(narrow, wide, [count + 1] * len(narrow))

    @contextmanager
    def edit(self, count: Tensor) -> Iterator[None]:
        """Inside, every `parameter.data` is the fp32 master; after, it is held again as the policy says, exactly.

        An error inside keeps what was written before it, as in torch. `count` numbers updates, for rounding.
        """
        narrow = [p for p in self.names if not self.is_whole(p)]
        self.accept_writes()
        # Each in memory of its own: what saves weights takes parts of one storage for tied weights, and keeps one.
        held = swap_data(narrow, [w.clone() if w._is_view() else w for w in self.wide(narrow)])
        try:
            yield
        finally:
            wide = swap_data(narrow, held)
            self.note_writes(narrow)
            for p, old, new in zip(narrow, held, wide, strict=True):
                if (new.shape, new.device, new.dtype) != (old.shape, old.device, torch.float32):
                    raise ModelChangedError(
                        f"`{self.names[p]}` was resized, cast or moved inside run.edit(): it is {new.dtype} of "
                        f"shape {tuple(new.shape)} on {new.device} now. No narrow or split master was changed",
                        hint=PREPARE_AGAIN,
                    )
            self.put(narrow, wide, [count] * len(narrow))

    def _loader(self, narrow: Mapping[str, Tensor]) -> Callable[..., None]:
        def hook(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for key, p in narrow.items():
                value = state.get(prefix + key)
                if isinstance(value, Tensor) and value.shape == p.shape:
                    wide = value.detach().to(p.device, torch.float32)
                    self.put([p], [wide], [torch.zeros((), device=p.device)])
                    state[prefix + key] = p.detach()  # the dictionary is torch's copy of the one it was given

        return hook

    def _round_back(self, parameter: Tensor, wide: Tensor, count: Tensor) -> None:
        param = self.of(parameter)
        if param.stochastic:
            # Flat, so that compiled code sees one dimension, whose size it soon takes for a variable.
            function = compiled(_stochastic) if parameter.device.type == "cuda" else _stochastic
            key = (str(self.seed), count.to(torch.int64), tensor_id(self.names[parameter]))
            parameter.copy_(function(wide.reshape(-1), param.format, *key).view(wide.shape))
        elif parameter.dtype == torch.float32:
            parameter.copy_(carried(wide, param.format))
        else:
            parameter.copy_(wide)


class Averages:
    """Exponential moving averages of masters, in fp32: the rule of core.averages, for all in three launches."""

    def __init__(self, masters: Masters, parameters: Sequence[Tensor], decay: float):
        check_decay(decay)
        self.masters, self.decay = masters, decay
        self.parameters = [p for p in parameters if p.dtype in BY_DTYPE]
        self.restart()

    def restart(self) -> None:
        """Begins from the masters as they are now."""
        self.values = [w.detach().clone() for w in self.masters.wide(self.parameters)]

    def named(self) -> dict[str, Tensor]:
        """Returns the averages by the names of their parameters."""
        return {self.masters.names[p]: a for p, a in zip(self.parameters, self.values, strict=True)}

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Moves the averages towards the masters if `applied`, a device scalar, is 1, and not if it is 0."""
        away = torch._foreach_sub([w.detach() for w in self.masters.wide(self.parameters)], self.values)
        torch._foreach_mul_(away, (1.0 - self.decay) * applied)
        torch._foreach_add_(self.values, away)

    @contextmanager
    def swap_in(self, count: Tensor) -> Iterator[None]:
        """Inside, the parameters are the averages, held as masters are; after, the masters are back, exactly."""
        remainders = [lo for lo in self.masters.layout(self.parameters).remainders if lo is not None]
        live = [*map(values_of, self.parameters), *remainders]
        before = [t.clone() for t in live]
        with torch.no_grad():
            self.masters.assign(self.parameters, self.values, count)
        try:
            yield
        finally:
            for t, old in zip(live, before, strict=True):
                t.copy_(old)
            self.masters.note_writes(self.parameters)


def swap_data(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Gives each parameter other data and returns its own, past the checks that watch split masters."""
    own = list(map(DATA.__get__, parameters))
    for p, data in zip(parameters, others, strict=True):
        DATA.__set__(p, data)
    return own


def _join(halves: list[Tensor], remainders: list[Tensor]) -> list[Tensor]:
    small, large = _group_by_size(halves)
    joined: dict[int, Tensor] = {i: join(halves[i], remainders[i]) for i in large}
    if small:
        flat = [_flatten([column[i] for i in small]) for column in (halves, remainders)]
        views = _unflatten_dense_tensors(join(*flat), [halves[i] for i in small])
        joined |= dict(zip(small, views, strict=True))
    return [joined[i] for i in range(len(halves))]


def _split(halves: list[Tensor], remainders: list[Tensor], wide: list[Tensor]) -> list[Tensor]:
    small, large = _group_by_size(halves)
    for i in large:
        new_hi, new_lo = split(wide[i])
        halves[i].copy_(new_hi)
        remainders[i].copy_(new_lo)
    if small:
        parts = split(_flatten([wide[i] for i in small]))
        for column, part in zip((halves, remainders), parts, strict=True):
            live = [column[i] for i in small]
            torch._foreach_copy_(live, list(_unflatten_dense_tensors(part, live)))
    return []


def _group_by_size(halves: list[Tensor]) -> tuple[list[int], list[int]]:
    """Returns the positions of small tensors, which a CPU converts together, and of all others."""
    small = [i for i, t in enumerate(halves) if t.numel() <= _SMALL and t.is_cpu and t.is_contiguous()]
    known = set(small)
    return small, [i for i in range(len(halves)) if i not in known]


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _stochastic(wide: Tensor, fmt: Format, seed: str, count: Tensor, tensor: int) -> Tensor:
    # The seed is a string because dynamo makes a number that changes, in another run, symbolic; inductor cannot
    # then compile what is done with its bits (torch 2.13, CPU). The tensor's number may be: it is only a counter.
    bits = random_bits(wide.shape, seed=int(seed), step=count, tensor=tensor, device=wide.device)
    return quantize(wide, fmt, overflow="inf", rounding="stochastic", bits=bits)


def _apply_to_all(function: Callable[..., list[Tensor]], *lists: Any) -> list[Tensor]:
    return (compiled(function) if lists[0][0].device.type == "cuda" else function)(*lists)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, compiled for every list of tensors: dynamo would give up after eight compilations."""
    fast = torch.compile(function)

    def call(*given: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=256):
            return fast(*given)

    return call
