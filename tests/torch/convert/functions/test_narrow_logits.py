"""Logits that a model widens before its loss: the kernel reads them narrow, and all other code sees fp32."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from benchmarks import zoo
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import E4M3
from halfstep.torch import prepare
from halfstep.torch.convert.functions import narrow_logits
from halfstep.torch.convert.functions.mode import run_in_mode
from halfstep.torch.convert.functions.narrow_logits import Widened, widen
from halfstep.torch.fusion import FUSED
from halfstep.torch.fusion import loss as fusion
from halfstep.torch.fusion.loss import OF_LAYER, OF_ROWS
from halfstep.torch.loss import plain as losses
from halfstep.torch.numerics.dtypes import supported
from tests.torch.graphs import fused

TARGETS = torch.tensor([[0, 1], [-100, 4]])


@pytest.fixture
def rows(monkeypatch):
    """The shapes that our loss was given; its operations compute in torch's functions here."""
    seen = []
    real = losses.row_cross_entropy
    monkeypatch.setattr(
        losses, "why_no_kernel", lambda x, dtype, casts=None: "" if dtype in losses.NARROW else "wide"
    )
    for module in (narrow_logits, fusion):
        monkeypatch.setattr(module, "why_no_kernel", losses.why_no_kernel)
    for module in (losses, fusion):
        monkeypatch.setattr(
            module, "row_cross_entropy", lambda x, *rest: seen.append((x.dtype, x.shape)) or real(x, *rest)
        )
    monkeypatch.setattr(narrow_logits, "LARGE", 5)
    return seen


class Model(nn.Module):
    """As many write a language model."""

    def __init__(self, form):
        super().__init__()
        self.body, self.head, self.form = nn.Linear(4, 4), nn.Linear(4, 6), form

    def forward(self, x, targets):
        return FORMS[self.form](self.head(self.body(x)), targets)


def flat(logits, targets, **options):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def written(logits, targets):
    logits = logits.float()
    logits[..., 5] = -1.0
    logits /= 2
    return flat(logits, targets)


def shifted(logits, targets):
    """As models ask for everything about their logits on the way to the loss."""
    logits = logits.float()
    assert (logits.dtype, logits.device, logits.requires_grad) == (torch.float32, targets.device, True)
    assert (logits.shape, logits.size(-1), logits.ndim, len(logits)) == ((2, 2, 6), 6, 3, 2)
    assert not logits.is_cuda
    assert not logits.is_leaf
    assert logits.mT.dtype == torch.float32
    assert logits.split(1)[0].dtype == logits.norm().dtype == torch.float32
    z = logits[..., :-1, :].contiguous().to(targets.device).view(-1, logits.shape[-1]).float()
    t = targets[..., 1:].contiguous().view(-1).to(z.device)
    return F.cross_entropy(z, t, ignore_index=-100, reduction="mean")


FORMS = {
    "float": lambda z, t: flat(z.float(), t),
    "narrow": flat,
    "shifted": shifted,
    "sum, smoothed": lambda z, t: flat(z.float(), t, reduction="sum", label_smoothing=0.1),
    "none": lambda z, t: flat(z.float(), t, reduction="none").mean(),
    "beside logits": lambda z, t: (z.float(), flat(z.float(), t)),
    "scaled": lambda z, t: flat(z.float() * 0.5, t),
    "written": written,
    "weights": lambda z, t: flat(z.float(), t, weight=torch.ones(6)),
    "log softmax": lambda z, t: F.nll_loss(F.log_softmax(z.float(), -1).flatten(0, 1), t.flatten()),
}
OURS = ("float", "narrow", "shifted", "sum, smoothed", "none", "beside logits")


def shape_of(form):
    return (2, 6) if form == "shifted" else (4, 6)


def passes(form, compiled=False):
    torch.manual_seed(0)
    model = Model(form)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    call = torch.compile(model, fullgraph=True, backend=fused()) if compiled else model
    y = call(torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1)), TARGETS)
    *logits, loss = y if isinstance(y, tuple) else (y,)
    assert loss.dtype == torch.float32
    assert all(type(z) is torch.Tensor and z.dtype == torch.float32 for z in logits)
    run.backward(loss)
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_and_its_gradients_are_those_of_torch(form, rows, monkeypatch):
    loss, grads = passes(form)
    assert rows == ([(torch.bfloat16, shape_of(form))] if form in OURS else [])
    monkeypatch.setattr(losses, "why_no_kernel", lambda *_: "not here")
    monkeypatch.setattr(narrow_logits, "why_no_kernel", lambda *_: "not here")
    right, right_grads = passes(form)
    assert (loss - right).abs() <= 32 * 2.0**-24 * right
    for grad, expected in zip(grads, right_grads, strict=True):
        # The logits' gradient is rounded once in both, of numbers that differ by roundings of fp32.
        assert (grad - expected).norm() <= 2.0**-8 * expected.norm()


def test_the_backward_pass_reads_the_narrow_numbers_too(rows, monkeypatch):
    given = []
    real = losses.row_gradients
    monkeypatch.setattr(losses, "row_gradients", lambda logits, *rest: given.append(logits) or real(logits, *rest))
    passes("shifted")
    assert [(type(logits), logits.dtype) for logits in given] == [(torch.Tensor, torch.bfloat16)]


@pytest.mark.prove
@pytest.mark.parametrize("form", FORMS)
def test_compiled_code_does_the_same(form, rows):
    torch.compiler.reset()
    loss, grads = passes(form)
    FUSED.clear()
    compiled, compiled_grads = passes(form, compiled=True)
    by_layer = form in OURS and form not in ("none", "beside logits", "shifted")  # which also takes their norm
    assert ({(OF_LAYER if by_layer else OF_ROWS): 1} if form in OURS else {}) == FUSED
    assert (loss - compiled).abs() <= 32 * 2.0**-24 * loss
    for grad, expected in zip(compiled_grads, grads, strict=True):  # as in the test of `ENDS`
        assert (grad - expected).norm() <= (2.0**-7 if by_layer else 0) * expected.norm()


def view_written(logits, targets):
    logits = logits.float()
    logits.view(-1, 6)[:, 5] = -1.0
    return flat(logits, targets)


def part_written(logits, targets):
    logits = logits.float()
    logits.tensor_split(2)[0].mul_(2)
    return flat(logits, targets)


@pytest.mark.prove
@pytest.mark.parametrize("write", [view_written, part_written])
def test_a_write_through_a_view_is_seen_by_the_loss_of_compiled_code(write, rows, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setitem(FORMS, "mine", write)
    FUSED.clear()
    loss, grads = passes("mine", compiled=True)
    assert not FUSED
    monkeypatch.setattr(narrow_logits, "why_no_kernel", lambda *_: "not here")
    right, right_grads = passes("mine")
    assert torch.equal(loss, right)
    assert all(torch.equal(a, b) for a, b in zip(grads, right_grads, strict=True))


def test_a_module_that_no_mode_reaches_is_given_fp32():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return (self.gain * x).to(x.dtype)

    x = torch.randn(3, 6).bfloat16().requires_grad_()
    assert run_in_mode(None, Own(), (widen(x * 1),), {}).dtype == torch.float32


@pytest.mark.prove
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_models_of_transformers_widen_their_logits_and_compile_as_one_graph(name, rows):
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.compiler.reset()
    x, results = zoo.tokens(), []
    for compiled in (False, True):
        model, _ = zoo.FAMILIES[name].make()
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
        call = torch.compile(model, fullgraph=True, backend=fused()) if compiled else model
        y = call(input_ids=x, labels=x, use_cache=False)
        run.backward(y.loss)
        results.append([y.loss.detach(), y.logits.float(), *(p.grad for p in model.parameters())])
    assert {dtype for dtype, _ in rows} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_it_is_fp32_to_other_code_and_the_logits_stay_as_they_are():
    x = torch.randn(3, 5).bfloat16().requires_grad_()
    y = widen(x * 1)
    assert (y.dtype, y.shape, y.requires_grad, y.float() is y) == (torch.float32, (3, 5), True, True)
    for computed in (y.sum(), y * 2, y.T, y[0] + 1, torch.cat([y, y]), y.detach(), y.softmax(-1)):
        assert (type(computed), computed.dtype) == (torch.Tensor, torch.float32)
    assert torch.equal(y.view(-1)[2:4] + 0, x.float().view(-1)[2:4])
    z = x.detach().clone()
    copy = widen(z)
    copy[0] = 1 + 2.0**-20
    copy.mul_(2)
    assert torch.equal(z, x)
    assert (copy[0] == 2 + 2.0**-19).all()
    assert torch.equal(copy[1:] / 2, x[1:].float())
    with pytest.raises(HalfstepError, match="there are views"):
        widen(z).view(-1)[0] = 1.0
    base = widen(z)
    view = base.view(-1)
    with pytest.raises(HalfstepError, match="there are views"):
        base[0] = 1.0
    assert torch.equal(view + 0, z.float().view(-1))
    assert isinstance(widen(z).view(-1), Widened)


class Decoder(nn.Module):
    """Ends as most do: a norm, the head, and the loss of what the head returned."""

    def __init__(self, end):
        super().__init__()
        self.body, self.norm, self.head, self.end = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6), end

    def forward(self, x, targets):
        h = self.norm(self.body(x))
        logits = self.head(h)
        return self.end(h, logits, targets)


def shuffled(h, logits, targets):
    return F.cross_entropy(logits.flatten(0, 1)[torch.tensor([1, 0, 3, 2])].float(), targets.flatten())


def halved(h, logits, targets):
    logits.div_(2.0)
    return flat(logits.float(), targets)


ENDS = {
    "returned": (lambda h, logits, targets: flat(logits.float(), targets), True),
    "not widened": (lambda h, logits, targets: flat(logits, targets, label_smoothing=0.1), True),
    "summed": (lambda h, logits, targets: flat(logits.float(), targets, reduction="sum"), True),
    "with its logits": (lambda h, logits, targets: (flat(logits.float(), targets), logits), False),
    "changed": (lambda h, logits, targets: 2 * flat(logits.float(), targets), True),
    "each row": (lambda h, logits, targets: flat(logits.float(), targets, reduction="none").sum(), False),
    "shuffled": (shuffled, False),
    "written": (halved, False),
}


def ends(end, *, compiled, memory="fast"):
    """Returns the loss, the gradients, and which operations computed the loss."""
    torch.manual_seed(0)
    model, targets = Decoder(ENDS[end][0]), torch.tensor([[0, 1], [-100, 4]])
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed", memory=memory)
    used = []

    def note(graph, inputs):
        return fused(aot_autograd(fw_compiler=keep, bw_compiler=keep))(graph, inputs)

    def keep(graph, inputs):
        for node in graph.graph.nodes:
            called = str(node.args[0] if "auto_functionalized" in str(node.target) else node.target)
            used.extend(called.split(".")[1:2] if called.startswith("halfstep.") else [])
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    y = (torch.compile(model, fullgraph=True, backend=note) if compiled else model)(torch.randn(2, 2, 4), targets)
    loss = y[0] if isinstance(y, tuple) else y
    run.backward(loss)
    return loss.detach(), [p.grad.clone() for p in model.parameters()], used


@pytest.mark.prove
@pytest.mark.parametrize(("end", "memory"), [*((end, "fast") for end in ENDS), ("returned", "lean")])
def test_a_compiled_model_that_returns_its_loss_alone_computes_it_with_the_layer(end, memory, rows):
    """A lean one in chunks."""
    loss, grads, used = ends(end, compiled=True, memory=memory)
    alone = ["cross_entropy_" if memory == "fast" else "linear_cross_entropy"]
    assert used == (alone if ENDS[end][1] else ["cross_entropy", "cross_entropy_grad"])
    right, right_grads, _ = ends(end, compiled=False)
    assert (loss - right).abs() <= 32 * 2.0**-24 * right.abs()
    for grad, expected in zip(grads, right_grads, strict=True):
        # The gradient that comes in is multiplied after the sums here, and before an operand is rounded there: the
        # logits' gradient and that of x are rounded to bf16, each by at most 2^-9, on both sides.
        assert (grad - expected).norm() <= 2.0**-7 * expected.norm()


@pytest.mark.prove
@pytest.mark.parametrize("widened", [True, False])
def test_a_hook_of_the_logits_is_called_in_compiled_code(widened, rows, monkeypatch):
    def hooked(h, logits, targets):
        logits = logits.float() if widened else logits
        logits.register_hook(lambda g: g * 0)
        return flat(logits, targets)

    monkeypatch.setitem(ENDS, "hooked", (hooked, False))
    _, grads, _ = ends("hooked", compiled=True)
    assert all(not grad.any() for grad in grads)


class Head(nn.Module):
    """A body whose result has no mark, and a head in fp8."""

    def __init__(self, of_logits):
        super().__init__()
        self.body, self.head, self.of_logits = nn.Linear(16, 16), nn.Linear(16, 48, bias=False), of_logits

    def forward(self, x, targets):
        logits = self.head(F.silu(self.body(x)))
        return self.of_logits(logits, targets), logits


MOVED = {
    "as they are": (flat, 2),
    "widened": (lambda z, t: flat(z.float(), t), 2),
    "a slice": (lambda z, t: flat(z[:, :-1], t[:, 1:]), 2),
    "a slice, widened": (lambda z, t: flat(z.float()[:, :-1].contiguous(), t[:, 1:]), 2),
    "transposed": (lambda z, t: flat(z.transpose(0, 1), t.t()), 2),
    "scaled": (lambda z, t: flat(z / 1.5, t), 0),
}


@pytest.mark.skipif(not supported(E4M3, "cpu"), reason=supported(E4M3, "cpu").reason)
@pytest.mark.parametrize(
    ("form", "compiled"),
    [
        *((form, False) for form in MOVED),
        ("a slice", True),
        *(pytest.param(form, True, marks=pytest.mark.prove) for form in MOVED if form != "a slice"),
    ],
)
def test_the_loss_knows_the_bits_that_a_narrow_head_keeps_of_a_gradient(form, compiled, rows, monkeypatch):
    kept, real = [], losses.row_cross_entropy
    for module in (losses, fusion):
        monkeypatch.setattr(
            module, "row_cross_entropy", lambda z, t, terms, bits=0: kept.append(bits) or real(z, t, terms, bits)
        )
    of_logits, bits = MOVED[form]
    model = Head(of_logits)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed; head: compute=e4m3,grad=e5m2")
    torch.compiler.reset()
    forward = torch.compile(model, backend=fused(), fullgraph=True) if compiled else model
    forward(torch.randn(2, 8, 16), torch.arange(16).view(2, 8))
    assert set(kept) == {bits}
