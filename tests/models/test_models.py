"""One training step of models that people have, in every format, against the same model in fp32, by layer.

**The bound.** A tensor that is stored in a format with unit roundoff u is off by factors 1 + d, |d| <= u. To first
order the error of a gradient is a linear function of all these d. So the fp32 model is run with every one of them
drawn at random: the result of each function of torch, forward and backward, and each parameter, times 1 + d, d
uniform in [-u, u]. The root mean square of a gradient's error over some draws is its sigma, for each parameter. It
is computed by fp32 and random numbers alone; nothing of halfstep is in it.

Rounding is no random number: equal numbers are rounded alike, and their errors add up. So draws are made in both
extremes, a d of its own for each element, and one d for all rows of a tensor, and the larger sigma counts. A run
is one more draw, at fewer places (islands are fp32): it must be within 5 sigma, gradient by gradient. Errors are
linear in u, so sigma of fp16 is an eighth of that of bf16. In fp8 the operands of linear layers are off by 2^-4
(e4m3) and the gradients that meet them by 2^-3 (e5m2), too.

A run in fp32 would be within every bound. So the error of all gradients together must be a tenth of its sigma.
"""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from benchmarks import zoo
from halfstep.core.errors import ScalingError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16
from halfstep.torch.run import prepare

NAMES = tuple(zoo.FAMILIES)
EMULATED = ("bf16-mixed,emulate=true", "fp16-mixed,emulate=true", "fp8-mixed,emulate=true")
POLICIES = ("bf16-mixed", "fp16-mixed", *EMULATED)
SIGMAS, RAN, DRAWS = 5.0, 0.1, 5


def make(name, attention="sdpa"):
    family = zoo.FAMILIES[name]
    pytest.importorskip(family.package, reason=f"{family.package} is not installed")
    return family.make(attention)


class Noise(torch.autograd.Function):
    """x (1 + d) forward, g (1 + d') backward."""

    @staticmethod
    def forward(ctx, x, u, u_grad, draw):
        ctx.u_grad, ctx.draw = u_grad, draw
        return x * (1 + u * draw(x))

    @staticmethod
    def backward(ctx, g):
        return g * (1 + ctx.u_grad * ctx.draw(g)), None, None, None


class Perturbed(TorchFunctionMode):
    """Every result of a function is off by u; the operands of linear layers by more, where `operands` say so."""

    def __init__(self, u, draw, operands, exempt):
        self.u, self.draw, self.operands, self.exempt = u, draw, operands, exempt

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y_grad = self.u
        exempt = any(a is e for a in args for e in self.exempt)
        if self.operands and func in (F.linear, torch.addmm) and not exempt:
            u, y_grad = self.operands
            matrix = [isinstance(a, torch.Tensor) and a.dim() > 1 for a in args]
            args = [Noise.apply(a, u, 0.0, self.draw) if m else a for a, m in zip(args, matrix, strict=True)]
        y = func(*args, **(kwargs or {}))
        if not self.stored(func, args, y):
            return y
        return Noise.apply(y, self.u, y_grad, self.draw)

    def stored(self, func, args, y):
        """Whether a function made new activations: no view, no mask, no number."""
        if not isinstance(y, torch.Tensor) or y.dtype is not torch.float32 or not y.dim():
            return False
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if any(a.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for a in given):
            return False
        tables = func in (torch.Tensor.cos, torch.Tensor.sin)
        return (y.requires_grad or tables) and bool(y.detach().abs().max() < 1e30)


def drawer(seed, *, rows):
    """Numbers in [-1, 1]: one for each element, or the same for all rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(x):
        shape = (1,) * (x.dim() - 1) + x.shape[-1:] if rows and x.dim() else x.shape
        return 2 * torch.rand(shape, generator=generator) - 1

    return draw


def gradients(model, loss_fn, scale=1.0):
    for p in model.parameters():
        p.grad = None
    loss = loss_fn(model)
    (loss * scale).backward()
    return float(loss.detach()), {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None}


def pin_routing(model, decisions):
    """Routers decide as they did first: another decision is no rounding error."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):

            def hook(_, args, out, name=name):
                logits, _, chosen = out
                chosen = decisions.setdefault(name, chosen)
                shares = logits.float().softmax(-1).gather(-1, chosen)
                return logits, shares / shares.sum(-1, keepdim=True), chosen

            module.register_forward_hook(hook)


@cache
def reference(name, fp8=False):
    """Loss and gradients in fp32, their sigmas for bf16, and what routers decided."""
    model, loss_fn = make(name, "eager")
    decisions = {}
    pin_routing(model, decisions)
    loss, grads = gradients(model, loss_fn)
    u = BF16.epsilon / 2
    operands = (E4M3.epsilon / 2, E5M2.epsilon / 2) if fp8 else None
    routers = [p for n, p in model.named_parameters() if ".gate." in n]
    held = {n: p.detach().clone() for n, p in model.named_parameters()}
    sigmas = []
    for rows in (False, True):
        squares = dict.fromkeys(("", *grads), 0.0)
        for seed in range(DRAWS):
            draw = drawer(seed, rows=rows)
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(held[n] * (1 + u * draw(p)))
            with Perturbed(u, draw, operands, routers):
                off, others = gradients(model, loss_fn)
            squares[""] += (off - loss) ** 2 / DRAWS
            for n, g in others.items():
                squares[n] += float((g - grads[n]).square().sum()) / DRAWS
        sigmas.append(squares)
    return loss, grads, {n: math.sqrt(max(s[n] for s in sigmas)) for n in sigmas[0]}, decisions


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", zoo.ATTENTION)
@pytest.mark.parametrize(
    "name",
    # The references of the others take longer than the rest of the file.
    [pytest.param(n, marks=() if n in ("gpt2", "mixtral") else pytest.mark.prove) for n in NAMES],
)
def test_a_step_is_within_the_roundings_of_its_format(name, attention, policy):
    model, loss_fn = make(name, attention)
    loss, grads, sigmas, decisions = reference(name, fp8="fp8" in policy)
    pin_routing(model, dict(decisions))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy)
    ours, found = gradients(model, loss_fn, scale=float(run.scale_state.scale))
    relative = FP16.epsilon / BF16.epsilon if "fp16" in policy else 1.0
    assert found.keys() == grads.keys()
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert abs(ours - loss) <= SIGMAS * relative * sigmas[""]
    errors = {n: float((found[n] - g).norm()) for n, g in grads.items()}
    beyond = {n: e / (relative * sigmas[n]) for n, e in errors.items() if not e <= SIGMAS * relative * sigmas[n]}
    assert not beyond
    total = math.hypot(*errors.values()) / (relative * math.hypot(*(sigmas[n] for n in grads)))
    assert total >= RAN


@pytest.mark.parametrize(
    "policy", ["bf16-mixed", pytest.param("fp16-mixed,param=fp32:split", marks=pytest.mark.prove)]
)
@pytest.mark.parametrize(
    "given", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.prove)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_was_loaded_narrow_is_widened_and_listed(name, given, policy):
    """Hazard: pure bf16 by accident. `dtype="auto"` gives the dtype of the checkpoint, without masters."""
    model, loss_fn = make(name)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    before = {n: p.detach().to(given).float() for n, p in model.named_parameters()}
    torch.nn.Module.to(model, given)  # diffusers warns of its own
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5), policy)
    assert sorted(run.conversion.widened) == sorted(trained)
    assert f"widened to fp32 masters: {len(trained)} parameters" in run.summary()
    assert all(torch.equal(w, before[n]) for n, w in run.weights().items())
    result = run.step(lambda _: loss_fn(model), [0])
    assert not bool(result.skipped)
    after = run.weights()
    moved = [n for n in trained if not torch.equal(after[n], before[n])]
    assert len(moved) > len(trained) / 2  # at a rate of 1e-5, where bf16 loses 84 % of updates
    narrow = [n for n, b in model.named_buffers() if b.dtype == given]
    assert ("were already rounded, and stay so" in run.summary()) == bool(narrow)


def test_what_a_model_returns_is_in_the_loss_format_and_tied_weights_stay_so():
    model, _ = make("llama")
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    with torch.no_grad():
        out = model(zoo.tokens(), use_cache=True)
        longer = model.generate(zoo.tokens(), max_new_tokens=2, do_sample=False, eos_token_id=-1)
    assert (type(out).__name__, out.logits.dtype) == ("CausalLMOutputWithPast", torch.float32)
    assert out["logits"] is out.logits
    assert (out.past_key_values.layers[0].keys.dtype, longer.shape) == (torch.bfloat16, (2, 10))
    assert run.masters.complete
    for name in ("gpt2", "qwen3", "t5"):
        model, _ = make(name)
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed,param=fp32:split")
        assert head.weight is table.weight
        assert head.weight.dtype == torch.bfloat16
        run.unprepare()
        assert head.weight is table.weight


def test_routers_are_fp32_inside_and_out():
    model, loss_fn = make("mixtral")
    seen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    loss_fn(model)
    for x, (logits, shares, _) in seen:
        assert x.dtype == torch.bfloat16
        assert logits.dtype == shares.dtype == torch.float32
    for (x, (logits, _, _)), layer in zip(seen, model.model.layers, strict=True):
        assert torch.equal(logits, F.linear(x.float(), layer.mlp.gate.weight))
    forms = {change.name: change.form for change in run.conversion.changes}
    assert forms["model.layers.0.mlp.gate"] == "is a router: fp32 inside and out"


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-mixed,emulate=true"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_multiply_in_compute_with_fp32_weight_gradients(experts, policy):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, loss_fn = zoo._mixtral("sdpa", experts)
    loss, grads, sigmas, decisions = reference("mixtral")
    pin_routing(model, dict(decisions))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    ours, found = gradients(model, loss_fn, scale=float(run.scale_state.scale))
    relative = FP16.epsilon / BF16.epsilon if "fp16" in policy else 1.0
    assert abs(ours - loss) <= SIGMAS * relative * sigmas[""]
    for n, g in grads.items():
        assert float((found[n] - g).norm()) <= SIGMAS * relative * sigmas[n], n
    weight = found["model.layers.0.mlp.experts.down_proj"]
    fmt = torch.float16 if "fp16" in policy else torch.bfloat16
    assert weight.dtype == torch.float32
    if not ("emulate" in policy and experts == "batched_mm"):  # gathered weights, which fp32 does not tell apart
        assert not torch.equal(weight, weight.to(fmt).float())  # summed in fp32, not rounded after
    rows = run.coverage(lambda _: loss_fn(model), 0).rows
    experts = [row for row in rows if row.module.endswith("experts")]
    assert any(row.how == "covered" for row in experts)
    assert not any(row.why.startswith("fp32 operands") for row in experts)


OVERFLOWS = "encoder.block.1.layer.1.DenseReluDense.wo"


def overflowing():
    """A T5 one of whose MLPs goes beyond 65504, as those of the published ones do."""
    model, loss_fn = make("t5")
    model.get_submodule(OVERFLOWS).weight.data.mul_(1e5)
    return model, loss_fn


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:the loss scale is")
def test_the_overflow_of_t5_is_named_by_layer_and_the_one_that_it_hides_too():
    """Its blocks clamp infinities where the stream is fp16: the loss is finite, and wrong."""
    model, loss_fn = overflowing()
    with torch.no_grad():
        wide = float(loss_fn(model))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp16-mixed")
    result = run.step(lambda _: loss_fn(model), [0])
    assert not bool(result.skipped)
    cause = run.blame(lambda _: loss_fn(model), [0])
    assert (cause.where, cause.module) == ("forward", OVERFLOWS)
    assert "4 modules" in run.summary()
    assert "that their authors keep in fp32 run in fp16 here: `**.wo: compute=fp32`" in run.summary()
    run.unprepare()
    ruled = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp16-mixed; **.wo: compute=fp32")
    assert ruled.blame(lambda _: loss_fn(model), [0]).where == "nowhere"
    assert "authors" not in ruled.summary()
    ours = float(ruled.step(lambda _: loss_fn(model), [0]).loss)
    assert abs(ours - wide) < abs(float(result.loss) - wide) / 10
    model, loss_fn = overflowing()
    policy = "fp16-mixed,emulate=true,scale=dynamic:init=4:floor=2"
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy)
    for _ in range(3):
        result = run.step(lambda _: loss_fn(model), [0])
    with pytest.raises(ScalingError, match=rf"floor, 2; forward: {OVERFLOWS}, largest input \d") as raised:
        run.check(result)
    assert f"`{OVERFLOWS}: compute=fp32`" in raised.value.hint


def test_the_input_of_t5s_wo_is_no_reason_to_run_it_in_fp32():
    """Hazard: it casts its input to the weight's dtype, which is fp32."""
    model, loss_fn = make("t5")
    seen, layer = [], model.encoder.block[0].layer[1].DenseReluDense.wo
    layer.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    loss_fn(model)
    assert seen == [(torch.float32, torch.bfloat16)]
