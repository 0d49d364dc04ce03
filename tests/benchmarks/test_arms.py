"""The recipes of the race: one model, one start, the same data; clipping and the finite check in each."""

import ast
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpt2
from benchmarks.race import arm_worker as worker
from benchmarks.race import arms as recipes
from benchmarks.race.contract import ARMS, CEILING, CLIP_NORM, Setting
from halfstep.core.errors import HalfstepError
from halfstep.torch.convert import apply

CPU = torch.device("cpu")
# How far the format of a recipe alone may take it from fp32.
BF16, FP16 = 2**-8, 2**-11
PEERS = {"accelerate": "accelerate", "fabric": "lightning", "hf": "transformers", "torchao": "torchao"}
# Ours and the one that most people use; the others are part of `make prove`.
NAMES = [n if ARMS[n].ours or n == "autocast" else pytest.param(n, marks=pytest.mark.prove) for n in ARMS]


def setting(arm, **changed):
    usual = Setting(arm, "cpu", 2, 32, 2, 256, 16, 4, 1, compile=False, seed=7, tokens="", held_out="")
    return replace(usual, **changed)


def make(name, **changed):
    if name in PEERS and find_spec(PEERS[name]) is None:
        pytest.skip(f"{PEERS[name]} is not installed")
    if name == "accelerate":  # its state is one of the process, and here the process has several
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    try:
        return recipes.MAKERS[name](setting(name, **changed), CPU, False)
    except recipes.MissingError as error:
        pytest.skip(error.message)


def batch(seed=0, size=4):
    tokens = torch.randint(0, 256, (size, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@cache
def reference_loss():
    """The first loss in fp32."""
    return float(make("fp32").step([batch()]))


def listen(arm, norms):
    step = arm.run.step

    def listened(*given):
        result = step(*given)
        norms.append(float(result.grad_norm))
        return result

    arm.run.step = listened


def weights(arm):
    ours = ARMS[arm.setting.arm].ours  # whose masters may be split
    held = arm.run.weights().values() if ours else arm.model.parameters()
    return [p.detach().clone() for p in held]


def test_every_arm_is_described_and_can_be_made():
    assert list(recipes.MAKERS) == list(ARMS)
    assert {name for name, recipe in ARMS.items() if recipe.ours} == {
        name for name, maker in recipes.MAKERS.items() if issubclass(maker, recipes.Halfstep)
    }
    assert {name: ARMS[name].package for name in ARMS if ARMS[name].package} == PEERS


def test_the_model_is_gpt2_as_in_transformers_and_was_written_without_halfstep_in_mind():
    tree = ast.parse(Path(gpt2.__file__).read_text())
    result = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    result |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert result == {"torch", "torch.nn"}
    with torch.device("meta"):
        model = gpt2.GPT2(layers=12, width=768, heads=12, vocabulary=50304, context=1024)
    # OpenAI's 124,439,808, and the rows that pad 50,257 tokens to 50,304.
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + (50304 - 50257) * 768
    assert model.lm_head.weight is model.wte.weight
    theirs, ours = make("hf").model, make("fp32").model
    with torch.no_grad():
        assert float(theirs(*batch())) == pytest.approx(float(ours(*batch())), rel=1e-6)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_all_begin_with_the_same_loss_and_learn(name):
    arm = make(name)
    first, again = [float(arm.step([batch()])) for _ in range(2)]
    bound = FP16 if "fp16" in name else 0.0 if name == "fp32" else BF16
    expected = reference_loss()
    assert first == pytest.approx(expected, rel=bound, abs=0)
    assert (first == expected) == (name == "fp32")  # what says that it computes in less does
    assert again < first
    assert float(arm.evaluate(batch())) < again


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_not_finite_changes_nothing(name):
    arm = make(name)
    arm.step([batch()])  # moments are there
    before, forward = weights(arm), arm.forward
    arm.forward = lambda *batch: forward(*batch) * torch.inf
    arm.step([batch()])
    assert all(torch.equal(old, new) for old, new in zip(before, weights(arm), strict=True))
    arm.forward = forward
    assert torch.isfinite(arm.step([batch()]))
    assert not all(torch.equal(old, new) for old, new in zip(before, weights(arm), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        n if ARMS[n].ours or n == "autocast" else pytest.param(n, marks=pytest.mark.prove)
        for n in ARMS
        if n != "torchao"  # it steps as autocast does, and rounds other gradients to e5m2
    ],
)
def test_micro_batches_are_one_update_of_their_mean(name, monkeypatch):
    # Both arms must choose alike which layers are narrow; measured, that may depend on what else the machine does.
    monkeypatch.setitem(apply.apply_resolved.__kwdefaults__, "timer", lambda work, precisions: [2.0, 1.0])
    norms = []
    monkeypatch.setattr(recipes, "_found_inf", lambda norm: (norms.append(float(norm)), torch.zeros(()))[1])
    inputs, targets = batch(size=8)
    halves = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    losses, moved = [], []
    for given in ([(inputs, targets)], halves):
        arm = make(name, micro_batches=len(given))
        before = weights(arm)
        if ARMS[name].ours:
            listen(arm, norms)
        losses.append(float(arm.step(given)))
        moved.append([(new - old).sign() for old, new in zip(before, weights(arm), strict=True)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if name == "fp32" else BF16)
    # Adam's first update has the size of the rate and the sign of the gradient, whatever the gradient's size.
    same = [(one == other).float().mean() for one, other in zip(*moved, strict=True)]
    assert min(same) > 0.9
    if name != "autocast-fp16":  # whose scaler looks at the gradients itself
        assert norms[0] == pytest.approx(norms[1], rel=2**-6)


@pytest.mark.parametrize("name", ["fp32", "autocast-fp16"])
def test_a_gradient_is_unscaled_and_then_clipped_to_the_norm(name):
    seen = []
    arm = make(name)
    arm.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # ten times the loss is too much for 65536
    step, forward = arm.optimizer.step, arm.forward

    def looked():
        assert getattr(arm.optimizer, "grad_scale", None) is None  # nothing is left to unscale
        seen.extend(p.grad.norm() for p in arm.model.parameters())
        step()

    arm.optimizer.step = looked
    arm.forward = lambda *batch: forward(*batch) * 10
    arm.step([batch()])
    assert float(torch.stack(seen).norm()) == pytest.approx(CLIP_NORM, rel=1e-4)


def test_a_package_that_is_not_there_is_missing_and_not_replaced(monkeypatch):
    monkeypatch.setattr(recipes, "find_spec", lambda name: None)
    for name, package in PEERS.items():
        with pytest.raises(recipes.MissingError, match=f"{package} is not installed") as caught:
            recipes.MAKERS[name](setting(name), CPU, False)
        assert caught.value.hint == f"pip install {package}"
    with pytest.raises(recipes.MissingError, match="TF32 needs an NVIDIA GPU"):
        recipes.MAKERS["tf32"](setting("tf32"), CPU, False)


@pytest.fixture
def files(tmp_path):
    tokens, held_out = tmp_path / "tokens.npy", tmp_path / "held_out.npy"
    draw = np.random.default_rng(0)
    np.save(tokens, draw.integers(0, 256, (20, 1, 4, 17)).astype(np.uint16))
    np.save(held_out, draw.integers(0, 256, (6, 17)).astype(np.uint16))
    return {"tokens": str(tokens), "held_out": str(held_out)}


def test_a_worker_reads_the_data_once(files):
    racer, hello = worker.start(setting("fp32", batch=16, **files))  # 16: held-out text in fours
    assert (hello["device"], hello["kind"], hello["compiled"]) == ("CPU", "cpu", False)
    answers = [racer.train(3), racer.train(2)]
    by_hand = make("fp32")
    expected = []
    for update in np.load(files["tokens"])[:7]:
        tokens = torch.from_numpy(update[0].astype(np.int64))
        expected.append(float(by_hand.step([(tokens[:, :-1], tokens[:, 1:])])))
    assert answers[0]["losses"] + answers[1]["losses"] == expected
    assert all(answer["seconds"] > 0 for answer in answers)
    windows = torch.from_numpy(np.load(files["held_out"]).astype(np.int64))
    mean = by_hand.evaluate((windows[:, :-1], windows[:, 1:]))
    assert racer.finish()["held_out"] == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.prove
def test_the_ceiling_is_a_racer(files):
    racer, hello = worker.start(setting(CEILING, **files))
    assert hello["versions"] == {"torch": torch.__version__}
    assert racer.train(1)["flops"] > 0
    assert racer.finish() == {}


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("toaster", "`toaster` is not a torch device"),
        ("meta", "the race runs on `cuda` or `cpu`, not on `meta`"),
        pytest.param(
            None,
            "there is no NVIDIA GPU here to race on",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_device_that_cannot_be_raced_on(device, said):
    with pytest.raises(HalfstepError, match=said):
        worker.start(setting("fp32", device=device))
