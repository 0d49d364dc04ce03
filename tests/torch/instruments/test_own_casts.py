"""Faults in a model's own code: a shadow names the module, and is silent about the same model without them."""

import ctypes
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from halfstep.training.run.monitor import shadow_finding
from tests.torch.instruments.test_replay import same_states

WIDTH, ROWS = 32, 24


class Norm(nn.RMSNorm):
    """A norm whose result a model changes."""

    def __init__(self, change):
        super().__init__(WIDTH)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


class Attention(nn.Module):
    def __init__(self, softmax):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.softmax = softmax

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(self.softmax((q @ k.mT) * WIDTH**-0.5).to(v.dtype) @ v)


class Block(nn.Module):
    def __init__(self, norm, softmax):
        super().__init__()
        self.norm, self.attn = Norm(norm), Attention(softmax)

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Net(nn.Module):
    """Three blocks, of which the second has what a test plants."""

    def __init__(self, norm=None, softmax=None):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        plain = {"norm": as_it_is, "softmax": softmax_in_fp32}
        planted = {"norm": norm or as_it_is, "softmax": softmax or softmax_in_fp32}
        self.blocks = nn.ModuleList(Block(**(planted if index == 1 else plain)) for index in range(3))
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, index):
        x = self.embed(index)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def as_it_is(x):
    return x


def softmax_in_fp32(x):
    return F.softmax(x.float(), -1)


def tokens(seed=1):
    return torch.randint(64, (4, ROWS), generator=torch.Generator().manual_seed(seed))


def prepared(policy="bf16-mixed", **planted):
    torch.manual_seed(0)
    net = Net(**planted)
    run = prepare(net, AdamW(net.named_parameters(), lr=1e-2), policy)

    def loss_fn(index):
        return F.cross_entropy(net(index).flatten(0, 1).float(), index.roll(-1, 1).flatten())

    for seed in range(3):
        run.step(loss_fn, [tokens(seed + 5)])
    return run, loss_fn


def shadow(policy="bf16-mixed", **planted):
    run, loss_fn = prepared(policy, **planted)
    return run.shadow(loss_fn, [tokens()])


# --- what users write


def to_fp8(x):
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def to_fp8_by_type(x):
    return x.type(torch.float8_e5m2).type_as(x)


def into_an_fp8_buffer(x):
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn).copy_(x).to(x.dtype)


def halves(x):
    return x.half().to(x.dtype)


def bfloats(x):
    return x.bfloat16().to(x.dtype)


def with_a_walk(x):
    steps = torch.rand(x.shape, dtype=torch.bfloat16)
    return x + steps.cumsum(-2).to(x.dtype) * 0.01


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.mm(x.flatten(0, 1), torch.eye(WIDTH)).view(x.shape).to(x.dtype)


def softmax_in_bf16(x):
    return F.softmax(x, -1, dtype=torch.bfloat16)


def softmax_by_hand(x):
    x = x.bfloat16()
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


class Rounded(torch.autograd.Function):
    """Rounds gradients, as a layer does that is written for fp8."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.to(torch.float8_e5m2).to(g.dtype)


FAULTS = {
    "fp8 after a norm": ("bf16-mixed", {"norm": to_fp8}, "float8_e4m3fn"),
    "fp8 by type": ("bf16-mixed", {"norm": to_fp8_by_type}, "float8_e5m2"),
    "an fp8 buffer": ("bf16-mixed", {"norm": into_an_fp8_buffer}, "float8_e4m3fn"),
    "an fp8 gradient": ("bf16-mixed", {"norm": Rounded.apply}, "float8_e5m2"),
    "a softmax's dtype in fp16": ("fp16-mixed", {"softmax": softmax_in_bf16}, "bfloat16"),
    "half in fp32": ("fp32", {"norm": halves}, "float16"),
    "bfloat16 in fp32": ("fp32", {"norm": bfloats}, "bfloat16"),
    "random numbers in fp32": ("fp32", {"norm": with_a_walk}, "bfloat16"),
    "autocast in fp32": ("fp32", {"norm": under_autocast}, "bfloat16"),
    "a softmax's dtype in fp32": ("fp32", {"softmax": softmax_in_bf16}, "bfloat16"),
    "a softmax by hand in fp32": ("fp32", {"softmax": softmax_by_hand}, "bfloat16"),
}


@pytest.mark.parametrize(("policy", "planted", "dtype"), FAULTS.values(), ids=FAULTS)
def test_a_cast_in_the_models_own_code_is_outside_and_named(policy, planted, dtype):
    result = shadow(policy, **planted)
    module = "blocks.1." + ("norm" if "norm" in planted else "attn")
    assert result.causes == (module,)
    assert result.outside
    assert f"`{module}` casts to {dtype} (test_own_casts.py:" in result.describe()
    assert result.to_event()["casts"][module].startswith(f"casts to {dtype}")
    assert result.unwidened == {}
    finding = shadow_finding(result)
    assert (finding.where, finding.policy_rule) == ([module], None)
    assert finding.fix.startswith("take the casts out of its code")


def widened_and_back(x):
    return x.to(torch.float64).to(x.dtype)


SOUND = {
    "nothing": {},
    "a cast to fp64": {"norm": widened_and_back},
    "the policy's own format": {"norm": bfloats, "softmax": softmax_in_bf16},
}


@pytest.mark.parametrize("planted", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,emulate=true"])
def test_the_same_model_without_them_is_inside(policy, planted):
    result = shadow(policy, **planted)
    assert (result.outside, result.loss_outside, result.causes, result.unwidened) == ([], False, (), {})
    assert [*result.casts] == (["blocks.1.norm", "blocks.1.attn"] if "softmax" in planted else [])


# --- what no pass can widen


def truncated(x):
    return (x.bfloat16().view(torch.int16) & -16).view(torch.bfloat16).to(x.dtype)


def only_bf16(x):
    y = x.bfloat16()
    if y.dtype is not torch.bfloat16:
        raise TypeError("flash kernels take bf16")
    return y.to(x.dtype)


def scaled_matmul(x):
    one, codes = torch.ones(()), x.detach().flatten(0, 1).to(torch.float8_e4m3fn)
    y = torch._scaled_mm(codes, torch.eye(WIDTH).to(torch.float8_e4m3fn).t(), one, one, out_dtype=torch.float32)
    return x + y.view(x.shape).to(x.dtype) / 8


def read_by_address(x):
    codes = x.detach().bfloat16().contiguous()
    memory = (ctypes.c_int16 * codes.numel()).from_address(codes.data_ptr())
    assert len([*memory]) == codes.numel()
    return x


@torch.library.custom_op("halfstep_tests::squeeze", mutates_args=())
def squeeze(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e5m2).to(x.dtype)


squeeze.register_autograd(lambda ctx, g: g)

CANNOT = {
    "bits": (truncated, "reads or writes bits (test_own_casts.py:"),
    "a check of its dtype": (only_bf16, "TypeError: flash kernels take bf16"),
    "a matmul of fp8": (scaled_matmul, ("RuntimeError: ", "ValueError: ")),  # as the CPU is
    "memory": (read_by_address, "a kernel reads its memory (test_own_casts.py:"),
    "a registered kernel": (
        squeeze,
        "`halfstep_tests.squeeze.default` is a kernel of its own (test_own_casts.py:",
    ),
}


@pytest.mark.parametrize(("planted", "why"), CANNOT.values(), ids=CANNOT)
def test_what_the_fp32_pass_cannot_widen_is_said(planted, why):
    result = shadow(norm=planted)
    assert [*result.unwidened] == ["blocks.1.norm"]
    said = result.unwidened["blocks.1.norm"]
    assert said.startswith(why)
    assert f"not widened in the fp32 pass: `blocks.1.norm`: {said[:12]}" in str(result)
    assert result.to_event()["unwidened"] == dict(result.unwidened)


@pytest.mark.prove
def test_the_rest_is_widened_where_one_module_cannot_be():
    result = shadow(norm=to_fp8, softmax=lambda x: only_bf16(F.softmax(x, -1)))
    assert result.causes == ("blocks.1.norm",)
    assert [*result.unwidened] == ["blocks.1.attn"]


class Narrow(nn.Module):
    """Numbers that are bf16 before any pass, in a product with what its code casts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("turn", torch.eye(WIDTH).bfloat16(), persistent=False)

    def forward(self, x):
        noise = torch.rand(x.shape, dtype=torch.bfloat16) * 1e-3
        return (x.bfloat16() + noise) @ self.turn @ self.weight.bfloat16()


def test_narrow_buffers_batches_and_random_numbers_meet_wide_ones():
    torch.manual_seed(0)
    net = nn.Sequential(Narrow(), nn.Linear(WIDTH, 1))
    run = prepare(net, AdamW(net.named_parameters(), lr=1e-2), "bf16-mixed")
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = run.shadow(lambda x: net(x).square().mean(), [x])
    assert (result.outside, result.unwidened) == ([], {})
    assert [*result.casts] == ["0"]


@pytest.mark.prove
@pytest.mark.parametrize("planted", [{"norm": to_fp8}, {"norm": only_bf16, "softmax": softmax_by_hand}])
def test_training_has_the_same_bits_with_a_shadow(planted):
    states = []
    for looks in (False, True):
        run, loss_fn = prepared(**planted)
        if looks:
            run.shadow(loss_fn, [tokens()])
        run.step(loss_fn, [tokens(2)])
        states.append({**run.state_dict(), "random": torch.get_rng_state()})
    assert same_states(*states)


@pytest.mark.prove
def test_checkpointed_blocks_are_widened_when_they_run_again():
    run, loss_fn = prepared(norm=to_fp8)
    for block in run.model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert run.shadow(loss_fn, [tokens()]).causes == ("blocks.1.norm",)


class Sums(nn.Module):
    """Sums rows as a mixture of experts does, one after the other, in a buffer."""

    def __init__(self, dtype):
        super().__init__()
        self.up, self.dtype = nn.Linear(WIDTH, WIDTH), dtype

    def forward(self, x):
        sums = torch.zeros(1, WIDTH, dtype=self.dtype)
        squares = self.up(x).square()  # in bf16, which a buffer of another dtype refuses
        for rows in (squares if self.dtype is torch.bfloat16 else squares.to(self.dtype)).split(1):
            sums = sums.index_add(0, torch.zeros(1, dtype=torch.long), rows)
        return sums / len(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_in_a_buffer_of_bf16_are_outside_and_named(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sums(dtype), nn.Linear(WIDTH, 1))
    run = prepare(net, AdamW(net.named_parameters(), lr=1e-2), "bf16-mixed")
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
    result = run.shadow(lambda x: net(x).square().mean(), [x])
    narrow = dtype is torch.bfloat16
    assert result.causes == (("1",) if narrow else ())
    assert ("`1` casts to bfloat16" in str(result)) == narrow
