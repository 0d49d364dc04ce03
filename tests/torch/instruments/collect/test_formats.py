"""The formats of a model's operations are seen with layer and line, eager and compiled, and no number changes."""

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _global_forward_hooks

from halfstep.core.audit.engine import check
from halfstep.torch.instruments.collect.formats import switches
from halfstep.torch.instruments.collect.watch import Watch, record_of
from halfstep.torch.run import prepare

HERE = "test_formats.py:"


class Inner(nn.Module):
    """A layer that runs some code."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def forward(self, x):
        return self.code(x)


class Net(nn.Module):
    """Such a layer between two matrices, in bf16."""

    def __init__(self, code=F.gelu, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Inner(code)
        self.first, self.last = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def wide_loss(y):
    return y.float().square().mean()


def watched(model, loss_fn=wide_loss, *, steps=3, compiled=None, dtype=torch.bfloat16):
    """Trains a little, and returns what was seen and the losses."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Watch() as watch:
        call = torch.compile(model, backend=compiled, fullgraph=True) if compiled else model
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_fn(call(torch.randn(8, 8, dtype=dtype)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return watch.record(), losses


def found(record):
    return check(record, select=["HS4"])


def softmax_by_hand(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def norm_by_hand(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def in_fp32(code):
    return lambda x: code(x.float()).to(x.dtype)


table, mixing = torch.ones(8), torch.eye(8)

CODE = {  # what a layer does, and its twin that is right
    "HS401": (norm_by_hand, in_fp32(norm_by_hand)),
    "HS401 normalize": (F.normalize, in_fp32(F.normalize)),
    "HS402 by hand": (softmax_by_hand, in_fp32(softmax_by_hand)),
    "HS402": (lambda x: F.log_softmax(x, -1), lambda x: x.softmax(-1)),  # F.softmax sums in fp32
    "HS406": (
        lambda x: (F.relu(x * table) @ mixing).bfloat16(),
        lambda x: F.relu(x * table).bfloat16() @ mixing.bfloat16(),
    ),
}
compiled_too = [None, pytest.param("eager", marks=pytest.mark.prove)]


@pytest.mark.parametrize("case", CODE)
@pytest.mark.parametrize("compiled", compiled_too, ids=["eager", "compiled"])
def test_a_layer_that_computes_too_narrow_is_named_with_its_line(case, compiled):
    bad, good = CODE[case]
    record, _ = watched(Net(bad), compiled=compiled)
    (finding,) = found(record)
    assert (finding.rule, finding.where) == (case.split()[0], ["inner"])
    assert HERE in finding.place
    assert found(watched(Net(good), compiled=compiled)[0]) == []


def test_a_compiled_model_keeps_one_graph_and_says_what_was_not_seen():
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    record, losses = watched(Net(norm_by_hand), compiled="eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    assert [f.rule for f in found(record)] == ["HS401"]
    assert any("values of activations" in text for text in record.unseen)
    assert losses == watched(Net(norm_by_hand))[1]


def test_a_model_whose_graph_was_compiled_before_is_not_hooked():
    model, x = Net(), torch.randn(8, 8, dtype=torch.bfloat16)
    torch.compile(Net(), backend="eager")(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch() as watch:
        wide_loss(torch.compile(model, backend="eager")(x)).backward()
        optimizer.step()
        assert not watch.log.formats.watching


@pytest.mark.parametrize("narrow", [lambda y: F.mse_loss(y, y * 0), lambda y: y.square().mean()])
def test_a_narrow_loss_is_found_by_its_function_or_by_what_backward_is_given(narrow):
    (finding,) = found(watched(Net(), narrow)[0])
    assert finding.rule == "HS404"
    assert HERE in finding.place
    assert found(watched(Net(), lambda y: narrow(y.float()))[0]) == []


class Wide(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.weight)


@pytest.mark.prove
def test_the_backward_of_a_compiled_fp32_layer_under_autocast_is_found():
    def seen(where):
        torch.manual_seed(0)
        model = nn.Sequential(Wide(8, 4, bias=False))
        with torch.autocast("cpu", torch.bfloat16), torch._functorch.config.patch(backward_pass_autocast=where):
            record = watched(model, compiled="aot_eager", dtype=torch.float32, steps=1)[0]
        return found(record), model[0].weight.grad.clone()

    (finding,), rounded = seen("same_as_forward")
    assert (finding.rule, finding.where) == ("HS411", ["0"])
    clean, exact = seen("off")
    assert clean == []
    assert not rounded.equal(exact)


def places(x, count, positions=torch.Tensor.long, dtype=None):
    """Adds to an activation what a table has at counted positions."""
    at = positions(count(torch.ones(2, 1024, dtype=dtype or x.dtype)))
    return x + torch.linspace(0, 1, 5000, dtype=x.dtype)[at % 5000].mean()


COUNTS = {
    "the length of a sequence": (lambda one: one.cumsum(1), torch.Tensor.long, True),
    "in another way": (lambda one: torch.cumsum(one, dim=1) - 1, lambda count: count.to(torch.int32), True),
    "its masked form": (lambda one: one.cumsum(1) * one, lambda count: count[:, 300:].type(torch.int64), True),
    "of a mask": (lambda one: one.bool().cumsum(1, dtype=one.dtype), torch.Tensor.int, True),
    "a range": (lambda one: torch.arange(1024, dtype=one.dtype), torch.Tensor.long, True),
    "in fp32": (lambda one: one.float().cumsum(1), torch.Tensor.long, False),
    "of integers": (lambda one: one.long().cumsum(1), torch.Tensor.int, False),
    "short enough": (lambda one: one[:, :256].cumsum(1), torch.Tensor.long, False),
    "exact in steps": (lambda one: torch.arange(0, 512, 4, dtype=one.dtype), torch.Tensor.long, False),
    "a sum of shares": (lambda one: (one / 700).cumsum(1) * 600, torch.Tensor.long, False),
    "not as integers": (lambda one: one.cumsum(1), lambda count: (count > 300).long(), False),
}


@pytest.mark.parametrize("case", COUNTS)
def test_positions_that_are_counted_in_a_narrow_format_are_found(case):
    count, positions, bad = COUNTS[case]
    found_here = found(watched(Net(lambda x: places(x, count, positions)))[0])
    assert [(f.rule, f.where) for f in found_here] == ([("HS412", ["inner"])] if bad else [])
    if bad:
        assert HERE in found_here[0].place
        assert found_here[0].evidence["rounded"] > 300
        assert "bf16" in found_here[0].message
    else:
        assert found(watched(Net(lambda x: places(x, count, positions, torch.float16)))[0]) == []


WAVES = torch.tensor([1.0, 0.1])
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


@torch.no_grad()
def without_gradients(t):
    return (t.float()[:, None] * WAVES).cos()


ANGLES = {
    "timesteps that were cast": (lambda t: (t.bfloat16()[:, None].float() * WAVES).sin(), True),
    "their table is made without gradients": (lambda t: without_gradients(t.bfloat16()), True),
    "shares that were cast before they are scaled": (
        lambda t: (((t / 1000).bfloat16() * 1000).double()[:, None] * WAVES).cos(),
        True,
    ),
    "joined": (lambda t: torch.cat([t.bfloat16().float()[:, None] * WAVES] * 2, -1).cos(), True),
    "positions that autocast multiplies": (lambda t: AUTOCAST(torch.matmul)(t[:, None], WAVES[None]).cos(), True),
    "in fp32": (lambda t: (t[:, None] * WAVES).sin(), False),
    "multiplied outside autocast": (lambda t: (t[:, None] @ WAVES[None]).cos().bfloat16(), False),
    "whole numbers that bf16 has": (lambda t: (t[:257].bfloat16().float()[:, None] * WAVES).cos(), False),
    "integers": (lambda t: (t.long().float()[:, None] * WAVES).cos(), False),
    "not as angles": (lambda t: (t.bfloat16().float()[:, None] * WAVES).tanh(), False),
    "not as positions": (lambda t: t.bfloat16().float().long().float(), False),
}


@pytest.mark.parametrize("case", ANGLES)
def test_angles_of_narrow_positions_are_found(case):
    table, bad = ANGLES[case]
    found_here = found(watched(Net(lambda x: x + table(torch.arange(1000.0)).mean().to(x.dtype)))[0])
    expected = ("HS412", "warning", "likely", ["inner"])
    assert [(f.rule, f.severity, f.confidence, f.where) for f in found_here] == ([expected] if bad else [])
    if bad:
        assert HERE in found_here[0].place
        assert found_here[0].evidence["share"] == pytest.approx(
            0.371, abs=0.001
        )  # 258 and more, at one of two waves


def test_the_sine_of_an_activation_is_no_position():
    assert found(watched(Net(lambda x: x + (x * 1e4).sin()))[0]) == []


def test_fp16_counts_to_2048():
    def net(length):
        return Net(lambda x: x + x.new_ones(length, dtype=torch.float16).cumsum(0).long().max())

    assert found(watched(net(2048))[0]) == []
    (finding,) = found(watched(net(2050))[0])
    assert (finding.rule, finding.evidence["share"]) == ("HS412", 1 / 2050)  # 2049


def test_a_run_names_positions_that_are_counted_in_its_compute_format():
    model = Net(lambda x: places(x, lambda one: one.cumsum(1)), torch.float32)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    with pytest.warns(UserWarning, match="`cumsum` counts in bf16") as caught:
        run.coverage(lambda x: model(x).square().mean(), torch.randn(8, 8))
    assert "`inner`" in str(caught[0].message)
    assert "counts in bf16" in run.summary()
    model.inner.code = lambda x: places(x.float(), lambda one: one.cumsum(1)).to(x.dtype)
    assert "counts in bf16" not in str(run.coverage(lambda x: model(x).square().mean(), torch.randn(8, 8)))


class Rotary(Net):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4, dtype=dtype))


def test_frequencies_that_were_cast_are_found():
    (finding,) = found(watched(Rotary(torch.bfloat16))[0])
    assert (finding.rule, finding.where) == ("HS405", ["inv_freq"])
    assert found(watched(Rotary(torch.float32))[0]) == []


def test_one_norm_whose_gains_were_cast_is_found():
    class Casts(nn.Module):
        def __init__(self, narrow):
            super().__init__()
            self.norms = nn.ModuleList(
                nn.LayerNorm(8, dtype=torch.bfloat16 if i in narrow else None) for i in range(4)
            )

        def forward(self, x):
            for norm in self.norms:
                x = norm(x.to(norm.weight.dtype))
            return x

    (finding,) = found(watched(Casts({2}))[0])
    assert (finding.rule, finding.where, finding.confidence) == ("HS401", ["norms.2"], "likely")
    assert found(watched(Casts({}))[0]) == []
    assert found(watched(Casts({0, 1, 2, 3}))[0]) == []  # all of them: HS101 is about that


def test_hooks_leave_after_a_few_updates():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []
    with Watch():
        for _ in range(5):
            wide_loss(model(torch.randn(8, 8, dtype=torch.bfloat16))).backward()
            optimizer.step()
            hooked.append(bool(_global_forward_hooks))
    assert hooked == [True, True, False, False, False]


def test_a_model_can_be_copied_and_saved_while_it_is_watched():
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch() as watch:
        wide_loss(model(torch.randn(8, 8))).backward()
        optimizer.step()
        assert watch.log.formats.watching
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not copied[0]._forward_hooks
            assert copied(torch.ones(8)).equal(model(torch.ones(8)))


def test_a_model_that_steps_inside_its_forward():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            wide_loss(self.net(x)).backward()
            optimizer.step()

    model = Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch() as watch:
        for _ in range(5):
            model(torch.randn(8, 8, dtype=torch.bfloat16))
            assert torch._C._len_torch_function_stack() == 0
        assert not _global_forward_hooks
    assert {op.module for op in watch.record().operations} >= {"net.first", "net.last"}


def test_a_forward_that_raises_leaves_no_mode_on():
    class Fails(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise ValueError("once")
            return super().forward(x)

    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch() as watch:
        for _ in range(3):
            try:
                wide_loss(model(torch.randn(8, 8, dtype=torch.bfloat16))).backward()
            except ValueError:
                assert torch._C._len_torch_function_stack() == 0
            optimizer.step()
    assert [op.module for op in watch.record().operations if op.kind == "matmul"] == ["first", "last"]


def test_a_rule_that_narrows_an_island_of_a_prepared_model_is_found():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "bf16-mixed,norm=bf16")
    with Watch() as watch:
        for _ in range(3):
            run.step(lambda x: wide_loss(model(x)), [torch.randn(4, 8)])
    (finding,) = found(watch.record())
    assert (finding.rule, finding.where, finding.policy_rule) == ("HS401", ["1"], '"1" = "norm=fp32"')


def test_switches_name_tf32_and_fp8_that_was_asked_for(monkeypatch):
    cpu = {"": Net()}
    cuda = {"": SimpleNamespace(modules=list, parameters=lambda: [SimpleNamespace(device=torch.device("cuda"))])}
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert (switches(cuda, 0)["fp32_matmul"], switches(cpu, 0)["fp32_matmul"]) == ("tf32", "ieee")
        torch.set_float32_matmul_precision("highest")
        assert switches(cuda, 0)["fp32_matmul"] == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
    state = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state={"_mixed_precision": "fp8"}))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert (switches(cpu, 0)["fp8_asked"], switches(cpu, 0)["fp8_layers"]) == ("Accelerate", 0)
    assert [f.rule for f in found(watched(Net())[0])] == ["HS408"]
    assert switches(cpu, 3)["fp8_layers"] == 1


def test_a_factory_shows_the_formats_of_its_model():
    model = Net(norm_by_hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 8, dtype=torch.bfloat16)
    (finding,) = found(record_of(model, optimizer, lambda batch: wide_loss(model(batch)), x, steps=2))
    assert (finding.rule, finding.where) == ("HS401", ["inner"])
    assert not _global_forward_hooks
