"""Functions that torch refuses in narrow formats, or of two dtypes, work wherever autocast makes them work."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch.run import prepare
from tests.torch.nets import draw

HALVES = {
    "bf16-mixed": torch.bfloat16,
    "fp16-mixed,scale=dynamic:init=4": torch.float16,
    "bf16-mixed,param=fp32:split": torch.bfloat16,
}
INDEX = torch.tensor([0, 1, 1, 2, 3, 4, 5, 7])
COLUMNS = INDEX.expand(8, 8).mT.contiguous()


class Coded(nn.Module):
    """Code between two layers, with a parameter of its own; what it is given is not singular."""

    def __init__(self, code):
        super().__init__()
        torch.manual_seed(0)  # of the bias
        self.code = code
        self.layer, self.p = nn.Linear(8, 8), nn.Parameter(torch.eye(8) + 0.1 * draw(8, 8, seed=2))
        with torch.no_grad():
            self.layer.weight.copy_(2 * torch.eye(8) + 0.1 * draw(8, 8, seed=3))

    def forward(self, x):
        y = self.code(self.layer(x), self.p)
        return y.abs() if y.is_complex() else y


def square(y):
    return y.float().square().mean()


def of_one(function):
    return lambda h, p: function(h)


fft, linalg = torch.fft, torch.linalg
FP32 = {  # in fp32, whatever is given
    **{f.__name__: of_one(f) for f in (fft.fft, fft.ifft, fft.rfft, fft.ihfft, fft.hfft, fft.fft2, fft.rfftn)},
    "irfft": lambda h, p: fft.irfft(fft.rfft(h) * fft.rfft(p)),
    "rfft of a parameter": lambda h, p: fft.rfft(p) * h[0, 0],
    "stft": lambda h, p: torch.stft(h, 4, window=torch.hann_window(4), return_complex=True),
    "view_as_complex": lambda h, p: torch.view_as_complex(h.reshape(8, 4, 2)),
    "polar": lambda h, p: torch.polar(h.abs(), h),
    **{f.__name__: of_one(f) for f in (linalg.inv, linalg.svdvals, linalg.eigvals, linalg.cond)},
    "inverse": lambda h, p: h.inverse(),
    "eigvalsh": lambda h, p: linalg.eigvalsh(h @ h.mT),
    "eigh": lambda h, p: linalg.eigh(h @ h.mT)[0],
    "svd": lambda h, p: linalg.svd(h)[1],
    "qr": lambda h, p: linalg.qr(h)[1].abs(),
    "solve": lambda h, p: linalg.solve(h, h + 1),
    "solve of a parameter": lambda h, p: linalg.solve(p, h),
    "solve_triangular": lambda h, p: linalg.solve_triangular(p.triu(), h, upper=True),
    "cholesky": lambda h, p: linalg.cholesky(h @ h.mT + torch.eye(8)),
    "lstsq": lambda h, p: linalg.lstsq(h, h)[0],
    "matrix_norm 2": lambda h, p: linalg.matrix_norm(p, 2) * h.float(),
    "cdist": lambda h, p: torch.cdist(h, h + 1),
    "cdist with a parameter": lambda h, p: torch.cdist(h, p, p=1.0),
    "quantile": lambda h, p: h.quantile(0.5),
    "grid_sample": lambda h, p: F.grid_sample(h[None, None], torch.zeros(1, 4, 4, 2), align_corners=False),
    "avg_pool3d": lambda h, p: F.avg_pool3d(h.reshape(1, 4, 4, 4), 2),
}
COMPUTE = {  # a parameter that does not promote what it meets
    "prelu": lambda h, p: F.prelu(h, p[0, :1]),
    "vecdot": lambda h, p: linalg.vecdot(h, p),
    "einsum": lambda h, p: torch.einsum("ij,jk->ik", h, p),
    "baddbmm": lambda h, p: torch.baddbmm(torch.zeros(1, 8, 8), h[None], p[None]),
    "cumprod": lambda h, p: h.cumprod(1),
    "logcumsumexp": lambda h, p: h.logcumsumexp(1),
    "interpolate": lambda h, p: F.interpolate(h[None], scale_factor=2.0, mode="linear"),
    "histc": lambda h, p: h.detach().histc() + h.sum(),
    "cosine_similarity": lambda h, p: F.cosine_similarity(h, p),
}
BEYOND = {  # of the dtype of the first, which autocast leaves to torch, which refuses it
    "index_add": lambda h, p: torch.zeros(8, 8).index_add(0, INDEX, h),
    "index_add_": lambda h, p: torch.zeros(8, 8).index_add_(0, INDEX, h),
    "index_add to a parameter": lambda h, p: p.index_add(0, INDEX, h),
    "index_add of a parameter": lambda h, p: h.index_add(0, INDEX, p),
    "index_copy": lambda h, p: torch.zeros(8, 8).index_copy(0, INDEX.unique()[:5], h[:5]),
    "index_put": lambda h, p: torch.zeros(8, 8).index_put((INDEX,), h, accumulate=True),
    "scatter": lambda h, p: h.scatter(0, torch.arange(8)[:, None].expand(8, 8), p),
    "scatter_add": lambda h, p: torch.zeros(8, 8).scatter_add(0, COLUMNS, h),
    "scatter_reduce": lambda h, p: torch.zeros(8, 8).scatter_reduce(0, COLUMNS, h, "sum"),
    "masked_scatter": lambda h, p: torch.zeros(8, 8).masked_scatter(p > 0, h),
    "nuclear norm": lambda h, p: linalg.matrix_norm(h, "nuc"),
    "pinv": lambda h, p: linalg.pinv(h),
    "det": lambda h, p: linalg.det(h / 2),
    "slogdet": lambda h, p: linalg.slogdet(h)[1],
    "complex": lambda h, p: torch.complex(h, p),
    "pdist": lambda h, p: F.pdist(h),
    "lerp": lambda h, p: torch.lerp(h, p, 0.5),
    "cross": lambda h, p: torch.cross(h[:, :3], p[:, :3], dim=-1),
}


def ours(code, policy):
    """What the code returns in a step, and the gradients."""
    model, seen = Coded(code), []

    def loss_fn(x):
        seen.append(model(x))
        return square(seen[-1])

    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy)
    run.backward(loss_fn(torch.eye(8) + 0.1 * draw(8, 8, seed=1)))
    run.unscale()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert not bool(run.update().skipped)
    return seen[0].detach()


def close(one, other):
    scale = other.float().abs().max()
    return (one.float() - other.float()).abs().max() <= 2**-4 * scale


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("name", [*FP32, *COMPUTE])
def test_what_autocast_makes_work_works(name, policy):
    code = {**FP32, **COMPUTE}[name]
    with torch.autocast("cpu", HALVES[policy]):
        expected = Coded(code)(torch.eye(8) + 0.1 * draw(8, 8, seed=1))
    found = ours(code, policy)
    if name in FP32:
        assert found.dtype == expected.dtype == torch.float32
    assert close(found, expected)


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("name", BEYOND)
def test_what_even_autocast_refuses_works_in_the_dtype_of_the_first(name, policy):
    plain = Coded(BEYOND[name])(torch.eye(8) + 0.1 * draw(8, 8, seed=1))
    assert close(ours(BEYOND[name], policy), plain)


def test_compiled_code_has_them_too():
    model = Coded(lambda h, p: fft.irfft(fft.rfft(h) * fft.rfft(p)).index_add(0, INDEX, h))
    x = draw(8, 8)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_their_own_dtypes_are_left_to_torch_where_nothing_is_narrow():
    model = Coded(lambda h, p: linalg.vecdot(h.double(), p))
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with pytest.raises(RuntimeError, match="same dtype"):
        model(draw(8, 8))
