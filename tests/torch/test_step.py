"""One update: weights of micro-batches, the order of unscale and clip, skipped steps, the floor."""

import pytest
import torch

from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.core.policy import Policy
from halfstep.core.precision import base_precision
from halfstep.torch.layers import CastedLinear
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.step import Run

FP16 = "compute=fp16,emulate=true,scale=dynamic:init=1024:interval=3:floor=256"


# Two fp32 sums of the same terms in another order: at most 36 positive terms, and a few products around them.
SUMMED = 2 * 48 * 2.0**-24


class Recorder(AdamW):
    """Keeps the gradients it was handed."""

    def step(self, grads, *, found_inf=None, scale=None):
        self.seen = {self.names[p]: g * scale for p, g in grads.items()}
        super().step(grads, found_inf=found_inf, scale=scale)


def run(policy="fp32", clip_norm=0.0, seed=0, dtype=torch.float32):
    model = CastedLinear(4, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
    model.weight.data = model.weight.data.to(dtype)
    parsed = Policy.parse(policy)
    model.precision = base_precision(parsed)
    return Run(model, [Recorder([{"params": list(model.named_parameters())}], lr=0.1)], parsed, clip_norm)


def data(rows, seed=1):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def loss_of(run):
    return lambda x: (run.model(x).float().square().sum(), float(len(x)))


def test_micro_batches_of_unequal_size_are_weighted_by_their_tokens():
    whole, parts = run(), run()
    x = data(12)
    magnitude = 2 * (whole.model(x).detach().abs().t() @ x.abs()) / 12  # of the terms of d/dW sum (W x)^2 / 12
    one = whole.step(loss_of(whole), [x])
    other = parts.step(loss_of(parts), [x[:1], x[1:4], x[4:]])
    assert float(one.loss) == pytest.approx(float(other.loss), rel=SUMMED)
    left, right = (r.optimizers[0].seen["weight"] for r in (whole, parts))
    assert ((left - right).abs() <= SUMMED * magnitude).all()


def test_a_mean_loss_counts_each_micro_batch_alike():
    r = run()
    x = data(12)
    result = r.step(lambda b: r.model(b).square().mean(), [x[:2], x[2:]])
    with torch.no_grad():
        expected = sum(run().model(b).square().mean() for b in (x[:2], x[2:])) / 2
    assert float(result.loss) == pytest.approx(float(expected), rel=SUMMED)


def test_gradients_are_unscaled_with_the_scale_that_was_used():
    """On the step where the scale grows, dividing by the new scale would halve the gradient."""
    plain, scaled = run("compute=fp16,scale=static:value=1,emulate=true"), run(FP16)
    scales = []
    for step in range(7):
        for r in (plain, scaled):
            result = r.step(loss_of(r), [data(4, seed=step) * 0.1])
        scales.append(float(result.scale))
        # a power of two moves exponents only, and nothing here is near either end of fp16
        assert torch.equal(plain.optimizers[0].seen["weight"], scaled.optimizers[0].seen["weight"]), step
    assert scales == [1024, 1024, 1024, 2048, 2048, 2048, 4096]


def test_clipping_sees_unscaled_gradients():
    r = run(FP16, clip_norm=0.5)
    result = r.step(loss_of(r), [data(4)])
    norm = float(result.grad_norm)
    assert norm > 0.5
    plain = run("fp32")
    plain.step(loss_of(plain), [data(4)])
    assert norm == pytest.approx(float(plain.optimizers[0].seen["weight"].norm()), rel=2.0**-9)
    assert float(r.optimizers[0].seen["weight"].norm()) == pytest.approx(0.5, rel=SUMMED)


def test_a_small_gradient_is_not_clipped():
    r, plain = run(clip_norm=1e6), run()
    for each in (r, plain):
        each.step(loss_of(each), [data(4)])
    assert torch.equal(r.optimizers[0].seen["weight"], plain.optimizers[0].seen["weight"])


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", FP16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_under_every_policy(policy, bad):
    r = run(policy)
    before = r.model.weight.detach().clone()
    result = r.step(lambda x: r.model(x).float().square().sum() * bad, [data(4)])
    assert bool(result.skipped)
    assert torch.equal(r.model.weight, before)
    assert int(r.num_applied) == 0
    assert not bool(r.step(loss_of(r), [data(4)]).skipped)
    assert int(r.num_applied) == 1
    assert not torch.equal(r.model.weight, before)


def test_one_bad_micro_batch_spoils_the_whole_step_and_no_other():
    r = run()
    assert bool(r.step(loss_of(r), [data(4), data(4) * float("nan"), data(4)]).skipped)
    assert not bool(r.step(loss_of(r), [data(4)]).skipped)


def test_at_the_floor_the_run_stops_and_says_why():
    r = run(FP16)

    def bad(x):
        return r.model(x).float().square().sum() * float("inf")

    for expected in (1024, 512, 256):
        result = r.step(bad, [data(4)])
        assert float(result.scale) == expected
    with pytest.raises(ScalingError, match="floor, 256"):
        r.check(result)
    r.check(r.step(loss_of(r), [data(4)]))


def test_sums_over_micro_batches_are_fp32_where_parameters_are_bf16():
    """Adding 256 gradients of 1 to a bf16 sum stops at 256; here the sum goes on."""
    r = run("bf16-true", dtype=torch.bfloat16)
    x = torch.ones(1, 4)
    r.step(lambda b: r.model(b).float().sum(), [x] * 400)
    seen = r.optimizers[0].seen["weight"]
    assert seen.dtype == torch.float32
    assert torch.equal(seen, torch.ones(3, 4))  # 400 gradients of 1, over 400
    assert r.model.weight.dtype == torch.bfloat16


def test_results_stay_tensors_until_read():
    r = run()
    result = r.step(loss_of(r), [data(1)])
    for value in (result.loss, result.skipped, result.scale, result.grad_norm, result.stuck):
        assert isinstance(value, torch.Tensor)


def test_update_without_backward_is_refused():
    with pytest.raises(HalfstepError, match="no gradients"):
        run().update()


def test_gradients_do_not_leak_into_the_next_step():
    r, fresh = run(), run()
    with torch.no_grad():
        fresh.model.weight.copy_(r.model.weight)
    r.backward(r.model(data(4)).square().sum())
    r.update()
    with torch.no_grad():
        r.model.weight.copy_(fresh.model.weight)
    r.step(loss_of(r), [data(4, seed=5)])
    fresh.step(loss_of(fresh), [data(4, seed=5)])
    assert torch.equal(r.optimizers[0].seen["weight"], fresh.optimizers[0].seen["weight"])


def test_a_micro_batch_without_tokens_adds_nothing():
    plain = run()
    plain.step(loss_of(plain), [data(4)])
    for empty in (0.0, torch.tensor(0.0), torch.tensor(0)):
        for order in (0, 1):
            r = run()
            batches = [(data(4), 4.0), (data(1), empty)][:: 1 if order else -1]
            result = r.step(lambda b, r=r: (r.model(b[0]).square().sum() * (b[1] > 0), b[1]), batches)
            seen, expected = r.optimizers[0].seen["weight"], plain.optimizers[0].seen["weight"]
            # 1 / 4 and 4 / 4 are exact, so only the order of products can differ
            torch.testing.assert_close(seen, expected, rtol=2.0**-22, atol=0)
            assert not bool(result.skipped)


def test_a_step_whose_micro_batches_all_lack_tokens_is_no_update():
    r = run()
    with pytest.raises(HalfstepError, match="no gradients"):
        r.step(lambda b: (r.model(b).sum() * 0, 0.0), [data(4)])
    before = r.model.weight.detach().clone()
    result = r.step(lambda b: (r.model(b).sum() * 0, torch.tensor(0.0)), [data(4)])  # known on the device alone
    assert bool(result.skipped)
    assert torch.equal(r.model.weight, before)


def test_weights_may_be_on_the_device():
    numbers, tensors = run(), run()
    x = data(12)
    numbers.step(lambda b: (numbers.model(b).square().sum(), float(len(b))), [x[:2], x[2:]])
    tensors.step(lambda b: (tensors.model(b).square().sum(), torch.tensor(len(b))), [x[:2], x[2:]])
    left, right = (r.optimizers[0].seen["weight"] for r in (numbers, tensors))
    torch.testing.assert_close(left, right, rtol=2.0**-21, atol=0)


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_that_is_no_number_of_tokens_is_refused(weight):
    r = run()
    with pytest.raises(HalfstepError, match="number of tokens"):
        r.backward(r.model(data(1)).sum(), weight=weight)


def test_an_update_wants_the_last_micro_batch():
    r = run()
    r.backward(r.model(data(1)).sum(), last=False)
    with pytest.raises(HalfstepError, match="last=False"):
        r.update()
    r.backward(r.model(data(1)).sum(), last=True)
    assert not bool(r.update().skipped)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda r: r.model(data(2)), r"the loss has the shape \(2, 3\)"),
        (lambda r: r.model(data(2)).detach().sum(), "needs no gradient"),
        (lambda r: r.model(data(2)).sum().bfloat16(), "bfloat16, and the policy says loss=fp32"),
        (lambda r: r.model(data(2)).sum().half(), "float16, and the policy says loss=fp32"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_with_the_remedy(loss, said):
    r = run()
    with pytest.raises(HalfstepError, match=said) as raised:
        r.backward(loss(r))
    assert raised.value.hint


def test_a_loss_that_depends_on_no_parameter_of_an_optimizer_is_refused():
    r = run()
    other = torch.ones(1, requires_grad=True)
    with pytest.raises(HalfstepError, match="no parameter of the optimizers"):
        r.step(lambda b: other.sum(), [0])


def test_frozen_and_unused_parameters_stay_where_they_are():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("used", "unused", "frozen")})
    model["frozen"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stock = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    r = Run(model, [stock], Policy.parse("fp32"))
    r.step(lambda x: model["frozen"](model["used"](x)).square().mean(), [data(3)])
    moved = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"used"}


def test_parameters_that_no_optimizer_holds_neither_spoil_nor_clip_a_step():
    model = torch.nn.ModuleDict({"held": torch.nn.Linear(4, 4), "free": torch.nn.Linear(4, 4)})
    r = Run(model, [torch.optim.SGD(model["held"].parameters(), lr=1.0)], Policy.parse("fp32"), clip_norm=1e9)
    result = r.step(lambda x: model["held"](x).mean() + model["free"](x).sum() * 1e30 * 1e30, [data(3)])
    assert not bool(result.skipped)
    assert float(result.grad_norm) < 100
    assert model["free"].weight.grad is None


def test_complex_parameters_are_trained_as_they_are():
    p = torch.nn.Parameter(torch.tensor([3 + 4j, 1j]))
    model = torch.nn.ParameterDict({"p": p, "q": torch.nn.Parameter(torch.ones(2))})
    r = Run(model, [torch.optim.SGD(model.parameters(), lr=1.0)], Policy.parse("fp32"), clip_norm=1.0)
    result = r.step(lambda _: (model["p"].abs().square().sum() + 0 * model["q"].sum()) / 2, [0])
    norm = (26) ** 0.5  # of (3 + 4j, 1j)
    assert float(result.grad_norm) == pytest.approx(norm, rel=SUMMED)
    torch.testing.assert_close(p.detach(), torch.tensor([3 + 4j, 1j]) * (1 - 1 / norm))


SPARSE = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_are_summed_unscaled_and_clipped_by_their_values(name):
    """Against the same optimizer alone, on the gradient made by hand; rows are looked up twice, in two batches."""
    table = torch.nn.Embedding(6, 3, sparse=True)
    alone = torch.nn.Parameter(table.weight.detach().clone())
    policy = Policy.parse("compute=fp16,scale=static:value=1024,emulate=true")
    r = Run(table, [SPARSE[name](table.parameters())], policy, clip_norm=0.5)
    stock = SPARSE[name]([alone])
    batches = [torch.tensor([1, 1, 4]), torch.tensor([4, 2])]
    target = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        result = r.step(lambda i: ((table(i) * target[i]).sum(), float(len(i))), batches)
        counts = torch.tensor([0, 2, 1, 0, 2, 0.0])
        gradient = target * counts[:, None] / 5
        assert float(result.grad_norm) == pytest.approx(float(gradient.norm()), rel=8 * SUMMED)
        gradient = gradient * (0.5 / gradient.norm()).clamp(max=1)
        alone.grad = gradient.to_sparse(1)
        stock.step()
        torch.testing.assert_close(table.weight.detach(), alone.detach(), rtol=2.0**-18, atol=2.0**-20)
    bad = r.step(lambda i: (table(i) * float("inf")).sum(), batches)
    assert bool(bad.skipped)
    torch.testing.assert_close(table.weight.detach(), alone.detach(), rtol=2.0**-18, atol=2.0**-20)
