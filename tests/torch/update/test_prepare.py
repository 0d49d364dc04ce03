"""prepare: any model, any optimizer; what it says, what it gives back, what it refuses."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep.core.errors import (
    GradientsError,
    HalfstepError,
    OptimizerParametersError,
    PolicyError,
    RunStateError,
)
from halfstep.core.policy import Policy
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.optim.muon import Muon
from halfstep.torch.run import prepare
from halfstep.torch.update.buffers import Buffers, Contents
from tests.refusals import refuses
from tests.torch.nets import same_by_name


class Net(nn.Module):
    def __init__(self, width=8, vocabulary=13, dropout=0.0, again=False, reentrant=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(vocabulary, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.again, self.reentrant = again, reentrant

    def block(self, x):
        return self.drop(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, tokens):
        x = self.embed(tokens)
        y = checkpoint(self.block, x, use_reentrant=self.reentrant) if self.again else self.block(x)
        return self.head(x + y)


def batch(seed=0, rows=4):
    tokens = torch.randint(0, 13, (rows, 7), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model):
    return lambda given: F.cross_entropy(model(given[0]).flatten(0, -2), given[1].flatten())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(policy, make, steps=5, *, micro=2, net=Net, **options):
    model = net()
    run = prepare(model, make(model), policy, **options)
    results = [run.step(loss_of(model), [batch(2 * s + m) for m in range(micro)]) for s in range(steps)]
    return run, [float(r.loss) for r in results]


OURS = {
    "AdamW": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "Muon": lambda m: [
        Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01),
        AdamW([p for p in m.parameters() if p.ndim < 2], lr=0.01),
    ],
}
STOCK = {
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "plain": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "torch Muon": lambda m: [
        torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01),
        torch.optim.SGD([p for p in m.parameters() if p.ndim < 2], lr=0.01),
    ],
}
ALL = OURS | STOCK


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "AdamW" else pytest.mark.prove) for n in ALL])
def test_a_hundred_split_steps_are_a_hundred_fp32_steps_bit_for_bit(name):
    """With fp32 compute the joined master multiplies. benchmarks/prove/split_steps.py takes a thousand steps."""
    whole, losses = trained("fp32", ALL[name], 100, clip_norm=1.0)
    split, others = trained("param=fp32:split", ALL[name], 100, clip_norm=1.0)
    assert losses == others
    assert losses[-1] < losses[0]
    assert {p.dtype for p in split.model.parameters()} == {torch.bfloat16, torch.float32}
    assert same_by_name(whole.weights(), split.weights())


@pytest.mark.parametrize("name", STOCK)
def test_fp32_is_what_the_optimizer_does_alone(name):
    run, losses = trained("fp32", STOCK[name], 10)
    model = Net()
    optimizers = STOCK[name](model)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for step, found in enumerate(losses):
        total = 0.0
        for m in range(2):
            part = loss_of(model)(batch(2 * step + m))
            part.backward()
            total += float(part.detach())
        for p in model.parameters():
            p.grad.mul_(0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert found == pytest.approx(total / 2, rel=2.0**-22)
    assert all(torch.equal(p, run.weights()[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "policy",
    [
        "bf16-mixed,param=fp32:split",
        *(
            pytest.param(policy, marks=pytest.mark.prove)
            for policy in ("bf16-mixed", "fp16-mixed", "bf16-true", "bf16-true,param=bf16:stochastic")
        ),
    ],
)
def test_every_optimizer_learns_under_every_policy(policy, name):
    run, losses = trained(policy, ALL[name], 12, ema=0.5)
    assert sum(losses[-3:]) < sum(losses[:3])
    assert policy == "fp16-mixed" or int(run.num_applied) == 12
    narrow = torch.bfloat16 if "bf16-true" in policy else torch.float32
    assert run.model.norm.weight.dtype == narrow


def test_the_two_verbs_are_the_step():
    run, losses = trained("bf16-mixed", OURS["AdamW"], 3, clip_norm=0.5)
    model = Net()
    mine = prepare(model, OURS["AdamW"](model), "bf16-mixed", clip_norm=0.5)
    for step, expected in enumerate(losses):
        for m in range(2):
            mine.backward(loss_of(model)(batch(2 * step + m)), last=m == 1)
        assert float(mine.update().loss) == expected
    assert same_by_name(run.weights(), mine.weights())


@pytest.mark.parametrize("name", ["fused", "AdamW"])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true"])
def test_unprepare_returns_the_masters_in_fp32_and_the_optimizer_still_works(policy, name):
    run, _ = trained(policy, ALL[name], 3)
    expected = run.weights()
    model = run.unprepare()
    assert type(model) is Net
    assert {type(m) for m in model.modules()} == {type(m) for m in Net().modules()}
    assert all(torch.equal(p, expected[n]) and p.dtype == torch.float32 for n, p in model.named_parameters())
    loss_of(model)(batch()).backward()
    run.optimizers[0].step()
    assert 0 < float((model.up.weight.detach() - expected["up.weight"]).abs().max()) < 0.1
    for call in (lambda: run.step(loss_of(model), [batch()]), run.update, run.unprepare):
        with pytest.raises(RunStateError):
            call()
    prepare(model, STOCK["SGD"](model), "bf16-mixed").step(loss_of(model), [batch()])


def test_the_summary_says_what_was_done_and_what_it_costs():
    model = Net()
    model.extra = nn.Linear(2, 2)
    model.odd = nn.Bilinear(2, 2, 2, bias=False)
    given = [p for n, p in model.named_parameters() if not n.startswith("extra")]
    both = [torch.optim.AdamW(given[:2], fused=True), torch.optim.Adagrad(given[2:])]
    said = prepare(model, both, "bf16-mixed,param=fp32:split", clip_norm=1.0, ema=0.99).summary()
    for part in (
        "bf16-mixed,param=fp32:split",
        "4 Linear (up, down, head, and 1 more): multiplies in bf16, weight gradients in fp32",
        "bf16 and a 16-bit remainder",
        "not trained: 2 parameters that no optimizer holds (extra.weight, extra.bias)",
        "clipped to 1",
        "decay 0.99",
        "AdamW (torch, fused): no sync",
        "Adagrad (torch): one sync per step, because",
        "Bilinear",
    ):
        assert part in said, part
    model = Net().bfloat16()
    stock = torch.optim.Adagrad(model.parameters(), lr=0.1)  # makes its state at once, in bf16
    run = prepare(model, stock, "bf16-mixed")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {state["sum"].dtype for state in stock.state.values()} == {torch.float32}
    assert "widened to fp32 masters: 6 parameters" in run.summary()


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout_changes_nothing(policy, reentrant):
    found = []
    for again in (False, True):
        torch.manual_seed(5)
        net = partial(Net, dropout=0.3, again=again, reentrant=reentrant)
        found.append(trained(policy, OURS["AdamW"], 3, micro=1, net=net))
    assert found[0][1] == found[1][1]
    assert same_by_name(*(run.weights() for run, _ in found))


def test_averages_are_of_masters_and_evaluate_as_they_are_held():
    decay, model = 0.5, Net()
    run = prepare(model, STOCK["fused"](model), "bf16-mixed,param=fp32:split", ema=decay)
    averages = run.weights()
    for step in range(4):
        bad = step == 2
        run.step(lambda b, bad=bad: loss_of(model)(b) * (float("nan") if bad else 1), [batch(step)])
        if not bad:
            averages = {n: a + (1 - decay) * (run.weights()[n] - a) for n, a in averages.items()}
    assert all(torch.equal(run.ema[n], a) for n, a in averages.items())
    before = run.weights()
    with run.averaged():
        assert all(torch.equal(w, averages[n]) for n, w in run.weights().items())
        assert model.up.weight.dtype == torch.bfloat16
        with pytest.raises(HalfstepError, match="averages"):
            run.step(loss_of(model), [batch()])
    assert all(torch.equal(w, before[n]) for n, w in run.weights().items())
    run.step(loss_of(model), [batch()])
    with pytest.raises(RunStateError), trained("fp32", OURS["AdamW"], 0)[0].averaged():
        pass


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
def test_a_group_added_later_is_taken_if_the_policy_reached_it(make):
    model = Net()
    stock = make([model.up.weight], lr=0.01)
    run = prepare(model, stock, "bf16-mixed,param=fp32:split")
    run.step(loss_of(model), [batch()])
    before = run.weights()
    stock.add_param_group({"params": [model.down.weight, model.norm.weight]})
    run.step(loss_of(model), [batch(1)])
    moved = {n for n, w in run.weights().items() if not torch.equal(w, before[n])}
    assert moved == {"up.weight", "down.weight", "norm.weight"}
    stock.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(OptimizerParametersError):
        run.step(loss_of(model), [batch(2)])


def test_a_frozen_bf16_base_is_unchanged_and_cannot_be_trained_later():
    model = Net().bfloat16()
    model.requires_grad_(False)
    model.adapter = nn.Linear(8, 8)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), "bf16-mixed,param=fp32:split", ema=0.5)

    run.step(loss_of(lambda x: model.head(model.adapter(model.embed(x))).float()), [batch()])
    assert set(run.ema) == {"adapter.weight", "adapter.bias"}
    for name, p in run.unprepare().named_parameters():
        assert torch.equal(p, before[name]) != name.startswith("adapter")
        assert p.dtype == before[name].dtype
    model = Net().bfloat16()
    model.up.requires_grad_(False)
    run = prepare(model, sgd(model), "bf16-mixed")
    model.up.requires_grad_(True)  # a bf16 weight that was frozen has no master
    with pytest.raises(HalfstepError, match=r"`up.weight` is torch.bfloat16, and no master"):
        run.step(loss_of(model), [batch()])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    prepare(model, AdamW(model.parameters()), "fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(HalfstepError, match=r"torch\.autocast"):
        model[0](torch.ones(1, 4))


def test_a_step_that_fails_half_way_leaves_nothing_and_no_optimizer_moves_when_another_cannot():
    found = []
    for fails in (False, True):
        model = Net()
        run = prepare(model, OURS["AdamW"](model), "bf16-mixed,param=fp32:split")
        if fails:
            with pytest.raises(IndexError):
                run.step(loss_of(model), [batch(), (torch.full((1, 2), 99), torch.zeros(1, 2, dtype=torch.int64))])
        run.step(loss_of(model), [batch(3)])
        found.append(run.weights())
    assert same_by_name(*found)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    optimizers = [AdamW(model[1].parameters(), lr=0.1), AdamW(model[0].parameters(), lr=0.1)]
    run = prepare(model, optimizers, "bf16-mixed")
    before = run.weights()
    with pytest.raises(GradientsError):
        run.step(lambda x: model(x).sum(), [torch.tensor([1, 2])])
    assert all(torch.equal(w, run.weights()[name]) for name, w in before.items())


def test_weights_loaded_after_prepare_are_stored_as_masters_are_held():
    source = Net()
    source.load_state_dict({k: torch.randn_like(v) for k, v in source.state_dict().items()})
    for policy in ("bf16-mixed,param=fp32:split", "bf16-true,emulate=true", "bf16-true"):
        model = Net()
        run = prepare(model, OURS["AdamW"](model), policy)
        model.load_state_dict(source.state_dict())
        expected = {n: p.detach() for n, p in source.named_parameters()}
        if "bf16-true" in policy:
            expected = {n: p.bfloat16().float() for n, p in expected.items()}
        assert all(torch.equal(w, expected[n]) for n, w in run.weights().items()), policy


REFUSED = [
    (lambda m: prepare(m, AdamW(m.parameters()), "fp16-mixed,scale=none"), PolicyError, "without a scale"),
    (lambda m: prepare(m, torch.optim.LBFGS(m.parameters()), "fp32"), HalfstepError, "closure"),
    *(
        (lambda m, s=s, v=v: prepare(m, AdamW(m.parameters()), "fp32", **{s: v}), HalfstepError, f"{s}={v}")
        for s, v in (
            ("clip_norm", -1.0),
            ("clip_norm", float("nan")),
            ("clip_norm", None),
            ("seed", -1),
            ("seed", None),
        )
    ),
    (lambda m: prepare(m.forward, AdamW(m.parameters()), "fp32"), HalfstepError, "not an nn.Module"),
    (lambda m: prepare(torch.compile(m), AdamW(m.parameters()), "fp32"), HalfstepError, "compiled already"),
]


@pytest.mark.parametrize(("call", "kind", "said"), REFUSED)
def test_a_refusal_leaves_the_model_unchanged(call, kind, said):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=said) as raised:
        call(model)
    assert raised.value.hint
    assert {type(m) for m in model.modules()} == {type(m) for m in Net().modules()}
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in model.state_dict().items())
    prepare(model, AdamW(model.parameters()), "bf16-mixed")


def test_a_second_prepare_and_moments_that_the_policy_contradicts_are_refused():
    model = Net()
    run = prepare(model, OURS["AdamW"](model), "bf16-mixed")
    run.backward(loss_of(model)(batch()))
    with refuses(HalfstepError, "policy already", "unprepare"):
        prepare(model, OURS["AdamW"](model), "bf16-mixed")
    assert float(run.update().grad_norm) > 0
    model = Net()
    assert prepare(model, OURS["AdamW"](model), Policy.parse("bf16-mixed")).policy == Policy.parse("bf16-mixed")
    model = nn.Linear(4, 2)
    with refuses(PolicyError, "moments=bf16", "moments=bf16"):
        prepare(model, AdamW(model.parameters(), moments="bf16"), "bf16-mixed")
    run = prepare(model, AdamW(model.parameters(), moments="bf16"), "bf16-mixed,moments=bf16")
    run.step(lambda x: model(x).sum(), [torch.ones(1, 4)])
    assert {s["exp_avg"].dtype for s in run.optimizers[0].state.values()} == {torch.bfloat16}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    run = prepare(model, AdamW(model.parameters()), "bf16-mixed")
    run.step(lambda x: model(x).sum(), [torch.ones(1, 4)])
    assert set(run.optimizers[0].state) == {model[1].weight, model[1].bias}


def test_an_earlier_backward_pass_is_no_part_of_a_step_and_a_scheduler_may_exist_before():
    def moved(before):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32")
        if before:
            (model(torch.ones(1, 4)).sum() * 100).backward()
        run.step(lambda x: model(x).sum(), [torch.ones(1, 4)])
        return run.weights()["weight"]

    assert torch.equal(moved(False), moved(True))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = prepare(model, optimizer, "fp32")
    run.step(lambda x: model(x).sum(), [torch.ones(1, 4)])
    assert run.scheduler_step(scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().float().mean(0)
        return y


def test_a_replaced_buffer_is_restored_too_and_statistics_that_changed_between_steps_are_kept():
    model = Counting()
    run = prepare(model, sgd(model), "fp32")
    run.step(lambda x: model(x).sum(), [torch.ones(1, 4)])
    before = model.mean.clone()
    assert before.any()
    result = run.step(lambda x: model(x).sum(), [torch.full((1, 4), float("nan"))])
    assert bool(result.skipped)
    assert torch.equal(model.mean, before)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    run = prepare(model, sgd(model), "fp32")
    run.step(lambda x: model(x).sum(), [torch.randn(8, 4)])
    with torch.no_grad():
        model(100 * torch.randn(8, 4))
    between = model[0].running_var.clone()  # batch norm's kernels write without counting: known by its numbers
    assert bool(run.step(lambda x: model(x).sum(), [torch.full((8, 4), float("nan"))]).skipped)
    assert torch.equal(model[0].running_var, between)


class Normalized(nn.Module):
    """A norm, whose writes are not counted, perhaps before a module that replaces its buffer."""

    def __init__(self, last):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), last

    def forward(self, x):
        return self.last(self.norm(x))


@pytest.mark.parametrize("last", [lambda: nn.Linear(4, 4), Counting])
def test_buffers_are_restored_wherever_they_are_now(last):
    torch.manual_seed(0)
    model = Normalized(last())
    run = prepare(model, sgd(model), "fp32")
    good, bad = torch.randn(8, 4), torch.full((8, 4), float("nan"))
    swaps = [
        lambda norm: None,
        lambda norm: setattr(norm, "running_mean", torch.ones(4)),
        lambda norm: setattr(norm.running_var, "data", 3 * torch.ones(4)),
        lambda norm: norm.num_batches_tracked.zero_(),
    ]
    for swap in swaps:
        run.step(lambda x: model(x).sum(), [good])
        swap(model.norm)
        before = [b.clone() for b in model.buffers()]
        assert bool(run.step(lambda x: model(x).sum(), [bad]).skipped)
        assert all(map(torch.equal, model.buffers(), before))
    # A module's own forward may replace them too, at any step.
    before = [b.clone() for b in model.norm.buffers()]

    def replaced(x):
        model.norm.running_mean = torch.zeros(4)
        return model(x).sum()

    assert bool(run.step(replaced, [bad]).skipped)
    assert all(map(torch.equal, model.norm.buffers(), before))


def test_the_buffers_of_many_norms_take_as_many_operations_as_those_of_one():
    """Each has three, and each of those took a copy before a step, and three operations after it."""

    def operations(norms):
        model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(norms)), nn.Linear(4, 2))
        buffers = Buffers(Contents(model))
        model(torch.randn(8, 4))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            buffers.remember()
            buffers.restore_unless(torch.tensor(True))
        counted = ("aten::_foreach_copy_", "aten::where", "aten::cat", "aten::clone")
        return sorted(event.name for event in seen.events() if event.name in counted)

    assert operations(1) == operations(8)
    assert "aten::where" in operations(1)


LOSSES = {
    "is a list": lambda loss: [loss],
    "one number": lambda loss: (loss, torch.ones(2)),
    "weight=None": lambda loss: (loss, None),
}


@pytest.mark.parametrize("message", LOSSES)
def test_what_is_not_a_loss_is_refused(message):
    model = nn.Linear(4, 2)
    run = prepare(model, AdamW(model.parameters()), "fp32")
    with pytest.raises(HalfstepError, match=message):
        run.step(lambda x: LOSSES[message](model(x).sum()), [torch.ones(1, 4)])
    run.step(lambda x: (model(x).sum(), torch.tensor([2])), [torch.ones(1, 4)])
