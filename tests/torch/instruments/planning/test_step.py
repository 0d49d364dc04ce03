"""A step followed on the meta device holds what the same step holds on a real one."""

import math

import pytest
import torch
from torch import nn

from halfstep.config.load import load
from halfstep.config.model import flops_per_token
from halfstep.core.devices import Device
from halfstep.core.errors import ConfigError
from halfstep.core.host import describe_cpu
from halfstep.core.policy import Policy
from halfstep.torch import AdamW, prepare
from halfstep.torch.fp8 import linear as fp8
from halfstep.torch.instruments.planning.compiled import backend
from halfstep.torch.instruments.planning.step import trace_factory, trace_recipe
from halfstep.torch.instruments.planning.timing import time_work
from halfstep.torch.instruments.planning.tracker import ROUND, Tracker, round_up
from halfstep.torch.numerics import cast

H200, A100 = Device("nvidia", "H200", capability=(9, 0)), Device("nvidia", "A100", capability=(8, 0))
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=64", "model.vocabulary=512"]
SMALL += ["training.batch=4", "training.measure_ceiling=false"]
WIDE = ["model.vocabulary=4096", "optimizer.name=adamw"]


def factory():
    model = nn.Sequential(nn.Embedding(96, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 96))
    tokens = torch.zeros(4, 16, dtype=torch.int64)

    def loss(batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return model, AdamW(model.parameters(), lr=1e-3), loss, tokens


def trace(*settings, policy="bf16-mixed", recipe="tiny", on=H200):
    return trace_recipe(load(recipe, [*SMALL, *settings]), Policy.parse(policy), on)


def peak(traced):
    return sum(traced.ledger.by_role(traced.role).values())


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-true"])
def test_it_holds_what_a_real_step_holds_on_a_cpu(policy):
    traced = trace_factory(factory, Policy.parse(policy), describe_cpu(), compiled=False)
    with Tracker("cpu") as trace:
        model, optimizer, loss, tokens = factory()
        run = prepare(model, optimizer, policy)
        for _ in range(2):
            run.step(loss, [tokens])
    real = sum(trace.ledger.allocations[key].nbytes for key in trace.ledger.at_peak())
    # The four numbers of the loss scale are made on the host: no operation of the meta device makes them.
    assert 0 <= real - peak(traced) <= 4 * ROUND


@pytest.mark.prove
def test_the_roles_of_a_recipe_add_up():
    settings = ["training.batch=32", "optimizer.name=adamw"]
    traced, config = trace(*settings, policy="bf16-mixed,param=fp32:split"), load("tiny", [*SMALL, *settings])
    found, numbers = traced.ledger.by_role(traced.role), config.model.num_parameters
    sizes = [math.prod(parameter.shape) for parameter in traced.parameters]
    assert found["moments"] == sum(2 * round_up(4 * size) + ROUND for size in sizes)  # and a count of steps each
    assert found["weights"] + found["masters"] >= 4 * numbers
    assert found["logits"] >= 32 * 64 * 512 * 2
    flops = sum(work.flops for work in traced.work)
    again = sum(w.flops for w in traced.work if w.kind == "attention" and w.phase == "backward") // 5
    assert flops - again == 32 * 64 * flops_per_token(config.model)  # fused attention makes its scores anew


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
def test_logits_are_not_what_an_mlp_holds_if_both_are_as_wide(policy):
    """A vocabulary as wide as the MLP, as `golf` has it: more layers hold more, and no more logits."""
    same = ["model.vocabulary=128", "optimizer.name=adamw"]
    two, four = (trace(*same, f"model.layers={n}", policy=policy) for n in (2, 4))
    logits = [each.ledger.by_role(each.role)["logits"] for each in (two, four)]
    assert logits[0] == logits[1] > 0


@pytest.mark.prove
def test_activations_grow_with_the_batch_and_nothing_else_does():
    four, eight = (trace(f"training.batch={n}") for n in (4, 8))
    scaled = four.with_batch(8).by_role(four.role)
    # What is not scaled: the batches, and what may be no activation because it is small.
    at_peak = [four.ledger.allocations[key] for key in four.ledger.at_peak()]
    small = [a.nbytes for a in at_peak if a.phase in ("forward", "backward") and a.nbytes <= ROUND * 4]
    assert 0 <= peak(eight) - sum(scaled.values()) <= sum(small) + round_up(2 * 4 * 65 * 8)


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "fp32"])
def test_compiled_code_holds_less(policy):
    eager, compiled = (trace(f"training.compile={flag}", policy=policy) for flag in ("false", "true"))
    roles = [each.ledger.by_role(each.role) for each in (eager, compiled)]
    assert 0 < roles[1]["activations"] < roles[0]["activations"]
    assert sum(w.flops for w in compiled.work) == sum(w.flops for w in eager.work)


@pytest.mark.prove
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_gelu_in_the_matmuls_keeps_no_more_and_multiplies_the_same(memory):
    """On a GPU that is older than Hopper, compiled code computes it apart."""
    shape = ["training.compile=true", f"training.memory={memory}"]
    fused, apart = (trace(*shape, recipe="gpt2", on=device) for device in (H200, A100))
    roles = [each.ledger.by_role(each.role) for each in (fused, apart)]
    assert roles[0]["activations"] <= roles[1]["activations"]
    products = [sorted(w.shape for w in each.work if w.kind == "matmul") for each in (fused, apart)]
    assert products[0] == products[1]
    # Passes of their own over h: none forward, and backward one if gelu(h) is computed again.
    assert sum(w.nbytes for w in fused.work) < sum(w.nbytes for w in apart.work)


@pytest.mark.prove
def test_compiled_code_writes_the_gradient_of_the_logits_over_them():
    traced = trace(*WIDE, "training.compile=true")
    logits = round_up(4 * 64 * 4096 * 2)
    assert traced.ledger.by_role(traced.role)["logits"] == logits
    loss = [w for w in traced.work if w.format.startswith("cross_entropy_ ")]
    assert {(w.shape, w.phase) for w in loss} == {((4 * 64, 4096), "forward")}
    assert all(logits <= w.nbytes < 1.1 * logits for w in loss)


@pytest.mark.parametrize("compiled", ["false", pytest.param("true", marks=pytest.mark.prove)])
def test_a_loss_in_chunks_does_the_same_work_with_fewer_logits(compiled):
    shape = [*WIDE, f"training.compile={compiled}"]
    fast, lean = (trace(*shape, f"training.memory={memory}") for memory in ("fast", "lean"))
    assert sum(w.flops for w in lean.work) == sum(w.flops for w in fast.work)
    logits, chunk = 4 * 64 * 4096 * 2, 64 * 4096 * 2
    assert peak(fast) - peak(lean) >= logits - chunk - 4 * 4096 * 32 * 2  # its fp32 gradient is held meanwhile
    assert any(a.nbytes == chunk for a in lean.ledger.allocations.values())


@pytest.mark.prove
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_narrow_head_holds_no_more_than_one_in_bf16(compiled, monkeypatch):
    """Codes in both layouts of the logits' gradient, or fp32 copies of it, would be more than the layers save."""
    monkeypatch.setattr(fp8, "CODES", 4 * 64 * 4096 // 8)
    monkeypatch.setattr(cast, "AT_ONCE", 2**14)
    shape = [*WIDE, f"training.compile={compiled}", "model.mlp=gelu"]  # of which layers in bf16 keep more
    wide, narrow = (trace(*shape, policy=policy) for policy in ("bf16-mixed", "fp8-mixed,compute=e4m3"))
    if compiled == "false":
        logits = [traced.ledger.by_role(traced.role)["logits"] for traced in (wide, narrow)]
        assert logits[1] <= logits[0]
    assert peak(narrow) <= peak(wide)
    assert sum(w.flops for w in narrow.work) == sum(w.flops for w in wide.work)


def test_a_factory_that_names_a_device_is_refused():
    def made():
        with torch.device("cpu"):
            return factory()

    with pytest.raises(ConfigError, match="on a device"):
        trace_factory(made, Policy.parse("fp32"), H200, compiled=False)


def test_a_format_the_gpu_lacks_is_refused():
    with pytest.raises(Exception, match=r"cannot run on A100: compute capability 8\.0; e4m3 needs 8\.9"):
        trace(policy="fp8-mixed", on=A100)


def test_a_third_party_model_is_planned_with_a_loss_scale_and_the_meta_device_is_itself_again():
    traced = trace_factory(factory, Policy.parse("fp16-mixed"), H200, compiled=False)
    assert {w.format for w in traced.work if w.kind == "matmul"} == {"fp16"}
    tensor = torch.empty(2, device="meta")
    assert tensor.is_meta
    assert not tensor.is_cuda


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.project = heads, nn.Linear(64, 64)

    def forward(self, x):
        q = self.project(x).view(2, 32, 4, 16).transpose(1, 2)
        k = q[:, : self.heads]
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=self.heads < 4)


def attention_of(policy, heads):
    def made():
        model = Attention(heads)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, lambda x: model(x).sum(), torch.zeros(2, 32, 64)

    traced = trace_factory(made, Policy.parse(policy), H200, compiled=False)
    return [work for work in traced.work if work.kind == "attention"]


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
def test_attention_is_counted_in_the_format_of_its_queries_in_both_passes(policy):
    forward, backward = attention_of(policy, 4)
    assert forward.format == backward.format == policy.partition("-")[0]
    assert 2 * backward.flops == 5 * forward.flops == 5 * 2 * 2 * (2 * 4 * 32 * 16) * 32


def test_grouped_heads_are_fused_in_halves_and_not_in_fp32():
    assert len(attention_of("bf16-mixed", 2)) == 2
    assert not attention_of("fp32", 2)


def test_large_operations_are_timed_again_on_tensors_that_look_like_theirs():
    def made():
        model = nn.Sequential(nn.Embedding(512, 1024), nn.GELU())
        return (
            model,
            AdamW(model.parameters(), lr=1e-3),
            lambda x: model(x).sum(),
            torch.zeros(256, dtype=torch.int64),
        )

    work = trace_factory(made, Policy.parse("fp32"), H200, compiled=False).work
    taken = {each.format: each for each in time_work(work, "cpu", copied=1000)}
    for name in ("", "gelu float32", "gelu_backward float32 strided", "embedding_dense_backward float32 int64"):
        assert taken[name].seconds > 0, name
    assert taken["gelu float32"].work == 2 * 256 * 1024 * 4


def trace_compiled(function, *shapes):
    with Tracker("meta") as tracker:
        compiled = torch.compile(function, backend=backend(tracker), dynamic=False)
        compiled(*(torch.empty(shape, device="meta") for shape in shapes))
    return tracker


@pytest.mark.parametrize(("times", "tensors"), [(4, 1), (9, 2)])
def test_a_kernel_that_inductor_cuts_does_not_write_over_what_it_read(times, tensors):
    def product_of_a_product(x, weight):
        made = changed = x @ weight
        for _ in range(times):  # two operations with a constant each
            changed = changed * 1.5 + 0.5
        return (changed * made) @ weight.t()

    ledger = trace_compiled(product_of_a_product, (256, 64), (64, 4096)).ledger
    assert sum(ledger.allocations[key].nbytes == 256 * 4096 * 4 for key in ledger.at_peak()) == tensors


def test_compiled_code_reads_once_what_two_sums_of_the_same_numbers_need():
    def gradients(x, y):
        return (x * y).sum(0), (x + y).sum(0), x.relu().sum(1)

    # The sums over rows are made in one kernel; that over columns loops over the same numbers in another order.
    moved = sorted(work.nbytes for work in trace_compiled(gradients, (64, 128), (64, 128)).work)
    assert moved == [4 * (64 * 128 + 64), 4 * (2 * 64 * 128 + 2 * 128)]


@pytest.mark.prove
def test_every_layer_of_a_deep_model_moves_the_same_bytes_in_compiled_code():
    """Later layers would move more if they computed the gradients of the stream before them again."""
    sizes = ["model.kv_heads=2", "model.mlp_width=64", "training.micro_batches=1", "training.compile=true"]
    moved = []
    for layers in (2, 4, 6):
        work = trace(*sizes, f"model.layers={layers}", recipe="golf").work
        moved.append(sum(w.nbytes for w in work if w.kind == "bytes" and w.phase == "backward"))
    table = 4 * 3 * 32  # of fp32 weights of the skips, one more with every two layers: its gradients grow with it
    assert abs((moved[2] - moved[1]) - (moved[1] - moved[0])) <= table


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_states_of_torchs_own_optimizers_are_planned(build):
    def made():
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        return model, build(model.parameters()), lambda x: model(x).float().square().mean(), torch.zeros(4, 256)

    traced = trace_factory(made, Policy.parse("bf16-mixed"), describe_cpu(), compiled=False)
    moments = [key for key, role in traced.roles.items() if role == "moments"]
    planned = sum(traced.ledger.allocations[key].nbytes for key in moments)
    model, optimizer, loss, x = made()
    prepare(model, optimizer, "bf16-mixed").step(loss, [x])
    held = [value for state in optimizer.state.values() for value in state.values()]
    real = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    assert planned == pytest.approx(real, rel=0.02)
