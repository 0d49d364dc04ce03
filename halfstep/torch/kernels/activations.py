"""Activation functions that take less time or memory than torch's own.

**The tanh form of GELU**, in compiled code on a GPU, by a sigmoid:

    x (1 + tanh(u)) / 2  =  x sigmoid(2 u)        u = sqrt(2 / pi) (x + 0.044715 x^3)

The same function, computed in fp32 and rounded once. inductor calls CUDA's tanh, a polynomial and an exponential;
its sigmoid is an exponential and a division, and kernels with a GELU in them take a fifth to a third less time.
Where u is far below 0 it is also closer: 1 + tanh(u) is rounded near 1, a sigmoid near itself.

**The exact form of GELU** of 16-bit numbers, x Phi(x), in compiled code on a GPU, by one exponential:

    Phi(-|x|) = 2^P(|x|)

P is a polynomial, fitted to the logarithm. Up to |x| = 6.5 it is off by less than 2^-16 of Phi(-|x|), so a result
in bf16 or fp16 is at most the one next to the right one; beyond, where it is below 2^-31, it falls to 0 faster.
torch rounds 1 + erf(x) near 1, which for x < -2 is off by more.

**relu(x)^2 in bf16** keeps its result alone, which the next matmul keeps anyway. A bf16 number has 8 bits, so
that its square, rounded to 8, is off by at most 2^-8 of itself, and the root of that by 2^-9 of x. What is so
close to x is rounded to x, so the gradient has the bits that it has with x: a test tries every number. Squares
below 2^-126 have fewer bits: of an x below 2^-63, a slope below 2^-62 becomes another one as small.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.core.formats import BF16
from halfstep.torch.numerics.cast import carried
from halfstep.torch.numerics.provenance import compiling, recording, transforming

TWICE = 2 * math.sqrt(2 / math.pi)
# The logarithm to base 2 of how much of a normal distribution is below -x, from x^0 on, for x from 0 to 6.5.
TAIL = (-1.00000387, -1.15118017, -0.458615705, -0.0538245033, 8.44738617e-3, -9.16363098e-4, 5.99365996e-5,
        -1.75777743e-6)  # fmt: skip


def gelu(x: Tensor) -> Tensor:
    """Returns the tanh form of GELU."""
    return by_sigmoid(x) if x.is_cuda and compiling() else F.gelu(x, approximate="tanh")


def by_sigmoid(x: Tensor) -> Tensor:
    """Returns the same."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide * (TWICE + TWICE * 0.044715 * wide * wide))).to(x.dtype)


class ExactGELU(torch.autograd.Function):
    """x Phi(x) of numbers in 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.float() * _share_below(x.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].float()
        density = torch.exp2(x * x * (-0.5 / math.log(2))) * (1 / math.sqrt(2 * math.pi))
        return (g.float() * (_share_below(x) + x * density)).to(g.dtype)


def _share_below(x: Tensor) -> Tensor:
    """Returns how much of a normal distribution is below x."""
    distance = x.abs()
    power = TAIL[-1] * distance + TAIL[-2]
    for factor in TAIL[-3::-1]:
        power = power * distance + factor
    tail = torch.exp2(power)
    return torch.where(x > 0, 1 - tail, tail)


def squared_relu(x: Tensor) -> Tensor:
    """Returns relu(x)^2."""
    if x.dtype is not torch.bfloat16 or transforming():
        return F.relu(x).square()
    return SquaredReLU.apply(x)  # type: ignore[no-any-return]


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2 of bf16 numbers, whose backward pass finds relu(x) as the root of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.relu(x).square()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        if recording():  # a root has no slope at 0
            return g * (2 * torch.where(y > 0, torch.where(y > 0, y, 1).sqrt(), y))
        if compiling():  # which would leave out the rounding to bf16
            return (g.float() * (2 * carried(y.float().sqrt(), BF16))).to(g.dtype)
        return y.sqrt().mul_(2).mul_(g)
