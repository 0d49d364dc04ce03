"""A step that runs again in other formats, and leaves no trace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.core.formats import E4M3, FP32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.core.roles import Operand
from halfstep.torch.instruments.replay import precisions_of, replay, switch_formats
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare


class Model(nn.Module):
    """Something of everything that a pass changes: running statistics, dropout, a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(16, 16), nn.Linear(16, 32)
        self.norm, self.batch_norm = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.down, self.head = nn.Linear(32, 16), nn.Linear(16, 16, bias=False)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        self.calls = self.calls + 1
        x = self.embed(tokens)
        x = self.batch_norm(x + self.down(self.dropout(torch.relu(self.up(self.norm(x))))))
        return self.head(x)


def model(seed=0):
    torch.manual_seed(seed)
    return Model()


def tokens(seed, rows=8):
    return torch.randint(16, (rows, 2), generator=torch.Generator().manual_seed(seed))


def loss_of(called):
    return lambda batch: (
        F.cross_entropy(called(batch[:, 0]).float(), batch[:, 1], reduction="sum"),
        batch.shape[0],
    )


def prepared(policy, seed=0):
    net = model(seed)
    return prepare(net, AdamW(net.named_parameters(), lr=1e-2), policy, clip_norm=1.0), net


def in_fp32(run, loss_fn, batches):
    with switch_formats(run):
        return replay(run, loss_fn, batches, FP32)


@pytest.mark.parametrize(
    "policy", ["bf16-mixed", "bf16-mixed,param=fp32:split", "fp16-mixed", "bf16-mixed,emulate=true"]
)
def test_it_gives_the_loss_and_the_gradients_of_an_fp32_model(policy):
    batches = [tokens(1), tokens(2, rows=3)]
    run, net = prepared(policy)
    reference, twin = prepared("fp32")
    ours = in_fp32(run, loss_of(net), batches)
    theirs = in_fp32(reference, loss_of(twin), batches)
    assert torch.equal(ours.loss, theirs.loss)
    assert ours.gradients.keys() == theirs.gradients.keys() == dict(twin.named_parameters()).keys()
    # A scale is a power of two, but w_i / w_1 multiplies a loss without one, and the sum with one.
    for name, gradient in ours.gradients.items():
        torch.testing.assert_close(gradient, theirs.gradients[name], rtol=2.0**-20, atol=2.0**-24)


def test_it_gives_what_the_step_computes_if_precisions_are_those_of_the_run():
    run, net = prepared("bf16-mixed")
    with switch_formats(run, precisions_of(net)):
        again = replay(run, loss_of(net), [tokens(1)])
    total, count = loss_of(net)(tokens(1))
    run.backward(total / count)
    for name, p in net.named_parameters():
        assert torch.equal(p.grad, again.gradients[name])
    assert torch.equal(again.loss, (total / count).detach())


def test_one_module_gets_the_formats_that_are_said_and_the_rest_fp32():
    run, net = prepared("bf16-mixed")
    seen = {}

    def look(module, args, output):
        seen[module] = (args[0].dtype, output.dtype)

    hooks = [net.up.register_forward_hook(look), net.down.register_forward_hook(look)]
    with switch_formats(run, {"up": Precision.in_format(precisions_of(net)["up"].compute)}):
        replay(run, loss_of(net), [tokens(1)])
    assert seen == {net.up: (torch.float32, torch.bfloat16), net.down: (torch.bfloat16, torch.float32)}
    for hook in hooks:
        hook.remove()
    plain, with_norm = (in_fp32(run, loss_of(net), [tokens(1)]) for _ in range(2))
    assert torch.equal(plain.gradients["up.weight"], with_norm.gradients["up.weight"])
    coarse = Precision(norm=E4M3, emulate=True)
    narrow = Precision(operand=Operand(E4M3), emulate=True)
    for name, precision in (("norm", coarse), ("down", narrow)):
        with switch_formats(run, {name: precision}):
            changed = replay(run, loss_of(net), [tokens(1)], FP32)
        assert not torch.equal(changed.loss, plain.loss), name
    everything = precisions(Policy.parse("bf16-mixed"), [*precisions_of(net)])
    with switch_formats(run, everything):
        assert precisions_of(net)["head"] == everything["head"]
    assert precisions_of(net)["head"].compute == run.policy.compute.format


POLICIES = {
    "bf16": "bf16-mixed",
    "split": "bf16-mixed,param=fp32:split",
    "fp16 scaled": "fp16-mixed",
    "fp8 delayed": "fp8-mixed,compute=e4m3:delayed,emulate=true",
}


def trained_state(policy, look=None, watched=False):
    """What three steps leave behind, and looks at the model before, between and after micro-batches."""
    run, net = prepared(policy)
    monitor = run.monitor(every=1) if watched else None
    torch.manual_seed(7)
    loss_fn = loss_of(net)
    for step in range(3):
        if look is not None:
            look(run, loss_fn)
        for last in (False, True):
            total, count = loss_fn(tokens(step))
            run.backward(total / count, weight=count, last=last)
            if look is not None and step == 1:
                look(run, loss_fn)
        run.update()
    counted = [] if monitor is None else [(row.layer, row.activation, row.gradient) for row in monitor.numbers()]
    buffers, random = dict(net.named_buffers()), torch.get_rng_state()
    return {**run.state_dict(), "buffers": buffers, "random": random, "counted": counted}


def same_states(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_states(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_states, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_training_continues_bit_for_bit(policy, watched):
    def look(run, loss_fn):
        with switch_formats(run, precisions_of(run.model)):
            replay(run, loss_fn, [tokens(9)])
        in_fp32(run, loss_fn, [tokens(9)])

    states = trained_state(policy, None, watched), trained_state(policy, look, watched)
    assert same_states(*states)
    assert bool(states[0]["counted"]) == watched


@pytest.mark.prove
def test_a_compiled_model_runs_eagerly_and_is_not_compiled_again():
    graphs = []
    torch._dynamo.reset()
    run, net = prepared("bf16-mixed")
    compiled = torch.compile(net, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    run.step(loss_of(compiled), [tokens(1)])
    run.step(loss_of(compiled), [tokens(1)])
    before = len(graphs)
    in_fp32(run, loss_of(compiled), [tokens(1)])
    assert len(graphs) == before
    run.step(loss_of(compiled), [tokens(1)])
    assert len(graphs) == before
