"""Which narrow operands are refused, and what is measured; the timer is fake, so that it can be any device."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from halfstep.config.load import load
from halfstep.config.model import ModelConfig
from halfstep.core.arrays.measure import TOKENS
from halfstep.core.choice.layers import BUDGET, NO_LAYERS
from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import E4M3, E5M2
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.core.roles import Operand
from halfstep.torch import layers
from halfstep.torch.convert import fp8_choice
from halfstep.torch.convert.apply import apply, apply_resolved
from halfstep.torch.convert.fp8_choice import CPU_TOKENS, measure_all
from halfstep.torch.convert.functions import narrow_logits
from halfstep.torch.convert.plan import plans_of
from halfstep.torch.fusion import loss as fusion
from halfstep.torch.loss import plain as losses
from halfstep.torch.loss.plain import LEAN_CHUNKS
from halfstep.torch.measure import LayerWork, time_layer
from halfstep.torch.model import Decoder
from halfstep.torch.numerics.dtypes import product_failure, supported
from halfstep.torch.run import Run, prepare
from halfstep.torch.session import Session
from halfstep.torch.state import load_state, restored, state_of, stored
from tests.conformance.fp8_device import Device
from tests.refusals import refuses
from tests.torch import graphs

needs_fp8 = pytest.mark.skipif(not supported(E4M3, "cpu"), reason=supported(E4M3, "cpu").reason)
WITHOUT_ROWS = product_failure(E4M3, E4M3, torch.device("cpu"), rows=True) if supported(E4M3, "cpu") else "no fp8"
needs_rows = pytest.mark.skipif(bool(WITHOUT_ROWS), reason=WITHOUT_ROWS)  # torch 2.11 has them on GPUs alone
ALL = {"up", "down", "again", "head"}
MEASURED = "bf16-mixed,compute=e4m3:measured,grad=e5m2"


class Net(nn.Module):
    def __init__(self, wide=64, classes=16):
        super().__init__()
        self.up, self.down = nn.Linear(16, wide), nn.Linear(wide, 16, bias=False)
        self.again, self.head = nn.Linear(16, wide), nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x) + self.again(x))))


def prepared(policy=MEASURED, net=None, device=None, **options):
    net = Net() if net is None else net
    applied = apply(net, Policy.parse(policy), timer=device or Device(), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return Run(net, [optimizer], Policy.parse(policy), conversion=applied)


def narrow_layers(model):
    return {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.precision.narrow}


@needs_fp8
def test_a_layer_is_narrow_where_that_is_faster_and_evaluation_leaves_it_so():
    device = Device({(16, 64): 0.4e-3, (64, 16): 0.99e-3})
    run = prepared(device=device)
    assert narrow_layers(run.model) == {"up", "again"}
    # By size, the most work first: up and again are one size, twice.
    assert [(work.inputs, work.outputs) for work, _ in device.asked] == [(16, 64), (64, 16), (16, 16)]
    text = run.summary()
    assert "2 Linear (up, again): multiplies in e4m3 forward and e5m2 backward, weight gradients in fp32 " in text
    assert "(measured: 0.4 ms in e4m3 and e5m2, 1 ms in bf16)" in text
    down = "multiplies in bf16, weight gradients in fp32 (measured: 0.99 ms in e4m3 and e5m2"
    assert f"1 Linear (down): {down}" in text
    assert "measured: 2 of the 4 matmuls that rules name are faster in e4m3 and e5m2, the others stay bf16" in text
    assert f"3 sizes timed eager in 0.0 s of at most {BUDGET:g} s" in text
    # fp8-mixed evaluates in bf16; after it, layers that were slower in fp8 must not come back narrow.
    run = prepared("fp8-mixed", device=Device({(16, 64): 0.4e-3, (64, 16): 0.99e-3}))
    before = narrow_layers(run.model)
    with run.evaluation():
        assert not narrow_layers(run.model)
    assert narrow_layers(run.model) == before == {"up", "again"}
    net = Net()
    run = prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp8-mixed", tokens=64)
    assert "measured: " in run.summary()
    with pytest.raises(HalfstepError, match="tokens=0"):
        prepare(Net(), torch.optim.SGD(net.parameters(), lr=0.1), "fp8-mixed", tokens=0)


@needs_fp8
@pytest.mark.parametrize(
    ("otherwise", "layers", "text"),
    [
        (0.1e-3, ALL, "all 4 matmuls that rules name are faster in e4m3 and e5m2 than in"),
        (2e-3, set(), "none of the 4 matmuls that rules name is faster in e4m3 and e5m2, so all stay bf16"),
    ],
)
def test_a_fast_device_and_a_slow_one(otherwise, layers, text):
    run = prepared(device=Device(otherwise=otherwise))
    assert narrow_layers(run.model) == layers
    assert text in run.summary()


@needs_rows
def test_a_layer_is_timed_as_it_will_run():
    device = Device()
    prepared("bf16-mixed,param=fp32:split,compute=e4m3:row:measured", device=device, tokens=77)
    work, (wide, narrow_form) = device.asked[0]
    assert work == LayerWork(16, 64, 77, bias=True, split=True, device=torch.device("cpu"))
    assert wide.operand == wide.grad_operand == Operand(wide.compute)
    assert narrow_form.operand == Operand(E4M3, granularity="row", measured=True)
    assert not next(work for work, _ in device.asked if work.inputs == 64).bias
    prepared(device=(other := Device()))
    assert other.asked[0][0].tokens == min(TOKENS, CPU_TOKENS)
    assert not other.asked[0][0].split


@needs_fp8
def test_only_what_a_rule_says_it_of_is_measured_and_what_is_not_timed_stays_wide():
    device = Device()
    run = prepared("bf16-mixed; up: compute=e4m3:measured; down: compute=e4m3", device=device)
    assert len(device.asked) == 1
    assert narrow_layers(run.model) == {"down"}
    assert apply(Net(), Policy.parse("bf16-mixed; up: compute=e4m3"), timer=device).measured is NO_LAYERS
    device = Device({(16, 64): torch.OutOfMemoryError("2 GiB")}, otherwise=0.5e-3)
    run = prepared(device=device)
    assert narrow_layers(run.model) == {"down", "head"}
    assert "not timed: 256 tokens take more memory than there is, so it stays bf16" in run.summary()
    seconds = iter([0.0, 0.0, BUDGET / 2, BUDGET, BUDGET])
    found = precisions(Policy.parse(MEASURED), ["up", "down", "again", "head"])
    device = Device(otherwise=0.5e-3)
    measured = measure_all(plans_of(Net()), found, {}, 64, timer=device, clock=lambda: next(seconds))
    assert len(device.asked) == 2
    assert measured.narrow == {"up": True, "down": True, "again": True, "head": False}
    assert measured.notes["head"] == f"not timed within {BUDGET:g} s, so it stays bf16"


def test_emulated_nothing_is_measured_and_all_is_narrow():
    device = Device()
    run = prepared(f"{MEASURED},emulate=true", device=device)
    assert not device.asked
    assert len(narrow_layers(run.model)) == 4
    assert "measured: nothing, since it is emulated: all 4 matmuls of the rules are narrow" in run.summary()


@needs_fp8
def test_a_resumed_run_takes_over_what_was_measured():
    first = prepared(device=Device({(16, 64): 0.4e-3}))
    saved = {name: stored(t) for name, t in state_of(first).items()}
    second = prepared(device=Device({(16, 16): 0.4e-3}))
    timed, own = second.summary(), state_of(second)
    assert narrow_layers(second.model) == {"head"}
    load_state(second, {name: restored(record) for name, record in saved.items()})
    assert narrow_layers(second.model) == {"up", "again"}
    assert "up, again): multiplies in e4m3 forward and e5m2 backward" in second.summary()
    assert "(as in the run that is resumed; here measured: 2 ms in e4m3 and e5m2, 1 ms" in second.summary()
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.model(x), second.model(x))
    text = second.conversion.measured.description
    assert text.startswith("2 of the 4 matmuls that rules name are narrow, adopted from the run that is resumed")
    assert "timed here, 3 of them would differ: 1 of the 4 matmuls that rules name are faster in" in text
    assert f"measured: {text}" in second.summary()
    load_state(second, own)  # back to what was measured here
    assert second.summary() == timed
    load_state(first, state_of(first))
    assert "adopted" not in first.summary()


DELAYED = "bf16-mixed,compute=e4m3:delayed:measured,grad=e5m2:delayed"
WIDE_LAYERS = {(16, 64): 0.4e-3}  # up and again
OTHERS = {(64, 16): 0.4e-3, (16, 16): 0.4e-3}  # down and head


def steps(run, numbers):
    """Updates with batches of their own, each of another size of numbers, so that histories matter."""
    for number in numbers:
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(number)) * 4.0 ** (number % 3)
        run.step(lambda x: run.model(x).square().mean(), [x])


@needs_fp8
@pytest.mark.parametrize("now", [OTHERS, {**WIDE_LAYERS, **OTHERS}, {}], ids=["other", "all", "none"])
@pytest.mark.parametrize("then", [WIDE_LAYERS, {**WIDE_LAYERS, **OTHERS}, {}], ids=["some", "all", "none"])
def test_a_delayed_run_resumes_bit_for_bit_whatever_is_faster_now(then, now):
    """Layers that were narrow then and are slower now, and the other way around, with the histories of then."""
    torch.manual_seed(0)
    whole = prepared(DELAYED, device=Device(then))
    steps(whole, range(3))
    saved = {name: stored(t) for name, t in state_of(whole).items()}
    resumed = prepared(DELAYED, device=Device(now))
    load_state(resumed, {name: restored(record) for name, record in saved.items()})
    assert narrow_layers(resumed.model) == narrow_layers(whole.model)
    for run in (whole, resumed):
        steps(run, range(3, 6))
    after = [{n: t.clone() for n, t in state_of(run).items()} for run in (whole, resumed)]
    assert after[0].keys() == after[1].keys()
    assert not [name for name, t in after[0].items() if not torch.equal(t, after[1][name])]
    used = {name for name, t in resumed.amaxes.named().items() if t.any()}
    assert used == narrow_layers(resumed.model)
    assert f"delayed: {len(used)} matmuls are scaled by the largest amax" in resumed.summary()


@needs_fp8
def test_a_session_measures_its_own_micro_batch(monkeypatch):
    device = Device({(32, 128): 0.4e-3})
    monkeypatch.setitem(apply_resolved.__kwdefaults__, "timer", device)
    sizes = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "training.batch=3"]
    session = Session(load("tiny", sizes), Policy.parse("fp8-mixed"), "cpu")
    assert {work.tokens for work, _ in device.asked} == {48}
    assert (32, 256) in {(work.inputs, work.outputs) for work, _ in device.asked}  # the head is the embedding
    before = {n: m.precision for n, m in session.model.named_modules() if hasattr(m, "precision")}
    session.evaluate([torch.zeros(1, 17, dtype=torch.int32).numpy()])
    assert before == {n: m.precision for n, m in session.model.named_modules() if hasattr(m, "precision")}
    assert session.model.blocks[0].mlp.up.precision.narrow
    assert not session.model.blocks[0].attn.q.precision.narrow
    assert session.notes[0].startswith("measured: 1 of the 7 matmuls that rules name are faster")
    monkeypatch.setitem(apply_resolved.__kwdefaults__, "timer", Device({(32, 256): 0.4e-3}))
    resumed = Session(load("tiny", sizes), Policy.parse("fp8-mixed"), "cpu")
    assert resumed.model.lm_head.precision.narrow
    resumed.load(session.state())
    assert before == {n: m.precision for n, m in resumed.model.named_modules() if hasattr(m, "precision")}
    assert "adopted from the run that is resumed" in resumed.notes[0]


@needs_fp8
def test_a_head_is_timed_with_its_loss_where_that_is_how_it_runs(monkeypatch):
    asked = {}
    for fused, lean in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(losses, "has_kernel", lambda _, fused=fused: fused)
        config = ModelConfig(vocabulary=32, context=16, layers=1, width=16, heads=2, softcap=5.0)
        model, device = Decoder(config), Device()
        given = {"timer": device, "memory": "lean" if lean else "fast"}
        found = apply(model, Policy.parse("fp8-mixed"), model.module_names(), **given).measured
        asked[fused, lean] = {(work.inputs, work.outputs): work.loss for work, _ in device.asked}
        assert {work.softcap for work, _ in device.asked if work.loss} == ({5.0} if fused else set())
        assert found.notes["lm_head"].endswith(", with its loss") is fused
        assert not found.notes["blocks.0.attn.q"].endswith("loss")
    assert [(size, chunks) for size, chunks in asked[True, False].items() if chunks] == [((16, 32), 1)]
    assert [chunks for chunks in asked[True, True].values() if chunks] == [LEAN_CHUNKS]
    assert not any(asked[False, False].values())


class Others(nn.Module):
    """A language model as people write it: its head has as many outputs as its embedding has rows."""

    def __init__(self, returns="loss"):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight, self.returns = self.table.weight, returns

    def forward(self, tokens, targets):
        logits = self.head(self.norm(self.table(tokens)))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss if self.returns == "loss" else (loss, logits)


class Losses(Device):
    """A device where a head is slower in fp8, and with its loss as given."""

    def __call__(self, work, precisions):
        return [1e-3, self.otherwise] if work.loss else [*super().__call__(work, precisions)[:1], 2e-3]


@pytest.fixture
def kernel(monkeypatch):
    """The loss kernel runs here, of any vocabulary; its operations compute in torch's functions."""
    monkeypatch.setattr(
        losses, "why_no_kernel", lambda x, dtype, casts=None: "" if dtype in losses.NARROW else "wide"
    )
    for module in (narrow_logits, fusion):
        monkeypatch.setattr(module, "why_no_kernel", losses.why_no_kernel)
    monkeypatch.setattr(narrow_logits, "LARGE", 32)


@needs_fp8
def test_a_head_of_others_is_timed_with_its_loss_and_is_wide_without(kernel):
    for faster in (True, False):
        run = prepared(net=Others(), device=Losses(otherwise=0.4e-3 if faster else 0.99e-3))
        assert run.conversion.measured.narrow == {"head": False, "head:loss": faster}
        head, text = run.model.head, run.summary()
        assert not head.precision.narrow
        assert (head.halfstep.loss_casts is not None) is faster
        alone = (
            "multiplies in bf16, weight gradients in fp32 (in e4m3 and e5m2 the gradient of its logits would be "
        )
        alone += "rounded to the nearest, which costs loss"
        compiled = "compiled in a model that returns its loss and not its logits, it multiplies in e4m3 and e5m2, "
        time = "measured: 0.4 ms" if faster else "measured: 0.99 ms"
        and_loss = f"{compiled if faster else ''}{time} in e4m3 and e5m2, 1 ms in bf16, with its loss"
        assert f"1 Linear (head): {alone}; {and_loss})" in text
    # Also one that would be faster alone.
    run = prepared(net=Others(), device=Device(otherwise=0.4e-3))
    assert not run.model.head.precision.narrow
    assert run.model.head.halfstep.loss_casts is not None
    prepared(net=Others(), device=(device := Device()), memory="lean")
    assert [work.loss for work, _ in device.asked] == [LEAN_CHUNKS]


@needs_fp8
@pytest.mark.parametrize("case", ["no kernel", "eager", "small", "no table", "emulated"])
def test_what_has_no_loss_of_its_own_is_timed_alone(case, kernel, monkeypatch):
    if case == "no kernel":
        monkeypatch.setattr(losses, "why_no_kernel", lambda *_: "not here")
    if case == "small":
        monkeypatch.setattr(narrow_logits, "LARGE", 33)
    net = Others()
    if case == "no table":
        net.table = nn.EmbeddingBag(32, 16)
    policy = f"{MEASURED},emulate=true" if case == "emulated" else MEASURED
    run = prepared(policy, net, Losses(otherwise=0.4e-3), compiled=case != "eager")
    assert run.conversion.measured.narrow == ({} if case == "emulated" else {"head": False})
    assert run.model.head.halfstep.loss_casts is None


@needs_fp8
def test_evaluation_and_unprepare_take_the_casts_of_the_loss_away(kernel):
    run = prepared("fp8-mixed", Others(), Losses(otherwise=0.4e-3))
    head = run.model.head
    given = head.halfstep.loss_casts
    with run.evaluation():
        assert head.halfstep.loss_casts is None
    assert head.halfstep.loss_casts is given is not None
    run.unprepare()
    assert not hasattr(head, "halfstep")


@needs_fp8
@pytest.mark.parametrize("policy", [MEASURED, DELAYED], ids=["current", "delayed"])
def test_a_resumed_run_takes_over_the_choice_of_a_loss(policy, kernel):
    fast, slow = (prepared(policy, Others(), Losses(otherwise=s)) for s in (0.4e-3, 2e-3))
    saved = {name: stored(t) for name, t in state_of(fast).items()}
    before = slow.summary()
    own = {name: restored(stored(t)) for name, t in state_of(slow).items()}
    load_state(slow, {name: restored(record) for name, record in saved.items()})
    assert slow.model.head.halfstep.loss_casts is fast.model.head.halfstep.loss_casts is not None
    assert "it multiplies in e4m3 and e5m2, as in the run that is resumed; here measured: 2 ms" in slow.summary()
    assert f"delayed: {int(policy == DELAYED)} matmuls" in slow.summary() or policy == MEASURED
    load_state(slow, own)
    assert slow.summary() == before
    # Of a run that did not measure it, on another device or before there was this choice: it ran as the layer.
    del saved["narrow.head:loss"]
    load_state(fast, {name: restored(record) for name, record in saved.items()})
    assert fast.model.head.halfstep.loss_casts is None
    alone = prepared(policy, Others(), Losses(), compiled=False)
    load_state(alone, own)
    assert alone.conversion.measured.narrow == {"head": False}


def compiled_pass(policy, returns, device):
    """Returns the loss, the gradients, which kinds of matmuls the compiled graphs have, and bits of gradients."""
    torch.manual_seed(0)
    run, used, kept = prepared(policy, Others(returns), device), set(), []

    def keep(graph, inputs):
        called = [str(node.target) for node in graph.graph.nodes]
        kept.extend(node.args[-1] for node in graph.graph.nodes if "cross_entropy_grad" in str(node.target))
        used.update(kind for kind in ("scaled_mm", "aten.mm", "linear") if any(kind in name for name in called))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = graphs.fused(aot_autograd(fw_compiler=keep, bw_compiler=keep))
    y = torch.compile(run.model, fullgraph=True, backend=backend)(*torch.randint(32, (2, 2, 8)))
    run.backward(y[0] if returns == "logits" else y)
    return [*(y if returns == "logits" else [y]), *(p.grad for p in run.model.parameters())], used, kept


@pytest.mark.prove
@needs_fp8
@pytest.mark.parametrize(("policy", "returns"), [(MEASURED, "loss"), (MEASURED, "logits"), (DELAYED, "loss")])
def test_compiled_code_has_the_loss_in_fp8_or_the_logits_in_bf16_and_not_both(policy, returns, kernel):
    found, used, _ = compiled_pass(policy, returns, Losses(otherwise=0.4e-3))
    same = policy.replace(":measured", "") if returns == "loss" else "bf16-mixed"
    right, expected, _ = compiled_pass(same, returns, None)
    assert used == expected
    assert ("scaled_mm" in used, len(used)) == (returns == "loss", 1)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.prove
@needs_fp8
@pytest.mark.parametrize(("policy", "bits"), [("bf16-mixed,compute=e4m3,grad=e5m2", 2), ("bf16-mixed", 0)])
def test_logits_that_compiled_code_returns_have_a_gradient_with_the_bits_that_a_narrow_head_keeps(
    policy, bits, kernel
):
    """The loss is not computed with the layer, but it knows the layer: its gradient is rounded stochastically."""
    (*_, weight_grad), used, kept = compiled_pass(policy, "logits", None)
    assert kept == [bits]
    assert ("scaled_mm" in used) is bool(bits)
    assert weight_grad.any()


@needs_fp8
@pytest.mark.parametrize(("policy", "bits"), [("bf16-mixed,compute=e4m3,grad=e5m2", 2), ("bf16-mixed", 0)])
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()),
        lambda logits, targets: F.cross_entropy(logits.view(-1, 32), targets.view(-1), reduction="sum"),
        lambda logits, targets: F.cross_entropy(
            logits[:, :-1].contiguous().flatten(0, 1), targets[:, 1:].flatten()
        ),
    ],
    ids=["widened", "narrow", "shifted"],
)
def test_in_eager_code_logits_have_such_a_gradient_too(policy, bits, loss, kernel, monkeypatch):
    kept, real = [], losses.row_gradients
    monkeypatch.setattr(losses, "row_gradients", lambda *args: kept.append(args[-1]) or real(*args))
    model = Others()
    model.forward = lambda tokens, targets: loss(model.head(model.norm(model.table(tokens))), targets)
    run = prepared(policy, model)
    run.backward(model(*torch.randint(32, (2, 2, 8))))
    assert kept == [bits]


@needs_fp8
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_timer_of_a_head_runs_the_fused_loss_in_both_forms(chunks, monkeypatch):
    seen, given = [], []
    for module, name in ((losses, "linear_losses"), (layers, "narrow_losses")):
        real = getattr(module, name)

        def noted(*args, real=real, name=name):
            seen.append(name)
            given.extend(arg for arg in args if isinstance(arg, losses.Terms))
            return real(*args)

        monkeypatch.setattr(module, name, noted)
    work = LayerWork(16, 32, 24, bias=False, split=True, device=torch.device("cpu"), loss=chunks, softcap=3.0)
    narrow_form = precision_of(MEASURED)
    assert all(0 < seconds < 1 for seconds in time_layer(work, (narrow_form.widened(), narrow_form)))
    assert all(terms == losses.Terms(softcap=3.0) for terms in given)
    assert seen[:6] == ["linear_losses"] * 3 + ["narrow_losses"] * 3
    assert set(seen[6:]) == {"linear_losses", "narrow_losses"}


@needs_fp8
def test_a_real_timer_times_both_forms_of_a_layer():
    for split in (False, True):
        work = LayerWork(16, 32, 24, bias=True, split=split, device=torch.device("cpu"))
        state = torch.random.get_rng_state()
        narrow_form = precision_of(f"{MEASURED},matmul=fp32")
        delayed = precision_of("bf16-mixed,compute=e4m3:delayed")
        times = time_layer(work, (narrow_form.widened(), narrow_form, delayed))
        assert len(times) == 3
        assert all(0 < seconds < 1 for seconds in times)
        assert torch.equal(state, torch.random.get_rng_state())


def precision_of(policy):
    return precisions(Policy.parse(policy), ["a"])["a"]


@needs_fp8
@pytest.mark.parametrize("policy", ["bf16-mixed,compute=e4m3,grad=e5m2", MEASURED])
def test_sizes_that_no_kernel_takes_are_refused_by_name_all_at_once(policy):
    with pytest.raises(PolicyError) as caught:
        prepared(policy, Net(wide=40, classes=10))
    said = "`up` cannot run in e4m3 and e5m2: out_features is 40, an fp8 matmul needs a multiple of 16"
    assert said in str(caught.value)
    assert "and 3 more: `down`, `again`, `head`" in str(caught.value)
    rules = caught.value.hint.split("`")[1]
    assert rules == "; up: compute=bf16; down: compute=bf16; again: compute=bf16; head: compute=bf16"
    with pytest.raises(PolicyError, match=r"`down` cannot run in .*: in_features is 40"):
        prepared(f"{policy}; up: compute=bf16; again: compute=bf16", Net(wide=40))
    # The rules that the refusal names make it run.
    assert not narrow_layers(prepared(f"{policy}{rules}", Net(wide=40, classes=10)).model)


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        pytest.param("bf16-mixed; down: compute=e4m3", {"down"}, marks=needs_fp8, id="not named"),
        pytest.param("bf16-mixed,grad=e5m2", ALL, marks=needs_fp8, id="one is wide"),
        pytest.param("bf16-mixed,compute=e4m3,emulate=true", ALL, id="emulated"),
    ],
)
def test_what_is_not_a_product_of_two_narrow_operands_may_have_any_size(policy, layers):
    assert narrow_layers(prepared(policy, Net(64 if layers == {"down"} else 40, classes=10)).model) == layers


@needs_fp8
def test_pairs_and_scales_a_row_that_the_device_does_not_multiply_are_refused_with_the_reason(monkeypatch):
    """As NVIDIA has it: two e5m2 are none."""
    asked = []

    def failure(left, right, device, *, rows=False, dtype=torch.bfloat16):
        asked.append((str(left), str(right), rows, dtype))
        return "Multiplication of two Float8_e5m2 matrices is not supported" if left == right == E5M2 else ""

    monkeypatch.setattr(fp8_choice, "product_failure", failure)
    with refuses(PolicyError, r"a matmul of e5m2 and e5m2 .* on cpu: Multiplication of two", "emulate=true"):
        prepared("bf16-mixed,compute=e5m2")
    prepared("bf16-mixed,compute=e4m3,grad=e5m2")
    assert ("e5m2", "e4m3", False, torch.float32) in asked

    def played(left, right, device, *, rows=False, dtype=torch.bfloat16):
        return "only per-tensor scaling" if rows else ""

    monkeypatch.setattr(fp8_choice, "product_failure", played)
    monkeypatch.setitem(fp8_choice.ROWS_INTO_FP32, "cpu", False)
    with pytest.raises(PolicyError, match="one scale per row cannot run on cpu: only per-tensor") as error:
        prepared("bf16-mixed,compute=e4m3:row,grad=e5m2")
    assert error.value.hint.startswith("leave out `:row`; or add `emulate=true`")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("bf16-mixed,matmul=fp32:fast", "there are none"),
        ("bf16-mixed,grad=e5m2,matmul=fp32:fast", "there are none"),
        ("bf16-mixed,compute=e4m3,matmul=fp32:fast,emulate=true", "is not emulated"),
        pytest.param("bf16-mixed,compute=e4m3,matmul=fp32:fast", "and this is cpu", marks=needs_fp8),
        ("bf16-mixed,compute=e3m2", "e3m2 cannot run on cpu"),
    ],
)
def test_what_would_change_nothing_is_refused(policy, said):
    net = Net()
    with refuses(PolicyError, said):
        prepared(policy, net)
    assert type(net.up) is nn.Linear
