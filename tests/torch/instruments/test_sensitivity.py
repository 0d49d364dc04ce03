"""What a format does to each kind of operation alone: a fault is found in its kind, and in no other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from halfstep.torch.session import Session
from tests.refusals import refuses
from tests.token_batches import batch
from tests.torch.instruments.test_replay import POLICIES, same_states, tokens, trained_state

WIDTH, KINDS = 32, {"matmul", "embedding", "norm", "softmax", "loss", "residual", "update"}


class Net(nn.Module):
    """Every kind of operation once; `sharp` makes its softmax pick one row, `steep` its logits large."""

    def __init__(self, sharp=1.0, steep=1.0):
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.head = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, WIDTH, 64))
        self.sharp, self.steep = sharp, steep

    def forward(self, index):
        x = self.embed(index)
        y = self.norm(x)
        weights = F.softmax((self.q(y) @ self.k(y).mT) * self.sharp, -1)
        return self.head(x + weights @ y) * self.steep


def loss_of(net):
    return lambda index: F.cross_entropy(net(index).flatten(0, 1), index.roll(-1, 1).flatten())


def sensitivity(fmt="bf16", policy="bf16-mixed,emulate=true", lr=1e-2, **options):
    torch.manual_seed(0)
    net = Net(**options)
    run = prepare(net, AdamW(net.named_parameters(), lr=lr), policy)
    index = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        run.step(loss_of(net), [index])
    return run.sensitivity(loss_of(net), [index], fmt)


def test_every_kind_loses_a_little_in_bf16_the_most_sensitive_first():
    lost = sensitivity()
    assert lost.keys() == KINDS
    assert [*lost.values()] == sorted(lost.values(), reverse=True)
    assert all(0 < lost[kind] < 1e-3 for kind in KINDS - {"update"})


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_it_is_the_same_whatever_the_run_computes_in(policy):
    assert max(sensitivity("fp32", policy).values()) < 1e-6
    narrow, wide = sensitivity("e5m2", policy), sensitivity("bf16", policy)
    assert narrow["matmul"] > 100 * wide["matmul"]
    assert narrow.keys() == KINDS - {"embedding"}


def test_a_softmax_a_loss_and_an_update_that_need_fp32_stand_out():
    plain = sensitivity()
    sharp, steep, slow = sensitivity(sharp=30.0), sensitivity(steep=100.0), sensitivity(lr=1e-6)
    assert sharp["softmax"] > 30 * plain["softmax"]
    assert steep["loss"] > 30 * plain["loss"]
    assert slow["update"] > 0.9 > plain["update"] > 1e-3
    assert slow["norm"] < 1e-3


def test_a_kind_that_a_model_lacks_loses_nothing():
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    run = prepare(net, "bf16-mixed,emulate=true")
    with refuses(HalfstepError, "no optimizer"):
        run.sensitivity(lambda x: net(x).square().mean(), [torch.ones(4, 8)])
    run.attach(AdamW(net.parameters(), lr=1e-3))
    lost = run.sensitivity(lambda x: net(x).square().mean(), [torch.randn(4, 8)])
    assert {kind for kind, share in lost.items() if share > 1e-9} == {
        "matmul",
        "update",
        "loss",
    }  # what it returns


def test_the_reference_decoder_has_every_kind():
    settings = ["model.context=8", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=4"]
    session = Session(
        load("tiny", [*settings, "training.compile=false"]), Policy.parse("fp32"), "cpu", lambda n, xp: 1.0
    )
    session.step(batch(0, session))
    lost = session.run.sensitivity(session._sum_and_count, session._to_device(batch(1, session)).unbind())
    assert min(lost.values()) > 0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_training_has_the_same_bits_with_it(policy):
    def look(run, loss_fn):
        if int(run.num_applied) == 1:
            run.sensitivity(loss_fn, [tokens(9), tokens(8, rows=3)])

    assert same_states(trained_state(policy), trained_state(policy, look))
