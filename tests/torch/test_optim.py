import pytest
import torch

from halfstep.core.formats import BF16, FP32
from halfstep.core.roles import Param
from halfstep.torch.optim import AdamW, Muon, orthogonalize


def parameter(*shape, seed=0, dtype=torch.float32):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Parameter(drawn.to(dtype))


def grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(p.shape, generator=generator) for p in params}


def test_adamw_is_torchs_adamw_bit_for_bit_on_fp32():
    ours, theirs = [parameter(6, 4), parameter(5, seed=1)], [parameter(6, 4), parameter(5, seed=1)]
    optimizer = AdamW(
        [
            {"params": [("a", ours[0])], "weight_decay": 0.1},
            {"params": [("b", ours[1])], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    stock = torch.optim.AdamW(
        [{"params": [theirs[0]], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}],
        lr=torch.tensor(1e-2),  # a rate on the device is fp32, and so is ours
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(20):
        given = grads(ours, step)
        for p, mine in zip(theirs, ours, strict=True):
            p.grad = given[mine].clone()
        optimizer.step(given, found_inf=torch.zeros(()))
        stock.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_step_that_is_not_finite_changes_nothing_at_all(kind):
    p = parameter(4, 4)
    optimizer = kind([{"params": [("w", p)]}], lr=0.1, weight_decay=0.1)
    optimizer.step(grads([p], 0), found_inf=torch.zeros(()))
    before = [p.detach().clone(), *(value.clone() for value in optimizer.state[p].values())]
    optimizer.step({p: torch.full((4, 4), float("nan"))}, found_inf=torch.ones(()))
    after = [p.detach(), *optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_parameter_without_a_gradient_stays(kind):
    p, q = parameter(4, 4), parameter(4, 4, seed=1)
    before = q.detach().clone()
    kind([{"params": [("p", p), ("q", q)]}], lr=0.1, weight_decay=0.1).step(grads([p], 0))
    assert torch.equal(q, before)


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_bf16_master_is_updated_in_fp32_and_rounded_once(kind):
    """One step from the same weight: the bf16 result is the rounded fp32 result."""
    narrow = parameter(8, 8, dtype=torch.bfloat16)
    wide = torch.nn.Parameter(narrow.detach().float())
    given = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    kind([{"params": [("w", narrow)]}], lr=0.01, masters={"w": Param(BF16)}).step({narrow: given})
    kind([{"params": [("w", wide)]}], lr=0.01).step({wide: given})
    assert torch.equal(narrow, wide.to(torch.bfloat16))
    assert not torch.equal(narrow.float(), wide)


def test_bf16_weights_at_one_and_a_small_rate_never_move_to_nearest_and_do_stochastically():
    """The lost update: 1 - 1e-4 rounds to 1 in bf16, whose neighbor below is 1 - 2^-8."""

    def train(param):
        p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = AdamW([{"params": [("w", p)]}], lr=1e-4, masters={"w": param})
        for _ in range(50):
            optimizer.step({p: torch.ones(4096)})
        return p.detach().float()

    assert torch.equal(train(Param(BF16)), torch.ones(4096))
    moved = train(Param(BF16, stochastic=True))
    # Each step moves an element by 2^-8 with probability 1e-4 * 2^8: in the mean by 1e-4, 50 times. An
    # element's sum of 50 such steps has variance below 50 * 1e-4 * 2^-8.
    deviation = (50 * 1e-4 * 2.0**-8 / 4096) ** 0.5
    assert abs(float(1 - moved.mean()) - 50e-4) < 5 * deviation
    assert torch.equal(moved, train(Param(BF16, stochastic=True)))  # the same on every replica


def test_bf16_moments_are_stored_in_bf16_and_computed_in_fp32():
    p = parameter(8, 8)
    optimizer = AdamW([{"params": [("w", p)]}], moments={"w": BF16})
    optimizer.step(grads([p], 0))
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
    wide = parameter(8, 8)
    AdamW([{"params": [("w", wide)]}], moments={"w": FP32}).step({wide: grads([p], 0)[p]})
    assert torch.equal(p, wide)  # the first step does not read a rounded moment


def test_rates_follow_a_device_scalar():
    p, q = parameter(4), parameter(4)
    half, full = (AdamW([{"params": [("w", t)]}], lr=lr) for t, lr in ((p, 0.2), (q, 0.1)))
    half.set_factor(torch.tensor(0.5))
    half.step(grads([p], 0))
    full.step({q: grads([p], 0)[p]})
    assert torch.equal(p, q)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonalize_pushes_singular_values_towards_one(shape):
    drawn = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    out = orthogonalize(drawn, FP32)
    values = torch.linalg.svdvals(out)
    # Jordan et al.'s coefficients leave singular values between about 0.7 and 1.2, unless they began near 0.
    assert float(values.max()) < 1.3
    assert float(values.median()) > 0.6
    u, _, v = torch.linalg.svd(drawn, full_matrices=False)
    # the singular vectors stay: what is orthogonalized agrees in direction with u v
    assert float((out * (u @ v)).sum(dim=(-2, -1)).min()) > 0.7 * min(shape)


def test_muon_takes_matrices_only():
    with pytest.raises(ValueError, match="matrices"):
        Muon([{"params": [("gain", parameter(4))]}])


def test_muon_is_the_same_one_by_one_and_in_batches():
    together = [parameter(4, 8, seed=s) for s in range(3)]
    alone = [parameter(4, 8, seed=s) for s in range(3)]
    given = [torch.randn(4, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    Muon([{"params": [(str(i), p) for i, p in enumerate(together)]}]).step(dict(zip(together, given, strict=True)))
    for index, p in enumerate(alone):
        Muon([{"params": [(str(index), p)]}]).step({p: given[index]})
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-20, atol=2.0**-20)
