"""Plans of a job: how it is spread, what travels, what fits, and how long it takes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from halfstep.config.load import load
from halfstep.config.machines import Machine, Rates, Timed, load_machine
from halfstep.core.errors import ConfigError
from halfstep.core.policy import Policy
from halfstep.tools.plan.machine import save
from halfstep.tools.plan.plan import plan_factory, plan_recipe, spread
from halfstep.torch.instruments.planning.step import trace_factory
from halfstep.torch.instruments.planning.tracker import Ledger
from halfstep.torch.update.step import Engine

H200 = load_machine("h200")
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "model.vocabulary=64"]
BF16 = Policy.parse("bf16-mixed")


def test_ranks_take_micro_batches_or_rows():
    config = load("tiny", ["training.batch=6", "training.micro_batches=4"])
    assert (spread(config, 4, H200).batch, spread(config, 4, H200).micro_batches) == (6, 1)
    assert (spread(config, 3, H200).batch, spread(config, 3, H200).micro_batches) == (2, 4)
    with pytest.raises(ConfigError, match="5 GPUs divide neither 4 micro-batches nor a batch of 6"):
        spread(config, 5, H200)


@pytest.mark.parametrize("gpus", [8, 12])
def test_hybrid_groups_must_be_whole_machines(gpus):
    config = load("tiny", ["parallel.shard=hybrid", "training.micro_batches=48"])
    with pytest.raises(ConfigError, match="hybrid"):
        spread(config, gpus, H200)
    assert spread(config, 16, H200).copies == 2


@pytest.mark.prove
def test_what_travels_is_what_each_engine_sends():
    config = load("tiny", [*SMALL, "training.micro_batches=4"])
    numbers = config.model.num_parameters
    alone, ddp = (plan_recipe(config, BF16, H200, gpus, 0.0) for gpus in (1, 4))
    assert sum(alone.sent_bytes.values()) == 0
    assert ddp.sent_bytes == {"weights": 0, "gradients": 2 * (numbers * 4 * 3 // 4)}
    config = load("tiny", [*SMALL, "training.micro_batches=4", "parallel.shard=full"])
    fsdp = plan_recipe(config, BF16, H200, 4, 0.0)
    assert fsdp.sent_bytes["gradients"] == numbers * 4 * 3 // 4
    assert 0 < fsdp.sent_bytes["weights"] < 2 * numbers * 4
    assert fsdp.memory_bytes["moments"] < ddp.memory_bytes["moments"] / 3


@pytest.mark.prove
def test_a_batch_that_does_not_fit_names_the_largest_that_does():
    config = load("tiny", [*SMALL, "training.batch=64"])
    whole = plan_recipe(config, BF16, H200, 1, 2.5)
    small = replace(H200, memory=whole.reserved_bytes - 2**21)
    plan = plan_recipe(config, BF16, small, 1, 2.5)
    assert whole.fits
    assert not plan.fits
    assert 0 < plan.largest_batch < 64 < whole.largest_batch
    assert plan.to_dict()["price"] == [hours * 2.5 for hours in plan.gpu_hours]


def layered():
    """A model as wide as GPT-2, and a batch of 8 rows."""
    layers = (nn.Linear(768, 768) for _ in range(6))
    model = nn.Sequential(nn.Embedding(50304, 768), *layers, nn.Linear(768, 50304))
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    return model, torch.optim.AdamW(model.parameters()), lambda b: model(b).square().mean(), tokens


@pytest.mark.parametrize("mib", [500, 2000, 8000, 40000, 143156])
def test_the_largest_batch_is_found_in_a_few_looks_at_the_allocator(mib, monkeypatch):
    """Of a step that is traced once, in two updates: the first makes the optimizer's state."""
    updates, looks = [], []
    step, reserved = Engine.step, Ledger.reserved
    monkeypatch.setattr(Engine, "step", lambda *given: updates.append(1) or step(*given))
    monkeypatch.setattr(Ledger, "reserved", lambda ledger: looks.append(1) or reserved(ledger))
    machine = replace(H200, memory=mib * 2**20)
    plan = plan_factory(layered, BF16, machine, 1, 0.0, compiled=False, steps=10)
    assert len(updates) == 2
    assert len(looks) <= 8  # one of them for the batch that was asked for
    traced = trace_factory(layered, BF16, machine.hardware, compiled=False)
    fits = [_fits(traced, batch, machine) for batch in (max(plan.largest_batch, 1), plan.largest_batch + 1)]
    assert fits == [plan.largest_batch > 0, False]


def _fits(traced, batch, machine):
    return traced.with_batch(batch).reserved() + machine.context <= machine.memory


@pytest.mark.prove
def test_timed_shapes_make_a_number_of_a_range():
    machine = Machine(
        "M", "nvidia", 10**11, 1e12, Rates(fp32=1e13, bf16=1e14), capability=(9, 0), launch=(0.0, 0.0)
    )
    config = load("tiny", SMALL)
    low, high = plan_recipe(config, BF16, machine, 1, 0.0).seconds
    assert low < high
    from halfstep.torch.instruments.planning.step import trace_recipe

    work = trace_recipe(config, BF16, machine.hardware).work
    timed = tuple(Timed(w.kind, w.format, w.shape, 1e-6, w.flops) for w in work if w.kind != "bytes")  # type: ignore[arg-type]
    timed += (Timed("bytes", "", (8,), 1e-12, 1.0),)
    plan = plan_recipe(config, BF16, replace(machine, timed=timed), 1, 0.0)
    assert plan.seconds[0] == plan.seconds[1]
    assert plan.timed_share == 1.0


@pytest.mark.prove
def test_a_host_that_was_timed_is_the_limit_of_small_passes_and_not_of_compiled_ones():
    """Two passes at 1 s each and an update of 0.1 s."""
    machine = Machine("M", "nvidia", 10**11, 1e15, Rates(fp32=1e17, bf16=1e17, e4m3=1e17), capability=(9, 0))
    config = load("tiny", [*SMALL, "training.micro_batches=2"])
    low, high = plan_recipe(config, BF16, machine, 1, 0.0).seconds
    assert high == pytest.approx(4 * low)
    from halfstep.torch.instruments.planning.step import trace_recipe

    work = trace_recipe(config, BF16, machine.hardware).work
    update = sum(w.phase == "update" for w in work)
    each = (len(work) - update) // 2
    timed = (
        Timed("pass", "bf16-mixed", (each,), 1.0, each),
        Timed("update", "bf16-mixed", (update,), 0.1, update),
    )
    machine = replace(machine, timed=timed)
    assert plan_recipe(config, BF16, machine, 1, 0.0).seconds == pytest.approx((2.1, 2.1))
    low, high = plan_recipe(config, Policy.parse("fp8-mixed"), machine, 1, 0.0).seconds
    assert high == pytest.approx(4 * low)  # its compute is bf16 as well, and its code is not
    compiled = load("tiny", [*SMALL, "training.micro_batches=2", "training.compile=true"])
    assert plan_recipe(compiled, BF16, machine, 1, 0.0).seconds[0] < 1


@pytest.mark.prove
def test_a_machine_file_of_this_machine_reads_back(tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    monkeypatch.setattr("halfstep.tools.plan.machine._on_host", lambda device: [Policy.parse("fp32")])
    machine = save(path, load("tiny", [*SMALL, "training.batch=2"]), "cpu")
    assert load_machine(str(path)) == machine
    assert {timed.kind for timed in machine.timed} == {"matmul", "attention", "bytes", "pass", "update"}
    assert 0 < 2 * machine.launch[0] == machine.launch[1]
    with pytest.raises(ConfigError, match="exists"):
        save(path, load("tiny", SMALL), "cpu")
