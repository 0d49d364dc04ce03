"""The monitor on torch: counts against the reference, no bit of a step changed, as many graphs, samples."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from halfstep.core.errors import HalfstepError
from halfstep.core.observed import AMAX, COLUMNS, COUNT, OVERFLOW, ROLES, UNDERFLOW
from halfstep.core.roles import Operand
from halfstep.core.stats.tensors import TensorStats
from halfstep.core.stats.what_if import SPECS, signal_lost, spec_of
from halfstep.torch import prepare
from halfstep.torch.instruments.monitor import watched_layers
from halfstep.torch.instruments.observe.sums import observations, part_of, requantize
from halfstep.torch.layers import CastedLinear
from halfstep.torch.numerics.cast import quantize, quantize_scaled
from tests.columns import row_of
from tests.refusals import refuses
from tests.torch.nets import Decoder

LOST = 3  # the column of lost updates


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(8), nn.ReLU(inplace=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def tokens(seed, rows=4):
    return torch.randint(0, 20, (rows, 6), generator=torch.Generator().manual_seed(seed))


def make(policy="bf16-mixed", again=False, monitor=None, lr=1e-2):
    torch.manual_seed(0)
    model = Decoder(Block, 2, 8, 20, recompute=again)
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr), policy)
    return run, None if monitor is None else run.monitor(**monitor)


def watched_by_hand(model, policy="bf16-mixed", **monitor):
    run = prepare(model, policy)
    run.attach(torch.optim.SGD(model.parameters(), 1e-3))
    return run, run.monitor(**monitor)


def loss_of(called):
    def loss(batch):
        logits = called(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return loss


def train(run, called=None, steps=3):
    loss = loss_of(run.model if called is None else called)
    results = [run.step(loss, [tokens(2 * i), tokens(2 * i + 1)]) for i in range(steps)]
    return [r.loss for r in results], run.weights()


def same(one, other):
    assert [float(x) for x in one[0]] == [float(x) for x in other[0]]
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


# --- every step


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,param=fp32:split", "fp32"])
@pytest.mark.parametrize("again", [False, True])
def test_no_bit_of_a_step_changes(policy, again):
    plain, watched = make(policy, again), make(policy, again, {"every": 1})
    same(train(plain[0]), train(watched[0]))
    numbers = watched[1].numbers()
    assert [row.layer.name for row in numbers][:3] == ["embed", "blocks.0.norm", "blocks.0.up"]
    assert all(row.activation["count"] > 0 and row.gradient["count"] > 0 for row in numbers)


def test_counts_are_those_of_the_reference():
    run, monitor = make("fp16-mixed", monitor={"slice": 16})
    seen = {}

    def before(module, args):
        seen.setdefault("activation", []).append(args[0].detach())

    def after(module, args, output):
        output.register_hook(lambda g: seen.setdefault("gradient", []).append(g))

    up = run.model.blocks[1].up
    up.register_forward_pre_hook(before)
    up.register_forward_hook(after)
    train(run, steps=1)
    row = monitor.layer_numbers().read()[[i.name for i in monitor.layers].index("blocks.1.up")]
    for at, role in enumerate(ROLES):
        expected = np.zeros(len(COLUMNS))
        for x in seen[role]:  # 16 of (4, 5, 8) or (4, 5, 16): two tokens, or one
            kept = x[1, [1, 3]] if role == "activation" else x[1, 2]
            now = row_of(kept.float().numpy(), monitor.layers[0].format(role))
            expected = np.where(np.arange(len(COLUMNS)) == AMAX, np.maximum(expected, now), expected + now)
        np.testing.assert_array_equal(row[at], expected)
    assert not monitor.layer_numbers().read().any()  # from zero again


def test_overflow_and_underflow_are_counted_in_the_format_of_the_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run, monitor = watched_by_hand(model, "fp16-mixed", slice=64)
    x = torch.tensor([[1e5, 1e-9, 1e-6, float("nan")]])
    run.backward(run.model[0](x).sum().float())
    first = monitor.layer_numbers().read()[0, 0]
    assert first[[COUNT, OVERFLOW, UNDERFLOW]].tolist() == [4, 2, 1]
    assert first[AMAX] == 1e5


def test_narrow_operands_are_scaled_first():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    run, monitor = watched_by_hand(model, "bf16-mixed; 1: compute=e4m3", slice=64)
    assert monitor.layers[1].formats["activation"] == "e4m3"
    x = torch.full((1, 16), 1e4)
    x[0, 0] = 1e-3  # 2^-23.3 of the largest; e4m3 has 2^-18
    run.backward(run.model[1](x).sum().float())
    assert monitor.layer_numbers().read()[1, 0].tolist() == [16, 1e4, 0, 1, 0]


def test_a_frozen_part_stays_frozen():
    model = Decoder(Block, 2, 8, 20)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    run = prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), "bf16-mixed")
    monitor = run.monitor()
    seen = model.blocks[0](model.embed(tokens(0)))
    assert not seen.requires_grad
    train(run, steps=1)
    counts = monitor.layer_numbers().read()[:, 0, COUNT]
    assert counts[0] == 0 < counts[-1]


def test_a_copy_of_a_run_is_not_watched():
    run, _ = make(monitor={"every": 1})
    twin = copy.deepcopy(run)
    same(train(twin), train(run))
    assert twin.watching is None
    assert not any(hasattr(module, "halfstep_watch") for module in twin.model.modules())
    run.unprepare()
    assert not any(hasattr(module, "halfstep_watch") for module in run.model.modules())


@pytest.mark.prove
def test_as_many_graphs_as_without_it():
    graphs = []
    for monitor in (None, {"every": 1}):
        torch._dynamo.reset()
        run, _ = make("bf16-mixed", monitor=monitor)
        counter = CompileCounterWithBackend("aot_eager")
        results = train(run, torch.compile(run.model, fullgraph=True, backend=counter))
        graphs.append((counter.frame_count, results))
    assert graphs[0][0] == graphs[1][0] == 1
    same(graphs[0][1], graphs[1][1])
    assert all(row.gradient["count"] for row in run.watching.numbers())


@pytest.mark.prove
def test_what_was_compiled_without_it_is_compiled_again():
    """By default torch would take the graph of the first model for the second, and nothing would be counted."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = []
    for _ in range(2):
        run, _ = make("bf16-mixed")
        compiled.append((run, torch.compile(run.model, fullgraph=True, backend=counter)))
        train(*compiled[-1], steps=1)
    assert counter.frame_count == 1
    for run, called in compiled:
        run.monitor(every=1)
        train(run, called, steps=1)
        assert all(row.gradient["count"] for row in run.watching.numbers())
    again, _ = make("bf16-mixed")
    train(again, torch.compile(again.model, fullgraph=True, backend=counter), steps=1)


@pytest.mark.prove
def test_blocks_that_are_compiled_one_by_one_share_their_graph():
    counts = []
    for monitor in (None, {}):
        torch._dynamo.reset()
        run, _ = make("bf16-mixed", monitor=monitor)
        counter = CompileCounterWithBackend("eager")
        for block in run.model.blocks:
            block.compile(backend=counter, fullgraph=True)
        train(run, steps=1)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.prove
def test_compiled_kernels_change_no_bit():
    results = []
    for monitor in (None, {"every": 1, "slice": 8}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        # In bf16 a CPU's compiled code rounds where it happens to store a tensor; on a GPU matmuls read bf16.
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        run = prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), "fp32")
        if monitor is not None:
            run.monitor(**monitor)
        called = torch.compile(model, fullgraph=True)
        losses = [run.step(lambda x, f=called: f(x).square().mean(), [torch.ones(4, 8)]).loss for _ in range(2)]
        results.append((losses, run.weights()))
    same(*results)


def test_a_layer_that_is_used_twice_counts_twice():
    layer = nn.Linear(4, 4)
    layer.weight.data.fill_(0.01)
    run, monitor = watched_by_hand(nn.Sequential(layer, layer))
    x = torch.full((3, 4), 8.0)
    run.backward(run.model(x).sum())
    numbers = monitor.layer_numbers().read()
    assert numbers[:, :, COUNT].tolist() == [[24, 24]]
    assert numbers[0, 0, AMAX] == 8


@pytest.mark.prove
def test_a_layer_that_compiled_code_uses_twice_is_found_out_and_counted():
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    run, monitor = watched_by_hand(nn.Sequential(layer, layer, nn.Linear(4, 4)))
    called = torch.compile(run.model, backend="aot_eager")
    found = []
    for _ in range(2):
        run.backward(called(torch.full((3, 4), 8.0)).sum())
        found.append(monitor.layer_numbers().read()[:, :, COUNT].tolist())
    assert found == [[[0, 0], [12, 12]], [[24, 24], [12, 12]]]


# --- weights


def test_lost_updates():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.data.fill_(1.0)
    model[0].bias.data.zero_()
    run = prepare(model, torch.optim.AdamW(model.parameters(), 1e-5), "bf16-mixed,param=bf16,grad_weight=bf16")
    monitor = run.monitor()
    unread = monitor.weight_numbers()
    run.step(lambda x: model(x).square().mean(), [torch.randn(4, 8)])
    numbers = unread.read()
    assert numbers.shape == (2, 4)
    assert numbers[0, LOST] == 64 / 72  # 1e-5 is nothing beside 1.0; biases begin at 0
    assert (numbers[:, :2] > 0).all()


def test_a_model_that_is_one_layer():
    run = prepare(nn.Linear(8, 8), "bf16-mixed,param=fp32:split")
    run.attach(torch.optim.AdamW(run.model.parameters(), 1e-5))
    monitor = run.monitor()
    unread = monitor.weight_numbers()
    run.step(lambda x: run.model(x).square().mean(), [torch.randn(4, 8)])
    assert [info.name for info in monitor.layers] == ["Linear"]
    assert unread.read()[0, LOST] == 0
    assert monitor.layer_numbers().read()[0, :, COUNT].tolist() == [32, 32]


def test_numbers_of_an_update_are_those_of_the_masters():
    for policy in ("bf16-mixed,param=fp32:split", "fp16-mixed"):
        run, monitor = make(policy, monitor={"slice": 10**6}, lr=1e-3)
        before, unread = run.weights(), monitor.weight_numbers()
        loss = loss_of(run.model)
        run.backward(loss(tokens(0)))
        run.unscale()
        grads = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        run.update()
        numbers, after = unread.read(), run.weights()
        for info, row in zip(monitor.layers, numbers, strict=True):
            own = [name for name in before if name.startswith(info.name + ".")]

            def norm(tensors, own=own):
                return float(torch.cat([tensors[name].flatten().double() for name in own]).norm())

            moved = {name: after[name].double() - before[name].double() for name in own}
            expected = [norm(before), norm(grads), norm(moved)]
            # Sums of squares in fp64, of differences rounded once to fp32.
            np.testing.assert_allclose(row[:3], expected, rtol=2**-22)
            assert row[LOST] == 0


def test_a_skipped_update_loses_nothing():
    run, monitor = make("fp16-mixed")
    monitor = run.monitor()
    unread = monitor.weight_numbers()
    loss = loss_of(run.model)
    result = run.step(lambda batch: loss(batch) * float("inf"), [tokens(0)])
    assert bool(result.skipped)
    numbers = unread.read()
    assert np.isnan(numbers[:, LOST]).all()
    assert (numbers[:, 2] == 0).all()


# --- samples


@pytest.mark.parametrize("spec", SPECS)
def test_what_if_is_what_quantize_gives(spec):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 40) * torch.logspace(-8, 6, 40) ** 2
    amax = x.abs().flatten(1).amax(1)
    for each, seen, back in zip(x, observe(x), requantize(x, amax, spec), strict=True):
        fmt, scaled = spec_of(spec)
        if scaled == "no":
            expected = quantize(each, fmt, overflow="saturate")
        else:
            blocks = F.pad(each, (0, 24)).unflatten(-1, (-1, 32)) if scaled == "block" else each
            operand = Operand(fmt, "tensor" if scaled == "tensor" else "row")
            values, inv_scale = quantize_scaled(blocks, operand)
            expected = values * inv_scale
            expected = expected.flatten(-2)[..., :40] if scaled == "block" else expected
        assert torch.equal(back, expected)
        lost, reference = seen.what_if[spec], signal_lost(each.numpy(), spec)
        error = each.double() - expected.double()
        assert lost.underflow == int(((expected == 0) & (each != 0)).sum()) == reference.underflow
        assert lost.overflow == reference.overflow
        # The same squares in fp64, added in another order.
        assert lost.noise == pytest.approx(float(error.square().sum()), rel=each.numel() * 2**-53)
        assert lost.noise == pytest.approx(reference.noise, rel=each.numel() * 2**-53)


def observe(x, format="bf16"):
    return observations([part_of(each, format) for each in x])


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
def test_sums_are_those_of_tensor_stats(format):
    x = torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 6, 10)
    x[0, 0, :4] = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-149])
    for each, seen in zip(x, observe(x, format), strict=True):
        stats = TensorStats.of(each.numpy(), format)
        for name in ("count", "zeros", "nans", "infs", "overflow", "underflow", "subnormal", "amax", "amin"):
            assert getattr(seen.stats, name) == getattr(stats, name), name
        assert seen.stats.exponents == stats.exponents
        for name in ("signal", "noise", "fourth"):
            assert getattr(seen.stats, name) == pytest.approx(getattr(stats, name), rel=40 * 2**-53), name


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,param=fp32:split"])
def test_a_sample_leaves_no_trace(policy):
    plain, (run, monitor) = make(policy)[0], make(policy, monitor={})
    train(plain, steps=2)
    train(run, steps=2)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    samples = monitor.sample(loss_of(run.model), tokens(9, rows=32))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(p.grad is None for p in run.model.parameters())
    same(train(plain), train(run))
    assert [*samples] == [info.name for info in monitor.layers]
    up = samples["blocks.0.up"]
    assert up["activation"].count == 2 * 5 * 8  # a sixteenth of 32 rows
    assert up["gradient"].count == 2 * 5 * 16
    assert up["weight"].count == 8 * 16
    assert up["weight"].format == "fp32"
    assert up["activation"].exact
    assert 20 < up["activation"].what_if["e4m3"]["sqnr"] < 40


def test_gradients_of_a_sample_are_as_large_as_those_of_the_step():
    run, monitor = make("bf16-mixed", monitor={"slice": 10**6}, lr=0.0)
    batch = tokens(0, rows=1).expand(32, -1)  # all rows alike: a part of them has the same gradients
    run.step(loss_of(run.model), [batch])
    at = [info.name for info in monitor.layers].index("blocks.0.up")
    amax = monitor.layer_numbers().read()[at, 1, AMAX]
    sampled = monitor.sample(loss_of(run.model), batch)["blocks.0.up"]["gradient"].amax
    assert sampled == pytest.approx(amax, rel=2**-7)  # bf16 gradients; the mean is divided at another place


# --- in a loop


def test_a_table_of_layers():
    run, monitor = make("bf16-mixed,param=bf16,grad_weight=bf16", monitor={"every": 2}, lr=1e-6)
    for block in run.model.blocks:
        block.act.inplace = False  # of a rounded weight gradient, the layer's output is a view
    train(run, steps=1)
    assert "every 2 updates" in str(monitor)
    train(run, steps=1)
    lines = str(monitor).splitlines()
    assert lines[0].split()[:3] == ["layer", "format", "headroom"]
    assert len(lines) == 1 + len(monitor.layers)
    assert "100.00%" in lines[1]  # norms begin at 1, where 1e-6 is nothing
    assert monitor.numbers()[0].headroom("activation") > 100


def test_refusals():
    run, monitor = make(monitor={})
    with refuses(HalfstepError, "a monitor already", "stop()"):
        run.monitor()
    monitor.stop()
    with refuses(HalfstepError, "every=0", "every=100"):
        run.monitor(every=0)
    with refuses(HalfstepError, r"slice=2\.5", "slice=4096"):
        run.monitor(slice=2.5)
    with refuses(HalfstepError, r"slice=1152921504606846976: at most 1,048,576", "4096"):
        run.monitor(slice=2**60)
    assert run.monitor(slice=1) is run.watching


def test_a_casted_layer_without_a_policy_is_described():
    model = nn.Sequential(CastedLinear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1))
    kinds = {name: info.kind for name, (_, info) in watched_layers(model).items()}
    assert kinds == {"0": "matmul", "1": "norm", "3": "matmul"}
