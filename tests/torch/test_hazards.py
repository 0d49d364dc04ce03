"""What goes wrong in mixed precision, row by row of "Scaling" and "Masters and updates", and does not here.

Each test is of one row, and turns red when the guard is taken out: benchmarks/plant_faults.py does that.
"""

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError, PolicyError, ScalingError
from halfstep.core.formats import BF16
from halfstep.core.philox import random_bits, tensor_id
from halfstep.core.policy import Policy
from halfstep.core.rounding import cast
from halfstep.torch.optim import AdamW
from halfstep.torch.step import prepare

LAW = "fp16-mixed,scale=dynamic:init=1024:interval=3:floor=256"


class Weights(nn.Module):
    """Weights w with the loss sum(w x): the gradient is x, whatever w is."""

    def __init__(self, *values, shape=(1, -1)):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.layer.weight = nn.Parameter(torch.tensor(values).reshape(shape))
        self.layer.out_features, self.layer.in_features = self.layer.weight.shape

    def forward(self, x):
        return self.layer(x)


def loss_of(model):
    return lambda x: model(x.reshape(1, -1)).float().sum()


def sgd(model, rate=1.0):
    return torch.optim.SGD(model.parameters(), lr=rate)


def trained(policy, steps, x, *, values=(1.0, 2.0), make=sgd, **options):
    model = Weights(*values)
    run = prepare(model, make(model), policy, **options)
    for _ in range(steps):
        run.step(loss_of(model), [x])
    return run


# --- scaling -------------------------------------------------------------------------------------------------


def test_unscaling_with_the_new_scale():
    """On the step where the scale grows, the new scale would halve the gradient."""
    x = torch.tensor([1.0, -3.0])
    model = Weights(0.0, 0.0)
    run = prepare(model, sgd(model), LAW)
    for step in range(1, 8):
        result = run.step(loss_of(model), [x])
        assert torch.equal(run.weights()["layer.weight"], -step * x.reshape(1, 2)), step
    assert float(result.scale) == 4096


@pytest.mark.parametrize("compiled", [False, True])
def test_the_floor_holds_after_two_hundred_overflows_also_compiled(compiled):
    """Elsewhere the scale reaches 0.0 without a word, or loses its floor under a compiler."""
    if compiled:
        law = Policy.parse(LAW).scale
        judge = torch.compile(law.judge, backend="eager", fullgraph=True)
        state = prepare(model := Weights(1.0), sgd(model), LAW).scale_state
        for _ in range(200):
            state = judge(state, torch.tensor(False), torch).state
    else:
        state = trained(LAW, 200, torch.tensor([float("inf"), 1.0])).scale_state
    assert float(state.scale) == 256
    assert bool(state.stuck)


def test_one_scale_update_however_many_optimizers():
    """A scale that moves once per optimizer unscales the second with another one than was used."""
    model = nn.ModuleList([Weights(0.0), Weights(0.0)])
    run = prepare(model, [sgd(model[0]), sgd(model[1])], "fp16-mixed,scale=dynamic:init=1024:interval=1")
    x = torch.tensor([3.0])
    scales = [float(run.step(lambda b: loss_of(model[0])(b) + loss_of(model[1])(b), [x]).scale) for _ in range(4)]
    assert scales == [1024, 2048, 4096, 8192]
    assert all(float(w) == -12 for w in run.weights().values())


def test_at_the_floor_the_cause_is_named():
    model = Weights(1.0, 2.0)
    run = prepare(model, sgd(model), LAW)
    for _ in range(4):
        result = run.step(lambda x: loss_of(model)(x) * 1e9, [torch.ones(2)])
    with pytest.raises(ScalingError, match="backward: gradient of"):
        run.check(result)


def test_forward_overflow_is_not_told_as_a_scaling_problem():
    model = Weights(6e4, 6e4)
    run = prepare(model, sgd(model), LAW)
    for _ in range(4):
        result = run.step(lambda x: loss_of(model)(x).square(), [torch.ones(2)])
    with pytest.raises(ScalingError, match="forward: layer, largest input 1") as raised:
        run.check(result)
    assert "no loss scale reaches the forward pass" in raised.value.hint


def test_a_skip_is_visible_to_schedules():
    model = Weights(1.0)
    ours = AdamW(model.parameters())
    run = prepare(model, ours, "bf16-mixed")
    scheduler = torch.optim.lr_scheduler.StepLR(ours, step_size=1, gamma=0.5)
    for value in (1.0, float("nan"), 1.0):
        run.step(loss_of(model), [torch.tensor([value])])
        run.scheduler_step(scheduler)
    assert int(run.applied) == 2  # what our schedules count by
    assert scheduler.last_epoch == 2


def test_fp16_parameters_are_trainable():
    """Elsewhere "Attempting to unscale FP16 gradients": here they get fp32 masters, and the summary says so."""
    model = Weights(1.0, 2.0).half()
    run = prepare(model, sgd(model, 2.0**-12), LAW)
    run.step(loss_of(model), [torch.ones(2)])
    assert run.weights()["layer.weight"].tolist() == [[1 - 2.0**-12, 2 - 2.0**-12]]  # fp16 has no such number
    assert "widened" in run.summary()


def test_clipping_comes_after_unscaling():
    run = trained(LAW, 1, torch.tensor([3.0, 4.0]), values=(0.0, 0.0), clip_norm=10.0)
    assert run.weights()["layer.weight"].tolist() == [[-3.0, -4.0]]  # the scaled norm is 5120


def test_a_scale_with_bf16_is_refused():
    with pytest.raises(PolicyError, match="nothing to protect"):
        trained("bf16-mixed,scale=dynamic", 0, torch.ones(2))
    with pytest.raises(HalfstepError, match="a run scales the loss itself"):
        trained("bf16-mixed", 0, torch.ones(2), make=lambda m: [sgd(m), torch.amp.GradScaler("cpu")])


def test_the_scale_is_undone():
    run = trained("fp16-mixed,scale=static:value=4096", 1, torch.tensor([1.0, 2.0]), values=(0.0, 0.0))
    assert run.weights()["layer.weight"].tolist() == [[-1.0, -2.0]]


def test_the_scale_is_part_of_the_state():
    one = trained(LAW, 4, torch.tensor([1.0, 2.0]))
    other = trained(LAW, 0, torch.tensor([1.0, 2.0]))
    other.load_state_dict(one.state_dict())
    assert [float(v) for v in other.scale_state] == [2048, 1, 1, 0]


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true", LAW])
@pytest.mark.parametrize("make", [sgd, lambda m: AdamW(m.parameters(), weight_decay=0.1)])
def test_a_step_that_is_not_finite_changes_nothing_under_every_policy(policy, make):
    model = Weights(1.0, 2.0)
    run = prepare(model, make(model), policy)
    run.step(loss_of(model), [torch.ones(2)])
    before = {k: v.clone() for k, v in run.state_dict()["tensors"].items()}
    result = run.step(loss_of(model), [torch.tensor([1.0, float("nan")])])
    assert bool(result.skipped)
    after = run.state_dict()["tensors"]
    assert all(torch.equal(v, before[k]) for k, v in after.items() if not k.startswith(("scale.", "rng.")))


# --- masters and updates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_bf16_weights_get_masters_and_fp32_moments(kind):
    """A loader that gives bf16 weights makes pure bf16 training by accident; moments follow the dtype."""
    model = Weights(1.0, 2.0).bfloat16()
    stock = kind(model.parameters(), lr=1e-4)  # Adagrad makes its state here, in bf16
    run = prepare(model, stock, "bf16-mixed")
    run.step(loss_of(model), [torch.ones(2)])
    state = stock.state[model.layer.weight]
    assert {value.dtype for key, value in state.items()} == {torch.float32}
    wide = run.weights()["layer.weight"]
    assert model.layer.weight.dtype == torch.float32
    assert (wide != wide.bfloat16()).all()  # it moved by less than bf16 can


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split"])
@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
def test_small_updates_are_not_lost(policy, make):
    """A bf16 weight at 1 with a rate of 1e-4 moves by exactly 0.0 in 200 steps of AdamW."""
    run = trained(policy, 200, torch.ones(2), values=(1.0, 1.0), make=lambda m: make(m.parameters(), lr=1e-4))
    moved = 1 - run.weights()["layer.weight"]
    torch.testing.assert_close(moved, torch.full((1, 2), 200 * 1e-4), rtol=0.05, atol=0)


def test_moments_keep_their_format_when_a_state_is_loaded():
    """`Optimizer.load_state_dict` casts fp32 moments to the parameter's bf16."""
    one, other = (
        trained(
            "bf16-mixed,param=fp32:split",
            steps,
            torch.tensor([1.0, 1 / 3]),
            make=lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        )
        for steps in (2, 0)
    )
    other.load_state_dict(one.state_dict())
    left, right = (next(iter(run.optimizers[0].state.values())) for run in (one, other))
    assert right["exp_avg"].dtype == torch.float32
    assert torch.equal(left["exp_avg"], right["exp_avg"])


def test_split_masters_are_exact_on_ties_and_keep_nan():
    """With ties to even, an exact tie comes back one bf16 ulp wrong; a naive rule turns a NaN into -0.0 or inf."""
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x7F7F8000, 0x3F7FFFFF]).int().view(torch.float32)
    model = Weights(*ties.tolist())
    run = prepare(model, sgd(model), "bf16-mixed,param=fp32:split")
    assert torch.equal(run.weights()["layer.weight"][0], ties)
    run.unprepare()
    assert torch.equal(model.layer.weight[0], ties)
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1]).int().view(torch.float32)
    model = Weights(1.0, 1.0, 1.0)
    model.layer.weight.data = odd.reshape(1, 3).clone()
    run = prepare(model, sgd(model), "bf16-mixed,param=fp32:split")
    assert model.layer.weight.isnan().all()
    assert run.weights()["layer.weight"].isnan().all()


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain", "ours"])
def test_gradients_of_bf16_halves_are_fp32(kind):
    """1 + 2^-12 is no bf16: were the gradient rounded on its way, the weight would move by 1."""

    def make(model):
        ways = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}
        if kind == "ours":
            return AdamW(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=2.0**40)
        return torch.optim.AdamW(
            model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=2.0**40, weight_decay=0.0, **ways[kind]
        )

    model = Weights(0.0)
    run = prepare(model, make(model), "bf16-mixed,param=fp32:split")
    # the sum of two products of bf16 numbers, in fp32
    run.step(lambda x: model(x).float().sum(), [torch.tensor([[1.0], [2.0**-12]])])
    assert float(run.weights()["layer.weight"]) == -(1 + 2.0**-12) / 2.0**40


@pytest.mark.parametrize("make", [lambda m: AdamW(m.parameters(), lr=0.01), lambda m: sgd(m, 0.01)])
def test_stochastic_rounding_is_the_same_on_every_replica(make):
    """Replicas differ in their random state; the words depend on seed, update, tensor and element alone."""
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        values = torch.linspace(-1, 1, 64).tolist()
        run = trained("bf16-true,param=bf16:stochastic", 3, torch.linspace(0, 1, 64), values=values, make=make)
        found.append(run.weights()["layer.weight"])
        torch.rand(state)
    assert torch.equal(*found)


def test_stochastic_rounding_takes_the_words_of_its_counter():
    run = trained("bf16-true,param=bf16:stochastic", 1, torch.full((8,), 2.0**-12), values=[1.0] * 8, seed=5)
    words = random_bits((1, 8), seed=5, step=1, tensor=tensor_id("layer.weight"))
    wide = (torch.ones(1, 8) - 2.0**-12).numpy()
    expected = cast(wide, BF16, overflow="inf", rounding="stochastic", bits=words)
    assert (run.weights()["layer.weight"].numpy() == expected).all()


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true"])
def test_micro_batches_are_summed_in_fp32(policy):
    """256 and then ones: a sum in bf16 stays at 256."""
    model = Weights(0.0)
    run = prepare(model, sgd(model), policy)
    result = run.step(loss_of(model), [torch.tensor([256.0])] + [torch.tensor([1.0])] * 7)
    assert float(result.grad_norm) == (256 + 7) / 8


def test_a_fused_sgd_does_not_start_from_momentum_that_nobody_wrote():
    """torch's kernel skips the first step, and the momentum, allocated and not written, is used by the next."""
    model = Weights(1.0, 2.0)
    stock = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=True)
    run = prepare(model, stock, "bf16-mixed")
    run.step(loss_of(model), [torch.tensor([1.0, float("inf")])])
    assert not stock.state
    run.step(loss_of(model), [torch.ones(2)])
    assert run.weights()["layer.weight"].tolist() == [[0.0, 1.0]]


def test_running_statistics_survive_a_skipped_step():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    run = prepare(model, sgd(model), "bf16-mixed")
    run.step(lambda x: model(x).float().sum(), [torch.tensor([[1.0, float("inf")], [0.0, 1.0]])])
    assert torch.equal(model[0].running_mean, torch.zeros(2))
    assert int(model[0].num_batches_tracked) == 0
