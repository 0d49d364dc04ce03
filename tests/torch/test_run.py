"""One update on torch. What every backend does (weights, clipping, scaling, skips) is in tests/conformance."""

import pytest
import torch

from halfstep.core.errors import GradientsError, HalfstepError, LossError
from halfstep.core.policy import Policy
from halfstep.torch.convert.apply import apply
from halfstep.torch.layers import CastedLinear
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import Run, prepare
from tests.refusals import refuses

# Two fp32 sums of the same terms in another order: at most 36 positive terms, and a few products around them.
SUMMED = 2 * 48 * 2.0**-24


class Recorder(AdamW):
    def update(self, grads, found_inf, scale):
        self.seen = {name: grads[id(p)] * scale for p, name in self.names.items()}
        super().update(grads, found_inf, scale)


def in_fp32(model, optimizer, policy, **options):
    """A run whose policy scales and sums, of a model that computes in fp32."""
    return Run(model, [optimizer], Policy.parse(policy), conversion=apply(model, Policy.parse("fp32")), **options)


def run(policy="fp32"):
    model = CastedLinear(4, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    return in_fp32(model, Recorder([{"params": list(model.named_parameters())}], lr=0.1), policy)


def data(rows, seed=1):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def loss_of(run):
    return lambda x: (run.model(x).float().square().sum(), float(len(x)))


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_no_micro_batch_at_all_is_explained(policy):
    model = torch.nn.Linear(4, 3)
    r = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    for none in ([], iter(())):
        with refuses(HalfstepError, "micro_batches is empty", "run.step(loss_fn, [batch])"):
            r.step(loss_of(r), none)
    assert not bool(r.step(loss_of(r), [data(3)]).skipped)


def test_arrays_of_numpy_are_named():
    r = run("bf16-mixed")
    array = data(3).numpy()
    with refuses(HalfstepError, "micro_batches is one `ndarray`", "run.step(loss_fn, [torch.from_numpy(batch)])"):
        r.step(loss_of(r), array)
    for batch, take in ((array, lambda b: b), ((array, 1), lambda b: b[0]), ({"x": array}, lambda b: b["x"])):
        with refuses(HalfstepError, "loss_fn was given an array of numpy", "torch.from_numpy(array)"):
            r.step(lambda b, take=take: r.model(take(b)).square().mean(), [batch])


def test_what_is_wrong_in_a_loss_function_is_its_own_affair():
    def to_numpy(batch):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    with pytest.raises(TypeError, match="device type tensor"):  # not that a batch holds arrays of numpy
        run().step(to_numpy, [data(3)])
    with pytest.raises(ZeroDivisionError):
        run().step(lambda batch: 1 / 0, [data(3)])


def test_a_graph_can_be_kept_for_another_pass():
    r = run()
    loss = r.model(data(1)).sum()
    r.backward(loss, last=False, retain_graph=True)
    r.backward(loss)
    assert torch.equal(r.update().loss, loss)


def test_an_update_needs_gradients_tokens_and_the_last_micro_batch():
    with pytest.raises(GradientsError):
        run().update()
    r = run()
    r.backward(r.model(data(1)).sum(), last=False)
    with pytest.raises(HalfstepError, match="last=False"):
        r.update()
    r.backward(r.model(data(1)).sum(), last=True)
    assert not bool(r.update().skipped)
    r = run()
    other = torch.ones(1, requires_grad=True)
    with pytest.raises(GradientsError):
        r.step(lambda b: other.sum(), [0])
    r = run()
    with pytest.raises(GradientsError):
        r.step(lambda b: (r.model(b).sum() * 0, 0.0), [data(4)])
    before = r.model.weight.detach().clone()
    result = r.step(lambda b: (r.model(b).sum() * 0, torch.tensor(0.0)), [data(4)])  # known on the device alone
    assert bool(result.skipped)
    assert torch.equal(r.model.weight, before)
    result = r.step(loss_of(r), [data(1)])
    for value in (result.loss, result.skipped, result.scale, result.grad_norm, result.stuck):
        assert isinstance(value, torch.Tensor)


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed"])
def test_a_micro_batch_without_tokens_adds_nothing_and_weights_may_be_on_the_device(policy):
    plain = run(policy)
    plain.step(loss_of(plain), [data(4)])
    for empty in (0.0, torch.tensor(0.0), torch.tensor(0)):
        for order in (0, 1):
            r = run(policy)
            batches = [(data(4), 4.0), (data(1), empty)][:: 1 if order else -1]
            result = r.step(lambda b, r=r: (r.model(b[0]).square().sum() * (b[1] > 0), b[1]), batches)
            seen, expected = r.optimizers[0].seen["weight"], plain.optimizers[0].seen["weight"]
            # 1 / 4 and 4 / 4 are exact, so only the order of products can differ
            torch.testing.assert_close(seen, expected, rtol=2.0**-22, atol=0)
            assert not bool(result.skipped)
    numbers, tensors = run(policy), run(policy)
    x = data(12)
    numbers.step(lambda b: (numbers.model(b).square().sum(), float(len(b))), [x[:2], x[2:]])
    tensors.step(lambda b: (tensors.model(b).square().sum(), torch.tensor(len(b))), [x[:2], x[2:]])
    left, right = (r.optimizers[0].seen["weight"] for r in (numbers, tensors))
    torch.testing.assert_close(left, right, rtol=2.0**-21, atol=0)


def test_a_mean_over_no_tokens_skips_the_step_unless_it_is_weighted_by_them():
    """With all targets ignored, torch's cross-entropy is NaN and its gradients are zeros."""
    ignored = torch.full((2,), -100)
    for weights in ((None, None), (torch.tensor(2), torch.tensor(0))):
        r = run()
        before = r.model.weight.detach().clone()
        for targets, weight in zip((torch.tensor([0, 1]), ignored), weights, strict=True):
            loss = torch.nn.functional.cross_entropy(r.model(data(2)).float(), targets)
            r.backward(loss, weight=weight, last=targets is ignored)
        result = r.update()
        assert bool(result.skipped) == bool(result.loss.isnan()) == torch.equal(r.model.weight, before)
        assert bool(result.skipped) == (weights[1] is None)


def test_a_loss_that_is_not_finite_is_skipped_after_unscale_too_and_with_its_buffers_and_averages():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    r = prepare(model, AdamW(model.parameters(), lr=0.1), "fp16-mixed", ema=0.9)
    before = {name: t.clone() for name, t in r.state_dict()["tensors"].items()}
    buffers = [b.clone() for b in model.buffers()]
    for last in (False, True):
        r.backward(model(data(3)).float().mean() - (0.0 if last else float("inf")), last=last)
    r.unscale()
    assert bool(r.update().skipped)
    assert all(map(torch.equal, model.buffers(), buffers))
    after = r.state_dict()["tensors"]
    same = {name for name, t in after.items() if torch.equal(t, before[name])}
    assert after.keys() - same <= {"scale.good_steps", "rng.cpu"}


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_that_is_not_a_number_of_tokens_is_refused(weight):
    r = run()
    with pytest.raises(LossError):
        r.backward(r.model(data(1)).sum(), weight=weight)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda r: r.model(data(2)).sum().bfloat16(), "bfloat16, and the policy says loss=fp32"),
        (lambda r: r.model(data(2)).sum().half(), "float16, and the policy says loss=fp32"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_with_the_remedy(loss, said):
    r = run()
    with refuses(HalfstepError, said):
        r.backward(loss(r))


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed,scale=static:value=256"])
def test_normalized_losses_are_summed_and_divided_by_nothing(policy):
    """As a trainer divides each sum by the tokens of all micro-batches: 1, 2 and 5 rows of 8."""
    x, parts = data(8), (slice(0, 1), slice(1, 3), slice(3, 8))
    weighted, shares = run(policy), run(policy)
    means = weighted.step(loss_of(weighted), [x[part] for part in parts])
    for place, part in enumerate(parts):
        loss = shares.model(x[part]).float().square().sum() / len(x)
        shares.backward(loss, last=place == 2, normalized=True)
    summed = shares.update()
    left, right = (r.optimizers[0].seen["weight"] for r in (weighted, shares))
    # As fp32 sums, of terms of both signs: relative to the largest gradient.
    torch.testing.assert_close(right, left, rtol=0, atol=SUMMED * float(left.abs().max()))
    torch.testing.assert_close(summed.loss, means.loss, rtol=SUMMED, atol=0)
    torch.testing.assert_close(summed.grad_norm, means.grad_norm, rtol=SUMMED, atol=0)
    assert not bool(summed.skipped)


def test_normalized_gradients_are_exactly_their_sum_and_need_no_unscale_without_a_scale():
    r = run()
    r.backward(r.model(data(4)).sum(), last=False, normalized=True)
    (first,) = [p.grad.clone() for p in r.model.parameters()]
    r.backward(r.model(data(3, 2)).sum(), normalized=True)
    other = run()
    other.model(data(3, 2)).sum().backward()
    total = first + other.model.weight.grad
    assert torch.equal(r.model.weight.grad, total)
    r.model.weight.grad.mul_(2.0)  # the gradient of the loss already, to change as one likes
    r.update()
    assert torch.equal(r.optimizers[0].seen["weight"], 2 * total)


def test_a_normalized_loss_has_no_weight_and_is_not_mixed_with_others():
    r = run()
    with refuses(HalfstepError, "normalized loss has no weight", "weight"):
        r.backward(r.model(data(4)).sum(), weight=4.0, normalized=True)
    for first in (True, False):
        r.forget()
        r.backward(r.model(data(4)).sum(), last=False, normalized=first)
        with refuses(HalfstepError, "normalized or not", "run.forget()"):
            r.backward(r.model(data(4)).sum(), normalized=not first)
    r.forget()
    r.backward(r.model(data(4)).sum(), normalized=True)
    assert not bool(r.update().skipped)


def test_frozen_unused_unheld_and_complex_parameters_are_what_they_are():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("used", "unused", "frozen")})
    model["frozen"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stock = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    r = prepare(model, stock, "fp32")
    r.step(lambda x: model["frozen"](model["used"](x)).square().mean(), [data(3)])
    moved = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"used"}
    model = torch.nn.ModuleDict({"held": torch.nn.Linear(4, 4), "free": torch.nn.Linear(4, 4)})
    r = prepare(model, [torch.optim.SGD(model["held"].parameters(), lr=1.0)], "fp32", clip_norm=1e9)

    def loss(x):
        free = model["free"](x).sum()
        free.register_hook(lambda grad: grad * float("inf"))
        return model["held"](x).mean() + free

    result = r.step(loss, [data(3)])
    assert not bool(result.skipped)
    assert float(result.grad_norm) < 100
    assert model["free"].weight.grad is None
    p = torch.nn.Parameter(torch.tensor([3 + 4j, 1j]))
    model = torch.nn.ParameterDict({"p": p, "q": torch.nn.Parameter(torch.ones(2))})
    r = prepare(model, [torch.optim.SGD(model.parameters(), lr=1.0)], "fp32", clip_norm=1.0)
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
    policy = "compute=fp16,scale=static:value=1024,emulate=true"
    r = in_fp32(table, SPARSE[name](table.parameters()), policy, clip_norm=0.5)
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


@pytest.mark.parametrize("param", ["fp32", "fp32:split"])
def test_averages_are_evaluated_in_the_eval_role_whichever_block_is_the_outer_one(param):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    run = prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.5), f"bf16-mixed,param={param},eval=fp32", ema=0.5
    )
    for _ in range(3):
        run.step(lambda batch: model(batch).square().mean(), [x])
    before = run.weights()
    with run.evaluation(), run.averaged():
        expected = model(x)
    with run.averaged(), run.evaluation():
        assert torch.equal(model(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in run.weights().items())
    assert not torch.equal(model(x), expected)
