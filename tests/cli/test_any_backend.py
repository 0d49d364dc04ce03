"""A checkpoint of any backend is evaluated, sampled from, exported and begun with on any, as people type it.

Masters are split where that is asked for, so a checkpoint has halves and remainders; what reads it gets whole
numbers.
"""

import json

import numpy as np
import pytest

from halfstep.cli.main import run
from halfstep.cli.trained import held_out_text
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.core.state_format import Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.evaluation import evaluate
from halfstep.training.loop import Loop
from halfstep.training.paths import CHECKPOINTS
from halfstep.training.run.trained import open_trained
from halfstep.training.weights.artifact import masters

BACKENDS = ("torch", "jax", "mlx")
SPLIT = "bf16-mixed,param=fp32:split"
SHORT = ["model.vocabulary=256", "model.context=16", "model.layers=1", "model.width=16", "model.heads=2",
         "training.batch=2", "training.micro_batches=1", "training.steps=2", "training.compile=false",
         "training.validation_tokens=128", "training.measure_ceiling=false", "monitor.on=false"]  # fmt: skip

pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("\n\n".join(f"line {i} of {i * i}" for i in range(400)))
    return [*SHORT, f"data.source={text}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, settings):
    """A finished run on each backend."""
    made = {backend: tmp_path_factory.mktemp(backend) / "run" for backend in BACKENDS}
    chosen = [word for setting in settings for word in ("--set", setting)]
    for backend, out in made.items():
        words = ["train", "gpt2", "--backend", backend, "--policy", SPLIT, "--device", "cpu", "--out", str(out)]
        assert run([*words, *chosen]) == 0
        saved = checkpoint.load(checkpoint.latest(out / CHECKPOINTS))[0]
        assert saved["model.blocks.0.mlp.up.weight"].dtype == "BF16"
        assert "remainder.blocks.0.mlp.up.weight" in saved
    return made


def weights_of(place):
    trained = open_trained(place, "cpu", policy="fp32", backend="torch")
    return trained, {
        name: value.copy() for name, value in masters(trained.state, trained.config.model, averaged=False)
    }


def bound(place):
    """How much the loss of a run's weights may depend on the order of sums.

    A sum of n products in fp32 is exact for weights that were changed by a relative n 2^-24, if its order is any
    (benchmarks/prove/other_backends.py): twice the most that such changes do to the loss.
    """
    trained, weights = weights_of(place)
    corpus, generator = held_out_text(trained), np.random.default_rng(0)
    losses = [evaluate(trained.session, corpus, trained.config).loss]
    change = trained.config.model.vocabulary * 2.0**-24
    for _ in range(4):
        moved = {name: w * (1 + change * generator.choice([-1.0, 1.0], w.shape)) for name, w in weights.items()}
        stored = {f"model.{n}": Stored("F32", w.shape, w.astype(np.float32).tobytes()) for n, w in moved.items()}
        trained.session.load_weights(stored)
        losses.append(evaluate(trained.session, corpus, trained.config).loss)
    return 2 * max(abs(loss - losses[0]) for loss in losses)


@pytest.mark.parametrize("begun", BACKENDS)
def test_eval_and_sample_on_any(runs, capsysbinary, begun):
    losses, texts = {}, set()
    for backend in BACKENDS:
        where = [str(runs[begun]), "--backend", backend, "--policy", "fp32", "--device", "cpu"]
        capsysbinary.readouterr()
        assert run(["eval", *where, "--json"]) == 0
        losses[backend] = json.loads(capsysbinary.readouterr().out)["loss"]
        assert run(["sample", *where, "--prompt", "line 1", "--length", "8", "--temperature", "0"]) == 0
        texts.add(capsysbinary.readouterr().out)
    most = bound(runs[begun])
    assert 0 < most < 1e-3 * losses["torch"]
    assert max(losses.values()) - min(losses.values()) <= most
    assert len(texts) == 1


@pytest.mark.parametrize("begun", BACKENDS)
def test_begin_on_any_with_its_weights_and_those_of_its_export(runs, settings, tmp_path, capsys, begun):
    _, weights = weights_of(runs[begun])
    sources = [runs[begun]]
    for to in ("hf", "safetensors"):
        place = tmp_path / to
        words = ["export", str(runs[begun]), "--to", to, "--format", "fp32", "--out", str(place)]
        assert run([*words, "--device", "cpu"]) == 0, capsys.readouterr().err
        sources.append(place)
    for source in sources:
        for backend in BACKENDS:
            config = load("gpt2", [*settings, f"backend={backend}", f"init={source}"])
            loop = Loop(config, Policy.parse(SPLIT), tmp_path / f"{source.name}-{backend}", device="cpu")
            found = dict(masters(loop.session.state(), config.model, averaged=False))
            loop.lock.release()
            assert found.keys() == weights.keys()
            assert [name for name in weights if not np.array_equal(found[name], weights[name])] == []
