"""Running out of memory: refused before the model is built, or reported with a remedy."""

import pytest

from halfstep.cli.main import run
from halfstep.config.load import load
from halfstep.core import host
from halfstep.core.policy import Policy
from halfstep.training.checkpoints import checkpoint
from halfstep.training.memory import OutOfMemoryError, check_fits, least_bytes
from tests.training.runs import at_step, events_of, raising, starter

begin = starter("training.batch=6", "training.micro_batches=2", "training.steps=8", "training.save_every=3")


def start(text, out, *extra, backend="torch", **options):
    pytest.importorskip("mlx.core" if backend == "mlx" else backend)
    return begin(text, out, f"backend={backend}", *extra, **options)


@pytest.mark.parametrize(
    ("policy", "settings", "train", "a_parameter"),
    [
        ("fp32", ["optimizer.name=adamw"], True, 4 + 4 + 8),
        ("bf16-mixed", ["optimizer.name=adamw"], True, 4 + 4 + 8),  # masters, gradients and moments are fp32
        ("fp32", ["optimizer.name=muon"], True, 4 + 4 + 4),
        ("bf16-true", [], True, 2 + 2 + 4),
        ("fp32", [], False, 4),
        ("bf16-mixed,param=fp32:split", [], False, 4),
        ("bf16-mixed; lm_head: param=bf16", [], False, 2),
    ],
)
def test_the_least_that_a_run_takes(policy, settings, train, a_parameter):
    config = load("tiny", ["model.tied=false", *settings])
    assert least_bytes(config, Policy.parse(policy), train=train) == a_parameter * config.model.num_parameters


def test_a_model_that_the_device_cannot_hold_is_refused_and_one_that_fits_is_not():
    config, policy = load("tiny"), Policy.parse("fp32")
    least = least_bytes(config, policy, train=True)
    check_fits(config, policy, least, train=True)
    check_fits(config, policy, None, train=True)
    check_fits(config, policy, least - 1, train=False)
    with pytest.raises(
        OutOfMemoryError, match=r"weights, gradients and moments take .* and the device has"
    ) as caught:
        check_fits(config, policy, least - 1, train=True)
    assert "model.width" in caught.value.hint


@pytest.mark.parametrize(("shards", "a_parameter"), [(1, 16), (2, 8), (8, 4)])  # weights are whole at first
def test_shards_hold_a_share(shards, a_parameter):
    config, policy = load("tiny", ["optimizer.name=adamw"]), Policy.parse("fp32")
    least = a_parameter * config.model.num_parameters
    check_fits(config, policy, least, train=True, shards=shards)
    with pytest.raises(OutOfMemoryError, match="takes" if shards > 1 else "take"):
        check_fits(config, policy, least - 1, train=True, shards=shards)


@pytest.mark.parametrize("backend", ["torch", "jax", "mlx"])
@pytest.mark.parametrize("width", [2**20, 2**40])  # more than any machine has; beyond what 64 bits count
def test_a_model_too_large_is_refused_before_anything_is_built(text, tmp_path, backend, width):
    with pytest.raises(OutOfMemoryError, match="parameters"):
        start(text, tmp_path / "run", f"model.width={width}", backend=backend)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("policy", ["auto", "auto,norm=bf16", "bf16-mixed"])
def test_a_model_too_large_is_refused_before_anything_is_measured(text, tmp_path, monkeypatch, capsys, policy):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    words = ["train", "tiny", "--policy", policy, "--device", "cpu", "--out", "run"]
    settings = ["model.width=131072", "model.heads=1024", f"data.source={text}"]
    assert run([*words, *(word for setting in settings for word in ("--set", setting))]) == 2
    assert "weights, gradients and moments take" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def torch_fails():
    import torch

    torch.empty(2**50)


def jax_fails():
    import jax.numpy as jnp

    jnp.zeros(2**45).block_until_ready()


MLX = "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum"
FAILS = {"torch": torch_fails, "jax": jax_fails, "mlx": raising(RuntimeError(MLX))}


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.prove), "mlx"])
def test_a_step_that_does_not_fit_stops_the_run_with_a_remedy(text, out, backend):
    loop = start(text, out, backend=backend)
    at_step(loop, 6, FAILS[backend])
    with pytest.raises(
        OutOfMemoryError, match=r"ran out of memory after step [45]: .* of .*iB were held"
    ) as caught:
        loop.run()
    assert (
        "`--set training.batch=3 --set training.micro_batches=4` makes updates of the same data"
        in caught.value.hint
    )
    assert "training.recompute_blocks=true" in caught.value.hint
    assert "--resume continues after step 3" in caught.value.hint
    assert checkpoint.latest(out / "checkpoints").name == "step-000003"
    (stop,) = events_of(out, "stop")
    assert "ran out of memory" in stop["reason"]
    assert stop["saved"] == 3
    smaller = ["training.batch=3", "training.micro_batches=4", "training.recompute_blocks=true"]
    resumed = start(text, out, *smaller, backend=backend, resume=True)  # as the hint says
    assert any("training.batch was 6 and is 3" in warning for warning in resumed.warnings)
    assert resumed.run().finished


def test_the_hint_names_only_what_takes_less(text, tmp_path):
    loop = start(text, tmp_path / "run", "training.batch=1", "training.recompute_blocks=true")
    at_step(loop, 1, torch_fails)
    with pytest.raises(OutOfMemoryError):
        loop.run()


@pytest.mark.prove
@pytest.mark.parametrize("backend", FAILS)
def test_other_errors_are_left_as_they_are(text, tmp_path, backend):
    loop = start(text, tmp_path / "run", backend=backend)
    at_step(loop, 2, raising(RuntimeError("a shape is wrong")))
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        loop.run()


def test_a_model_that_did_not_fit_on_a_shared_device_says_so(text, tmp_path, monkeypatch):
    from halfstep.torch import session

    monkeypatch.setattr(session.Decoder, "to_empty", lambda *_, **__: torch_fails())
    with pytest.raises(OutOfMemoryError, match=r"while it received .* parameters"):
        start(text, tmp_path / "run")


def test_the_memory_of_a_container_is_what_it_may_have(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_LIMIT", limit)
    whole = host.memory()
    limit.write_text("max\n")
    assert host.memory() == whole
    limit.write_text("123456\n")
    assert host.memory() == 123456
    assert 0 < host.peak_memory() < whole
