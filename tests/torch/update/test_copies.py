"""Copies of models and runs with a policy are independent, and pickles are refused with the remedy."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW
from halfstep.torch.run import prepare
from halfstep.torch.state import state_of
from tests.refusals import refuses
from tests.torch.nets import same_by_name

DELAYED = "bf16-mixed,compute=e4m3:delayed,grad=e5m2:delayed,emulate=true"
POLICIES = ("bf16-mixed", "bf16-mixed,param=fp32:split", "fp16-mixed,emulate=true", DELAYED)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inside = nn.Embedding(16, 16), nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.gain, self.head = Gain(), nn.Linear(16, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.gain(self.inside(self.table(x)))).float()


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.gain


def prepared(policy, kind=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Net()
    return prepare(model, kind(model.parameters(), lr=1e-2), policy)


def steps(run, count=2, scale=1.0):
    x = torch.arange(16).view(2, 8)
    for number in range(count):
        run.step(lambda x: run.model(x).square().mean() * scale * 4.0**number, [x])  # noqa: B023


def bits(run):
    return {name: t.clone() for name, t in state_of(run).items() if not name.startswith("rng.")}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW], ids=["stock", "ours"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_a_run_continues_independently_bit_for_bit(policy, kind):
    run = prepared(policy, kind)
    steps(run)
    twin, before = copy.deepcopy(run), bits(run)
    assert same_by_name(bits(twin), before)
    steps(twin, scale=64.0)
    assert same_by_name(bits(run), before)  # nothing is shared
    steps(run, scale=64.0)
    assert same_by_name(bits(run), bits(twin))
    assert twin.model.head.weight is twin.model.table.weight
    if "split" in policy:
        with refuses(HalfstepError, "`inside.0.weight` is the bf16 half", "run.edit()"):
            twin.model.inside[0].weight.clone()
    expected = {name: w.clone() for name, w in run.weights().items()}
    plain = twin.unprepare()
    assert type(plain) is Net
    assert all(torch.equal(p, expected[name]) for name, p in plain.named_parameters())
    steps(run)  # the other one is unaffected


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_a_model_computes_the_same(policy, copied):
    run = prepared(policy)
    steps(run)
    with run.edit():  # where masters are split, a copy is made whole; elsewhere nothing changes
        twin, x = copied(run.model), torch.arange(8)
    assert type(twin) is type(run.model)
    assert torch.equal(twin(x), run.model(x))
    state = run.model.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in twin.state_dict().items())
    assert {t.dtype for t in state.values()} == {torch.float32}


@pytest.mark.parametrize(
    "pickled",
    [
        lambda run: torch.save(run.model, io.BytesIO()),
        lambda run: pickle.dumps(run.model),
        lambda run: pickle.dumps(run.model, protocol=0),
        lambda run: pickle.dumps(run.model.gain),
        lambda run: torch.save({"step": 1, "model": run.model.inside}, io.BytesIO()),
        pickle.dumps,
    ],
    ids=["torch.save", "pickle", "protocol 0", "a part", "in a dict", "the run"],
)
def test_a_pickle_is_refused_with_the_remedy(pickled):
    run = prepared("bf16-mixed,param=fp32:split")
    with pytest.raises(HalfstepError, match="with a policy cannot be pickled") as caught:
        pickled(run)
    assert isinstance(caught.value, TypeError)  # as caches of compilers expect of what has none
    for remedy in ("model.state_dict()", "run.state_dict()", "run.unprepare()", "copy.deepcopy"):
        assert remedy in caught.value.hint
    torch.save(run.model.state_dict(), io.BytesIO())
    torch.save(run.state_dict(), io.BytesIO())
    assert type(pickle.loads(pickle.dumps(run.unprepare()))) is Net


def test_a_slice_of_a_prepared_sequential_is_a_plain_one_of_its_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    run = prepare(model, torch.optim.SGD(model.parameters(), 0.1), "bf16-mixed")
    x = torch.randn(3, 4)
    for part in (model[:2], copy.deepcopy(model)[:2], model[1:] + nn.Sequential()):
        assert type(part) is nn.Sequential
        assert part(x).dtype == torch.bfloat16
    assert torch.equal(model[2](model[:2](x)).float(), model(x))
    assert [p is q for p, q in zip(model[:2].parameters(), model.parameters(), strict=False)] == [True] * 4
    new = type(model)(nn.Linear(4, 1))  # as models clone themselves
    assert new(x).dtype == torch.float32
    assert run.step(lambda x: model[:](x).float().square().mean(), [x]).loss > 0
    listed = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    prepare(listed, torch.optim.SGD(listed.parameters(), 0.1), "bf16-mixed")
    assert listed[1:][0](x).dtype == torch.bfloat16


def test_a_shallow_copy_of_a_layer_between_the_passes_loses_no_gradient():
    """The copy shares the parameter; a new owner of its gradient would miss the one that is on its way."""
    norms = []
    for copied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        run = prepare(model, AdamW(model.parameters()), "bf16-mixed,param=fp32:split")
        loss = model(torch.ones(2, 4)).square().mean().float()
        if copied:
            copy.copy(model[0])
        run.backward(loss)
        if copied:
            copy.copy(model[0])
        norms.append(run.update().grad_norm)
    assert torch.equal(*norms)


def test_a_module_is_copied_as_data_parallel_does():
    model = nn.Sequential(nn.Linear(4, 4))
    prepare(model, AdamW(model.parameters()), "bf16-mixed")
    replica = model[0]._replicate_for_data_parallel()
    assert type(replica) is type(model[0])
