"""Lean memory: the same gradients, while less is kept for the backward pass, by the amount that is predicted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.config.load import load
from halfstep.config.weights import initial_weights
from halfstep.core.devices import Device
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.torch import AdamW, prepare
from halfstep.torch.convert.apply import apply
from halfstep.torch.instruments.planning.step import trace_factory, trace_recipe
from halfstep.torch.instruments.planning.tracker import Tracker
from halfstep.torch.model import Decoder
from halfstep.torch.numerics.recompute import drop_recomputable, recompute_in_backward

H200 = Device("nvidia", "H200", capability=(9, 0))
D, T, B = 16, 8, 4
SMALL = [f"model.width={D}", "model.heads=2", f"model.context={T}", "model.vocabulary=64", "model.layers=2"]
GROUPED = ["model.kv_heads=1", "model.mlp_width=32"]
RECIPES = {"gpt2": [], "qwen3": [*GROUPED, "model.head_width=8"], "golf": GROUPED}


def decoder(recipe, policy, memory, *extra):
    config = load(recipe, [*SMALL, *RECIPES[recipe], "model.zero_init=false", *extra])
    model = Decoder(config.model)
    model.set_weights(initial_weights(model.config, 0))
    apply(model, Policy.parse(policy), model.module_names(), memory=memory)
    return model


def gradients(model):
    tokens = torch.randint(0, 64, (B, T + 1), generator=torch.Generator().manual_seed(0))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return {"loss": loss, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,emulate=true", "fp8-mixed,emulate=true"])
def test_no_bit_of_a_gradient_changes(recipe, policy):
    fast, lean = (gradients(decoder(recipe, policy, memory)) for memory in ("fast", "lean"))
    assert all(torch.equal(fast[name], lean[name]) for name in fast)


class Gated(nn.Module):
    """A block as others write it: a norm, functions between layers, and a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(D, 4 * D)
        self.down, self.second, self.last = nn.Linear(4 * D, D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x + self.last(F.relu(self.second(x)).square())


def foreign(memory, policy="bf16-mixed,param=fp32"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Gated(), nn.RMSNorm(D), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    run = prepare(model, AdamW(model.parameters(), lr=1e-2), policy, memory=memory)
    return model, run


def test_a_model_that_others_wrote_trains_to_the_same_bits_and_is_given_back():
    trained = {}
    for memory in ("fast", "lean"):
        model, run = foreign(memory)
        batch = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            run.step(lambda x, model=model: model(x).square().mean(), [batch])
        trained[memory] = run.unprepare().state_dict()
        assert type(model[1].norm) is nn.LayerNorm
        assert not hasattr(model[1].norm, "halfstep")
    assert all(torch.equal(trained["fast"][n], trained["lean"][n]) for n in trained["fast"])


def held(call):
    """Returns the bytes that a forward pass leaves for the backward pass, with its result."""
    with Tracker("cpu") as trace:
        result = call()
        freed = {-event for event in trace.ledger.events if event < 0}
        live = sum(a.nbytes for key, a in trace.ledger.allocations.items() if key not in freed)
    del result
    return live


UNIT = B * T * D * 2  # bytes of a bf16 activation; statistics of norms, which Python never sees, are not counted


def test_lean_keeps_inputs_of_cheap_functions_and_not_their_results():
    """Of an eager norm an fp32 copy of its input and the result are kept; of gelu its input and result.

    Lean keeps the bf16 input of the norm, and the input of gelu.
    """
    found = {}
    for memory in ("fast", "lean"):
        model = nn.Sequential(
            nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)
        )
        prepare(model, AdamW(model.parameters()), "bf16-mixed", memory=memory)
        x = torch.randn(B, T, D)
        found[memory] = held(lambda model=model, x=x: model(x))
    assert found["fast"] - found["lean"] == (2 + 1 - 1 + 4) * UNIT


def test_each_layer_of_a_recipe_keeps_less_by_the_same_amount():
    found = {}
    for memory in ("fast", "lean"):
        for layers in (1, 2):
            model = decoder("gpt2", "bf16-mixed", memory, f"model.layers={layers}")
            tokens = torch.zeros(B, T, dtype=torch.int64)
            found[memory, layers] = held(lambda model=model, tokens=tokens: model(tokens))
    fast, lean = (found[memory, 2] - found[memory, 1] for memory in ("fast", "lean"))
    assert fast - lean == 2 * (2 + 1 - 1) * UNIT + 4 * UNIT


@pytest.mark.prove
def test_compiled_code_keeps_less_by_what_it_computes_again():
    """On a GPU: two results of norms, one of gelu, 4 D wide, and the statistics of both norms."""
    peaks = {}
    sizes = ["model.width=64", "model.context=64", "training.batch=64", "training.compile=true"]
    for memory in ("fast", "lean"):
        for layers in (3, 4):
            given = [
                *SMALL,
                *sizes,
                f"model.layers={layers}",
                f"training.memory={memory}",
                "training.micro_batches=1",
            ]
            traced = trace_recipe(load("gpt2", given), Policy.parse("bf16-mixed"), H200)
            peaks[memory, layers] = sum(traced.ledger.by_role(traced.role).values())
    fast, lean = (peaks[memory, 4] - peaks[memory, 3] for memory in ("fast", "lean"))
    assert fast - lean == 64 * 64 * ((1 + 1 + 4) * 64 * 2 + 4 * 4)


@pytest.mark.prove
def test_the_setting_of_one_model_does_not_reach_another_that_is_compiled():
    """And both compile in one graph."""
    kept = {}
    for memory in ("fast", "lean", "fast"):
        made = trace_factory(factory, Policy.parse("bf16-mixed"), H200, compiled=True, memory=memory)
        kept.setdefault(memory, []).append(sum(made.ledger.by_role(made.role).values()))
    assert kept["fast"][0] == kept["fast"][1] > kept["lean"][0]


def factory():
    model = nn.Sequential(
        nn.Embedding(64, D), Gated(), nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)
    )
    batch = torch.zeros(256, 64, dtype=torch.int64)
    return model, AdamW(model.parameters()), lambda x: model(x).square().mean(), batch


@pytest.mark.prove
def test_compiled_gradients_are_those_of_fast_to_the_rounding_of_fp32():
    """The same operations, of which some may be ordered otherwise: at most sixteen roundings of fp32 apart."""
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    found = []
    for memory in ("fast", "lean"):
        torch.compiler.reset()
        model, _ = foreign(memory, "fp32")
        torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for fast, lean in zip(*found, strict=True):
        assert (fast - lean).norm() <= 2**-20 * fast.norm()


def test_results_are_recomputed_for_a_second_derivative():
    """Gradient penalties differentiate a gradient: the values are those without recomputation."""
    torch.manual_seed(0)
    w, v = torch.randn(D, D, dtype=torch.float64, requires_grad=True), torch.randn(D, dtype=torch.float64)

    def penalty(call):
        x = torch.ones(2, D, dtype=torch.float64, requires_grad=True)
        y = call(lambda x: F.silu(x), F.linear(x, w))
        with drop_recomputable(y):
            z = F.linear(y, w) @ v
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), w)[0]

    expected = penalty(lambda f, x: f(x))
    assert (penalty(recompute_in_backward) - expected).norm() <= 1e-14 * expected.norm()


def test_a_write_into_what_is_kept_is_refused_as_torch_refuses_it():
    h = torch.ones(2, D, requires_grad=True) * 1.0
    y = recompute_in_backward(lambda x: F.gelu(x), h)
    w = torch.ones(D, D, requires_grad=True)
    with drop_recomputable(y):
        z = F.linear(y, w)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_model_without_anything_cheap_is_refused():
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    with pytest.raises(HalfstepError, match="would change nothing: among Linear, ReLU, Sequential"):
        prepare(model, AdamW(model.parameters()), "bf16-mixed", memory="lean")
    assert type(model) is nn.Sequential
    with pytest.raises(HalfstepError, match='memory is "small"'):
        prepare(model, AdamW(model.parameters()), "bf16-mixed", memory="small")
