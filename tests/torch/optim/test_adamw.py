import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP32
from halfstep.core.roles import Param
from halfstep.torch.numerics.cast import split
from halfstep.torch.numerics.split.parameter import make_split
from halfstep.torch.optim import muon
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.optim.masters import Masters
from halfstep.torch.optim.muon import Muon, orthogonalize, why_torch
from tests.refusals import refuses


def parameter(*shape, seed=0, dtype=torch.float32):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Parameter(drawn.to(dtype))


def grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(p.shape, generator=generator) for p in params}


both_kinds = pytest.mark.parametrize("kind", [AdamW, Muon])


def test_adamw_is_torchs_adamw_bit_for_bit_on_fp32():
    ours, theirs = [parameter(6, 4), parameter(5, seed=1)], [parameter(6, 4), parameter(5, seed=1)]
    optimizer = AdamW(
        [{"params": [("a", ours[0])], "weight_decay": 0.1}, {"params": [("b", ours[1])], "weight_decay": 0.0}],
        lr=1e-2,
    )
    stock = torch.optim.AdamW(
        [{"params": [theirs[0]], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}],
        lr=torch.tensor(1e-2),  # a rate on the device is fp32, and so is ours
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(20):
        given = grads(ours, step)
        for p, mine in zip(theirs, ours, strict=True):
            p.grad = given[mine].clone()
        optimizer.step(given, found_inf=torch.zeros(()))
        stock.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@both_kinds
def test_a_step_that_is_not_finite_and_one_without_a_gradient_change_nothing(kind):
    p = parameter(4, 4)
    optimizer = kind([{"params": [("w", p)]}], lr=0.1, weight_decay=0.1)
    optimizer.step(grads([p], 0), found_inf=torch.zeros(()))
    before = [p.detach().clone(), *(value.clone() for value in optimizer.state[p].values())]
    optimizer.step({p: torch.full((4, 4), float("nan"))}, found_inf=torch.ones(()))
    after = [p.detach(), *optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    p, q = parameter(4, 4), parameter(4, 4, seed=1)
    before = q.detach().clone()
    kind([{"params": [("p", p), ("q", q)]}], lr=0.1, weight_decay=0.1).step(grads([p], 0))
    assert torch.equal(q, before)


@both_kinds
def test_a_bf16_master_is_rounded_once_and_a_split_one_takes_the_steps_of_fp32(kind):
    """One step from the same weight: the bf16 result is the rounded fp32 result."""
    narrow = parameter(8, 8, dtype=torch.bfloat16)
    wide = torch.nn.Parameter(narrow.detach().float())
    given = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    kind([{"params": [("w", narrow)]}], lr=0.01, masters={"w": Param(BF16)}).step({narrow: given})
    kind([{"params": [("w", wide)]}], lr=0.01).step({wide: given})
    assert torch.equal(narrow, wide.to(torch.bfloat16))
    assert not torch.equal(narrow.float(), wide)
    whole = parameter(6, 5)
    hi, lo = split(whole.detach())
    half = torch.nn.Parameter(hi)
    make_split(half, lo)
    ours, theirs = kind([("w", half)], lr=0.01, weight_decay=0.1), kind([("w", whole)], lr=0.01, weight_decay=0.1)
    masters = Masters({half: "w"}, {"w": Param(FP32, split=True)}, {"w": lo})
    ours.bind(masters, {"w": FP32}, FP32, emulate=False)
    for step in range(30):
        given = grads([whole], step)[whole]
        skip = torch.tensor(float(step % 7 == 3))
        ours.step({half: given.clone()}, found_inf=skip)
        theirs.step({whole: given.clone()}, found_inf=skip)
    assert half.dtype == torch.bfloat16
    assert torch.equal(masters.wide([half])[0], whole)
    left, right = ours.state[half], theirs.state[whole]
    assert all(torch.equal(left[key], right[key]) for key in right)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonalize_pushes_singular_values_towards_one(shape):
    drawn = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    out = orthogonalize(drawn, FP32)
    values = torch.linalg.svdvals(out)
    # Jordan et al.'s coefficients leave singular values between about 0.7 and 1.2, unless they began near 0.
    assert float(values.max()) < 1.3
    assert float(values.median()) > 0.6
    u, _, v = torch.linalg.svd(drawn, full_matrices=False)
    # the singular vectors stay: what is orthogonalized agrees in direction with u v
    assert float((out * (u @ v)).sum(dim=(-2, -1)).min()) > 0.7 * min(shape)


@pytest.mark.parametrize("shape", [(4,), (), (2, 3, 4)])
def test_muon_takes_only_matrices_and_says_what_takes_the_rest(shape):
    with refuses(HalfstepError, "`gain` has the shape", "AdamW"):
        Muon([{"params": [("gain", parameter(*shape))]}])
    muon, odd = Muon([parameter(2, 3)]), parameter(*shape)
    with pytest.raises(HalfstepError, match="matrices"):
        muon.add_param_group({"params": [odd]})
    assert len(muon.param_groups) == 1
    assert odd not in muon.names


@both_kinds
def test_parameters_come_as_torch_takes_them(kind):
    """Tensors, a generator of them, (name, tensor) pairs, groups: the same updates, under the names given."""
    given = grads([parameter(4, 6)], 1).popitem()[1]
    found = []
    for wrap in (
        lambda p: [p],
        lambda p: (q for q in [p]),
        lambda p: [("w", p)],
        lambda p: [{"params": [p]}],
        lambda p: [{"params": [("w", p)], "lr": 0.1}],
    ):
        p = parameter(4, 6)
        optimizer = kind(wrap(p), lr=0.1)
        p.grad = given.clone()
        optimizer.step()
        found.append((p.detach(), optimizer.names[p]))
    assert all(torch.equal(found[0][0], value) for value, _ in found)
    assert [name for _, name in found] == ["0", "0", "w", "0", "w"]


def test_rates_follow_a_scheduler_and_a_factor_on_the_device():
    p, q = parameter(4), parameter(4)
    moved, fixed = AdamW([p], lr=0.2), AdamW([q], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(moved, lambda step: 0.5)
    for optimizer, t in ((moved, p), (fixed, q)):
        t.grad = torch.ones(4)
        optimizer.step()
    assert torch.equal(p, q)
    assert float(moved.rate_of(moved.param_groups[0])) == pytest.approx(0.1)
    p = parameter(4)
    optimizer = AdamW([p], lr=0.2)
    optimizer.set_factor(torch.tensor(0.25))
    optimizer.param_groups[0]["lr"] = 0.4
    p.grad = torch.ones(4)
    optimizer.step()
    assert float(optimizer.rate_of(optimizer.param_groups[0])) == pytest.approx(0.1)
    p, q = parameter(4), parameter(4)
    half, full = (AdamW([{"params": [("w", t)]}], lr=lr) for t, lr in ((p, 0.2), (q, 0.1)))
    half.set_factor(torch.tensor(0.5))
    half.step(grads([p], 0))
    full.step({q: grads([p], 0)[p]})
    assert torch.equal(p, q)


@both_kinds
def test_sparse_gradients_and_numbers_that_are_not_real_are_refused(kind):
    p = parameter(4, 4)
    sparse = torch.ones(4, 4).to_sparse(1)
    with refuses(HalfstepError, "`w` is sparse", "SparseAdam"):
        kind([("w", p)]).step({p: sparse})
    with refuses(HalfstepError, "complex64", "torch.optim.AdamW"):
        kind([("w", torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))])


def test_moments_keep_their_format_in_steps_and_through_torchs_own_load():
    """torch casts state to the parameter's dtype: fp32 moments of a bf16 parameter come back bf16."""
    one, other = parameter(4, 4, dtype=torch.bfloat16), parameter(4, 4, dtype=torch.bfloat16)
    saved, loaded = AdamW([("w", one)]), AdamW([("w", other)])
    saved.step(grads([one], 0))
    loaded.load_state_dict(saved.state_dict())
    for key, value in saved.state[one].items():
        assert loaded.state[other][key].dtype == torch.float32
        assert torch.equal(loaded.state[other][key], value)
    narrow = AdamW([("w", one)], moments={"w": BF16})
    with pytest.raises(HalfstepError, match="`exp_avg` of `w`"):
        narrow.load_state_dict(saved.state_dict())
    p = parameter(8, 8)
    optimizer = AdamW([{"params": [("w", p)]}], moments={"w": BF16})
    optimizer.step(grads([p], 0))
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
    wide = parameter(8, 8)
    AdamW([{"params": [("w", wide)]}], moments={"w": FP32}).step({wide: grads([p], 0)[p]})
    assert torch.equal(p, wide)  # the first step does not read a rounded moment


def test_bind_casts_the_moments_and_gives_muon_the_compute_format_unless_it_has_its_own():
    p = parameter(4, 4)
    optimizer = AdamW([("w", p)])
    optimizer.step(grads([p], 0))
    before = optimizer.state[p]["exp_avg"].clone()
    optimizer.bind(Masters({p: "layer.weight"}), {"layer.weight": BF16}, FP32, emulate=False)
    assert optimizer.names[p] == "layer.weight"
    assert torch.equal(optimizer.state[p]["exp_avg"], before.bfloat16())
    taken, own = Muon([parameter(2, 2)]), Muon([parameter(2, 2)], iteration=FP32)
    for optimizer in (taken, own):
        optimizer.bind(Masters({}), {}, BF16, emulate=False)
    assert (taken.iteration, own.iteration) == (BF16, FP32)


@pytest.mark.parametrize("shape", [(4, 4), (3, 12), (12, 3)])
def test_a_step_of_muon_is_its_equation(shape):
    """w (1 - rate decay) - rate sqrt(max(1, rows / columns)) O(g + b m), m = g; square, wide and tall."""
    p = parameter(*shape)
    before, g = p.detach().clone(), grads([p], 1)[p]
    Muon([p], lr=0.1, momentum=0.75, weight_decay=0.5).step({p: g})
    orthogonal = orthogonalize(torch.stack([g + 0.75 * g]), FP32)[0]
    expected = before * (1 - 0.1 * 0.5) - 0.1 * max(1.0, shape[0] / shape[1]) ** 0.5 * orthogonal
    torch.testing.assert_close(p.detach(), expected, rtol=2.0**-21, atol=2.0**-21)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_matrices_beyond_a_chunk_are_updated_in_several_batches_to_the_same_bits(monkeypatch, number):
    sizes = []
    real = muon.orthogonalize

    def noted(matrices, **how):
        sizes.append(len(matrices))
        return real(matrices, **how)

    def train(chunk):
        sizes.clear()
        monkeypatch.setattr(muon, "CHUNK", chunk)
        monkeypatch.setattr(muon, "orthogonalize", noted)
        params = [parameter(4, 8, seed=s) for s in range(5)]
        optimizer = Muon(params, weight_decay=0.1)
        for step in range(2):
            optimizer.step(grads(params, step))
        return [t.detach() for p in params for t in (p, *optimizer.state[p].values())], sizes[: len(sizes) // 2]

    together, whole = train(2**20)
    apart, taken = train(number * 32 + 31)
    assert (whole, taken) == ([5], {1: [1] * 5, 2: [2, 2, 1], 5: [5]}[number])
    assert all(map(torch.equal, together, apart))
    assert train(1)[1] == [1] * 5  # a matrix is never divided


def test_muon_says_how_its_products_are_computed_and_why():
    assert Muon([parameter(2, 2)]).note == "Newton-Schulz in fp32, symmetric products by torch: no kernel for cpu"
    gpu = torch.device("cuda", 0)
    assert why_torch(gpu, torch.float32) in (
        "Triton is not installed",
        "the kernel multiplies bf16 and fp16, not float32",
    )
    emulated = Muon([parameter(2, 2)])
    emulated.bind(Masters({}), {}, BF16, emulate=True)
    assert emulated.note == "Newton-Schulz in bf16, symmetric products by torch: the policy emulates"


@pytest.mark.parametrize(
    ("capability", "kernel"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)]
)
def test_the_kernel_is_for_gpus_that_multiply_bf16(monkeypatch, capability, kernel):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(muon, "has_triton", lambda: True)
    assert (not why_torch(torch.device("cuda", 0), torch.bfloat16)) == kernel


class NoReads(TorchDispatchMode):
    """Refuses to read a number, which waits for a device that is not the CPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@both_kinds
def test_a_step_reads_no_number(kind):
    params = [parameter(4, 8, seed=s) for s in range(2)]
    optimizer = kind(params, lr=torch.tensor(0.1), weight_decay=0.1)
    with NoReads():
        optimizer.step(grads(params, 0), found_inf=torch.zeros(()), scale=torch.ones(()))


WRONG = {
    "no setting `fused`": {"fused": True},
    "no setting `amsgrad`": {"amsgrad": True},
    "lr=-1": {"lr": -1.0},
    "lr=nan": {"lr": float("nan")},
    r"betas\[1\]=1.0": {"betas": (0.9, 1.0)},
    "eps=-1": {"eps": -1.0},
    "weight_decay=-1": {"weight_decay": -1.0},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_impossible_setting_is_refused(message):
    with pytest.raises(HalfstepError, match=message):
        AdamW([parameter(4)], **WRONG[message])


def test_split_masters_and_closures_are_refused():
    with refuses(HalfstepError, "split masters", "prepare"):
        AdamW([parameter(4, 4)], masters="fp32:split")
    with refuses(HalfstepError, "closures", "step()"):
        AdamW([parameter(4)]).step(lambda: 0.0)


@both_kinds
@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_a_copy_is_independent(kind, way):
    optimizer = kind([("w", parameter(4, 4))], lr=0.1)
    optimizer.set_factor(0.5)
    for step in range(2):
        optimizer.step(grads(optimizer.names, step))
    other = way(optimizer)
    for made in (optimizer, other):
        made.step(grads(made.names, 7))
    assert [*optimizer.names.values()] == [*other.names.values()] == ["w"]
    ((mine, theirs),) = zip(optimizer.names, other.names, strict=True)
    assert mine is not theirs
    assert torch.equal(mine, theirs)


def test_the_state_of_torchs_adamw_may_be_loaded_directly():
    mine, theirs = parameter(4, 4), parameter(4, 4)
    stock = torch.optim.AdamW([theirs], lr=torch.tensor(0.1), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    theirs.grad = torch.ones(4, 4)
    stock.step()
    optimizer = AdamW([mine], lr=0.1)
    optimizer.load_state_dict(stock.state_dict())
    mine.data.copy_(theirs)
    optimizer.step({mine: torch.ones(4, 4)})
    stock.step()
    assert torch.equal(mine, theirs)
