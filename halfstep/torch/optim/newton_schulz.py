"""Newton-Schulz: pushes the singular values of matrices to about one, by matrix products alone.

    A <- X X^T
    X <- a X + (b A + c A^2) X          five times, from X = M / |M|; a tall M is transposed, so that A is small

Three products a step, each rounded once: what is added is added to the fp32 sum. The first two are symmetric, and
on an NVIDIA GPU a kernel of ours computes half of them (kernels/symmetric.py); elsewhere torch's `bmm` and
`baddbmm` compute all of them. `why_torch` is the rule.
"""

from functools import cache

import torch
from torch import Tensor

from halfstep.config.groups import NEWTON_SCHULZ
from halfstep.core.formats import Format
from halfstep.torch.kernels import has_triton
from halfstep.torch.numerics.cast import carried
from halfstep.torch.numerics.dtypes import NARROW, dtype_of


def orthogonalize(matrices: Tensor, iteration: Format, steps: int = 5, *, emulate: bool = False) -> Tensor:
    """Pushes the singular values of each matrix of a batch to about one."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    size = x.norm(dim=(-2, -1), keepdim=True) + 1e-7
    if emulate:  # rounds what hardware would store
        x = carried(x / size, iteration)
        for _ in range(steps):
            product = carried(x @ x.mT, iteration)
            x = carried(a * x + carried(b * product + c * (product @ product), iteration) @ x, iteration)
    else:
        # One pass: divided in fp32, and rounded and transposed as it is stored.
        x = torch.div(x, size, out=torch.empty(x.shape, dtype=dtype_of(iteration), device=x.device))
        by_kernel = not why_torch(x.device, x.dtype)
        for _ in range(steps):
            x = torch.baddbmm(x, (_by_kernel if by_kernel else _by_torch)(x, b, c), x, beta=a)
    return x.mT if tall else x


def why_torch(device: torch.device, dtype: torch.dtype) -> str:
    """Returns why torch computes the symmetric products of matrices; empty if our kernel does."""
    if device.type != "cuda":  # also meta that stands in for a GPU: a plan counts torch's products
        return f"no kernel for {device.type}"
    if not has_triton():
        return "Triton is not installed"
    if dtype not in NARROW:
        return f"the kernel multiplies bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
    return "" if _capability(device) >= (8, 0) else "the kernel needs an NVIDIA GPU of compute capability 8.0"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _by_torch(x: Tensor, b: float, c: float) -> Tensor:
    """Returns b A + c A^2."""
    product = torch.bmm(x, x.mT)
    return torch.baddbmm(product, product, product, beta=b, alpha=c)


def _by_kernel(x: Tensor, b: float, c: float) -> Tensor:
    """Returns b A + c A^2, half of it computed and half mirrored."""
    from halfstep.torch.kernels.symmetric import quadratic, square  # Triton is installed, as `why_torch` knows

    return quadratic(square(x), b, c)
