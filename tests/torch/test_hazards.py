"""What goes wrong in mixed precision elsewhere, row by row, and not here.

Each test covers one hazard and turns red when its guard is removed: benchmarks/prove/hazards.py does that, and
names the tests of the hazards that a module's own tests cover.
"""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from halfstep.config.load import load as load_config
from halfstep.config.model import ModelConfig
from halfstep.core.errors import (
    AutocastError,
    AutoPolicyError,
    HalfstepError,
    PolicyConflictError,
    PolicyError,
    RunStateError,
    ScalingError,
)
from halfstep.core.formats import BF16
from halfstep.core.policy import Policy
from halfstep.torch.layers import casts_for, rotate
from halfstep.torch.model import rope_tables
from halfstep.torch.numerics.cast import carried
from halfstep.torch.optim import adamw
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.optim.muon import Muon
from halfstep.torch.run import prepare
from halfstep.torch.session import Session
from halfstep.torch.update.switches import Switches, fp32_is_fp32
from tests.refusals import refuses

SPLIT = "bf16-mixed,param=fp32:split"
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


def test_one_scale_update_however_many_optimizers():
    """A scale that moves once per optimizer unscales the second with another one than was used."""
    model = nn.ModuleList([Weights(0.0), Weights(0.0)])
    run = prepare(model, [sgd(model[0]), sgd(model[1])], "fp16-mixed,scale=dynamic:init=1024:interval=1")
    x = torch.tensor([3.0])
    scales = [float(run.step(lambda b: loss_of(model[0])(b) + loss_of(model[1])(b), [x]).scale) for _ in range(4)]
    assert scales == [1024, 2048, 4096, 8192]
    assert all(float(w) == -12 for w in run.weights().values())


@pytest.mark.filterwarnings("ignore:the loss scale is")
def test_at_the_floor_the_cause_is_named():
    model = Weights(1.0, 2.0)
    run = prepare(model, sgd(model), LAW)
    for _ in range(4):
        result = run.step(lambda x: loss_of(model)(x) * 1e9, [torch.ones(2)])
    with pytest.raises(ScalingError, match="backward: gradient of"):
        run.check(result)


@pytest.mark.filterwarnings("ignore:the loss scale is")
def test_forward_overflow_is_not_reported_as_a_scaling_problem():
    model = Weights(6e4, 6e4)
    run = prepare(model, sgd(model), LAW)
    for _ in range(4):
        result = run.step(lambda x: loss_of(model)(x).square(), [torch.ones(2)])
    with refuses(ScalingError, "forward: layer, largest input 1", "no loss scale reaches the forward pass"):
        run.check(result)


def test_a_skip_is_visible_to_schedules():
    model = Weights(1.0)
    ours = AdamW(model.parameters())
    run = prepare(model, ours, "bf16-mixed")
    scheduler = torch.optim.lr_scheduler.StepLR(ours, step_size=1, gamma=0.5)
    with pytest.raises(RunStateError):
        run.scheduler_step(scheduler)
    moved = []
    for value in (1.0, float("nan"), 1.0):
        run.step(loss_of(model), [torch.tensor([value])])
        moved.append(run.scheduler_step(scheduler))
    assert moved == [True, False, True]
    assert int(run.num_applied) == 2  # what our schedules count by
    assert ours.param_groups[0]["lr"] == 1e-3 / 4


def test_fp16_parameters_are_trainable():
    """Elsewhere "Attempting to unscale FP16 gradients": here they get fp32 masters, and the summary says so."""
    model = Weights(1.0, 2.0).half()
    run = prepare(model, sgd(model, 2.0**-12), LAW)
    run.step(loss_of(model), [torch.ones(2)])
    assert run.weights()["layer.weight"].tolist() == [[1 - 2.0**-12, 2 - 2.0**-12]]  # fp16 has no such number
    assert "widened" in run.summary()


def test_a_scale_with_bf16_runs_with_a_warning_and_a_second_scaler_is_refused():
    with pytest.warns(UserWarning, match="nothing to protect"):
        trained("bf16-mixed,scale=dynamic", 1, torch.ones(2))
    with pytest.raises(AutocastError):
        trained("bf16-mixed", 0, torch.ones(2), make=lambda m: [sgd(m), torch.amp.GradScaler("cpu")])


@pytest.mark.parametrize(
    ("make", "moment"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), momentum=0.5), "momentum_buffer"),
        (lambda m: AdamW(m.parameters(), betas=(0.0, 0.0)), "exp_avg"),
        (lambda m: Muon(m.parameters(), momentum=0.5), "momentum"),
    ],
    ids=["stock", "AdamW", "Muon"],
)
def test_the_scale_is_undone(make, moment):
    """The first moment after one step is the gradient; a rate that adapts would hide a scale."""
    run = trained("fp16-mixed,scale=static:value=4096", 1, torch.tensor([1.0, 2.0]), make=make)
    assert next(iter(run.optimizers[0].state.values()))[moment].tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", SPLIT, "bf16-true", LAW])
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


@pytest.mark.parametrize("policy", ["bf16-mixed", SPLIT])
@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
def test_small_updates_are_not_lost(policy, make):
    """A bf16 weight at 1 with a rate of 1e-4 moves by exactly 0.0 in 200 steps of AdamW."""
    run = trained(policy, 200, torch.ones(2), values=(1.0, 1.0), make=lambda m: make(m.parameters(), lr=1e-4))
    moved = 1 - run.weights()["layer.weight"]
    torch.testing.assert_close(moved, torch.full((1, 2), 200 * 1e-4), rtol=0.05, atol=0)


def test_moments_keep_their_format_when_a_state_is_loaded():
    """`Optimizer.load_state_dict` casts fp32 moments to the parameter's bf16."""
    x, make = torch.tensor([1.0, 1 / 3]), lambda m: torch.optim.AdamW(m.parameters(), fused=True)
    one, other = (trained(SPLIT, steps, x, make=make) for steps in (2, 0))
    other.load_state_dict(one.state_dict())
    left, right = (next(iter(run.optimizers[0].state.values())) for run in (one, other))
    assert right["exp_avg"].dtype == torch.float32
    assert torch.equal(left["exp_avg"], right["exp_avg"])


def test_split_masters_are_exact_on_ties_and_keep_nan():
    """With ties to even, an exact tie comes back one bf16 ulp wrong; a naive rule turns a NaN into -0.0 or inf.

    A truncated half is exact with its remainder as well, and twice as far from the master in every matmul.
    """
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x7F7F8000, 0x3F7FFFFF]).int().view(torch.float32)
    model = Weights(*ties.tolist())
    run = prepare(model, sgd(model), SPLIT)
    assert model.layer.weight[0, 4].item() == 1.0  # of 1 - 2^-24: the nearest
    assert torch.equal(run.weights()["layer.weight"][0], ties)
    run.unprepare()
    assert torch.equal(model.layer.weight[0], ties)
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1]).int().view(torch.float32)
    model = Weights(1.0, 1.0, 1.0)
    model.layer.weight.data = odd.reshape(1, 3).clone()
    run = prepare(model, sgd(model), SPLIT)
    assert model.layer.weight.isnan().all()
    assert run.weights()["layer.weight"].isnan().all()


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain", "ours"])
def test_gradients_of_bf16_halves_are_fp32(kind):
    """1 + 2^-12 is no bf16: were the gradient rounded on its way, the weight would move by 1."""

    def make(model):
        settings = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 2.0**40}
        if kind == "ours":
            return AdamW(model.parameters(), **settings)
        ways = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}
        return torch.optim.AdamW(model.parameters(), **settings, weight_decay=0.0, **ways[kind])

    model = Weights(0.0)
    run = prepare(model, make(model), SPLIT)
    # the sum of two products of bf16 numbers, in fp32
    run.step(lambda x: model(x).float().sum(), [torch.tensor([[1.0], [2.0**-12]])])
    assert float(run.weights()["layer.weight"]) == -(1 + 2.0**-12) / 2.0**40


@pytest.fixture
def mesh():
    """This process alone, as FSDP wants it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def narrow_beside_wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))


def test_a_group_of_fsdp_has_one_dtype(mesh):
    """FSDP2 refuses bf16 weights next to fp32 norms; given a policy, all are fp32 masters, which it takes."""
    models = [narrow_beside_wide() for _ in range(2)]
    for model in models:
        prepare(model, sgd(model), "bf16-mixed")
    fully_shard(models[1], mesh=mesh)
    for model in models:
        model(torch.ones(2, 4)).square().sum().backward()
    for whole, shard in zip(*(model.parameters() for model in models), strict=True):
        assert shard.grad.dtype == torch.float32
        assert torch.equal(shard.grad.full_tensor(), whole.grad)


def test_fsdp_is_not_trained_behind_its_back(mesh):
    """It replaces parameters: a run that was made before holds none of the model, one made after is refused."""
    model = narrow_beside_wide()
    run = prepare(model, sgd(model), "bf16-mixed")
    fully_shard(model, mesh=mesh)
    with pytest.raises(HalfstepError, match="fully_shard"):
        run.step(lambda x: model(x).float().sum(), [torch.ones(2, 4)])
    model = narrow_beside_wide()
    fully_shard(model[0], mesh=mesh)
    model[0].unshard()  # as after a forward pass: the parameters look like any others
    with pytest.raises(HalfstepError, match="`0` is wrapped by FSDP already"):
        prepare(model, sgd(model), "bf16-mixed")


def test_gradients_of_halves_are_averaged_over_processes(mesh, monkeypatch):
    """DDP sums the gradients of parameters, and a half has none in the graph: replicas would part at once."""
    model = Weights(1.0, 2.0)
    run = prepare(model, SPLIT)
    run.attach(sgd(model))

    def all_reduce(tensor):  # with a rank whose gradients are 3, and all else as here
        tensor += 3 if tensor.shape == (2,) else tensor.clone()

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    run.step(loss_of(model), [torch.ones(2)])
    (weight,) = run.weights().values()
    assert weight.tolist() == [[1.0 - 2.0, 2.0 - 2.0]]


def test_auto_is_not_measured_by_several_processes(mesh, monkeypatch):
    """Two of them could choose differently."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(AutoPolicyError):
        trained("auto", 0, torch.ones(2))


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


def test_a_fused_sgd_does_not_start_from_momentum_that_nobody_wrote():
    """torch's kernel skips the first step, and the momentum, allocated and not written, is used by the next."""
    model = Weights(1.0, 2.0)
    stock = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=True)
    run = prepare(model, stock, "bf16-mixed")
    run.step(loss_of(model), [torch.tensor([1.0, float("inf")])])
    assert not stock.state
    run.step(loss_of(model), [torch.ones(2)])
    assert run.weights()["layer.weight"].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("policy", ["bf16-mixed", SPLIT, LAW])
def test_no_cast_outlives_a_step(policy):
    """autocast keeps its casts for a whole region: where the optimizer steps inside, old weights are used on."""
    model = Weights(1.0, 2.0)
    run = prepare(model, sgd(model), policy)
    for expected in (3.0, 1.0, -1.0):
        assert loss_of(model)(torch.ones(2)).item() == expected
        run.step(loss_of(model), [torch.ones(2)])


def test_rotary_angles_are_right_at_every_position():
    """bf16 has no odd number above 256: angles made in it are off by as much as pi at 4096."""
    cos_TK, sin_TK = rope_tables(ModelConfig(width=4, heads=1, context=4096))
    angles = torch.arange(4096, dtype=torch.float64)  # of the first feature, which turns by 1 a position
    assert torch.equal(cos_TK[:, 0], angles.cos().float())
    one = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(4096, 4)
    turned = rotate(one.bfloat16(), cos_TK, sin_TK, casts_for("bf16-mixed"))
    assert torch.equal(turned[:, 2], angles.sin().float().bfloat16())


@pytest.fixture
def loose_matmuls():
    """A process that lets matmuls be less than they are called."""
    flags = torch.backends.cuda.matmul
    found = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = True
    torch.set_float32_matmul_precision("medium")
    yield flags
    torch.set_float32_matmul_precision("highest")
    flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = found


@pytest.fixture
def newer_setting():
    """TF32 by torch's newer setting, as transformers' TrainingArguments allow it."""
    assert fp32_is_fp32()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.set_float32_matmul_precision("highest")


def test_tf32_is_seen_by_whichever_way_it_was_set(newer_setting):
    """torch has two settings for it; reading the older one raises after the newer one was written."""
    assert not fp32_is_fp32()
    with pytest.raises(PolicyConflictError):
        trained("fp32", 0, torch.ones(2))
    trained("bf16-mixed", 0, torch.ones(2))


def test_halves_are_summed_in_fp32(loose_matmuls):
    """torch lets parts of a matmul's sum be rounded to the halves that it multiplies; a run on a GPU does not."""
    sums = Switches(torch.device("cuda"))
    assert not loose_matmuls.allow_bf16_reduced_precision_reduction
    assert not loose_matmuls.allow_fp16_reduced_precision_reduction
    sums.restore()
    assert loose_matmuls.allow_bf16_reduced_precision_reduction
    assert loose_matmuls.allow_fp16_reduced_precision_reduction


def test_fp32_is_fp32(loose_matmuls):
    """ "medium" makes an fp32 matmul one of TF32 on GPUs, and one of bf16 on CPUs that multiply bf16."""
    for policy in ("fp32", "bf16-mixed; layer: compute=fp32"):
        with refuses(PolicyError, "multiplies in fp32", "highest"):
            trained(policy, 0, torch.ones(2))
    trained("bf16-mixed", 0, torch.ones(2))
    Session(load_config("tiny", ["model.layers=1"]), Policy.parse("fp32"), "cpu")
    x = torch.full((64, 64), 1 + 2.0**-12)
    assert torch.equal(x @ torch.eye(64), x)
    trained("fp32", 0, torch.ones(2))


def test_a_state_of_tied_halves_goes_through_safetensors():
    """It refuses tensors that share their memory: a tied matrix is in a state once, under its first name."""
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3, bias=False))
    model[1].weight = model[0].weight
    run = prepare(model, AdamW(model.parameters()), SPLIT)
    run.step(lambda index: model(index).sum(), [torch.tensor([0, 2])])
    tensors = run.state_dict()["tensors"]
    found = load(save(tensors))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_another_rate_builds_no_second_graph(monkeypatch):
    """dynamo compiles a float that changes once more; whatever is compiled gets the rate in a tensor."""
    torch._dynamo.reset()
    counted = CompileCounter()
    compiled = torch.compile(lambda wide, lr: [w * lr for w in wide], backend=counted, fullgraph=True)
    monkeypatch.setattr(adamw, "adamw", lambda wide, *_, lr, **__: compiled(wide, lr))
    model = Weights(1.0, 2.0)
    ours = AdamW(model.parameters())
    run = prepare(model, ours, "bf16-mixed")
    for rate in (1e-2, 1e-3, 1e-4):
        ours.param_groups[0]["lr"] = rate
        run.step(loss_of(model), [torch.ones(2)])
    assert counted.frame_count == 1


@pytest.mark.prove
@pytest.mark.parametrize("policy", [SPLIT, f"{LAW},param=fp32:split"])
def test_a_longer_micro_batch_compiles_while_gradients_wait(policy):
    """dynamo compiles nothing that uses a parameter whose gradient is wider; a longer batch would need it to."""
    torch._dynamo.reset()
    model = Weights(1.0, 2.0)
    run = prepare(model, sgd(model), policy)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run.step(lambda x: compiled(x).sum(), [torch.ones(1, 2), torch.ones(3, 2)])
    assert run.weights()["layer.weight"].tolist() == [[-1.0, 0.0]]


def test_emulated_casts_are_not_dropped_by_the_compiler():
    """inductor takes a conversion to bf16 and back for nothing: the graph must round by operations on bits."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph.code)
        return graph.forward

    x = torch.linspace(-1, 1, 9)
    assert torch.equal(torch.compile(carried, backend=keep, fullgraph=True)(x, BF16), x.bfloat16().float())
    assert "torch.bfloat16" not in graphs[0]
