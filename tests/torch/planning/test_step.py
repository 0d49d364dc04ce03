"""A step followed on the meta device holds what the same step holds on a real one."""

import pytest
import torch
from torch import nn

from halfstep.config.flops import flops_per_token
from halfstep.config.load import load
from halfstep.core.devices import Device
from halfstep.core.errors import ConfigError
from halfstep.core.host import describe_cpu
from halfstep.core.policy import Policy
from halfstep.torch import AdamW, prepare
from halfstep.torch.planning.step import of_factory, of_recipe
from halfstep.torch.planning.tracker import Trace, Tracker

H200 = Device("nvidia", "H200", capability=(9, 0))
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=64", "model.vocabulary=512"]
SMALL += ["training.batch=4", "training.measure_ceiling=false"]


def factory():
    model = nn.Sequential(nn.Embedding(96, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 96))
    tokens = torch.zeros(4, 16, dtype=torch.int64)

    def loss(batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return model, AdamW(model.parameters(), lr=1e-3), loss, tokens


def peak(traced):
    return sum(traced.ledger.by_role(traced.role).values())


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-true"])
def test_it_holds_what_a_real_step_holds_on_a_cpu(policy):
    traced = of_factory(factory, Policy.parse(policy), describe_cpu(), compiled=False)
    trace = Trace()
    with Tracker(trace, "cpu"):
        model, optimizer, loss, tokens = factory()
        run = prepare(model, optimizer, policy)
        for _ in range(2):
            run.step(loss, [tokens])
    real = sum(trace.ledger.allocations[key].nbytes for key in trace.ledger.at_peak())
    assert peak(traced) == pytest.approx(real, rel=0.02)  # the batch itself, made in another order


@pytest.mark.prove
def test_the_roles_of_a_recipe_add_up():
    config = load("tiny", [*SMALL, "training.batch=32", "optimizer.name=adamw"])
    traced = of_recipe(config, Policy.parse("bf16-mixed,param=fp32:split"), H200)
    found, numbers = traced.ledger.by_role(traced.role), config.model.num_parameters
    assert found["moments"] == pytest.approx(8 * numbers, rel=0.2)  # and a count of steps each, in blocks of 512
    assert found["weights"] + found["masters"] >= 4 * numbers
    assert found["logits"] >= 32 * 64 * 512 * 2
    flops = sum(work.flops for work in traced.work)
    assert flops == pytest.approx(32 * 64 * flops_per_token(config.model), rel=0.05)  # flash backward counts 2.5


@pytest.mark.prove
def test_activations_grow_with_the_batch_and_nothing_else_does():
    four, eight = (of_recipe(load("tiny", [*SMALL, f"training.batch={n}"]), Policy.parse("bf16-mixed"), H200)
                   for n in (4, 8))  # fmt: skip
    scaled = four.with_batch(8).by_role(four.role)
    assert sum(scaled.values()) == pytest.approx(peak(eight), rel=0.01)


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "fp32"])
def test_compiled_code_holds_less(policy):
    eager, compiled = (
        of_recipe(load("tiny", [*SMALL, f"training.compile={flag}"]), Policy.parse(policy), H200)
        for flag in ("false", "true")
    )
    roles = [each.ledger.by_role(each.role) for each in (eager, compiled)]
    assert 0 < roles[1]["activations"] < roles[0]["activations"]
    assert sum(w.flops for w in compiled.work) == sum(w.flops for w in eager.work)


def test_a_factory_that_names_a_device_is_refused():
    def made():
        with torch.device("cpu"):
            return factory()

    with pytest.raises(ConfigError, match="on a device"):
        of_factory(made, Policy.parse("fp32"), H200, compiled=False)


def test_a_format_the_gpu_lacks_is_refused():
    with pytest.raises(Exception, match=r"cannot run on A100: compute capability 8\.0; e4m3 needs 8\.9"):
        of_recipe(load("tiny", SMALL), Policy.parse("fp8-mixed"), Device("nvidia", "A100", capability=(8, 0)))


def test_the_meta_device_is_itself_again_afterwards():
    of_factory(factory, Policy.parse("fp32"), H200, compiled=False)
    tensor = torch.empty(2, device="meta")
    assert tensor.is_meta
    assert not tensor.is_cuda
