"""The kernel against fp64, within the roundings of its sums. Without a GPU, interpreted, which has no bf16."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16, torch.float32]
# Rows, columns, terms of a sum: less than a block, a group of blocks and some, a part beyond the edge; nothing.
SHAPES = [(1, 8, 8), (37, 40, 24), (0, 8, 8)]
CASES = [(SHAPES[1], dtype) for dtype in DTYPES] + [(shape, DTYPES[0]) for shape in SHAPES[::2]]
FUNCTIONS = {
    "gelu": lambda h: F.gelu(h, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu2": lambda h: F.relu(h).square(),
}


@pytest.fixture
def kernel(monkeypatch):
    """The module of the kernel, with small groups of blocks."""
    from benchmarks.measure import activated

    monkeypatch.setattr(activated, "GROUP", 2)
    return activated


@pytest.fixture(params=[1, 2], ids=["whole", "in parts"])
def form(kernel, request):
    """Small blocks; a GPU has a smallest size for them."""
    sizes = (64, 64, 16) if CUDA else (16, 32, 16)
    return kernel.Form(*sizes, warps=4, stages=2, parts=request.param, flatten=request.param == 2)


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rounding(exact, dtype):
    """Returns by how much rounding to a format may change numbers."""
    info = torch.finfo(dtype)
    return exact.abs() * info.eps / 2 + info.smallest_normal * info.eps


def summed(magnitude, terms):
    """Returns how far fp32 sums of products may be off; tensor cores align them, which may lose another bit."""
    return 2 * (terms + 2) * 2.0**-23 * magnitude


def derivative(hidden, kind):
    wide = hidden.double().requires_grad_()
    return torch.autograd.grad(FUNCTIONS[kind](wide).sum(), wide)[0] if wide.numel() else wide


def in_fp32(x):
    """Returns how far an activation function or its slope may be off for being computed in fp32.

    A few roundings, of numbers up to x^2, and of an exponent of at most 1.6 (|x| + 0.045 |x|^3) while it matters:
    beyond |x| = 6 the shares are 0 and 1, to fp32's precision.
    """
    small = x.abs().clamp(max=6)
    return 2.0**-23 * (8 + 4 * x * x + 2 * small * (small + 0.1 * small**3))


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_forward_is_the_rounded_sum_and_the_function_of_it(kernel, form, shape, kind, dtype):
    rows, columns, terms = shape
    x, weight = draw(rows, terms, dtype=dtype), draw(columns, terms, dtype=dtype, seed=1)
    bias = None if kind == "relu2" else draw(columns, dtype=dtype, seed=2)
    hidden, out = kernel.forward(x, weight, bias, kind, form)
    added = torch.zeros(columns).to(x) if bias is None else bias
    exact = x.double() @ weight.double().T + added.double()
    magnitude = x.double().abs() @ weight.double().abs().T + added.double().abs()
    assert hidden.dtype == out.dtype == dtype
    assert ((hidden.double() - exact).abs() <= rounding(exact, dtype) + summed(magnitude, terms + 1)).all()
    wide = hidden.double()
    expected = FUNCTIONS[kind](wide)
    assert ((out.double() - expected).abs() <= rounding(expected, dtype) + in_fp32(wide)).all()


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_backward_is_the_gradient_of_what_entered_the_function(kernel, form, shape, kind, dtype):
    rows, columns, terms = shape
    grad, weight = draw(rows, terms, dtype=dtype), draw(terms, columns, dtype=dtype, seed=1)
    hidden = draw(rows, columns, dtype=dtype, seed=2)
    found = kernel.backward(grad, weight, hidden, kind, form)
    slope = derivative(hidden, kind)
    exact = (grad.double() @ weight.double()) * slope
    magnitude = grad.double().abs() @ weight.double().abs()
    error = summed(magnitude, terms) * slope.abs() + in_fp32(hidden.double()) * magnitude
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= rounding(exact, dtype) + error).all()


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_far_from_zero_it_is_exact_and_nan_stays_in_its_place(kernel, form, kind):
    far = torch.tensor([0.0, -0.0, 30.0, -30.0, 100.0, -100.0, -2.0, float("nan")], device=DEVICE).to(DTYPES[0])
    first = torch.zeros(8, 8, device=DEVICE, dtype=DTYPES[0])
    first[:, 0] = 1.0
    x = torch.zeros_like(first)
    x[:, 0] = far
    hidden, out = kernel.forward(x, first, None, kind, form)
    assert torch.equal(hidden.nan_to_num(7.0), far[:, None].expand(8, 8).nan_to_num(7.0))
    slope = kernel.backward(first, first.T.contiguous(), hidden, kind, form)
    for found, expected in ((out, FUNCTIONS[kind](hidden.double())), (slope, derivative(hidden, kind))):
        assert found[7].isnan().all()
        bound = rounding(expected, DTYPES[0]) + in_fp32(hidden.double())
        assert ((found.double() - expected).abs() <= bound)[:7].all()
