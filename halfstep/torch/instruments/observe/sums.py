"""Statistics of samples of many tensors at once: exponents, power sums, and what other formats would lose.

The definitions are core.stats; the casts are those of torch/numerics/cast.py, so that what is predicted is what a
layer in that format would do. A sample of each tensor is examined (`ELEMENTS` elements: whole rows, evenly
spaced); a scale per tensor follows the amax of the whole tensor. Samples of one shape are stacked and computed
together, in some two hundred small kernels, and the results are copied to the host once.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.formats import FP32, Format
from halfstep.core.observed import Observation, limits
from halfstep.core.roles import Operand
from halfstep.core.stats.tensors import FIRST_EXPONENT, NUM_EXPONENTS, TensorStats
from halfstep.core.stats.what_if import BLOCK, SPECS, SignalLost, spec_of
from halfstep.torch.loss.plain import evenly_spaced
from halfstep.torch.numerics.cast import amax_of, quantize, quantize_scaled, to_native
from halfstep.torch.numerics.dtypes import DTYPES

ELEMENTS = 2**15  # of a tensor that are examined
_AT_ONCE = 2**23  # elements that are computed together, which takes some ten times their bytes
_COUNTS = ("zeros", "nans", "infs", "overflow", "underflow", "subnormal")
_NUMBERS = ("amax", "amin", "signal", "noise", "fourth")


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums: fp64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


class Part(NamedTuple):
    """A sample of a tensor, (rows, features) in fp32, and the largest magnitude of the whole tensor."""

    values: Tensor
    amax: Tensor
    format: str  # of the tensor, as a spec


def part_of(x: Tensor, format: str) -> Part:
    """Copies a sample of a tensor, and computes the amax of the whole."""
    x = x.detach()
    amax = torch.linalg.vector_norm(x, torch.inf).float() if x.numel() else torch.zeros((), device=x.device)
    few = evenly_spaced(x, ELEMENTS)
    few = few.reshape(-1, few.shape[-1]) if few.dim() and few.numel() else few.reshape(1, -1)
    return Part(few.to(torch.float32, copy=True), amax, format)


@torch.no_grad()
def observations(parts: Sequence[Part]) -> list[Observation]:
    """Returns the statistics of each sample; waits for the device, once."""
    groups: dict[Any, list[int]] = {}
    for i, each in enumerate(parts):
        groups.setdefault((each.values.shape, each.values.device), []).append(i)
    chunks = [chunk for alike in groups.values() for chunk in _chunks(alike, parts[alike[0]].values.numel())]
    specs = [*dict.fromkeys([*SPECS, *(each.format for each in parts if each.format != str(FP32))])]
    sums = [_sums([parts[i] for i in chunk], specs) for chunk in chunks]
    rows = torch.cat([each.to(sums[0].device) for each in sums]).cpu().tolist() if sums else []
    by_part = dict(zip([i for chunk in chunks for i in chunk], rows, strict=True))
    return [_observation(part, by_part[i], specs) for i, part in enumerate(parts)]


def _chunks(indices: Sequence[int], elements: int) -> Iterator[Sequence[int]]:
    step = max(1, _AT_ONCE // max(1, elements))
    return (indices[start : start + step] for start in range(0, len(indices), step))


def _sums(parts: Sequence[Part], specs: Sequence[str]) -> Tensor:
    """Returns a row for each of parts that have one shape: `_basics`, what each spec loses, exponents."""
    x, amax = torch.stack([each.values for each in parts]), torch.stack([each.amax for each in parts])
    lost = [signal_lost(x, amax, spec) for spec in specs]
    basics = _basics(x, amax, [spec_of(each.format).format for each in parts])
    return torch.cat([basics, *lost, _exponents(x).to(basics.dtype)], -1)


def _observation(part: Part, row: Sequence[float], specs: Sequence[str]) -> Observation:
    count, size = part.values.numel(), len(_COUNTS) + len(_NUMBERS)
    basics: dict[str, Any] = dict(zip((*_COUNTS, *_NUMBERS), row, strict=False))
    lost = {spec: _lost(count, *row[size + 4 * i :][:4]) for i, spec in enumerate(specs)}
    format, scaled = spec_of(part.format)
    own = lost.get(part.format)
    if own is not None:
        basics |= {"signal": own.signal, "noise": own.noise}
    if own is not None and scaled != "no":  # as its operand is scaled
        basics |= {"overflow": own.overflow, "underflow": own.underflow, "subnormal": 0}
    basics |= {name: int(basics[name]) for name in _COUNTS}
    exponents = tuple(int(n) for n in row[size + 4 * len(specs) :])
    stats = TensorStats(format, count, **basics, exponents=exponents)
    return Observation(stats, {spec: lost[spec] for spec in SPECS})


def _lost(count: int, overflow: float, underflow: float, signal: float, noise: float) -> SignalLost:
    return SignalLost(count, int(overflow), int(underflow), signal, noise)


def requantize(x: Tensor, amax: Tensor, spec: str) -> Tensor:
    """Returns stacked matrices (parts, rows, features) in fp32, after a cast to the format of a spec and back."""
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
    y, finite = requantize(x, amax, spec), x.isfinite()
    kept = finite & y.isfinite()
    beyond = finite & ~kept
    if scaled == "no":
        beyond = finite & (x.abs() >= limits(format).overflow)
    exact = torch.where(kept, x, 0.0).to(sum_dtype(x.device))
    error = exact - torch.where(kept, y, 0.0).to(exact.dtype)
    sums = (beyond, (y == 0) & (x != 0), exact.square(), error.square())
    return torch.stack([s.flatten(1).sum(1, dtype=exact.dtype) for s in sums], -1)


def _basics(x: Tensor, amax: Tensor, formats: Sequence[Format]) -> Tensor:
    """Returns `_COUNTS` and `_NUMBERS` of stacked matrices, each as its format sees it without a scale."""
    constants = torch.tensor([limits(fmt) for fmt in formats]).to(x.device, non_blocking=True)
    over, under, subnormal = constants.reshape(-1, 1, 1, 3).unbind(-1)
    finite, magnitude, nonzero = x.isfinite(), x.abs(), x != 0
    exact = torch.where(finite, x, 0.0).to(sum_dtype(x.device))
    largest = torch.where(amax < torch.inf, amax.to(exact.dtype), exact.abs().flatten(1).amax(1))
    smallest = torch.where(finite & nonzero, magnitude, torch.inf).flatten(1).amin(1).to(exact.dtype)
    square, at_most = exact.square(), magnitude <= under
    sums = [~nonzero, x.isnan(), x.isinf(), finite & (magnitude >= over), nonzero & at_most]
    sums += [(magnitude < subnormal) & ~at_most, square, square.square()]
    *counts, signal, fourth = (each.flatten(1).sum(1, dtype=exact.dtype) for each in sums)
    return torch.stack([*counts, largest, smallest, signal, torch.zeros_like(signal), fourth], -1)


def _exponents(x: Tensor) -> Tensor:
    """Returns how many finite elements have each floor(log2 |x|), (parts, NUM_EXPONENTS)."""
    counted = x.isfinite() & (x != 0)
    # frexp has its significand in [1/2, 1), so its exponent is one more than floor(log2).
    index = torch.frexp(torch.where(counted, x, 1.0))[1].long() - 1 - FIRST_EXPONENT
    # Zeros, NaN and infinities go into one more bin, which is dropped.
    index = torch.where(counted, index, NUM_EXPONENTS).flatten(1)
    bins = torch.zeros(len(x), NUM_EXPONENTS + 1, dtype=torch.int64, device=x.device)
    return bins.scatter_add_(1, index, torch.ones_like(index))[:, :-1]
