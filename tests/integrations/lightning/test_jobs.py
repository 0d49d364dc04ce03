"""Lightning's Trainer and Fabric under a policy: compiled, on two replicas, and killed while they train."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F

from halfstep.core.errors import HalfstepError
from halfstep.integrations.lightning import Fabric, HalfstepPrecision
from tests.integrations.lightning.modules import (
    CLIP,
    MICRO,
    SPLIT,
    Module,
    assert_same,
    batches,
    fabric_of,
    fit,
    loop,
    network,
    trainer,
)
from tests.processes import preload_integrations, run_alone, run_ranks

pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

POLICIES = ["fp32", "bf16-mixed", "fp16-mixed"]
EMA = 0.9


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    preload_integrations()


# Compiled


class Compiled(Module):
    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_a_compiled_module_is_prepared_and_compiled_again(policy, tmp_path):
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    modules = [Compiled(), Compiled()]
    for module in modules:
        module.net[3].p = 0.0  # compiled or not, dropout draws other masks
    given = {"accumulate_grad_batches": MICRO, "gradient_clip_val": CLIP}
    _, fitted = fit(tmp_path, policy, module=torch.compile(modules[0], backend="aot_eager"), **given)
    assert 0 < counters["stats"]["unique_graphs"] <= 2  # one more where the batch's index becomes a symbol
    assert not counters["graph_break"]
    fit(tmp_path, policy, module=modules[1], **given)
    assert_same(*modules)
    assert fitted.precision_plugin.run.model is modules[0]


def test_a_compiled_model_is_prepared_before_fabric_compiles_it_again():
    nets = [network(), network()]
    for net, compiled in zip(nets, (True, False), strict=True):
        net[3].p = 0.0
        fabric, optimizer = fabric_of("bf16-mixed"), torch.optim.AdamW(net.parameters(), lr=3e-3)
        given = torch.compile(net, backend="aot_eager") if compiled else net
        loop(fabric, *fabric.setup(given, optimizer), 2)
    assert_same(*nets)


# Two replicas


def sgd(parameters, lr):
    """Its updates are proportional to gradients, so a bound of these is one of the weights."""
    return torch.optim.SGD(parameters, lr=100 * lr, momentum=0.9)


class Replicated(Module):
    def __init__(self):
        super().__init__(sgd)
        self.net[3].p = 0.0
        self.applied = []

    def on_train_batch_end(self, *_):
        self.applied.append(int(self.trainer.precision_plugin.run.num_applied))


def shares(rank, size):
    return torch.utils.data.DataLoader(batches()[rank::size], batch_size=None)


def train_replica(kind, policy, folder, bad=(), rank=0, size=1):
    module = Replicated()
    module.bad = bad
    data, options = shares(rank, size), {"strategy": "ddp", "devices": size} if size > 1 else {}
    micro_batches = 2 * MICRO // size
    if kind == "trainer":
        options |= {"accumulate_grad_batches": micro_batches, "gradient_clip_val": CLIP}
        trainer(folder, policy, use_distributed_sampler=False, **options).fit(module, data)
        return module
    fabric = Fabric(policy=policy, accelerator="cpu", **options)
    fabric.launch()
    model, optimizer = fabric.setup(module, sgd(module.parameters(), 3e-3))
    model.mark_forward_method("training_step")
    for index, batch in enumerate(data):
        last = (index + 1) % micro_batches == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model.training_step(batch, index) / micro_batches)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
    module.applied.append(int(fabric.run_of(model).num_applied))
    return module


def on_rank(job, *arguments):
    os.environ["TORCHELASTIC_RUN_ID"] = "replicas"  # as torchrun does; Lightning then starts no process itself
    return job(int(os.environ["RANK"]), *arguments)


def numbers(tensors):
    return {name: value.numpy() for name, value in tensors.items()}


def replica(rank, kind, policy, folder, bad):
    module = train_replica(kind, policy, folder, bad if rank else (), rank, 2)
    return numbers(module.state_dict()), module.applied[-1]


def train_replicas(kind, policy, folder, bad=()):
    (first, applied), (second, _) = run_ranks(on_rank, replica, kind, policy, folder, bad)
    assert all(numpy.array_equal(value, second[name]) for name, value in first.items())
    return first, applied


@pytest.mark.parametrize(
    ("kind", "policy"), [("trainer", "fp32"), ("fabric", "bf16-mixed"), ("trainer", "fp16-mixed")]
)
def test_two_replicas_take_the_steps_of_one_process(kind, policy, tmp_path):
    replicas, applied = train_replicas(kind, policy, tmp_path)
    assert applied == 2
    one, start = (numbers(each.state_dict()) for each in (train_replica(kind, policy, tmp_path), network()))
    # Sums have another order. From the second update on a weight may then round to its neighbor.
    bound = {"fp32": 2**-18, "bf16-mixed": 2**-8, "fp16-mixed": 2**-11}[policy]
    for name, value in replicas.items():
        moved = abs(one[name] - start[name.removeprefix("net.")]).max()
        assert moved > 0
        assert abs(value - one[name]).max() <= bound * moved, name


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_replicas_skip_a_step_together(kind, tmp_path):
    _, applied = train_replicas(kind, "fp16-mixed", tmp_path, bad=(0,))  # a loss of the second alone
    assert applied == 1


def refused_replica(rank, kind, policy, folder):
    with pytest.raises(HalfstepError, match="DDP") as caught:
        train_replica(kind, policy, folder, rank=rank, size=2)
    assert "hold masters whole" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "policy"), [("trainer", SPLIT), ("fabric", "bf16-true"), ("trainer", "bf16-mixed,accumulate=bf16")]
)
def test_masters_and_sums_that_are_not_whole_are_refused_on_replicas(kind, policy, tmp_path):
    run_ranks(on_rank, refused_replica, kind, policy, tmp_path)


# Killed


class Kills(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.current_epoch == 1 and index == 2:  # one micro-batch of two
            os.kill(os.getpid(), signal.SIGKILL)


class Stateful:
    """A loader that Lightning resumes in the middle of an epoch."""

    def __init__(self):
        self.place = 0

    def __len__(self):
        return len(batches())

    def __iter__(self):
        self.place %= len(self)
        while self.place < len(self):
            self.place += 1
            yield batches()[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def shuffled():
    return torch.utils.data.DataLoader(batches(), batch_size=None, shuffle=True)


def train(rank, folder, policy, middle, *callbacks, resume=None, **options):
    """Trains two epochs of four updates; saves after each epoch, or after each third update."""
    torch.manual_seed(2 + rank)
    keeps = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3 if middle else None)
    given = {"accumulate_grad_batches": MICRO, "gradient_clip_val": CLIP, "callbacks": [keeps, *callbacks]}
    plugin = HalfstepPrecision(policy, ema=EMA)
    fitted = trainer(folder, plugin, 2, enable_checkpointing=True, **given, **options)
    data = Stateful() if middle else shuffled()
    fitted.fit(Module(), data, shuffled(), ckpt_path=resume, weights_only=True)
    return fitted


def train_killed(folder, policy, middle):
    train(0, folder, policy, middle, Kills())


def assert_same_runs(one, other):
    states = one.state_dict()["tensors"], other.state_dict()["tensors"]
    assert states[0].keys() == states[1].keys()
    assert any(name.startswith("average.") for name in states[0])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def compare_trainers(folder, policy, middle, saved):
    """Asserts that a killed run resumes as if it had not been, in a process as fresh as its own was.

    On a CPU without bf16, torch multiplies fp16 by other code once a bf16 matmul was tried.
    """
    resumed, whole = train(0, folder, policy, middle, resume=saved), train(0, folder / "whole", policy, middle)
    runs = [each.precision_plugin.run for each in (whole, resumed)]
    assert int(runs[0].num_applied) == resumed.global_step == 8
    assert_same_runs(*runs)
    assert resumed.callback_metrics == whole.callback_metrics
    schedules = [each.lr_scheduler_configs[0].scheduler.state_dict() for each in (whole, resumed)]
    assert schedules[0] == schedules[1]


@pytest.mark.parametrize(
    ("policy", "middle"), [("fp32", True), ("bf16-mixed", False), ("fp16-mixed", False), ("fp16-mixed", True)]
)
def test_a_killed_trainer_resumes_to_the_same_bits(policy, middle, tmp_path):
    with pytest.raises(BrokenProcessPool):
        run_alone(train_killed, tmp_path, policy, middle)
    (saved,) = tmp_path.glob("*.ckpt")
    assert saved.name == f"step={3 if middle else 4}.ckpt"
    run_alone(compare_trainers, tmp_path, policy, middle, saved)


def train_in_fabric(rank, path, policy, kill_at=None, resume=False, **options):
    fabric, net = Fabric(policy=policy, ema=EMA, accelerator="cpu", **options), network()
    fabric.launch()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=20)
    model, optimizer = fabric.setup(net, optimizer)
    torch.manual_seed(2 + rank)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "update": 0}
    if resume:
        fabric.load(path, state)
    for update in range(state["update"], 6):
        for place, (inputs, targets) in enumerate(batches()[update % 4 * 2 :][:MICRO]):
            with fabric.no_backward_sync(model, enabled=place < MICRO - 1):
                fabric.backward(F.cross_entropy(model(inputs), targets) / MICRO)
            if (update, place) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if update % 3 == 2:
            fabric.save(path, state | {"update": update + 1})
    return fabric.run_of(model), schedule.state_dict()


def compare_loops(path, policy):
    """As `compare_trainers`."""
    resumed, schedule = train_in_fabric(0, path, policy, resume=True)
    whole, expected = train_in_fabric(0, path.with_name("whole.ckpt"), policy)
    assert int(whole.num_applied) == 6
    assert_same_runs(whole, resumed)
    assert schedule == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_fabric_loop_resumes_to_the_same_bits(policy, tmp_path):
    path = tmp_path / "saved.ckpt"
    with pytest.raises(BrokenProcessPool):
        run_alone(train_in_fabric, 0, path, policy, (4, 0))
    assert torch.load(path, weights_only=True)["update"] == 3
    run_alone(compare_loops, path, policy)


DDP = {"strategy": "ddp", "devices": 2}


def train_replica_of(rank, kind, folder, kill, resume):
    """Trains with dropout, whose masks differ between replicas."""
    if kind == "fabric":
        path = folder / "step=4.ckpt"
        run, _ = train_in_fabric(rank, path, "fp16-mixed", (4, 0) if kill else None, bool(resume), **DDP)
    else:
        callbacks = [Kills()] if kill else []
        fitted = train(rank, folder, "fp16-mixed", True, *callbacks, resume=resume, **DDP)
        run = fitted.precision_plugin.run
    return numbers(run.state_dict()["tensors"])


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_killed_replicas_resume_to_the_same_bits_each(kind, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    parts.mkdir()
    whole.mkdir()
    with pytest.raises(RuntimeError):  # of a process that is killed, or of the other that sees it end
        run_ranks(on_rank, train_replica_of, kind, parts, True, None)
    (saved,) = parts.glob("*.ckpt")
    resumed = run_ranks(on_rank, train_replica_of, kind, parts, False, saved)
    for states in zip(run_ranks(on_rank, train_replica_of, kind, whole, False, None), resumed, strict=True):
        for name, value in states[0].items():
            assert numpy.array_equal(value, states[1][name]), name
