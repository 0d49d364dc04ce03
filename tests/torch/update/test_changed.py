"""Models that are changed after they were prepared: what a run cannot follow is refused before anything moves."""

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW
from halfstep.torch.run import prepare
from tests.refusals import refuses

POLICIES = ("bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true", "fp16-mixed,emulate=true")
KINDS = {
    "ours": lambda p: AdamW(p, lr=1e-2),
    "stock": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}
X = torch.arange(8).view(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.body(self.table(x)))


def prepared(policy="bf16-mixed", kind="stock"):
    torch.manual_seed(0)
    model = Net()
    run = prepare(model, KINDS[kind](model.parameters()), policy)
    run.step(loss(model), [X])
    return run, model


def loss(model):
    return lambda x: model(x).square().mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_that_was_resized_and_a_head_that_was_replaced_are_refused(policy, kind):
    """Hazard: `resize_token_embeddings`. Moments keep their shape, and fused kernels go beyond their memory."""
    run, model = prepared(policy, kind)
    rows = torch.zeros(12, 16, dtype=model.table.weight.dtype)
    rows[:8] = model.table.weight.data
    model.table.weight.data, model.table.num_embeddings = rows, 12
    body = model.body.weight.detach().float()
    with refuses(HalfstepError, r"`table.weight` had the shape \(8, 16\) .* \(12, 16\) now", "prepare"):
        run.step(loss(model), [X])
    assert torch.equal(model.body.weight, body)
    run, model = prepared(policy, kind)
    model.head = nn.Linear(16, 8)  # hazard: it learns nothing, and nobody says so
    with refuses(HalfstepError, r"`head.weight` was not there .* is not trained \(2 such", "run.unprepare()"):
        run.step(loss(model), [X])


def test_an_additional_parameter_is_refused_before_anything_moves():
    run, model = prepared()
    model.extra = nn.Linear(16, 8)

    def both(x):
        h = model.body(model.table(x))
        return (model.head(h) + model.extra(h.float())).square().mean().float()

    before = {name: w.clone() for name, w in run.weights().items()}
    with pytest.raises(HalfstepError, match=r"`extra.weight` was not there .* \(2 such parameters\)"):
        run.step(both, [X])
    assert all(torch.equal(w, before[name]) for name, w in run.weights().items())


def test_new_parameters_without_a_gradient_or_removed_again_are_ignored_and_the_remedy_works():
    run, model = prepared()
    model.probe = nn.Linear(16, 2)  # nothing depends on it
    for _ in range(3):
        run.step(loss(model), [X])
    del model.probe
    model.head.requires_grad_(False)
    for _ in range(2):
        run.step(loss(model), [X])
    run, model = prepared("bf16-mixed,param=fp32:split")
    run.unprepare()
    rows = torch.cat([model.table.weight.data, torch.zeros(4, 16)])
    model.table = nn.Embedding.from_pretrained(rows, freeze=False)
    run = prepare(model, KINDS["ours"](model.parameters()), "bf16-mixed,param=fp32:split")
    run.step(loss(model), [X])
    assert run.weights()["table.weight"].shape == (12, 16)


@pytest.mark.parametrize(
    "policy", ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true", "fp16-mixed"]
)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_a_cast_of_a_prepared_model_is_called_that_whatever_the_policy(policy, cast):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    before = {name: p.dtype for name, p in model.named_parameters()}
    getattr(model, cast)()
    if all(p.dtype is before[name] for name, p in model.named_parameters()):
        run.step(lambda x: model(x).float().square().mean(), [torch.randn(2, 4)])
        return
    now = next(p.dtype for name, p in model.named_parameters() if p.dtype is not before[name])
    with refuses(HalfstepError, f"and is {now} now: the model was cast", "the policy casts by itself"):
        run.step(lambda x: model(x).float().square().mean(), [torch.randn(2, 4)])
