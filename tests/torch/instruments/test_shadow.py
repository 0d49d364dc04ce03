"""A step beside the same step in fp32, and beside noise of its format."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, E4M3, FP16
from halfstep.core.policy import Policy
from halfstep.torch.instruments.noise import shift_by_half_ulp
from halfstep.torch.optim.adamw import AdamW
from halfstep.torch.run import prepare
from halfstep.torch.session import Session
from tests.refusals import refuses
from tests.token_batches import batch
from tests.torch.instruments.test_replay import POLICIES, loss_of, prepared, same_states, tokens, trained_state
from tests.torch.nets import draw

TINY = ["model.context=8", "model.layers=1", "model.width=16", "model.heads=2"]
TINY += ["training.batch=4", "training.compile=false"]


def tiny(policy, *settings):
    """A session on the small model of `tiny`, after a step: before it, most gradients are zero."""
    session = Session(load("tiny", [*TINY, *settings]), Policy.parse(policy), "cpu", lambda applied, xp: 1.0)
    session.step(batch(0, session))
    return session


def test_fp32_equals_itself():
    session = tiny("fp32")
    result = session.shadow(batch(1, session))
    assert result.difference == 0.0
    assert {layer.sums.error for layer in result.layers.values()} == {0.0}
    assert result.outside == []
    assert "the gradients of all" in str(result)


ROUNDING = [
    ("bf16-mixed", "training.micro_batches=2"),
    ("bf16-mixed,param=fp32:split", "training.micro_batches=2"),
    ("fp16-mixed,emulate=true", "training.micro_batches=2"),
    ("bf16-mixed,emulate=true", "model.layers=12"),  # whose stream every block rounds
]


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("bf16-mixed,emulate=true", "training.micro_batches=2")]
    + [pytest.param(*case, marks=pytest.mark.prove) for case in ROUNDING],
)
def test_a_policy_that_only_rounds_its_operands_is_inside(policy, settings):
    session = tiny(policy, settings)
    result = session.shadow(batch(1, session))
    assert result.finite
    assert result.outside == []
    assert not result.loss_outside
    assert result.causes == ()
    assert {layer.sums.error > 0 for layer in result.layers.values()} == {True}


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed,emulate=true", "fp8-mixed,emulate=true"])
def test_the_recipe_tiny_is_inside_at_every_step(policy):
    session = tiny(policy, "model.layers=2", "model.width=32")
    for step in range(1, 4):
        result = session.shadow(batch(step, session))
        assert (result.outside, result.loss_outside) == ([], False), step
        session.step(batch(step, session))


def test_a_norm_that_a_rule_makes_narrow_is_outside_and_named():
    session = tiny("fp32; blocks.0.mlp_norm: norm=bf16")
    result = session.shadow(batch(1, session))
    assert result.causes == ("blocks.0.mlp_norm",)
    assert "blocks.0.mlp_norm" in result.outside
    assert "`blocks.0.mlp_norm` alone, with the rest in fp32, changes gradients" in str(result)
    event = result.to_event()
    assert (event["causes"], event["casts"], event["unwidened"]) == (["blocks.0.mlp_norm"], {}, {})
    assert event["layers"]["blocks.0.mlp_norm"]["outside"]
    assert event["layers"]["blocks.0.mlp_norm"].keys() == {"cosine", "norm_ratio", "sqnr", "band", "outside"}


def test_dropout_has_the_masks_of_the_step_in_every_pass():
    run, net = prepared("bf16-mixed")
    seen = []
    net.dropout.register_forward_hook(lambda module, args, output: seen.append(output == 0))
    run.shadow(loss_of(net), [tokens(1)])
    masks = seen[:]
    run.step(loss_of(net), [tokens(1)])
    # relu makes zeros too, where rounding decides; but what dropout dropped in the step is zero in all of them.
    assert len(masks) == 10
    assert torch.equal(masks[0], seen[-1])
    assert min((mask == masks[0]).float().mean() for mask in masks) > 0.9


@pytest.mark.prove
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_training_continues_bit_for_bit(policy):
    def look(run, loss_fn):
        if int(run.num_applied) == 1:
            run.shadow(loss_fn, [tokens(9), tokens(8, rows=3)])

    assert same_states(trained_state(policy), trained_state(policy, look))


def test_noise_is_half_an_ulp_up_or_down_the_same_for_the_same_number():
    x = draw(4096)
    for fmt in (BF16, FP16):
        moved = shift_by_half_ulp(x, fmt, 3)
        ulps = (moved - x).abs() / 2.0 ** (x.abs().log2().floor() - fmt.mantissa_bits)
        torch.testing.assert_close(ulps, torch.full_like(x, 0.5), rtol=0, atol=2.0**-10)
        assert 0.45 < (moved > x).float().mean() < 0.55
        assert torch.equal(shift_by_half_ulp(x.flip(0), fmt, 3).flip(0), moved)
        assert not torch.equal(shift_by_half_ulp(x, fmt, 4), moved)
    assert torch.equal(shift_by_half_ulp(torch.zeros(3), BF16, 0), torch.zeros(3))
    small = draw(64, scale=1e-9)  # below fp16's smallest number: as far as zero, or twice as large
    assert {*(shift_by_half_ulp(small, FP16, 0) / small).tolist()} == {0.0, 2.0}
    narrow = shift_by_half_ulp(draw(4096, scale=1e-6), E4M3, 0)  # scaled by its amax
    assert ((narrow - draw(4096, scale=1e-6)).abs() < draw(4096, scale=1e-6).abs().max() * 2.0**-4).all()


def test_any_model_is_compared_layer_by_layer_also_what_its_own_code_multiplies():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.q, self.norm = nn.Embedding(16, 16), nn.Linear(16, 16), nn.RMSNorm(16)
            self.head = nn.Parameter(torch.randn(16, 16) * 0.1)

        def forward(self, index):
            x = self.embed(index)
            q = self.q(self.norm(x))
            return F.scaled_dot_product_attention(q, x, x) @ self.head

    torch.manual_seed(0)
    net = Own()
    run = prepare(net, AdamW(net.named_parameters(), lr=1e-2), "bf16-mixed")
    index = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(1))
    result = run.shadow(lambda i: net(i).square().mean(), [index])
    assert [*result.layers] == ["head", "embed", "q", "norm"]
    assert result.outside == []
    assert min(layer.band.sqnr for layer in result.layers.values()) < 60


def test_what_cannot_be_compared_is_refused_or_said():
    run, net = prepared("fp16-mixed")
    with refuses(HalfstepError, "there are no batches"):
        run.shadow(loss_of(net), [])
    run.scale_state = run.scale_state._replace(scale=torch.tensor(2.0**60))
    result = run.shadow(loss_of(net), [tokens(1)])
    assert not result.finite
    assert (result.outside, result.loss_outside, result.describe()) == ([], False, "")
    assert "is not finite: run.blame" in str(result)
    run.unprepare()
    with refuses(HalfstepError, "the run has ended"):
        run.shadow(loss_of(net), [tokens(1)])
