"""Masters: the fp32 numbers that parameters stand for, however they are held, and what follows them.

    fp32          the parameter is its own master
    fp32:split    `parameter.data` is the nearest bf16, ties away from zero (hi), which matmuls use as it is, and
                  an int16 remainder (lo) is kept beside it: 4 bytes a number, and the join of both is exact
    bf16          there is none: the parameter is widened, updated and rounded back, to nearest or stochastically,
                  by words that depend on (seed, update, parameter, element) and so agree on every replica
    emulated      bf16 numbers in fp32 tensors, rounded back alike

**The seam.** torch's optimizers change `parameter.data` in place and in its own dtype: on a bf16 half they would
lose the remainder, and fused and foreach AdamW refuse a bf16 parameter with an fp32 gradient. Inside `opened`,
`parameter.data` is the fp32 master, so any optimizer makes the update that it makes in fp32, bit for bit; then it
is held again. Only the data is exchanged: the parameter, its gradient, its hooks and its place in the optimizer
stay. The price is 4 bytes a number, for as long as the optimizer runs, and two passes over the memory.

On a CUDA device the passes are compiled, all tensors in one function, because eager each would be some ten kernels
for each tensor. On other devices they are eager. Both have the same bits: nothing in them is rounded twice.

`Averages` are exponential moving averages of masters, in fp32. `Statistics` undoes what a forward pass wrote into
buffers (running means and variances) when its step is skipped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP16, FP32, Format
from halfstep.core.philox import tensor_id
from halfstep.core.roles import Param
from halfstep.torch.cast import carried, join, quantize, random_bits, split
from halfstep.torch.split import drop_stale_remainder, note_write

_BY_DTYPE = {torch.float32: Param(FP32), torch.bfloat16: Param(BF16), torch.float16: Param(FP16)}


class Masters:
    """How the parameters of a run are held, by name, and the way from there to fp32 and back."""

    def __init__(
        self,
        names: Mapping[Tensor, str],
        held: Mapping[str, Param] | None = None,
        remainders: Mapping[str, Tensor] | None = None,
        *,
        seed: int = 0,
        complete: bool = False,
    ):
        self.names = dict(names)
        self.held = dict(held or {})
        self.complete = complete  # what is not in `held` has no master and is left alone, as frozen parameters are
        # The tensors themselves: layers that need the whole master join it from the same remainder.
        self.remainders = dict(remainders or {})
        self.seed = seed

    def of(self, parameter: Tensor) -> Param:
        """How a parameter is held; one that no policy was given for, as its dtype says."""
        known = self.held.get(self.names.get(parameter, ""))
        return known or _BY_DTYPE.get(parameter.dtype, _BY_DTYPE[torch.float32])

    def is_whole(self, parameter: Tensor) -> bool:
        """Whether the parameter is its own master. Dtypes that no policy has a format for are left alone too."""
        if parameter.dtype not in _BY_DTYPE or (self.complete and self.names.get(parameter) not in self.held):
            return True
        # Also by the format: an emulated bf16 master is carried in fp32 and must be rounded back.
        return parameter.dtype == torch.float32 and self.of(parameter).format == FP32

    def is_split(self, parameter: Tensor) -> bool:
        """Whether the parameter is the bf16 half of a master, and the other half is here."""
        return self.names.get(parameter, "") in self.remainders

    def settle(self) -> None:
        """Drops the remainders of halves that somebody wrote to, and refuses halves that somebody resized."""
        for p, name in self.names.items() if self.remainders else ():
            lo = self.remainders.get(name)
            if lo is not None and p.shape != lo.shape:
                raise HalfstepError(
                    f"`{name}` had the shape {tuple(lo.shape)} when the model was prepared, and has "
                    f"{tuple(p.shape)} now: what its half leaves out is of the first",
                    hint="prepare the model after resizing it; what is here is rounded to bf16 by now",
                )
            drop_stale_remainder(p)

    @torch.no_grad()
    def wide(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The masters in fp32: the parameter itself where it is whole, else a new tensor."""
        found = {p: p if self.is_whole(p) else None for p in parameters}
        halves = [p for p in parameters if self.is_split(p)]
        for p in halves:
            drop_stale_remainder(p)
        joined = _over_all(_join, halves, [self.remainders[self.names[p]] for p in halves])
        found |= dict(zip(halves, joined, strict=True))
        # A copy also where the dtype is fp32: what is rounded back must not be the parameter.
        return [w if w is not None else p.detach().to(torch.float32, copy=True) for p, w in found.items()]

    @torch.no_grad()
    def put(self, parameters: Sequence[Tensor], wide: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Stores fp32 masters as they are held; a count is the number of the update, for stochastic rounding."""
        halves: list[Tensor] = []
        joined: list[Tensor] = []
        for p, w, count in zip(parameters, wide, counts, strict=True):
            if self.is_split(p):
                halves.append(p.detach())
                joined.append(w)
            elif w is not p:
                self._round_back(p, w, count)
        split = [p for p in parameters if self.is_split(p)]
        _over_all(_split, halves, [self.remainders[self.names[p]] for p in split], joined)
        for p in split:
            note_write(p)

    def assign(self, parameters: Sequence[Tensor], values: Sequence[Tensor], count: Tensor) -> None:
        """Sets masters to fp32 values, whether the parameter is its own or not."""
        for p, value in zip(parameters, values, strict=True):
            if self.is_whole(p):
                p.detach().copy_(value)
            else:
                self.put([p], [value], [count])

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks by which `load_state_dict` of any module rounds weights as they are held; halves do so alone."""
        handles = []
        for module in model.modules():
            own = module.named_parameters(recurse=False)
            narrow = {key: p for key, p in own if not self.is_whole(p) and not self.is_split(p)}
            if narrow:
                handles.append(module.register_load_state_dict_pre_hook(self._loader(narrow)))
        return handles

    @contextmanager
    def opened(self, parameters: Iterable[Tensor], count: Tensor) -> Iterator[None]:
        """Inside, `parameter.data` is the fp32 master. An error inside leaves everything as it was."""
        narrow = [p for p in parameters if not self.is_whole(p)]
        held = [p.data for p in narrow]
        for p, w in zip(narrow, self.wide(narrow), strict=True):
            p.data = w
        try:
            yield
        except BaseException:
            _set_data(narrow, held)
            raise
        wide = [p.data for p in narrow]  # an optimizer may have put another tensor there
        _set_data(narrow, held)
        self.put(narrow, wide, [count] * len(narrow))

    def _loader(self, narrow: Mapping[str, Tensor]) -> Callable[..., None]:
        def hook(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for key, p in narrow.items():
                value = state.get(prefix + key)
                if isinstance(value, Tensor) and value.shape == p.shape:
                    wide = value.detach().to(p.device, torch.float32)
                    self.put([p], [wide], [torch.zeros((), device=p.device)])
                    state[prefix + key] = p.detach()  # the dictionary is torch's own copy of the one given

        return hook

    def _round_back(self, parameter: Tensor, wide: Tensor, count: Tensor) -> None:
        param = self.of(parameter)
        if param.stochastic:
            # Flat, so that compiled code sees one dimension, whose size it soon takes for a variable.
            function = compiled(_stochastic) if parameter.is_cuda else _stochastic
            key = (str(self.seed), count.to(torch.int64), tensor_id(self.names[parameter]))
            parameter.copy_(function(wide.reshape(-1), param.format, *key).view(wide.shape))
        elif parameter.dtype == torch.float32:
            parameter.copy_(carried(wide, param.format))
        else:
            parameter.copy_(wide)


class Averages:
    """Exponential moving averages of masters, in fp32: a <- a + (1 - decay) (w - a), on applied updates only."""

    def __init__(self, masters: Masters, parameters: Sequence[Tensor], decay: float):
        check_decay(decay)
        self.masters, self.decay = masters, decay
        self.parameters = [p for p in parameters if p.dtype in _BY_DTYPE]
        wide = masters.wide(self.parameters)
        self.values = [w.detach().clone() for w in wide]

    def named(self) -> dict[str, Tensor]:
        """The averages by the names of their parameters."""
        return {self.masters.names[p]: a for p, a in zip(self.parameters, self.values, strict=True)}

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Moves the averages towards the masters where `applied`, a device scalar, is 1, and not where it is 0."""
        away = torch._foreach_sub([w.detach() for w in self.masters.wide(self.parameters)], self.values)
        torch._foreach_mul_(away, (1.0 - self.decay) * applied)
        torch._foreach_add_(self.values, away)

    @contextmanager
    def used(self, count: Tensor) -> Iterator[None]:
        """Inside, the parameters are the averages, held as masters are; after, the masters are back, exactly."""
        remainders = [self.masters.remainders.get(self.masters.names[p]) for p in self.parameters]
        live = [t.detach() for t in (*self.parameters, *remainders) if t is not None]
        before = [t.clone() for t in live]
        with torch.no_grad():
            self.masters.assign(self.parameters, self.values, count)
        try:
            yield
        finally:
            for t, old in zip(live, before, strict=True):
                t.copy_(old)
            for p in self.parameters:
                if self.masters.is_split(p):
                    note_write(p)


def check_decay(decay: float) -> None:
    """Refuses the decay of an average that averages nothing, or forgets nothing."""
    if not 0.0 < decay < 1.0:
        raise HalfstepError(
            f"ema={decay:g}: the decay of an average lies between 0 and 1",
            hint="0.999 averages over about a thousand updates; leave it out for none",
        )


class Statistics:
    """Buffers as they were before a step, put back where a step that wrote to them is skipped.

    What was written to is told by torch's count of versions, and by whether it is the same tensor still; except in
    batch and instance norms, whose kernels write to their running statistics without counting.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._kept: dict[str, tuple[Tensor, Tensor, int]] = {}  # a copy, what it is a copy of, its version then
        self.remember()

    @torch.no_grad()
    def remember(self) -> None:
        """Takes what was written to buffers since for what a skipped step gives back."""
        for name, buffer, uncounted in self._buffers():
            if self._changed(name, buffer):
                self._kept[name] = (buffer.detach().clone(), buffer, buffer._version)
            elif uncounted:
                self._kept[name][0].copy_(buffer)

    @torch.no_grad()
    def settle(self, finite: Tensor) -> None:
        """Keeps what the step wrote where `finite`, a device scalar, is true, and puts back what was there."""
        written: dict[str, tuple[Tensor, Tensor]] = {}
        for name, buffer, uncounted in self._buffers():
            before = self._kept[name][0] if name in self._kept else None
            if before is None or (buffer.shape, buffer.dtype) != (before.shape, before.dtype):
                self._kept[name] = (buffer.detach().clone(), buffer, buffer._version)
            elif uncounted or self._changed(name, buffer):
                written[name] = (buffer.detach(), before)
        if written:
            buffers, kept = (list(side) for side in zip(*written.values(), strict=True))
            chosen = [torch.where(finite, now, before) for now, before in zip(buffers, kept, strict=True)]
            torch._foreach_copy_(buffers, chosen)
            torch._foreach_copy_(kept, chosen)
        for name, buffer, _ in self._buffers():
            if name in written:
                self._kept[name] = (written[name][1], buffer, buffer._version)

    def _buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Every buffer with its name, and whether it may be written to without its version telling."""
        for prefix, module in self.model.named_modules():
            uncounted = isinstance(module, nn.modules.batchnorm._NormBase)
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield name, buffer, uncounted

    def _changed(self, name: str, buffer: Tensor) -> bool:
        """Whether a buffer was written to by a write that counts, or is another one."""
        _, known, version = self._kept.get(name, (None, None, -1))
        return known is not buffer or version != buffer._version


def _set_data(parameters: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    for p, data in zip(parameters, held, strict=True):
        p.data = data


def _join(halves: list[Tensor], remainders: list[Tensor]) -> list[Tensor]:
    return [join(hi, lo) for hi, lo in zip(halves, remainders, strict=True)]


def _split(halves: list[Tensor], remainders: list[Tensor], wide: list[Tensor]) -> list[Tensor]:
    for hi, lo, w in zip(halves, remainders, wide, strict=True):
        new_hi, new_lo = split(w)
        hi.copy_(new_hi)
        lo.copy_(new_lo)
    return []


def _stochastic(wide: Tensor, fmt: Format, seed: str, count: Tensor, tensor: int) -> Tensor:
    # The seed is a word because dynamo makes a number that changes, in another run, symbolic; inductor cannot then
    # compile what is done with its bits (torch 2.13, CPU). The tensor's number may be: it is only a counter.
    bits = random_bits(wide.shape, seed=int(seed), step=count, tensor=tensor, device=wide.device)
    return quantize(wide, fmt, overflow="inf", rounding="stochastic", bits=bits)


def _over_all(function: Callable[..., list[Tensor]], *lists: list[Tensor]) -> list[Tensor]:
    """A function of lists of tensors, compiled as one where they are on a CUDA device."""
    if not lists[0]:
        return []
    return (compiled(function) if lists[0][0].is_cuda else function)(*lists)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called, and for every list of tensors that it is called with.

    Dynamo gives a function up after eight compilations, and a process that tests has more models than that.
    """
    made = torch.compile(function)

    def call(*given: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=256):
            return made(*given)

    return call
