"""The kernel against fp64, within the roundings of its sums. Without a GPU, interpreted, which has no bf16."""

from importlib.util import find_spec

import pytest
import torch

from halfstep.config.groups import NEWTON_SCHULZ
from halfstep.core.formats import BF16, FP32
from halfstep.torch.optim import muon

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16, torch.float32]
# Less than a block, one, a block and some each way, several; rows that are multiples of 16 and that are not.
SHAPES = [(2, 5, 7), (1, 16, 16), (1, 1, 3), (1, 33, 36), (0, 4, 4)]
A, B, C = NEWTON_SCHULZ


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """The module of the kernel, with blocks of 16 by 16."""
    from halfstep.torch.kernels import symmetric

    monkeypatch.setattr(symmetric, "BLOCK", 16)
    monkeypatch.setattr(symmetric, "DEPTH", 16)
    return symmetric


def draw(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(found, exact, magnitude, terms):
    """Rounded once, after fp32 sums of so many products; tensor cores align them, which may lose another bit."""
    info = torch.finfo(found.dtype)
    bound = exact.abs() * info.eps / 2 + 2 * (terms + 2) * 2.0**-23 * magnitude + info.smallest_normal * info.eps
    return bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_products_are_those_of_fp64_rounded_once_and_symmetric(kernel, shape, dtype):
    x = draw(shape, dtype)
    product = kernel.square(x)
    wide = x.double()
    assert product.dtype == dtype
    assert near(product, wide @ wide.mT, wide.abs() @ wide.abs().mT, shape[-1])
    assert torch.equal(product, product.mT)
    # Smaller, for fp16's range.
    p = (product / shape[-1]).to(dtype)
    found, wide = kernel.quadratic(p, B, C), p.double()
    magnitude = abs(B) * wide.abs() + abs(C) * (wide.abs() @ wide.abs())
    assert near(found, B * wide + C * (wide @ wide), magnitude, shape[-2])
    assert torch.equal(found, found.mT)


def test_a_matrix_has_the_same_bits_alone_and_beside_others(kernel):
    x = draw((3, 18, 20), DTYPES[0])
    together = kernel.square(x)
    assert all(torch.equal(kernel.square(x[i : i + 1]), together[i : i + 1]) for i in range(3))


@pytest.mark.parametrize("shape", [(1, 20, 18), (1, 18, 20)], ids=str)
def test_five_steps_by_the_kernel_are_those_of_fp64(monkeypatch, shape):
    """In fp32: an error grows at most 3.9-fold at each step (a + 3 b s^2 + 5 c s^4, s up to 1.2)."""
    used = []
    real = muon._by_kernel
    monkeypatch.setattr(muon, "why_torch", lambda device, dtype: "")
    monkeypatch.setattr(muon, "_by_kernel", lambda *given: used.append(1) or real(*given))
    drawn = draw(shape)
    found = muon.orthogonalize(drawn, FP32)
    x = drawn.double()
    x = x.mT if shape[1] > shape[2] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        product = x @ x.mT
        x = A * x + (B * product + C * product @ product) @ x
    x = x.mT if shape[1] > shape[2] else x
    # A step: three sums of at most 20 terms and their roundings, of matrices of norms up to 2.9 sqrt(rows).
    local = 3 * 22 * 2.0**-24 * 2.9 * min(shape[1:]) ** 0.5
    assert float((found.double() - x).norm(dim=(-2, -1)).max()) <= local * sum(3.9**k for k in range(6))
    assert len(used) == 5


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", [(3, 768, 768), (2, 512, 1024), (2, 1024, 512)], ids=str)
def test_on_a_gpu_it_is_used_and_orthogonalizes_as_torchs_products_do(monkeypatch, shape):
    from halfstep.torch.kernels import symmetric

    monkeypatch.undo()
    assert (symmetric.BLOCK, muon.why_torch(torch.device("cuda", 0), torch.bfloat16)) == (128, "")
    drawn = draw(shape)
    ours = muon.orthogonalize(drawn, BF16)
    exact = muon.orthogonalize(drawn.double(), FP32)
    monkeypatch.setattr(muon, "why_torch", lambda device, dtype: "told")
    torchs = muon.orthogonalize(drawn, BF16)
    errors = [float((found.double() - exact.double()).norm()) for found in (ours, torchs)]
    # Both round in the same places, so that their errors are of one size, though not the same numbers.
    assert errors[0] <= 1.25 * errors[1]
