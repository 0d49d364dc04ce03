"""What only a GPU can show; docs/measurements/ keeps what it showed."""

import copy
import threading

import numpy as np
import pytest
import torch

from halfstep.config.load import load
from halfstep.core import philox, rounding
from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import BF16, E4M3
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.torch.fp8.linear import lower, write_transpose
from halfstep.torch.layers import casts_for, casts_of, linear, linear_cross_entropy
from halfstep.torch.loss import fp8 as loss
from halfstep.torch.loss.coded import coded_row_losses_
from halfstep.torch.loss.plain import PLAIN, row_losses_
from halfstep.torch.numerics.dtypes import supported
from halfstep.torch.numerics.matmul import tensor_core_padding
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.optim.muon import Muon
from halfstep.torch.run import prepare
from halfstep.torch.session import Session

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = ["model.layers=2", "training.batch=4", "training.micro_batches=2"]


def session(policy, *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cuda", lambda applied, xp: 1.0 / (1.0 + applied))


def batch(s, step=0):
    shape = (2, 4, s.config.model.context + 1)
    return np.random.default_rng(step).integers(0, 256, shape).astype(np.int32)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "policy",
    ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true,param=bf16:stochastic", "fp16-mixed"],
)
def test_a_step_waits_for_nothing(policy, optimizer):
    s = session(policy, f"optimizer.name={optimizer}")
    for step in range(3):
        s.step(batch(s, step))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [s.step(batch(s, step)) for step in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(np.isfinite(s.read(result)["loss"]) for result in results)


def test_the_native_step_agrees_with_the_emulated_one():
    """Loss and gradients differ by the order of fp32 sums, and by roundings to bf16 that tip either way."""
    native, emulated = (
        session("bf16-mixed", "optimizer.name=adamw"),
        session("bf16-mixed,emulate=true", "optimizer.name=adamw"),
    )
    left, right = (s.read(s.step(batch(s))) for s in (native, emulated))
    assert left["loss"] == pytest.approx(right["loss"], rel=BF16.epsilon)
    assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=4 * BF16.epsilon)


def test_a_compiled_step_has_the_same_loss():
    eager, compiled = session("bf16-mixed"), session("bf16-mixed", "training.compile=true")
    left, right = (s.read(s.step(batch(s)))["loss"] for s in (eager, compiled))
    assert left == pytest.approx(right, rel=BF16.epsilon)


def test_weight_gradients_are_fp32_from_the_sum_on():
    from halfstep.torch.layers import casts_of, linear

    casts = casts_of(session("bf16-mixed").model.blocks[0].mlp.up.precision)
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(48, 32, device="cuda", requires_grad=True)
    g = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)
    with torch.autograd.set_multithreading_enabled(False):  # torch warns of a matmul that is first in its thread
        linear(x, w, None, casts).backward(g)
    exact = g.double().t() @ x.double()
    magnitude = g.abs().double().t() @ x.abs().double()
    assert w.grad.dtype == torch.float32
    # 64 exact products summed in fp32; tensor cores align them to the largest, hence a factor of two
    assert ((w.grad.double() - exact).abs() <= 2 * 64 * 2.0**-23 * magnitude).all()
    assert not torch.equal(w.grad, w.grad.bfloat16().float())


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp8-mixed,compute=e4m3", "bf16-mixed,compute=e4m3:row"])
def test_a_bias_is_added_once_and_before_the_rounding_where_the_kernel_can(policy):
    """Of a product that is zero, the bias is left, whole; of one that is not, at most both roundings are lost."""
    from halfstep.core.precision import precisions
    from halfstep.torch.layers import casts_of, linear

    casts = casts_of(precisions(Policy.parse(policy), ["up"])["up"])
    w, b = torch.randn(48, 32, device="cuda"), torch.randn(48, device="cuda", requires_grad=True)
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(linear(torch.zeros_like(x), w, b, casts), b.bfloat16().expand(64, 48))
    without, y = linear(x, w, None, casts).double(), linear(x, w, b, casts)
    y.sum().backward()
    bound = BF16.epsilon * (without.abs() + y.abs().double())
    assert ((y.double() - without - b.bfloat16().double()).abs() <= bound).all()
    assert torch.equal(b.grad, torch.full_like(b, 64.0))


# --- fp8 -----------------------------------------------------------------------------------------------------

FP8 = [
    "fp8-mixed,compute=e4m3",
    "fp8-mixed,compute=e4m3,param=fp32:split",
    "bf16-mixed,compute=e4m3:row,grad=e4m3:row",
    "bf16-mixed,compute=e4m3:delayed,grad=e5m2:delayed",
    "fp8-mixed,compute=e4m3,matmul=fp32:fast",
]


@pytest.fixture
def fp8():
    if not (found := supported(E4M3, "cuda")):
        pytest.skip(found.reason)


@pytest.mark.parametrize("policy", FP8)
def test_fp8_learns_waits_for_nothing_and_agrees_with_its_emulation(fp8, policy):
    s = session(policy, "optimizer.rate=0.01", "optimizer.name=adamw")
    losses = [s.read(s.step(batch(s)))["loss"] for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [s.step(batch(s)) for _ in range(9)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses += [s.read(result)["loss"] for result in results]
    assert losses[-1] < losses[0] - 0.5
    emulated = session(f"{policy.replace(',matmul=fp32:fast', '')},emulate=true", "optimizer.name=adamw")
    # Operands are the same; sums of some 14 bits tip roundings to bf16, and those the codes of the next layer.
    assert losses[0] == pytest.approx(emulated.read(emulated.step(batch(emulated)))["loss"], rel=4 * BF16.epsilon)


@pytest.mark.parametrize("policy", FP8[:3])
def test_a_compiled_fp8_step_has_the_same_loss(fp8, policy):
    eager, compiled = session(policy), session(policy, "training.compile=true")
    left, right = (s.read(s.step(batch(s))) for s in (eager, compiled))
    assert left["loss"] == pytest.approx(right["loss"], rel=4 * BF16.epsilon)
    assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=2.0**-3)  # a rounding of e5m2 is 2^-3


@pytest.mark.parametrize(("tokens", "vocabulary"), [(256, 50304), (2048, 1024)])
def test_codes_over_the_logits_are_those_of_their_gradient_in_both_layouts(fp8, tokens, vocabulary, monkeypatch):
    """A row of a whole vocabulary takes several blocks and many warps, which write over what others have read."""
    c = casts_of(precisions(Policy.parse("bf16-mixed,compute=e4m3,grad=e5m2"), ["a"])["a"])
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    w = torch.randn(vocabulary, 64, device="cuda", generator=generator).mul(0.1).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    logits = linear(x, w, None, c).detach()
    wide, codes = logits.clone(), logits.view(torch.float8_e5m2)[:, :vocabulary]
    expected = row_losses_(wide, targets, vocabulary, *PLAIN, 1.0, c.precision.kept_bits)
    # The two forms of the kernel may fuse multiplications and additions differently: 20 sums of positive numbers,
    # whose logarithm is taken, and three roundings of numbers below 16.
    apart = coded_row_losses_(logits, targets, c.words, *PLAIN[:3]) - expected
    assert apart.abs().max() <= 2 * (20 + 3 * 16) * 2.0**-24
    made, _ = lower(wide, c.precision.grad_operand, c)
    # So much further up or down, of a unit that is at least 2^-3 of a number, one of 2^14 goes the other way.
    other = codes.view(torch.uint8) != made.view(torch.uint8)
    assert other.sum() <= other.numel() * 2.0**-14
    assert ((codes.float() - made.float()).abs() <= 2.0**-2 * made.float().abs()).all()
    assert torch.equal(write_transpose(codes).view(torch.uint8), codes.view(torch.uint8).t())

    def passed():
        x.grad = w.grad = None
        linear_cross_entropy(x, w, None, targets, c)[0].backward(torch.tensor(2.0**-9, device="cuda"))
        return x.grad, w.grad

    coded = passed()
    monkeypatch.setattr(loss, "why_not_coded", lambda *_, **__: "asked")
    for found, wanted in zip(coded, passed(), strict=True):
        # The same operands; a matmul of another number of rows may add its sums in another order.
        assert (found.float() - wanted.float()).norm() <= 2.0**-8 * wanted.float().norm()


def test_the_preset_measures_and_reports_it(fp8):
    model = net(256)
    run = prepare(model, AdamW(model.parameters()), "fp8-mixed", tokens=4096)
    assert "measured: " in run.summary()
    assert " ms in bf16" in run.summary()


def test_two_e5m2_are_refused_with_torchs_own_words(fp8):
    model = net()
    with pytest.raises(PolicyError, match="a matmul of e5m2 and e5m2"):
        prepare(model, AdamW(model.parameters()), "bf16-mixed,compute=e5m2")


# --- prepare -------------------------------------------------------------------------------------------------


def net(width=64):
    torch.manual_seed(0)
    layers = (torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
    return torch.nn.Sequential(torch.nn.LayerNorm(width), *layers).cuda()


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def rest(model):
    return [p for p in model.parameters() if p.ndim < 2]


NO_SYNC = {
    "ours": lambda m: AdamW(m.parameters(), lr=1e-3),
    "ours with Muon": lambda m: [Muon(matrices(m)), AdamW(rest(m))],
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, fused=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3, capturable=True),
}
MASTERS = ["bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true,param=bf16:stochastic", "fp16-mixed"]


def loss_of(model):
    return lambda x: model(x).float().square().mean()


@pytest.mark.parametrize("policy", MASTERS)
@pytest.mark.parametrize("name", NO_SYNC)
def test_a_prepared_step_waits_for_nothing_skipped_or_not(policy, name):
    model = net()
    run = prepare(model, NO_SYNC[name](model), policy, clip_norm=1.0, ema=0.99)
    x = torch.randn(32, 64, device="cuda")
    bad = x * float("nan")
    for _ in range(2):
        run.step(loss_of(model), [x, x])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [run.step(loss_of(model), [x, other]) for other in (x, bad, x)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [bool(r.skipped) for r in results] == [False, True, False]
    assert all(w.isfinite().all() for w in run.weights().values())


def test_the_named_sync_is_the_only_one():
    model = net()
    run = prepare(model, torch.optim.Adagrad(model.parameters()), "bf16-mixed")
    x = torch.randn(32, 64, device="cuda")
    run.step(loss_of(model), [x])
    assert "one sync per step" in run.summary()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing") as warned:
            run.step(loss_of(model), [x])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in warned if "called a synchronizing" in str(w.message)]) == 1


SPLIT_STEPS = {
    "fused": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True), "fp32"),
    "foreach": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=False), "fp32"),
    "ours": (lambda m: AdamW(m.parameters(), lr=1e-2, weight_decay=0.1), "fp32"),
    "ours, bf16 moments": (lambda m: AdamW(m.parameters(), lr=1e-2, weight_decay=0.1), "bf16"),
}


@pytest.mark.parametrize("name", SPLIT_STEPS)
def test_split_steps_are_fp32_steps_bit_for_bit(name):
    """The compiled join and split have the bits of the eager ones: nothing in them is rounded."""
    make, moments = SPLIT_STEPS[name]
    found = []
    x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for policy in ("fp32", "param=fp32:split"):
        model = net()
        run = prepare(model, make(model), f"{policy},moments={moments}")
        for _ in range(20):
            run.step(loss_of(model), [x])
        found.append(run.weights())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", SPLIT_STEPS)
def test_a_model_that_leaves_the_device_and_comes_back_loses_nothing(name):
    make, moments = SPLIT_STEPS[name]
    found = []
    x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for away in (False, True):
        model = net()
        run = prepare(model, make(model), f"param=fp32:split,moments={moments}")
        for _ in range(3):
            run.backward(loss_of(model)(x))
            if away:
                masters = {key: w.cpu() for key, w in run.weights().items()}
                model.cpu()
                assert all(torch.equal(w, masters[key]) for key, w in model.state_dict().items())
                with pytest.raises(HalfstepError, match=r"the model is on cpu, and .* on cuda:0"):
                    run.update()
                model.cuda()
            run.update()
        found.append(run.weights())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_stochastic_rounding_compiled_has_the_bits_of_the_reference():
    model = torch.nn.Linear(8, 8, bias=False).cuda()
    with torch.no_grad():
        model.weight.fill_(1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    run = prepare(model, sgd, "bf16-true,param=bf16:stochastic", seed=5)
    run.step(lambda x: model(x).float().sum(), [torch.ones(1, 8, device="cuda")])
    words = philox.random_bits((8, 8), seed=5, step=1, tensor=philox.tensor_id("weight"))
    wide = np.full((8, 8), 1 - 2.0**-12, np.float32)
    expected = rounding.cast(wide, BF16, overflow="inf", rounding="stochastic", bits=words)
    assert (run.weights()["weight"].cpu().numpy() == expected).all()


@pytest.mark.parametrize("policy", ["bf16-mixed,param=fp32:split", "fp16-mixed,scale=dynamic:interval=1:init=2"])
@pytest.mark.parametrize("name", ["ours", "AdamW"])
def test_another_rate_or_scale_compiles_nothing(policy, name):
    model = net()
    optimizer = NO_SYNC[name](model)
    run = prepare(model, optimizer, policy)
    forward = torch.compile(model)
    x = torch.randn(32, 64, device="cuda")
    for _ in range(2):
        run.step(lambda b: forward(b).float().square().mean(), [x])
    with torch.compiler.set_stance("fail_on_recompile"):
        for rate in (1e-2, 1e-4, 3e-5):
            optimizer.param_groups[0]["lr"] = rate
            run.step(lambda b: forward(b).float().square().mean(), [x])
    assert int(run.num_applied) == 5


def test_a_state_moved_through_host_memory_continues_bit_for_bit():
    x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for name in ("ours", "AdamW", "NAdam"):
        runs = []
        for _ in range(2):
            model = net()
            runs.append(prepare(model, NO_SYNC[name](model), "bf16-mixed,param=fp32:split"))
        one, other = runs
        one.step(loss_of(one.model), [x])
        given = one.state_dict()
        other.load_state_dict({**given, "tensors": {k: v.cpu() for k, v in given["tensors"].items()}})
        for run in runs:
            run.step(loss_of(run.model), [x])
        assert all(torch.equal(w, other.weights()[n]) for n, w in one.weights().items()), name


@pytest.mark.parametrize("policy", ["bf16-mixed,param=fp32:split", "fp16-mixed"])
def test_a_snapshot_waits_for_nothing_and_later_steps_do_not_change_it(policy):
    s = session(policy)
    s.read(s.step(batch(s)))
    s.snapshot()()  # pins its memory
    before = s.state()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        snapshot = s.snapshot()
        for step in range(1, 4):
            s.step(batch(s, step))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = {name: (dtype, shape, bytes(data)) for name, (dtype, shape, data) in snapshot().items()}
    assert found == before
    assert s.state()["applied"] != before["applied"]


def test_a_backward_pass_on_one_device_runs_in_the_thread_that_asks_for_it():
    model = torch.nn.Linear(8, 8).cuda()
    run = prepare(model, AdamW(model.parameters()), "bf16-mixed")
    threads = []
    model.weight.register_hook(lambda _: threads.append(threading.get_ident()))
    run.step(lambda x: model(x).square().mean(), [torch.randn(2, 8, device="cuda")])
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split", "fp16-mixed"])
def test_a_model_that_is_moved_between_prepare_and_attach_trains_as_if_it_had_been_there(policy):
    def trained(*, late):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
        model = model if late else model.cuda()
        run = prepare(model, policy, clip_norm=1.0, ema=0.9)
        model.cuda()
        run.attach(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
        assert run.switches.before
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).cuda()
            run.step(lambda x: model(x).square().mean(), [x])
        return run.weights() | run.ema

    left, right = trained(late=True), trained(late=False)
    assert all(torch.equal(w, right[name]) for name, w in left.items())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_vocabulary_that_is_not_a_multiple_of_8_is_multiplied_as_the_next_one(compiled):
    """Of small integers every sum is exact: the numbers are those of the CPU, where nothing is added."""

    def run(device):
        made = torch.Generator().manual_seed(0)
        x, weight = (torch.randint(-3, 4, shape, generator=made).float() for shape in ((4, 16), (5003, 16)))
        x, weight = (t.to(device).requires_grad_() for t in (x, weight))

        def product(x, weight):
            return linear(x, weight, None, casts_for("bf16-mixed"))

        y = (torch.compile(product) if compiled and device == "cuda" else product)(x, weight)
        grads = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
        return [t.cpu() for t in (y, *grads)]

    assert tensor_core_padding(5003, torch.empty(0, device="cuda")) == 5
    assert all(map(torch.equal, run("cuda"), run("cpu")))


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_is_fp32_inside_and_keeps_no_wide_copy(policy, training):
    """Its result and gradients are those of fp64, but for one rounding to the compute format and sums in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(16)).cuda().train(training)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            q.copy_(p.normal_())
    prepare(model, policy=policy)
    x = (4 + torch.randn(32, 16, 24, 24, device="cuda")).to(memory_format=torch.channels_last)
    x = x.to(torch.bfloat16 if policy == "bf16-mixed" else torch.float16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        given = x.clone().requires_grad_()
        y = model[0](given)
    wide = x.double().requires_grad_()
    expected = exact[0](wide)
    g = torch.randn_like(y)
    y.backward(g)
    expected.backward(g.double())
    eps = torch.finfo(y.dtype).eps
    assert (y - expected).norm() <= eps * expected.norm()
    assert (given.grad - wide.grad).norm() <= 2 * eps * wide.grad.norm()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() <= 2.0**-12 * q.grad.norm()
    assert not [t for t in kept if t.dtype == torch.float32 and t.numel() == x.numel()]
    assert y.is_contiguous(memory_format=torch.channels_last)
