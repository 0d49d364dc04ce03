"""The kernel against the formula in numpy, operation by operation in fp32: bits. Without a GPU, interpreted."""

from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from halfstep.core.formats import BF16, FP32
from halfstep.core.roles import Param
from halfstep.torch import kernels
from halfstep.torch.kernels import CAPTURED
from halfstep.torch.numerics.cast import carried, join, split
from halfstep.torch.numerics.split.parameter import make_split
from halfstep.torch.optim import adamw as optim
from halfstep.torch.optim.masters import Masters
from tests.torch.nets import same

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Smaller than a chunk, one chunk, a chunk and some, several: and no number at all.
SHAPES = [(5,), (64, 3), (7, 11), (64,), (0, 4), (1,)]
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1}


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """The module of the kernel, with chunks of 64 numbers."""
    from halfstep.torch.kernels import adamw

    monkeypatch.setattr(adamw, "CHUNK", 64)
    if DEVICE == "cpu":
        monkeypatch.setattr(optim, "reachable", lambda tensors: [t.is_contiguous() for t in tensors])
    return adamw


def draw(shape, seed, size=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(DEVICE)


def scalar(value):
    return torch.tensor(value, device=DEVICE)


def formula(w, m, v, g, t, *, rate, factor, betas, eps, decay):
    """One update in numpy, which rounds every operation to fp32."""
    f, (b1, b2) = np.float32, betas
    g = g * f(factor)
    m = f(b1) * m + f(1 - b1) * g
    v = f(b2) * v + f(1 - b2) * (g * g)
    pace, root = f(rate) / f(1 - b1**t), f(1 / np.sqrt(1 - b2**t))
    return w * (f(1) - f(rate) * f(decay)) - (pace * m) / (np.sqrt(v) * root + f(eps)), m, v


def step(update, grads, rate=0.1, factor=1.0, found_inf=0.0, **changed):
    flags = {"rate": scalar(rate), "factor": scalar(factor), "found_inf": scalar(found_inf)}
    update(grads, **flags, **{**SETTINGS, **changed})


def empty(shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize("held", ["whole", "split"])
def test_every_bit_is_that_of_the_formula(kernel, held):
    wide = [draw(shape, i) for i, shape in enumerate(SHAPES)]
    expected = [(w.cpu().numpy().copy(), 0 * w.cpu().numpy(), 0 * w.cpu().numpy()) for w in wide]
    params, remainders = (
        map(list, zip(*map(split, wide), strict=True)) if held == "split" else (wide, [None] * len(wide))
    )
    first, second, steps = empty(SHAPES), empty(SHAPES), empty([()] * len(SHAPES))
    update = kernel.Update(params, remainders, first, second, steps)
    for t in range(1, 6):
        grads = [draw(shape, 10 * t + i, 10.0**-t) for i, shape in enumerate(SHAPES)]
        rate, factor = 10.0**-t, 0.37 * t
        step(update, grads, rate=rate, factor=factor)
        expected = [
            formula(*old, g.cpu().numpy(), t, rate=rate, factor=factor, **SETTINGS)
            for old, g in zip(expected, grads, strict=True)
        ]
    found = [join(*pair) for pair in zip(params, remainders, strict=True)] if held == "split" else params
    for i, (w, m, v) in enumerate(expected):
        assert (found[i].cpu().numpy() == w).all()
        assert (first[i].cpu().numpy() == m).all()
        assert (second[i].cpu().numpy() == v).all()
        assert steps[i] == 5


def test_a_table_that_a_cuda_graph_wrote_to_is_sent_again_and_what_a_graph_sends_is_kept(kernel):
    params, grads = [draw((70,), 0)], [draw((70,), 1)]
    update = kernel.Update(params, [None], empty([(70,)]), empty([(70,)]), empty([()]))
    step(update, grads)
    table = update._table.clone()
    update._table[kernel.GRAD.value] = 0  # as the replay of a graph would leave the address of another gradient
    CAPTURED.note_replay()
    step(update, grads)
    assert torch.equal(update._table, table)
    held = []
    with CAPTURED.capturing(held):
        step(update, grads)
    assert [len(sent) for sent in held] == [1, 2]  # the address and both betas, although neither has changed
    assert CAPTURED.held is None


def test_where_gradients_were_not_finite_nothing_moves(kernel):
    params, steps, moments = [draw((70,), 0)], empty([()]), [draw((70,), 1)]
    before = [t.clone() for t in (*params, *moments)]
    nan = torch.full_like(params[0], torch.nan)
    step(kernel.Update(params, [None], moments, moments, steps), [nan], found_inf=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (*params, *moments), strict=True))
    assert steps[0] == 0


def test_the_cast_of_a_shard_is_written_with_it(kernel):
    """Also past the end of a shorter shard, nothing is: there is what pads it."""
    params, steps = [draw((70,), 0), draw((5,), 1)], empty([()] * 2)
    first, second = empty([(70,), (5,)]), empty([(70,), (5,)])
    casts = [torch.zeros(80, dtype=torch.bfloat16, device=DEVICE), None]
    update = kernel.Update(params, [None] * 2, first, second, steps, casts)
    step(update, [draw((70,), 2), draw((5,), 3)])
    assert torch.equal(casts[0][:70], params[0].bfloat16())
    assert not casts[0][70:].any()
    before = casts[0].clone()
    step(update, [draw((70,), 2), draw((5,), 3)], found_inf=1.0)
    assert torch.equal(casts[0], before)


def test_ties_go_away_from_zero_and_infinities_and_nan_are_those_of_cast(kernel):
    """To even, an exact tie comes back one bf16 ulp wrong; 0x7FFFFFFF, the NaN that GPUs make, becomes -0.0."""
    ties = [0x3F808000, 0x3F818000, -0x407F8000, 0x7F7F8000, 0x3F7FFFFF]
    wide = torch.tensor([*ties, 0x3F800000], device=DEVICE).int().view(torch.float32)
    grads = torch.tensor([0] * 5 + [0x7FFFFFFF], device=DEVICE).int().view(torch.float32)
    hi, lo = split(wide)
    step(kernel.Update([hi], [lo], empty([(6,)]), empty([(6,)]), empty([()])), [grads], decay=0.0)
    assert join(hi, lo).view(torch.int32)[:5].tolist() == ties
    assert (int(hi.view(torch.int16)[5]), int(lo[5])) == (0x7FC0, 0)
    # A master that is not finite already stays what it is, in the bits that cast.split gives it.
    wide = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.3e38, -0.0], device=DEVICE)
    hi, lo = split(wide)
    moments = empty([(5,)]), empty([(5,)])
    step(kernel.Update([hi], [lo], *moments, empty([()])), [torch.zeros_like(wide)], decay=0.0)
    expected = split(wide)
    assert same((hi.view(torch.int16), lo), (expected[0].view(torch.int16), expected[1]))


def test_tensors_that_moved_or_have_another_size_are_found(kernel):
    """Gradients are new tensors each step; a table that was not sent again would point at the old ones."""
    params, first, second, steps = [draw((8,), 0)], empty([(8,)]), empty([(8,)]), empty([()])
    update, kept = kernel.Update(params, [None], first, second, steps), []
    for t in range(3):
        kept.append(torch.full((8,), float(t), device=DEVICE))
        step(update, kept[-1:])
    rest = np.float32(1 - 0.9)
    assert (first[0].cpu().numpy() == np.float32(0.9) * (rest * np.float32(1)) + rest * np.float32(2)).all()
    # A parameter may have a gradient in one step and none in the next; the longer comes last here.
    p, q = (torch.nn.Parameter(torch.zeros(size, device=DEVICE)) for size in (8, 70))
    made = optim.AdamW([p, q])
    for one in (p, q):
        made.step({one: torch.ones_like(one)})
        assert (one < 0).all()


def optimizer_of(params, *, held, moments):
    names = {p: f"p{i}" for i, p in enumerate(params)}
    remainders = {}
    if held == "split":
        for p, name in names.items():
            p.data, remainders[name] = split(p.data)
            make_split(p, remainders[name])
    made = optim.AdamW([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], weight_decay=0.1)
    masters = Masters(names, dict.fromkeys(names.values(), Param(FP32, split=held == "split")), remainders)
    made.bind(masters, dict.fromkeys(names.values(), moments), FP32, emulate=False)
    return made


@pytest.mark.parametrize("moments", [pytest.param(FP32, marks=pytest.mark.prove), BF16], ids=str)
def test_the_optimizer_takes_the_kernel_and_split_masters_move_as_whole_ones(moments):
    found = []
    for held in ("whole", "split"):
        params = [torch.nn.Parameter(draw(shape, i)) for i, shape in enumerate(SHAPES)]
        made = optimizer_of(params, held=held, moments=moments)
        for t in range(4):
            grads = {p: draw(p.shape, 10 * t + i) for i, p in enumerate(params)}
            with mock.patch.object(optim, "adamw", side_effect=AssertionError("torch's kernel was called")):
                made.step(grads, found_inf=scalar(float(t == 2)), scale=scalar(0.5))
        assert all(made.state[p]["step"] == 3 for p in params)
        found.append([w.detach().clone() for w in made.masters.wide(params)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_the_kernel_cannot_reach_is_updated_by_torch():
    p = torch.nn.Parameter(draw((4, 6), 0).t())  # transposed: not contiguous
    q = torch.nn.Parameter(draw((4, 6), 0))
    made = optim.AdamW([p, q])
    before = p.detach().clone()
    with mock.patch.object(optim, "adamw", wraps=optim.adamw) as torchs:
        made.step({p: torch.ones_like(p), q: torch.ones_like(q)}, scale=scalar(0.5))
    assert [id(given) for given in torchs.call_args[0][0]] == [id(p)]
    assert not torch.equal(before, p)
    off = made.state[p]["exp_avg"] - made.state[q]["exp_avg"].t()
    # torch's kernel takes 1 - b1 of a b1 that is rounded to fp32, and may fuse what ours rounds twice.
    assert (off.abs() <= 0.5 * 2.0**-25 + 2 * 2.0**-24 * 0.05).all()


def roomy(values, dtype):
    """A tensor with memory of its own behind it: a kernel that took it for a wider one would stay in there."""
    return torch.zeros(4 * values.numel(), dtype=dtype, device=DEVICE)[: values.numel()].copy_(values)


def test_parameters_that_are_held_differently_are_distinguished():
    forms = [(True, BF16), (True, FP32), (False, FP32)]  # narrow ones first: read as such, none is left
    one, two = ([torch.nn.Parameter(draw((70,), i)) for i in range(3)] for _ in range(2))

    def made_of(params, forms):
        names, remainders = {p: f"p{i}" for i, p in enumerate(params)}, {}
        for p, (halved, _) in zip(params, forms, strict=True):
            if halved:
                p.data, remainders[names[p]] = split(p.data)
                make_split(p, remainders[names[p]])
        held = {names[p]: Param(FP32, split=halved) for p, (halved, _) in zip(params, forms, strict=True)}
        made = optim.AdamW(params, lr=0.1)
        moments = {names[p]: fmt for p, (_, fmt) in zip(params, forms, strict=True)}
        made.bind(Masters(names, held, remainders), moments, FP32, emulate=False)
        return made

    together = made_of(one, forms)
    alone = [made_of([p], [form]) for p, form in zip(two, forms, strict=True)]
    for t in range(3):
        grads = [draw((70,), 10 * t + i) for i in range(3)]
        together.step(dict(zip(one, grads, strict=True)))
        for made, p, g in zip(alone, two, grads, strict=True):
            made.step({p: g})
    for made, p, q in zip(alone, one, two, strict=True):
        assert torch.equal(together.masters.wide([p])[0], made.masters.wide([q])[0])


@pytest.mark.parametrize("what", ["master", "emulated"])
def test_only_fp32_masters_go_through_the_kernel(what):
    """A bf16 master would be read as fp32; an emulated one would not be rounded back."""
    p = torch.nn.Parameter(roomy(draw((24,), 0), torch.bfloat16 if what == "master" else torch.float32))
    p.data.copy_(carried(p.data.float(), BF16))
    made = optim.AdamW([p], lr=0.01)
    made.bind(Masters({p: "p"}, {"p": Param(BF16)}), {}, FP32, emulate=what == "emulated")
    with mock.patch.object(optim, "adamw", wraps=optim.adamw) as torchs:
        made.step({p: draw((24,), 1)})
    assert torchs.called
    assert torch.equal(p.float(), carried(p.data.float(), BF16))


@pytest.mark.parametrize("odd", ["bf16", "transposed", "unaligned"])
def test_gradients_that_the_kernel_cannot_read_are_copied(odd):
    """Read by their address alone, they would be other numbers."""
    p, q = (torch.nn.Parameter(draw((6, 4), 0)) for _ in range(2))
    grad = {
        "bf16": roomy(draw((24,), 1), torch.bfloat16).view(6, 4),
        "transposed": draw((4, 6), 1).t(),
        "unaligned": draw((32,), 1)[1:25].view(6, 4),
    }[odd]
    plain = grad.float().contiguous().clone()
    for parameter, given in ((p, grad), (q, plain)):
        optim.AdamW([parameter], lr=0.01).step({parameter: given})
    assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("odd", "reached"), [({}, True), ({"cuda": False}, False), ({"dense": False}, False), ({"at": 0x1008}, False)]
)
def test_a_kernel_gets_no_address_that_it_cannot_use(odd, reached):
    known = {"cuda": True, "dense": True, "at": 0x1000, **odd}
    tensor = SimpleNamespace(
        is_cuda=known["cuda"], is_contiguous=lambda: known["dense"], data_ptr=lambda: known["at"]
    )
    assert kernels.reachable([tensor]) == [reached]


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_state_whose_data_were_replaced_is_found_at_its_new_place(key):
    p = torch.nn.Parameter(draw((8,), 0))
    made = optim.AdamW([p])
    made.step({p: torch.ones_like(p)})
    old = made.state[p][key].data
    made.state[p][key].data = old.clone()
    made.step({p: torch.ones_like(p)})
    assert not torch.equal(old, made.state[p][key])
