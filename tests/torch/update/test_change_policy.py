"""Another policy in your own loop: what was learned keeps every bit, or the change is refused."""

import pytest
import torch
from torch import nn

from halfstep.config.load import load
from halfstep.core.errors import GradientsError, HalfstepError
from halfstep.core.policy import Policy
from halfstep.torch import prepare
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.session import Session
from halfstep.torch.state import state_of
from tests.conformance.session.sessions import SMALL
from tests.token_batches import batch
from tests.torch.nets import same_by_name

SPLIT, FP16 = "bf16-mixed,param=fp32:split,emulate=true", "fp16-mixed,emulate=true"
FP8 = "fp8-mixed,emulate=true"


class Loop:
    """A model, an optimizer, and a step that somebody wrote."""

    def __init__(self, build, policy, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
        self.optimizer = build(self.model.parameters(), lr=0.01)
        self.run = prepare(self.model, self.optimizer, policy, **options)
        self.x, self.y = torch.randn(4, 16), torch.randn(4, 4)

    def loss(self, scale=1.0):
        return ((self.model(self.x * scale) - self.y) ** 2).mean()

    def step(self, scale=1.0):
        return self.run.step(self.loss, [scale])

    def learned(self):
        """Copies of masters, moments and averages."""
        moments = {
            (i, key): value.clone()
            for i, each in enumerate(self.optimizer.state.values())
            for key, value in each.items()
            if torch.is_tensor(value)
        }
        return self.run.weights() | moments | {f"ema {n}": v.clone() for n, v in self.run.ema.items()}


@pytest.mark.parametrize("build", [torch.optim.AdamW, AdamW])
def test_masters_moments_and_averages_keep_every_bit(build):
    loop = Loop(build, SPLIT, ema=0.9, clip_norm=1.0)
    before, parameters = loop.run, [*loop.model.parameters()]
    loop.step()
    loop.step()
    learned = loop.learned()
    assert loop.run.change_policy(FP16) is before
    assert [id(p) for p in loop.model.parameters()] == [id(p) for p in parameters]
    assert (str(loop.run.policy), loop.run.clip_norm, int(loop.run.num_applied)) == (FP16, 1.0, 2)
    assert same_by_name(loop.learned(), learned)
    assert bool(torch.isfinite(loop.step().loss))
    assert not same_by_name(loop.learned(), learned)
    assert int(loop.run.num_applied) == 3
    loop.run.change_policy(SPLIT)
    assert {p.dtype for p in loop.model.parameters() if p.ndim == 2} == {torch.bfloat16}
    assert "16-bit remainder" in loop.run.summary()


def test_the_loss_scale_is_kept_if_both_policies_scale_alike():
    loop = Loop(AdamW, FP16)
    for scale in (1e6, 1e6, 1.0):  # the first ones overflow, and halve the scale
        loop.step(scale)
    halved = loop.run.scale_state
    loop.run.change_policy(f"{FP16}; 0: compute=fp32")
    assert [float(value) for value in loop.run.scale_state] == [float(value) for value in halved]
    assert float(halved.scale) == 65536 / 4
    loop.run.change_policy(SPLIT)
    loop.run.change_policy(FP16)
    assert float(loop.run.scale_state.scale) == 65536


def test_it_is_what_the_trainer_does():
    config = load("tiny", [*SMALL, "training.micro_batches=1", "training.ema=0.5"])
    ours, trainers = (Session(config, Policy.parse(FP8), "cpu") for _ in range(2))
    for each in (ours, trainers):
        each.step(batch(0, each))
    trainers.change_policy(Policy.parse(SPLIT))
    ours.run.change_policy(SPLIT)
    losses = [each.read(each.step(batch(1, each)))["loss"] for each in (ours, trainers)]
    assert losses[0] == losses[1]
    assert same_by_name(state_of(ours.run), state_of(trainers.run))


REFUSED = {
    "bf16-true,emulate=true": "would round what .* has learned: param of `0.weight` is fp32 before and bf16",
    f"{SPLIT},moments=bf16": "moments of `0.weight` is fp32 before and bf16 after",
    "bf16-mixed; 9: compute=fp32": "matches none of the 3 names",
    "bf61": "unknown preset",
    "fp8-mixed; **: compute=e4m3": "e4m3",  # known only once the model is given back
}


@pytest.mark.parametrize("policy", REFUSED)
def test_a_policy_that_cannot_take_over_is_refused_and_nothing_has_changed(policy):
    loop = Loop(AdamW, FP8, ema=0.9)
    loop.step()
    before = {name: value.clone() for name, value in state_of(loop.run).items()}
    with pytest.raises(HalfstepError, match=REFUSED[policy]):
        loop.run.change_policy(policy)
    assert str(loop.run.policy) == str(Policy.parse(FP8))
    assert same_by_name(state_of(loop.run), before)
    loop.step()


def test_gradients_that_wait_are_neither_dropped_nor_taken_over():
    loop = Loop(AdamW, FP16)
    loop.run.backward(loop.loss())
    with pytest.raises(GradientsError):
        loop.run.change_policy(SPLIT)
    loop.run.update()
    loop.run.change_policy(SPLIT)
