"""Fabric under a policy: the bits of a loop by hand, resumed exactly, nothing bypassed."""

import copy

import pytest
import torch
from torch.nn import functional as F

from halfstep.core.errors import HalfstepError
from halfstep.integrations.lightning import Fabric
from halfstep.torch import prepare
from tests.integrations.lightning.modules import (
    BF16,
    CLIP,
    FP16,
    FP32,
    MICRO,
    NARROW,
    POLICIES,
    SPLIT,
    Module,
    assert_same,
    batches,
    fabric_of,
    loop,
    network,
    set_up,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


@pytest.mark.parametrize("policy", [*POLICIES, SPLIT])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_fabric_takes_the_steps_of_a_loop_by_hand(policy, apart):
    fabric, model, optimizer = set_up(policy, apart=apart)
    torch.manual_seed(2)
    result = loop(fabric, model, optimizer, 3)
    assert float(result.grad_norm) > CLIP
    net = network()
    run, data = prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3), policy, clip_norm=CLIP), batches()
    torch.manual_seed(2)
    for update in range(3):
        for place in range(MICRO):
            inputs, targets = data[update * MICRO + place]
            run.backward(F.cross_entropy(net(inputs), targets) / MICRO, normalized=True)
        run.update()
    assert_same(net, model)


@pytest.mark.parametrize("policy", [FP32, BF16, FP16, SPLIT, NARROW])
def test_a_checkpoint_of_fabric_resumes_to_the_same_bits(policy, tmp_path):
    def go(last, resume=False):
        fabric, model, optimizer = set_up(policy)
        torch.manual_seed(2)
        state = {"model": model, "optimizer": optimizer, "update": 0}
        if resume:
            rest = fabric.load(tmp_path / "saved.ckpt", state)
            assert rest == {"extra": 7}
        loop(fabric, model, optimizer, last, state["update"])
        fabric.save(tmp_path / "saved.ckpt", {**state, "update": last, "extra": 7})
        return model, fabric.run_of(model)

    whole, run = go(4)
    go(2)
    resumed, again = go(4, resume=True)
    assert_same(whole, resumed)
    tensors = [each.state_dict()["tensors"] for each in (run, again)]
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())


def test_weights_alone_are_saved_and_loaded_as_fabric_does(tmp_path):
    fabric, model, optimizer = set_up("bf16-mixed")
    loop(fabric, model, optimizer, 1)
    fabric.save(tmp_path / "weights.ckpt", {"model": model})
    assert torch.load(tmp_path / "weights.ckpt", weights_only=True).keys() == {"model"}
    other, fresh, stepped = set_up("bf16-mixed")
    other.load(tmp_path / "weights.ckpt", {"model": fresh})
    assert_same(model, fresh)
    for strict in (True, False):
        with pytest.raises(HalfstepError, match="has no state of a run"):
            other.load(tmp_path / "weights.ckpt", {"model": fresh, "optimizer": stepped}, strict=strict)
    fabric.save(tmp_path / "all.ckpt", {"model": model, "first": optimizer})
    with pytest.raises(HalfstepError, match="no run for `optimizer`, only for first"):
        other.load(tmp_path / "all.ckpt", {"model": fresh, "optimizer": stepped}, strict=False)
    with pytest.raises(HalfstepError, match="the entry of the runs' states"):
        fabric.save(tmp_path / "all.ckpt", {"halfstep": 1})


def test_fabric_clips_by_value_and_returns_norms():
    fabric, model, optimizer = set_up("fp16-mixed")
    inputs, targets = batches()[0]
    fabric.backward(F.cross_entropy(model(inputs), targets))
    norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP)
    result = optimizer.step()
    assert float(norm) == pytest.approx(float(result.grad_norm), rel=2**-20)
    assert not result.skipped
    fabric.backward(F.cross_entropy(model(inputs), targets))
    fabric.clip_gradients(model, optimizer, clip_val=1e-3)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) <= 1e-3 * (1 + 2**-20)
    norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP)
    assert float(norm) == float(optimizer.step().grad_norm) > 0
    fabric.backward(F.cross_entropy(model(inputs), targets))
    assert float(optimizer.step().grad_norm) > 0  # and no clipping is left from before
    assert fabric.run_of(model).clip_norm == 0.0


def test_fabric_skips_and_returns_the_flag():
    fabric, model, optimizer = set_up("fp16-mixed")
    inputs, targets = batches()[0]
    before = copy.deepcopy(model.state_dict())
    fabric.backward(F.cross_entropy(model(inputs), targets) * float("inf"))
    assert optimizer.step().skipped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def closure():
        loss = F.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        return loss

    assert optimizer.step(closure) > 0
    assert int(fabric.run_of(model).num_applied) == 1


def test_fabric_with_two_models_needs_to_know_whose_loss_it_is():
    fabric, model, optimizer = set_up("bf16-mixed")
    teacher = fabric.setup(network())
    inputs, targets = batches()[0]
    with torch.no_grad():
        teacher(inputs)
    fabric.backward(F.cross_entropy(model(inputs), targets))
    optimizer.step()
    other = network()
    other, second = fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(HalfstepError, match="2 models were set up"):
        fabric.backward(F.cross_entropy(model(inputs), targets))
    fabric.backward(F.cross_entropy(other(inputs), targets), model=other)
    second.step()
    assert [int(fabric.run_of(each).num_applied) for each in (model, other)] == [1, 1]


def test_fabric_reaches_functions_outside_of_the_model():
    fabric, model, _ = set_up("bf16-mixed")
    logits = model(batches()[0][0])
    assert logits.dtype == torch.float32
    with fabric.autocast():
        narrow = F.cross_entropy(logits.bfloat16(), batches()[0][1])
    assert narrow.dtype == torch.float32


def test_fabric_runs_the_steps_of_a_lightning_module_inside_the_policy():
    module = Module()
    fabric, optimizer = fabric_of("fp16-mixed"), torch.optim.AdamW(module.parameters(), lr=3e-3)
    model, stepped = fabric.setup(module, optimizer)
    loss = model.training_step(batches()[0], 0)
    assert loss.dtype == torch.float32  # of fp16 logits
    assert module.seen == [torch.float16]
    fabric.backward(loss)
    assert not stepped.step().skipped


def test_what_fabric_would_bypass_is_refused():
    fabric, model, optimizer = set_up("bf16-mixed")
    loss = F.cross_entropy(model(batches()[0][0]), batches()[0][1])
    with pytest.raises(RuntimeError, match=r"call `fabric\.backward"):
        loss.backward()
    refused = {
        "precision='bf16-mixed' were given": lambda: Fabric(policy="fp32", precision="bf16-mixed"),
        "retain_graph=True": lambda: fabric.backward(loss, retain_graph=True),
        "error_if_nonfinite=True": lambda: fabric.clip_gradients(
            model, optimizer, max_norm=1.0, error_if_nonfinite=True
        ),
        "was not set up": lambda: fabric.run_of(network()),
        "no model that was set up": lambda: fabric.setup_optimizers(torch.optim.SGD(network().parameters())),
    }
    for words, call in refused.items():
        with pytest.raises(HalfstepError, match=words) as caught:
            call()
        assert caught.value.hint
