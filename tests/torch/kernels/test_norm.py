"""The kernel against the sum in fp64, within the roundings of fp32 sums. Without a GPU, interpreted."""

from importlib.util import find_spec

import pytest
import torch

from halfstep.torch.optim import drivers

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(5,), (64, 3), (7, 11), (64,), (0, 4), (1,)]


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """The module of the kernel, with chunks of 64 numbers."""
    from halfstep.torch.kernels import norm

    monkeypatch.setattr(norm, "CHUNK", 64)
    if DEVICE == "cpu":
        monkeypatch.setattr(drivers, "reachable", lambda tensors: [t.is_contiguous() for t in tensors])
    return norm


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def test_it_is_the_norm_of_new_gradients_each_time():
    norm = drivers.GradNorm()
    kept = [draw(seed) for seed in range(3)]
    for grads in [*kept, kept[0][:2], kept[1]]:
        numbers = torch.cat([g.flatten() for g in grads])
        exact = numbers.double().square().sum().sqrt()
        # Squares and sums of positive terms, each rounded once; half of it remains after the root.
        assert (norm(grads).double() - exact).abs() <= numbers.numel() * 2.0**-24 * exact
    assert norm.kernel is not None


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_number_that_is_not_finite_is_found(bad):
    grads = draw(0)
    grads[2][6, 10] = bad
    assert not drivers.GradNorm()(grads) < torch.inf


def test_gradients_that_the_kernel_cannot_read_go_to_torch():
    norm = drivers.GradNorm()
    grads = [draw(0)[1].bfloat16(), draw(0)[2].t()]
    assert torch.equal(norm(grads), drivers.norm_of(grads))
    assert norm.kernel is None
