"""Steps as CUDA graphs. Without a GPU, what is captured is recorded by operation, and done again in its memory.

So a number that Python knew at the capture, or a tensor that is no longer the one that was captured, shows as it
does on a GPU: the step is wrong.
"""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.config.load import load as load_config
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.torch import AdamW, Muon, prepare
from halfstep.torch.numerics.split.writes import DATA
from halfstep.torch.session import Session
from halfstep.torch.update import graph
from tests.refusals import refuses

NARROW = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=8"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Recorder(TorchDispatchMode):
    """Records operations; what they wrote to memory that was there before is undone by `undo`."""

    def __init__(self):
        super().__init__()
        self.calls, self._before = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert function is not torch.ops.aten._local_scalar_dense.default, "reading a number waits for the device"
        if function._schema.is_mutable:
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = function(*args, **kwargs)
        self.calls.append((function, *map(unversioned, (args, kwargs, out))))
        return out

    def undo(self):
        for storage, before in self._before.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, old in self.calls:
            new = function(*args, **kwargs)
            for was, now in zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True):
                if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                    was.copy_(now)


def unversioned(tree):
    """The same memory by other tensors: a replay on a GPU counts no writes."""
    return pytree.tree_map_only(torch.Tensor, DATA.__get__, tree)


class Recorded:
    """In place of CudaGraphs."""

    def __init__(self, device):
        pass

    def warm(self):
        return nullcontext()

    def capture(self, work):
        recorder = Recorder()
        try:
            with recorder:
                work()
        finally:
            recorder.undo()
        return recorder.replay


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(graph, "has_graphs", lambda device: True)
        monkeypatch.setattr(graph.StepGraph.__init__, "__defaults__", (Recorded,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def optimizers(model, which):
    if which == "adamw":
        return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    matrices = [model.up.weight, model.down.weight]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [Muon(matrices, lr=0.01), AdamW(rest, lr=0.01)]


def make(policy="bf16-mixed", which="adamw", graph=True, **options):
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    return prepare(model, optimizers(model, which), policy, clip_norm=1.0, graph=graph, **options)


def batches(step, count=2, length=6):
    generator = torch.Generator().manual_seed(step)
    return [
        {
            "tokens": torch.randint(0, 11, (2, length), generator=generator).to(DEVICE),
            "times": torch.ones((), device=DEVICE),
            "plus": torch.zeros((), device=DEVICE),
        }
        for _ in range(count)
    ]


def loss_of(run):
    def loss(batch):
        logits = run.model(batch["tokens"][:, :-1]).float().flatten(0, 1)
        return F.cross_entropy(logits, batch["tokens"][:, 1:].flatten()) * batch["times"] + batch["plus"]

    return loss


def state_of(run):
    return {name: t.clone() for name, t in run.state_dict()["tensors"].items()}


def train(run, steps=6, bad=(3,), count=2):
    """Trains with a schedule, and gradients that are not finite in some steps; returns what each step said."""
    loss, rows = loss_of(run), []
    for step in range(steps):
        given = batches(step, count)
        given[-1]["times"] *= float("inf") if step in bad else 1.0
        given[0]["plus"] -= float("inf") if step - 1 in bad else 0.0  # the loss alone
        for optimizer in run.optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            if isinstance(optimizer, Muon):
                optimizer.set_momentum(0.9 + 0.01 * run.num_applied)
        rows.append(run.step(loss, given))
    return [tuple(float(x) for x in (r.loss, r.skipped, r.scale, r.grad_norm, r.stuck)) for r in rows]


CASES = [
    ("bf16-mixed", "adamw", {}),
    ("bf16-mixed,param=fp32:split", "muon", {}),
    ("fp16-mixed,scale=dynamic:init=65536:interval=2,param=fp32:split", "adamw", {"ema": 0.9}),
    ("fp16-mixed,scale=dynamic:init=65536:interval=2", "muon", {}),
]


@pytest.mark.parametrize(("policy", "which", "options"), CASES, ids=lambda x: str(x) or "plain")
def test_steps_are_the_plain_ones_bit_for_bit(policy, which, options):
    """With a schedule, two micro-batches and two skipped steps; what a step returned stays what it was."""
    plain, replayed = make(policy, which, graph=False, **options), make(policy, which, **options)
    rows, found = train(plain), train(replayed)
    assert [row[1] for row in found] == [0, 0, 0, 1, 1, 0]
    assert str(found) == str(rows)
    left, right = state_of(plain), state_of(replayed)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert len(replayed.graph._captured) == 1
    assert "steps: one CUDA graph each" in replayed.summary()
    assert "CUDA graph" not in plain.summary()


def same(one, other):
    left, right = state_of(one), state_of(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def both(change, policy="bf16-mixed", which="muon", steps=5):
    """Trains a plain run and one with graphs, with a change before each step; returns both."""
    runs = make(policy, which, graph=False), make(policy, which)
    for run in runs:
        loss = loss_of(run)
        for step in range(steps):
            loss = change(run, step) or loss
            run.step(loss, batches(step))
    return runs


def set_decay(run, step):
    for optimizer in run.optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.5 * (step >= 3)


def freeze(run, step):
    run.model.head.requires_grad_(step < 3)


def freeze_by_turns(run, step):
    run.model.head.requires_grad_(step % 2 == 0)


def replace_data(run, step):
    """As `model.to` does: the numbers are elsewhere."""
    if step == 3:
        run.model.norm.weight.data = run.model.norm.weight.data.clone()


def clip(run, step):
    run.clip_norm = 1.0 if step < 3 else 1e-3


def load(run, step):
    if step == 3:
        run.load_state_dict(copy.deepcopy(run.state_dict()))
        for optimizer in run.optimizers:  # as torch's own optimizers do: other tensors
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_loss(run, step):
    factor, loss = 1.0 + (step >= 3), loss_of(run)
    return lambda batch: factor * loss(batch)


@pytest.mark.parametrize(
    "change", [set_decay, freeze, freeze_by_turns, replace_data, clip, load, other_loss], ids=lambda f: f.__name__
)
def test_what_python_knew_at_the_capture_is_noticed_when_it_changes(change):
    assert same(*both(change))


def test_a_loss_that_reads_a_new_tensor_at_each_step_is_not_replayed_with_an_old_one():
    """Python gives a new object the place of one that is gone, and with it the same id."""

    def losses_of(run, steps):
        loss, weight = loss_of(run), torch.ones(1, device=DEVICE)

        def weighted(batch):
            return loss(batch) * weight.sum()

        for step in range(steps):
            weight = torch.full((1,), 1.0 + step, device=DEVICE)
            yield float(run.step(weighted, batches(0)).loss)

    assert [*losses_of(make(), 8)] == [*losses_of(make(graph=False), 8)]
    with refuses(HalfstepError, "the loss function changed again", "the same loss function"):
        [*losses_of(make(), 9)]


def test_shapes_may_take_turns_and_each_is_captured_once():
    plain, replayed = make(graph=False), make()
    for run in (plain, replayed):
        loss = loss_of(run)
        for step in range(8):
            run.step(loss, batches(step, count=1 + step % 2, length=6 + step % 2))
    assert same(plain, replayed)
    assert len(replayed.graph._captured) == 2


def test_shapes_that_never_repeat_are_refused_by_name():
    run = make()
    with refuses(HalfstepError, "the shapes of micro-batches changed again", "pad micro-batches"):
        for length in range(4, 20):
            run.step(loss_of(run), batches(0, length=length))


def test_a_copy_of_a_run_has_graphs_of_its_own():
    run = make()
    train(run, 3)
    twin = copy.deepcopy(run)
    assert twin.graph.run is twin
    for each in (run, twin):
        train(each, 3)
    assert same(run, twin)


def test_another_policy_has_other_graphs():
    plain, replayed = make(graph=False), make()
    for run in (plain, replayed):
        train(run, 3, bad=())
        run.change_policy("fp32")
        train(run, 3, bad=())
    assert replayed.graph is not None
    assert same(plain, replayed)


def test_a_loss_that_reads_the_device_is_refused_and_the_run_is_as_it_was():
    run = make()

    def loss(batch):
        found = loss_of(run)(batch)
        return found if float(found.detach()) > -1 else found * 2

    run.step(loss, batches(0))
    before = state_of(run)
    with refuses(HalfstepError, "cannot be captured", "nothing in it may wait for the device"):
        run.step(loss, batches(1))
    after = state_of(run)
    assert all(torch.equal(before[name], after[name]) for name in before)
    plain = make(graph=False)
    plain.step(loss_of(plain), batches(0))
    for each in (run, plain):
        train(each)
    assert same(run, plain)


def test_what_cannot_be_a_graph_is_refused_with_the_reason(monkeypatch):
    model = Net().to(DEVICE)
    with refuses(HalfstepError, r"AdamW \(torch\) may hold its learning rate on the host", "graph=False"):
        prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed", graph=True)
    run = make()
    with refuses(HalfstepError, r"backward\(\) is part of one", "run.step"):
        run.backward(loss_of(run)(batches(0)[0]))
    with refuses(HalfstepError, "has no monitor", "graph=False"):
        run.monitor()
    with refuses(HalfstepError, "a micro-batch is on meta", "move it there"):
        run.step(loss_of(run), [{"tokens": torch.zeros(2, 3, device="meta")}])
    with refuses(HalfstepError, "a micro-batch holds a object", "pass tensors"):
        run.step(loss_of(run), [{"tokens": object()}])
    run.optimizers[0].register_step_post_hook(lambda *_: None)
    with refuses(HalfstepError, r"AdamW \(halfstep\) has hooks around its step", "graph=False"):
        run.step(loss_of(run), batches(0))
    monkeypatch.setattr(graph, "has_graphs", lambda device: False)
    with refuses(HalfstepError, "only an NVIDIA GPU has them", "graph=False"):
        make()


def test_a_model_that_writes_to_its_buffers_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(DEVICE)
    run = prepare(model, AdamW(model.parameters()), "fp32", graph=True)
    with refuses(HalfstepError, "writes to its buffers", "the update before this error was made"):
        run.step(lambda x: model(x).square().mean(), [torch.randn(8, 4, device=DEVICE)])


def test_the_trainer_makes_its_steps_as_graphs():
    def trained(*settings):
        config = load_config("tiny", [*NARROW, "monitor.on=false", *settings])
        schedule = lambda applied, xp: 1.0 / (1.0 + applied)  # noqa: E731
        session = Session(config, Policy.parse("fp32"), DEVICE, schedule, momentum=schedule)
        shape = (2, 2, config.model.context + 1)
        results = [
            session.step(np.random.default_rng(step).integers(0, 256, shape).astype(np.int32)) for step in range(4)
        ]
        return [session.read(result) for result in results], session

    rows, plain = trained()
    found, session = trained("training.graph=true")
    assert rows == found
    assert len(session.run.graph._captured) == 1
    assert plain.run.graph is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [(["backend=jax", "monitor.on=false"], "backend jax has no CUDA graphs"), ([], "the monitor sends numbers")],
)
def test_a_recipe_that_cannot_have_graphs_is_refused(settings, said):
    with pytest.raises(HalfstepError, match=said):
        load_config("tiny", ["training.graph=true", *settings])
