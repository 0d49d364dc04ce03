"""A parameter that is half of a split master, used by code that does not know it."""

import copy

import pytest
import torch

from halfstep.torch import AdamW, prepare
from tests.torch.nets import seeded_net

SPLIT = "bf16-mixed,param=fp32:split"


def data(seed=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model):
    return lambda x: model(x).square().mean()


def trained(policy=SPLIT, optimizer=AdamW, **settings):
    model = seeded_net()
    run = prepare(model, optimizer(model.parameters(), lr=1e-2, **settings), policy)
    run.step(loss_of(model), [data()])
    return run


def test_what_the_run_writes_itself_keeps_its_remainders():
    """Steps, averages, loading and copies: none of them is somebody else's write."""
    run = trained()
    before = run.weights()
    with run.evaluation():
        pass
    saved = run.state_dict()
    run.load_state_dict({**saved, "tensors": {k: v.clone() for k, v in saved["tensors"].items()}})
    run.model.load_state_dict(run.model.state_dict())
    copied = copy.deepcopy(run)
    assert all(torch.equal(w, run.weights()[name]) for name, w in before.items())
    assert any((w != w.bfloat16().float()).any() for w in before.values())
    assert torch.equal(copied.model.state_dict()["0.weight"], before["0.weight"])
    model = seeded_net()
    run = prepare(model, AdamW(model.parameters(), lr=1e-2), SPLIT, ema=0.9)
    run.step(loss_of(model), [data()])
    before = run.weights()
    with run.averaged():
        pass
    assert all(torch.equal(w, run.weights()[name]) for name, w in before.items())


@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.AdamW])
def test_a_weight_that_is_laid_out_otherwise_takes_the_steps_of_fp32(optimizer):
    """Its gradient must be laid out alike: a fused kernel goes through memory, not through indices."""
    found = []
    for policy in ("fp32", "param=fp32:split"):
        model = seeded_net()
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        fused = {} if optimizer is AdamW else {"fused": True}
        run = prepare(model, optimizer(model.parameters(), lr=1e-2, **fused), policy)
        for step in range(3):
            run.step(loss_of(model), [data(step)])
        found.append(run.weights())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("policy", ["fp32", SPLIT])
def test_hooks_on_a_parameter_run_whether_it_is_split_or_not(policy):
    model = seeded_net()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy)
    called = []
    model[0].weight.register_hook(lambda g: called.append(g.dtype) or g * 0)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.dtype))
    before = run.weights()
    run.step(loss_of(model), [data()])
    assert called == [torch.float32] * 2
    assert torch.equal(run.weights()["0.weight"], before["0.weight"])
    assert not torch.equal(run.weights()["2.weight"], before["2.weight"])


def test_a_model_given_back_takes_any_dtype_and_its_optimizer_has_fp32_moments():
    """grad_dtype, which split parameters need, must not outlive them."""
    run = trained()
    model = run.unprepare().double()
    model(data().double()).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
    model = seeded_net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    run = prepare(model, optimizer, f"{SPLIT},moments=bf16")
    run.step(loss_of(model), [data()])
    run.unprepare()
    model(data()).sum().backward()
    optimizer.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


class ReadsItsWeight(torch.nn.Module):
    """A model that looks at a weight before it multiplies, as T5's MLP in transformers does."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        weight = self.layer.weight
        assert isinstance(weight, torch.nn.Parameter)
        assert (weight.shape, weight.ndim, weight.dtype, weight.is_leaf) == ((8, 8), 2, torch.bfloat16, True)
        x = x.to(weight.device, weight.dtype) if weight.requires_grad and not weight.is_meta else x
        return self.layer(x)


def test_compiled_models_may_read_what_a_parameter_is():
    model = ReadsItsWeight()
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed,param=fp32:split")
    x = torch.randn(2, 8)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    run.backward(compiled(x).sum())
    assert model.layer.weight.grad.dtype == torch.float32
