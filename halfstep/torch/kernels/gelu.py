"""The tanh form of GELU as compiled code computes it on a GPU: by a sigmoid.

    x (1 + tanh(u)) / 2  =  x sigmoid(2 u)        u = sqrt(2 / pi) (x + 0.044715 x^3)

The same function, computed in fp32 and rounded once. inductor calls CUDA's tanh, a polynomial and an exponential;
its sigmoid is an exponential and a division, and kernels with a GELU in them take a fifth to a third less time.
Where u is far below 0 it is also closer: 1 + tanh(u) is rounded near 1, a sigmoid near itself.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.torch.tracing import compiling

TWICE = 2 * math.sqrt(2 / math.pi)


def gelu(x: Tensor) -> Tensor:
    """Returns the tanh form of GELU."""
    return by_sigmoid(x) if x.is_cuda and compiling() else F.gelu(x, approximate="tanh")


def by_sigmoid(x: Tensor) -> Tensor:
    """Returns the same."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide * (TWICE + TWICE * 0.044715 * wide * wide))).to(x.dtype)
