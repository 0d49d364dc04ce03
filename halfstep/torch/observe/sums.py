"""What a sample says about many tensors at once: exponents, power sums, and what other formats would lose.

The definitions are core.stats; the casts are those of halfstep.torch.cast, so that what is predicted is what a
layer in that format would do. A part of each tensor is looked at (`ELEMENTS` elements: whole rows, evenly
spaced); one scale for a tensor follows the amax of the whole of it. Parts of one shape are stacked and computed
together, in some two hundred small kernels for all of them, and the host is asked for the results once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.formats import FP32, parse
from halfstep.core.observed import Observation, limits
from halfstep.core.roles import Operand
from halfstep.core.stats.tensors import FIRST_EXPONENT, NUM_EXPONENTS, TensorStats
from halfstep.core.stats.what_if import BLOCK, SPECS, SignalLost, spec_of
from halfstep.torch.cast import amax_of, quantize, quantize_scaled, to_native
from halfstep.torch.dtypes import DTYPES
from halfstep.torch.observe.readback import wide
from halfstep.torch.observe.slots import part

ELEMENTS = 2**15  # of a tensor that are looked at
_AT_ONCE = 2**23  # elements: what is computed together takes some ten times their bytes
_COUNTS = ("zeros", "nans", "infs", "overflow", "underflow", "subnormal")


class Part(NamedTuple):
    """What is looked at of a tensor, (rows, features) in fp32, and the largest magnitude of the whole."""

    values: Tensor
    amax: Tensor
    format: str  # of the tensor, as a spec


def part_of(x: Tensor, format: str, elements: int = ELEMENTS) -> Part:
    """Copies a part of a tensor, and takes its amax."""
    x = x.detach()
    amax = torch.linalg.vector_norm(x, torch.inf).float() if x.numel() else torch.zeros((), device=x.device)
    seen = part(x, elements)
    seen = seen.reshape(-1, seen.shape[-1]) if seen.dim() and seen.numel() else seen.reshape(1, -1)
    return Part(seen.to(torch.float32, copy=True), amax, format)


@torch.no_grad()
def observations(parts: Mapping[Any, Part]) -> dict[Any, Observation]:
    """Returns the sums of each part; waits for the device."""
    groups: dict[Any, list[Any]] = {}
    for key, each in parts.items():
        groups.setdefault((each.values.shape, each.values.device, each.format), []).append(key)
    launched = [
        _Group.of([(key, parts[key]) for key in keys]) for all in groups.values() for keys in _chunks(all, parts)
    ]
    return {key: seen for group in launched for key, seen in group.read()}


def _chunks(keys: Sequence[Any], parts: Mapping[Any, Part]) -> Iterator[Sequence[Any]]:
    step = max(1, _AT_ONCE // max(1, parts[keys[0]].values.numel()))
    return (keys[start : start + step] for start in range(0, len(keys), step))


@dataclass
class _Group:
    """Sums of parts that have one shape and format, on the device."""

    keys: Sequence[Any]
    format: str
    count: int
    basics: Tensor  # (parts, counts, amax, amin, fourth)
    lost: dict[str, Tensor]  # {spec: (parts, overflow, underflow, signal, noise)}
    exponents: Tensor

    @classmethod
    def of(cls, given: Sequence[tuple[Any, Part]]) -> "_Group":
        format = given[0][1].format
        x = torch.stack([each.values for _, each in given])
        amax = torch.stack([each.amax for _, each in given])
        lost = {spec: signal_lost(x, amax, spec) for spec in dict.fromkeys([*SPECS, format]) if spec != str(FP32)}
        return cls([k for k, _ in given], format, x[0].numel(), _basics(x, amax, format), lost, _exponents(x))

    def read(self) -> Iterator[tuple[Any, Observation]]:
        basics, exponents = self.basics.cpu().tolist(), self.exponents.cpu().tolist()
        lost = {spec: sums.cpu().tolist() for spec, sums in self.lost.items()}
        for i, key in enumerate(self.keys):
            *counts, amax, amin, signal, fourth = basics[i]
            own = lost[self.format][i] if self.format in lost else [0, 0, signal, 0.0]
            stats = TensorStats(
                parse(self.format.partition(":")[0]),
                count=self.count,
                **dict(zip(_COUNTS, map(int, counts), strict=True)),
                amax=amax,
                amin=amin,
                signal=own[2],
                noise=own[3],
                fourth=fourth,
                exponents=tuple(exponents[i]),
            )
            what_if = {
                s: SignalLost(self.count, int(lost[s][i][0]), int(lost[s][i][1]), *lost[s][i][2:]) for s in SPECS
            }
            yield key, Observation(stats, what_if)


def requantized(x: Tensor, amax: Tensor, spec: str) -> Tensor:
    """Returns what comes back of stacked matrices (parts, rows, features) after the cast of a spec, in fp32."""
    format, scaled = spec_of(spec)
    if scaled == "no":
        cast = to_native if format in DTYPES else quantize  # the same numbers; in eager mode torch's is faster
        return cast(x, format, overflow="saturate").float()
    shape, width = x.shape, x.shape[-1]
    if scaled == "block":
        x = F.pad(x, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    operand = Operand(format, "tensor" if scaled == "tensor" else "row")
    amax = amax.reshape(-1, 1, 1) if scaled == "tensor" else amax_of(x, operand)
    values, inv_scale = quantize_scaled(x, operand, amax=amax, native=format in DTYPES)
    y = values.float() * inv_scale
    return y.flatten(-2)[..., :width] if scaled == "block" else y.reshape(shape)


def signal_lost(x: Tensor, amax: Tensor, spec: str) -> Tensor:
    """Returns overflow, underflow, signal and noise of each of stacked matrices, (parts, 4)."""
    format, scaled = spec_of(spec)
    y, finite = requantized(x, amax, spec), x.isfinite()
    kept = finite & y.isfinite()
    beyond = finite & ~kept
    if scaled == "no":
        beyond = finite & (x.abs() >= limits(format).overflow)
    exact = torch.where(kept, x, 0.0).to(wide(x.device))
    error = exact - torch.where(kept, y, 0.0).to(exact.dtype)
    sums = (beyond, (y == 0) & (x != 0), exact.square(), error.square())
    return torch.stack([s.flatten(1).sum(1, dtype=exact.dtype) for s in sums], -1)


def _basics(x: Tensor, amax: Tensor, format: str) -> Tensor:
    fmt, scaled = spec_of(format)
    finite, magnitude = x.isfinite(), x.abs()
    exact = torch.where(finite, x, 0.0).to(wide(x.device))
    largest = exact.abs().flatten(1).amax(1)
    largest = torch.where(amax < torch.inf, amax.to(largest), largest)
    smallest = torch.where(finite & (x != 0), magnitude, torch.inf).flatten(1).amin(1)
    square = exact.square()
    over, under, subnormal = limits(fmt)
    nonzero = x != 0
    counts = [~nonzero, x.isnan(), x.isinf()]
    if scaled == "no":
        small = magnitude < subnormal
        counts += [finite & (magnitude >= over), nonzero & (magnitude <= under), small & (magnitude > under)]
    else:  # by the scale that its operand has
        y = requantized(x, amax, format)
        none = torch.zeros_like(nonzero)
        counts += [finite & ~y.isfinite(), nonzero & (y == 0), none]
    numbers = [*counts, square, square.square()]
    *sums, signal, fourth = (n.flatten(1).sum(1, dtype=exact.dtype) for n in numbers)
    return torch.stack([*sums, largest, smallest.to(exact.dtype), signal, fourth], -1)


def _exponents(x: Tensor) -> Tensor:
    """Returns how many finite elements have each floor(log2 |x|), (parts, NUM_EXPONENTS)."""
    counted = x.isfinite() & (x != 0)
    # frexp has its significand in [1/2, 1), so its exponent is one more than floor(log2).
    index = torch.frexp(torch.where(counted, x, 1.0))[1].long() - 1 - FIRST_EXPONENT
    # What is not counted goes into one more bin.
    index = torch.where(counted, index, NUM_EXPONENTS).flatten(1)
    bins = torch.zeros(len(x), NUM_EXPONENTS + 1, dtype=torch.int64, device=x.device)
    return bins.scatter_add_(1, index, torch.ones_like(index))[:, :-1]
