"""The sources of `speedrun` and `golf` in plain torch compute and train like the recipes."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.race import recipe_sources as sources
from benchmarks.race import recipe_tokens, recipes
from halfstep.config.load import load
from halfstep.config.weights import initial_weights
from halfstep.core.policy import Policy
from halfstep.torch.model import Decoder
from halfstep.training.data.load import load_corpus
from halfstep.training.session import open_session

SHARED = ["model.vocabulary=64", "model.context=16", "model.width=32", "training.batch=2"]
SHARED += ["training.micro_batches=2", "training.compile=false"]
SMALL = {
    "speedrun": ["model.layers=3", "model.heads=2"],
    "golf": ["model.layers=5", "model.heads=4", "model.kv_heads=2", "model.mlp_width=64"],
}


def config_of(recipe):
    return load(recipe, [*SHARED, *SMALL[recipe]])


def awake(model):
    """Initial weights plus noise: zeros and ones would hide a wrong formula."""
    draw = np.random.default_rng(0).standard_normal
    return {n: np.asarray(v + 0.3 * draw(v.shape), np.float32) for n, v in initial_weights(model, 0)}


def source_of(recipe, weights, tables=torch.float32):
    model = {"speedrun": sources.Speedrun, "golf": sources.Golf}[recipe](config_of(recipe).model)
    model.table_dtype = tables
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


@pytest.mark.parametrize("recipe", SMALL)
def test_the_recipe_computes_what_its_source_computes(recipe):
    """Loss and gradients in fp32: some fifty sums of at most 128 terms in sequence, with random signs."""
    config = config_of(recipe).model
    weights = awake(config)
    ours, theirs = Decoder(config), source_of(recipe, weights)
    ours.set_weights(weights.items())
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 64, (3, 17)))
    loss = ours.loss(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    expected = theirs(tokens[:, :-1], tokens[:, 1:])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    loss.backward()
    expected.backward()
    named = dict(theirs.named_parameters())
    assert named.keys() == dict(ours.named_parameters()).keys()
    for name, p in ours.named_parameters():
        if name == "blocks.0.attn.value_mix":  # the first block mixes its values with themselves
            assert named[name].grad.abs() < 1e-5
            continue
        assert torch.linalg.norm(p.grad - named[name].grad) <= 2e-5 * torch.linalg.norm(p.grad), name


@torch.no_grad()
def test_rotating_the_other_way_equals_exchanging_halves(monkeypatch):
    """The sources rotate by the negative angle."""
    weights = awake(config_of("speedrun").model)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 64, (3, 17)))
    expected = source_of("speedrun", weights)(tokens[:, :-1], tokens[:, 1:])
    rotate = sources.rotate
    monkeypatch.setattr(sources, "rotate", lambda x, cos, sin: rotate(x, cos, -sin))
    other = source_of("speedrun", weights)(tokens[:, :-1], tokens[:, 1:])
    assert abs(float(other - expected)) > 1e-4
    for name in weights:
        if name.endswith(("attn.q.weight", "attn.k.weight")):
            heads = weights[name].reshape(2, 2, 8, 32)  # heads, halves, features of a half
            weights[name] = np.ascontiguousarray(heads[:, ::-1]).reshape(32, 32)
    exchanged = source_of("speedrun", weights)(tokens[:, :-1], tokens[:, 1:])
    assert float(exchanged) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.prove
@pytest.mark.parametrize("recipe", SMALL)
def test_the_recipe_trains_like_its_source(recipe):
    """Three updates with the source's own optimizers, in bf16: the same losses to a rounding of the logits."""
    config = load(recipe, [*SHARED, *SMALL[recipe], "model.layers=2", "model.context=8", "training.batch=1"])
    if recipe == "speedrun":
        config = replace(config, optimizer=replace(config.optimizer, head_rate=0.05))  # for such a small head
    rng = np.random.default_rng(2)
    batches = [rng.integers(0, 8, (2, 1, 9)).astype(np.int32) for _ in range(4)]
    session = open_session(config, Policy.parse("bf16-mixed"), "cpu")
    losses = [session.read(session.step(batch))["loss"] for batch in batches]
    arm = sources.Arm(config, dict(initial_weights(config.model, config.seed)), torch.device("cpu"))
    try:
        expected = []
        for done, batch in enumerate(batches):
            parts = [torch.from_numpy(part).long() for part in batch]
            expected.append(float(arm.step(done, [(t[:, :-1], t[:, 1:]) for t in parts], 1.0)))
    finally:
        del arm  # DDP as the last to hold the group would wait for gloo's threads, and those for the interpreter
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.set_float32_matmul_precision("highest")  # golf's source allows TF32
    assert losses == pytest.approx(expected, rel=2**-7)
    assert abs(losses[-1] - losses[0]) > 0.05  # the weights did move


def test_tokens_are_packed_from_source_text(tmp_path):
    pytest.importorskip("tokenizers")
    for i in range(120):
        (tmp_path / f"m{i:03}.py").write_text(f"def f{i}(x):\n    return x + {i}  # größer\n" * 3)
    summary = recipe_tokens.make(tmp_path / "out", 300, 1, [tmp_path])
    corpus = load_corpus(str(tmp_path / "out"), 0.1, 300)
    assert (len(corpus.train), len(corpus.validation)) == (summary["train_tokens"], summary["val_tokens"])
    sizes = [len((tmp_path / f"m{i:03}.py").read_bytes()) for i in range(120)]
    assert summary["val_bytes"] == sum(sizes[::50])
    assert summary["train_bytes"] + summary["val_bytes"] == sum(sizes)
    assert summary == json.loads((tmp_path / "out" / "tokens.json").read_text())
    assert recipe_tokens.make(tmp_path / "out", 300) == summary  # used as it is


def test_the_table_shows_the_measurements(monkeypatch):
    arm = {"losses": [3.0] * 4, "evaluations": {4: 2.5}, "memory": 35463 << 20}
    results = {
        "tokens_per_step": 524288,
        "arms": {"halfstep": {**arm, "seconds": [1.0, 1.1]}, "source": {**arm, "seconds": [1.09, 1.1]}},
    }
    table = "\n".join(recipes.table(results, "speedrun"))
    assert "time -4.1%, memory +0.0%" in table
    assert "time +0.4%, within 3 %" in table
    results["arms"]["source"]["seconds"] = [1.3]
    assert "NOT within 3 %" in "\n".join(recipes.table(results, "speedrun"))
    monkeypatch.setattr(sys, "argv", ["x", "--recipe", "golf", "--tokens", "a", "--json=b", "--steps", "3"])
    assert recipes.worker_options() == ["--recipe", "golf", "--steps", "3"]
