"""State: back bit for bit, in its own formats, of the same policy; and taken over from torch.amp."""

import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.optim.muon import Muon
from halfstep.torch.run import prepare
from halfstep.torch.state import load_state
from tests.refusals import refuses


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.norm, self.head = nn.Embedding(9, width), nn.BatchNorm1d(width), nn.Linear(width, 9)

    def forward(self, tokens):
        return self.head(F.dropout(self.norm(self.embed(tokens)), 0.1))


def loss_of(model):
    return lambda seed: F.cross_entropy(model(draw(seed)), draw(seed + 100))


def draw(seed):
    return torch.randint(0, 9, (16,), generator=torch.Generator().manual_seed(seed))


MAKE = {
    "ours": lambda m: AdamW(m.parameters(), lr=0.01),
    "both": lambda m: [Muon([m.embed.weight]), AdamW([m.head.weight, m.head.bias])],
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
}
POLICIES = ["bf16-mixed,param=fp32:split", "bf16-true,param=bf16:stochastic,moments=bf16", "fp16-mixed"]


def prepared(policy, name, **options):
    model = Net()
    return prepare(model, MAKE[name](model), policy, **options)


def train(run, seeds):
    return [float(run.step(loss_of(run.model), [s]).loss) for s in seeds]


def saved(run):
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("ours", "both", "fused") else pytest.mark.prove) for n in MAKE]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_run_continues_bit_for_bit(policy, name):
    one = prepared(policy, name, ema=0.9, clip_norm=1.0)
    train(one, range(3))
    one.optimizers[0].param_groups[0]["lr"] = 0.005  # as a scheduler would
    given = saved(one)
    other = prepared(policy, name, ema=0.9, clip_norm=1.0)
    train(other, [50])  # elsewhere, so that anything left out of the state would show
    torch.manual_seed(99)
    other.load_state_dict(given)
    torch.set_rng_state(given["tensors"]["rng.cpu"])
    ours = train(other, range(3, 6))
    torch.set_rng_state(given["tensors"]["rng.cpu"])
    assert train(one, range(3, 6)) == ours
    left, right = saved(one), saved(other)
    assert left["groups"] == right["groups"]
    assert left["tensors"].keys() == right["tensors"].keys()
    for key, value in left["tensors"].items():
        assert value.dtype == right["tensors"][key].dtype, key
        assert torch.equal(value, right["tensors"][key]), key


@pytest.mark.parametrize("name", ["ours", "fused", "foreach"])
def test_a_state_with_moments_of_another_format_is_refused_whole(name):
    run = prepared("bf16-mixed,param=fp32:split", name)
    train(run, range(2))
    given = saved(run)
    key = "optimizer.0.head.weight.exp_avg"
    given["tensors"][key] = given["tensors"][key].bfloat16()
    for fresh in (False, True):
        target = prepared("bf16-mixed,param=fp32:split", name)
        if not fresh:
            train(target, [7])
        before = target.weights()
        with pytest.raises(HalfstepError, match=f"`{key}` is bfloat16 of shape .* and float32"):
            target.load_state_dict(given)
        assert all(torch.equal(w, before[n]) for n, w in target.weights().items())


def test_a_state_of_another_policy_and_torchs_own_load_are_refused_with_the_remedy():
    given = saved(prepared("bf16-mixed", "fused"))
    target = prepared("bf16-mixed,param=fp32:split", "fused")
    with refuses(HalfstepError, "has the policy `bf16-mixed`, and this run has", '"bf16-mixed"', "load_weights"):
        target.load_state_dict(given)
    other = prepared("fp16-mixed,emulate=true", "fused")
    with refuses(ScalingError, "a loss scale of 1, which `scale=dynamic` does not have", "`scale.*`"):
        load_state(other, given["tensors"])
    load_state(other, {name: t for name, t in given["tensors"].items() if not name.startswith("scale.")})
    assert float(other.scale_state.scale) == 65536
    assert all(torch.equal(w, given["tensors"][f"model.{name}"]) for name, w in other.weights().items())
    model = Net()
    stock = MAKE["fused"](model)
    given = stock.state_dict()
    run = prepare(model, stock, "bf16-mixed,param=fp32:split")
    with refuses(HalfstepError, "casts moments", "load_torch_amp"):
        stock.load_state_dict(given)
    run.unprepare()
    stock.load_state_dict(given)  # the parameters are fp32 again
    model = Net()
    stock = MAKE["fused"](model)
    prepare(model, stock, "bf16-mixed")
    stock.load_state_dict(stock.state_dict())  # nothing is narrower


NOWHERE = {"optimizer.0.nowhere.exp_avg": torch.zeros(1)}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda given: {**given, "tensors": {}}, "another run"),
        (lambda given: {k: v for k, v in given.items() if k != "policy"}, "no `policy`"),
        (lambda given: {**given, "optimizers": ["SGD (torch)"]}, "from SGD"),
        (lambda given: {**given, "groups": [[{}, {}]]}, r"\[2\] groups"),
        (lambda given: {**given, "tensors": {**given["tensors"], **NOWHERE}}, "has no `nowhere`"),
    ],
)
def test_a_state_of_something_else_is_refused(other, said):
    run = prepared("fp32", "fused")
    train(run, [0])
    with pytest.raises(HalfstepError, match=said):
        prepared("fp32", "fused").load_state_dict(other(saved(run)))


def amp(steps=3):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)
    for seed in range(steps):
        loss_of(model)(seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    scaler = {"scale": 8192.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    return model, optimizer, {**scaler, "growth_interval": 2000, "_growth_tracker": 7}


@pytest.mark.parametrize("name", ["ours", "fused", "foreach plain"])
@pytest.mark.parametrize("policy", ["fp32", "param=fp32:split"])
def test_a_run_continues_where_torchs_adamw_stopped(policy, name):
    """In fp32 the next steps are those that torch would have made, bit for bit in torch's own fused kernel."""
    model, optimizer, _ = amp()
    given = optimizer.state_dict()
    mine = Net()
    mine.load_state_dict(model.state_dict())
    makes = {
        "ours": lambda m: AdamW(m.parameters(), lr=1.0, betas=(0.5, 0.5)),
        "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1.0, fused=True),
        "foreach plain": lambda m: torch.optim.AdamW(m.parameters(), lr=1.0, foreach=False),
    }
    run = prepare(mine, makes[name](mine), policy)
    said = run.load_torch_amp(given)
    assert "5 parameters after 3 updates" in said
    assert int(run.num_applied) == 3
    group = run.optimizers[0].param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.02, (0.9, 0.999), 0.3)
    torch.manual_seed(8)
    loss_of(model)(10).backward()
    optimizer.step()
    torch.manual_seed(8)
    train(run, [10])
    for key, p in model.named_parameters():
        # three kernels with the same arithmetic in another order: a few roundings of a step of at most 0.02 or so
        torch.testing.assert_close(run.weights()[key], p.detach(), rtol=2.0**-22, atol=16 * 2.0**-24 * 0.04)


def test_the_scale_of_a_gradscaler_follows_our_law_and_names_take_precedence_over_order():
    _, optimizer, scaler = amp()
    run = prepared("fp16-mixed", "ours")
    said = run.load_torch_amp(optimizer.state_dict(), scaler)
    assert "loss scale 8192 after 7 finite steps" in said
    assert (float(run.scale_state.scale), int(run.scale_state.good_steps)) == (8192, 7)
    assert run.scale_state.scale.dtype == torch.float32
    odd = {**scaler, "scale": 50000.0, "growth_interval": 100, "_growth_tracker": 9999}
    said = run.load_torch_amp([None], odd)
    assert (float(run.scale_state.scale), int(run.scale_state.good_steps)) == (32768, 1999)
    assert "growth_interval=100, but the policy's law holds now" in said
    run.load_torch_amp([None], {**scaler, "scale": 2.0**-9})
    assert float(run.scale_state.scale) == 1.0  # the floor
    model, _, _ = amp(0)
    named = torch.optim.AdamW(reversed(list(model.named_parameters())), lr=0.01)
    loss_of(model)(0).backward()
    named.step()
    run = prepared("fp32", "ours")
    run.load_torch_amp(named.state_dict())
    for key, p in model.named_parameters():
        ours = run.optimizers[0].state[dict(run.model.named_parameters())[key]]
        assert torch.equal(ours["exp_avg"], named.state[p]["exp_avg"])


@pytest.mark.parametrize(
    ("policy", "call", "said"),
    [
        ("bf16-mixed", lambda run, o, s: run.load_torch_amp(o, s), "policy says scale=none"),
        ("fp16-mixed", lambda run, o, s: run.load_torch_amp(o, {**s, "scale": 0.0}), "has no floor"),
        ("fp32", lambda run, o, s: run.load_torch_amp([o, o]), "2 optimizer states were given for 1"),
        ("fp32", lambda run, o, s: run.load_torch_amp({"params": 1}), "not a state of a torch optimizer"),
        ("fp32", lambda run, o, s: run.load_torch_amp({**o, "param_groups": []}), r"hold \[\] parameters"),
        (
            "fp32",
            lambda run, o, s: run.load_torch_amp({**o, "state": {0: {**o["state"][0], "max_exp_avg_sq": 0}}}),
            "amsgrad|differ in `max_exp_avg_sq`",
        ),
        (
            "fp32",
            lambda run, o, s: run.load_torch_amp({**o, "state": {0: o["state"][1]}}),
            r"`exp_avg` of `embed.weight` has the shape \(6,\), not \(9, 6\)",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_refused_whole(policy, call, said):
    _, optimizer, scaler = amp()
    run = prepared(policy, "ours")
    with refuses((HalfstepError, ScalingError), said):
        call(run, optimizer.state_dict(), scaler)
    assert (int(run.num_applied), float(run.scale_state.scale)) == (0, float(run.policy.scale.init().scale))
