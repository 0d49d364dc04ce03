"""Compares native fp8 with the emulated form of the same recipe, on any device that multiplies fp8.

    python benchmarks/prove/fp8_bits.py [--device cuda]

**Operands and scales** must equal the emulation bit for bit, eager and under torch.compile. The emulation builds
them from bit patterns, without torch's own conversion. The tensors are those that casts get wrong first (zeros,
subnormals, one outlier, rows of every size, infinities, NaN), with widths from 16 to 4096 and awkward numbers of
tokens. A NaN must be a NaN; the framework chooses which of its codes.

**Products** must be what their operands say. With the codes a, b and the scales undone, K products p_k = a_k b_k
are exact, and so is their sum here, in fp64. Of the magnitudes S = sum |p_k| a device may lose

    fp32 sums, in any order (CPU)            K 2^-24 S
    tensor core, partial sums in fp32        132 * 2^-13 S + K 2^-24 S
    tensor core, fast accumulation           33 (K / 32 + 1) 2^-13 S

An instruction of an NVIDIA tensor core sums 32 products and what was there before, 33 numbers, aligned to the
largest exponent among them, and keeps 13 bits below its leading one ("around 14 bits" in DeepSeek's
measurements, arXiv 2412.19437). Each of the 33 loses less than 2^-13 of the largest, which is no more than S.
Without fast accumulation four instructions are added up so, and then to a sum in fp32: 4 * 33 = 132 times the S
of the part, and the parts add up to S. With it there are K / 32 instructions in a row. The result is rounded
once to its format: half a unit of what it is. That is the worst case, in which every loss has the same sign;
`kept` is what was seen, beyond that rounding: -log2(error / S). Scales that multiply to a subnormal number are
not part of it: a kernel undoes them in an order of its own.

Exit code 1 if a bit differs or a bound is broken, 2 if the device lacks fp8.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.core.formats import BF16, E4M3, E5M2, FP32, Format
from halfstep.core.precision import Precision
from halfstep.core.roles import Accumulator, Operand
from halfstep.torch.convert.fp8_choice import try_row_scales
from halfstep.torch.fp8.linear import Lowered, lower, product
from halfstep.torch.layers import casts_of
from halfstep.torch.numerics.cast import quantize_scaled
from halfstep.torch.numerics.dtypes import describe, supported
from halfstep.torch.numerics.lowering import Casts

WIDTHS = (16, 48, 768, 4096)
TOKENS = (1, 16, 17, 250)
FORMATS = (E4M3, E5M2)
GRANULARITIES = ("tensor", "row")
COMPILED = (250, 768)  # one shape, so that each form is compiled once
# Tokens, inputs, outputs of the layers whose products are held to the bound.
LAYERS = ((17, 16, 16), (250, 48, 96), (1000, 768, 3072), (2049, 4096, 1024))
ON_CPU = LAYERS[:2]


def kinds(rows: int, width: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that casts get wrong first, in bf16."""
    generator = torch.Generator(device).manual_seed(rows * 10007 + width)

    def draw() -> Tensor:
        return torch.randn(rows, width, device=device, generator=generator)

    def with_one(value: float) -> Tensor:
        x = draw()
        x[rows // 2, width // 2] = value
        return x

    powers = torch.arange(rows, device=device).remainder(120).sub(60).float()
    yield "random", draw().bfloat16()
    yield "small", (draw() * 1e-6).bfloat16()
    yield "zeros", torch.zeros(rows, width, device=device).bfloat16()
    yield "subnormals", (draw() * 2.0**-130).bfloat16()
    yield "an outlier", with_one(1e30).bfloat16()
    yield "rows of every size", (draw() * torch.exp2(powers)[:, None]).bfloat16()
    yield (
        "ties and the largest",
        ((torch.arange(rows * width, device=device) % 3000 - 1500.0) / 2).view(rows, width).bfloat16(),
    )
    yield "inf", with_one(math.inf).bfloat16()
    yield "-inf", with_one(-math.inf).bfloat16()
    yield "nan", with_one(math.nan).bfloat16()


def casts(operand: Operand, grad: Operand, emulate: bool, fast: bool = False) -> Casts:
    """Returns the casts of a bf16 layer with these operands."""
    return casts_of(Precision(BF16, operand, BF16, grad, FP32, Accumulator(fast=fast), emulate=emulate))


def differing(a: Tensor, b: Tensor) -> int:
    """Counts the numbers that differ; two NaNs are equal, zeros of different sign are not."""
    a, b = a.float(), b.float()
    same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
    return int((~same).sum())


def operands(device: torch.device) -> Iterator[tuple[str, int, int, int]]:
    """Yields (description, numbers compared, codes that differ, scales that differ) for each kind of tensor."""
    found: dict[str, list[int]] = {}
    for fmt, granularity in itertools.product(FORMATS, GRANULARITIES):
        operand = Operand(fmt, granularity=granularity)
        native = casts(operand, operand, False)
        compiled = torch.compile(
            lambda x, o=operand, c=native: tuple(lower(x, o, c)), fullgraph=True, dynamic=False
        )
        for tokens, width in itertools.product(TOKENS, WIDTHS):
            for kind, x in kinds(tokens, width, device):
                emulated = Lowered(*quantize_scaled(x, operand))
                compare(found, f"eager, {kind}", lower(x, operand, native), emulated)
                turned = Lowered(*quantize_scaled(x.t(), operand))
                compare(found, f"transposed, {kind}", lower(x.t(), operand, native), turned)
                if (tokens, width) == COMPILED:
                    compare(found, f"compiled, {kind}", Lowered(*compiled(x)), emulated)
    yield from ((what, *counts) for what, counts in found.items())


def compare(found: dict[str, list[int]], what: str, native: Lowered, emulated: Lowered) -> None:
    """Counts the differences between two operands."""
    counts = found.setdefault(what, [0, 0, 0])
    assert native.inv_scale is not None
    assert emulated.inv_scale is not None
    counts[0] += native.values.numel()
    counts[1] += differing(native.values, emulated.values)
    counts[2] += differing(native.inv_scale, emulated.inv_scale)


def bound(terms: int, magnitude: Tensor, exact: Tensor, out: Format, on_cpu: bool, fast: bool) -> Tensor:
    """Returns how far each element of a product may be from the exact one."""
    if on_cpu:
        share = terms * 2.0**-24
    elif fast:
        share = 33 * (terms / 32 + 1) * 2.0**-13
    else:
        share = 132 * 2.0**-13 + terms * 2.0**-24
    summed = share * magnitude
    return summed + (exact.abs() + summed) * out.epsilon / 2


class Case(NamedTuple):
    """A product a b^T of (rows, sum) by (columns, sum)."""

    rows: int
    sum: int
    columns: int
    left: Operand
    right: Operand
    out: Format
    fast: bool = False

    def __str__(self) -> str:
        form = f"{self.left.format} {self.left.granularity}{' fast' if self.fast else ''}"
        return f"{self.rows} x {self.sum} x {self.columns}, {form}, {self.out} out"


def cases(on_cpu: bool) -> Iterator[Case]:
    """Yields products of the forward pass (e4m3, also fast), grad_input (e5m2) and grad_weight (fp32 out)."""
    for tokens, inputs, outputs in ON_CPU if on_cpu else LAYERS:
        filled = tokens + -tokens % 16
        for fmt, granularity in itertools.product(FORMATS, GRANULARITIES):
            pair = Operand(fmt, granularity=granularity), Operand(E4M3, granularity=granularity)
            yield Case(tokens, inputs, outputs, *pair, BF16)
            yield Case(tokens, inputs, outputs, *pair, FP32)
            yield Case(outputs, filled, inputs, *pair, FP32)
            if fmt == E4M3 and not on_cpu:
                yield Case(tokens, inputs, outputs, *pair, BF16, fast=True)


def check(case: Case, device: torch.device) -> tuple[float, float, int]:
    """Returns the worst error over its bound, the bits kept of S, and how many results are NaN on one side only.

    The left operand takes every kind of tensor, the right one is random.
    """
    left, right, out, fast = case.left, case.right, case.out, case.fast
    m, k, n = case.rows, case.sum, case.columns
    native, emulated = (casts(right, left, emulate, fast) for emulate in (False, True))
    dtype = torch.float32 if out == FP32 else torch.bfloat16
    w = torch.randn(n, k, device=device, generator=torch.Generator(device).manual_seed(1)).mul_(0.02).bfloat16()
    worst, kept, odd = 0.0, math.inf, 0
    for kind, x in kinds(m, k, device):
        if kind == "subnormals":
            continue
        a, b = lower(x, left, native), lower(w, right, native)
        y = product(a, b, out, dtype, native, fast=fast).double()
        e = product(lower(x.float(), left, emulated), lower(w.float(), right, emulated), out, dtype, emulated)
        odd += int((y.isnan() != e.isnan()).sum())
        codes_a, codes_b = a.values.double(), b.values.double()
        assert a.inv_scale is not None
        assert b.inv_scale is not None
        inverse = a.inv_scale.double() * b.inv_scale.double().reshape(1, -1)
        exact, magnitude = (codes_a @ codes_b.t()) * inverse, (codes_a.abs() @ codes_b.abs().t()) * inverse
        error = (y - exact).abs()
        ratio = (error / bound(k, magnitude, exact, out, device.type == "cpu", fast)).nan_to_num(0.0)
        worst = max(worst, float(ratio.max()))
        rounded = (error - exact.abs() * (out.epsilon / 2 if out != FP32 else 0)).clamp(min=0)
        share = (rounded / magnitude).nan_to_num(0.0)
        if float(share.max()) > 0:
            kept = min(kept, -math.log2(float(share.max())))
    return worst, kept, odd


def main(arguments: list[str]) -> int:
    """Prints both tables; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description="Native fp8 against its emulation, bit for bit.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args(arguments).device)
    for fmt in FORMATS:
        found = supported(fmt, device)
        if not found:
            print(f"{fmt} cannot run on {device}: {found.reason}", file=sys.stderr)
            return 2
    try_row_scales(device)
    torch.set_float32_matmul_precision("highest")
    failed = 0
    print(f"{describe(device)}, torch {torch.__version__}\n")
    print(f"{'operands':<36}{'numbers':>12}{'codes differ':>14}{'scales differ':>15}")
    for what, count, codes, scales in operands(device):
        failed += codes + scales > 0
        print(f"{what:<36}{count:>12,}{codes:>14,}{scales:>15,}{'   FAILED' if codes + scales else ''}")
    print(f"\n{'product':<44}{'error / bound':>14}{'kept, bits':>12}{'NaN differ':>12}")
    for case in cases(device.type == "cpu"):
        ratio, kept, odd = check(case, device)
        bad = ratio > 1 or odd > 0
        failed += bad
        print(f"{case!s:<44}{ratio:>14.4f}{kept:>12.1f}{odd:>12,}{'   FAILED' if bad else ''}")
    print(f"\n{failed} rows failed" if failed else "\nall rows passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
