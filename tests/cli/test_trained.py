"""`halfstep eval` in any policy and with averages, and `halfstep artifact`, as people type them."""

import json
import shutil

import pytest

from halfstep.cli.main import run
from halfstep.training.weights.artifact import decode
from tests.training.runs import raising

GIVEN = ["model.vocabulary=256", "model.context=16", "model.layers=2", "model.width=16", "model.heads=4",
         "model.kv_heads=2", "model.mlp_width=32", "training.batch=2", "training.micro_batches=1",
         "training.steps=3", "training.compile=false", "training.validation_tokens=64"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a small `golf` that keeps averages."""
    folder = tmp_path_factory.mktemp("golf")
    (folder / "text.txt").write_text("\n\n".join(f"line {i} of {i * i}" for i in range(400)))
    chosen = [*GIVEN, f"data.source={folder / 'text.txt'}", "training.ema=0.5"]
    settings = [word for setting in chosen for word in ("--set", setting)]
    out = str(folder / "run")
    assert (
        run(["train", "golf", "--policy", "bf16-mixed,emulate=true", "--device", "cpu", "--out", out, *settings])
        == 0
    )
    return folder / "run"


def run_json(capsys, *words):
    return run([*map(str, words), "--device", "cpu", "--json"]), json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed,emulate=true", "bf16-mixed,param=fp32:split", "bf16-true",
                                    "fp16-mixed,emulate=true", "fp8-mixed,emulate=true",
                                    "fp8-mixed,emulate=true,eval=fp32"])  # fmt: skip
def test_a_checkpoint_is_evaluated_in_any_policy(trained, capsys, policy):
    _, trained_in = run_json(capsys, "eval", trained)
    code, found = run_json(capsys, "eval", trained, "--policy", policy)
    assert (code, found["weights"], found["loss"]) == (0, "ema", pytest.approx(trained_in["loss"], rel=2**-7))
    if policy == "fp32":
        assert found["loss"] != trained_in["loss"]  # it did run in another precision


def test_averages_or_weights_as_requested(trained, capsys):
    _, average = run_json(capsys, "eval", trained, "--weights", "ema")
    _, plain = run_json(capsys, "eval", trained, "--weights", "model")
    _, unnamed = run_json(capsys, "eval", trained)
    assert average == unnamed
    assert (average["weights"], plain["weights"]) == ("ema", "model")
    assert abs(average["loss"] - plain["loss"]) > 1e-3
    events = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    (last,) = [event for event in events if event["event"] == "end"]
    assert last["validation_loss"] == average["loss"]  # what the run was judged by


def test_averages_that_were_not_kept_are_refused(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {i} of {i * i}" for i in range(400)))
    settings = [
        word for setting in [*GIVEN, f"data.source={tmp_path / 'text.txt'}"] for word in ("--set", setting)
    ]
    out = str(tmp_path / "run")
    assert run(["train", "tiny", "--policy", "fp32", "--device", "cpu", "--out", out, *settings]) == 0
    assert run(["eval", out, "--weights", "ema", "--device", "cpu"]) == 2
    assert "kept no average" in capsys.readouterr().err


def test_an_artifact_of_a_run(trained, tmp_path, capsys):
    code, result = run_json(capsys, "artifact", trained)
    data = (trained / "model.int8z").read_bytes()
    assert (code, result["bytes"], result["limit"], result["over"]) == (0, len(data), 16_000_000, 0)
    _, before = run_json(capsys, "eval", trained)
    assert result["loss_before"] == before["loss"]
    assert result["loss_after"] != result["loss_before"]
    assert result["bits_per_byte_after"] == pytest.approx(result["bits_per_byte_before"], rel=0.01)
    # the policy to evaluate in does not change what is written
    out = tmp_path / "other.int8z"
    run_json(capsys, "artifact", trained, "--policy", "bf16-true", "--out", out)
    assert out.read_bytes() == data
    run_json(capsys, "artifact", trained, "--weights", "model", "--out", out)
    assert out.read_bytes() != data
    assert decode(out.read_bytes())[0].layers == 2


def test_an_artifact_is_evaluated_sampled_from_and_trained_further(trained, tmp_path, capsysbinary):
    place = tmp_path / "model.int8z"
    _, result = run_json(capsysbinary, "artifact", trained, "--out", place)
    _, found = run_json(capsysbinary, "eval", place)
    assert (found["loss"], found["bits_per_byte"]) == (result["loss_after"], result["bits_per_byte_after"])
    assert (found["step"], found["policy"], found["weights"]) == (3, "bf16-mixed,emulate=true", "ema")
    capsysbinary.readouterr()
    assert run(["sample", str(place), "--device", "cpu", "--prompt", "line", "--length", "5"]) == 0
    assert len(capsysbinary.readouterr().out) == len(b"line") + 5 + 1
    settings = [word for s in [*GIVEN, f"data.source={trained.parent / 'text.txt'}"] for word in ("--set", s)]
    again = ["train", "golf", "--policy", "fp32", "--device", "cpu", "--out", str(tmp_path / "again")]
    assert run([*again, "--init", str(place), *settings]) == 0
    assert "its matrices were rounded to int8" in " ".join(capsysbinary.readouterr().err.decode().split())
    for wrong, said in (
        (["eval", str(place), "--weights", "model"], "was made of its run's ema weights"),
        (["artifact", str(place)], "is an artifact already"),
    ):
        assert run(wrong) == 2
        assert said in " ".join(capsysbinary.readouterr().err.decode().split())


@pytest.mark.parametrize("backend", ["mlx", pytest.param("jax", marks=pytest.mark.prove)])
def test_a_model_is_evaluated_and_sampled_from_on_another_backend(trained, tmp_path, capsysbinary, backend):
    pytest.importorskip("mlx.core" if backend == "mlx" else backend)
    fp32 = ["--policy", "fp32"]
    _, here = run_json(capsysbinary, "eval", trained, *fp32)
    code, there = run_json(capsysbinary, "eval", trained, "--backend", backend, *fp32)
    assert (code, here["backend"], there["backend"]) == (0, "torch", backend)
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
    sampled = ["sample", str(trained), "--device", "cpu", "--length", "9", "--temperature", "0", *fp32]
    assert run(sampled) == 0
    text = capsysbinary.readouterr().out
    assert run([*sampled, "--backend", backend]) == 0
    assert capsysbinary.readouterr().out == text
    place = tmp_path / "model.int8z"
    assert run_json(capsysbinary, "artifact", trained, "--backend", backend, "--out", place, *fp32)[0] == 0
    assert run_json(capsysbinary, "artifact", trained, "--out", tmp_path / "torch.int8z", *fp32)[0] == 0
    assert place.read_bytes() == (tmp_path / "torch.int8z").read_bytes()


def test_an_artifact_over_its_limit_is_an_exit_code_and_an_older_one_is_replaced(trained, tmp_path, capsys):
    code, result = run_json(capsys, "artifact", trained, "--limit", "100", "--out", tmp_path / "x")
    assert (code, result["over"]) == (1, result["bytes"] - 100)
    assert (tmp_path / "x").exists()
    assert run(["artifact", str(trained), "--device", "cpu", "--out", str(tmp_path / "no" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert run(["artifact", str(trained), "--limit", "-1"]) == 2
    assert "--limit must be from 0 to" in capsys.readouterr().err
    place = tmp_path / "x"
    place.write_bytes(b"HSINT8Z\1 of another run")
    assert run_json(capsys, "artifact", trained, "--out", place)[0] == 0
    assert decode(place.read_bytes())[0].layers == 2


def test_the_artifact_of_a_checkpoint_is_in_the_run_folder(trained, capsys, monkeypatch):
    (trained / "model.int8z").unlink(missing_ok=True)
    monkeypatch.chdir(trained / "checkpoints")
    run_json(capsys, "artifact", "step-000003")
    assert (trained / "model.int8z").is_file()
    assert not (trained / "checkpoints" / "model.int8z").exists()


PROTECTED = ["run.toml", "events.jsonl", "lock", "loggers.json", "report.html", "checkpoints/new"]
STANDING = ["checkpoints/step-000003/state.safetensors", "checkpoints/step-000003", "../text.txt"]


@pytest.fixture
def untouched(monkeypatch):
    """No checkpoint is read: what is refused is refused before the work."""
    monkeypatch.setattr("halfstep.training.run.trained.open_trained", raising(AssertionError("the work began")))


@pytest.mark.parametrize("name", [*PROTECTED, *STANDING])
@pytest.mark.parametrize("named", [".", "checkpoints/step-000003"])
def test_an_artifact_replaces_no_other_file(trained, untouched, capsys, named, name):
    place = trained / name
    before = place.read_bytes() if place.is_file() else None
    assert run(["artifact", str(trained / named), "--out", str(place)]) == 2
    err = capsys.readouterr().err
    assert f"error: `{place}` " in err
    assert "name another file with --out" in err
    assert before == (place.read_bytes() if place.is_file() else None)


def test_an_artifact_is_written_neither_among_checkpoints_nor_over_a_users_file(
    trained, untouched, capsys, tmp_path
):
    (tmp_path / "link").symlink_to(trained / "checkpoints")
    for place in (tmp_path / "link" / "x", trained / ".." / trained.name / "checkpoints" / "x"):
        assert run(["artifact", str(trained), "--out", str(place)]) == 2
        assert "belongs to the run" in capsys.readouterr().err
    (trained / "model.int8z").write_text("mine")
    assert run(["artifact", str(trained)]) == 2
    assert "exists, and is not an artifact" in capsys.readouterr().err
    assert (trained / "model.int8z").read_text() == "mine"
    (trained / "model.int8z").unlink()


def test_text_is_sampled_from_averages_or_weights_as_requested(trained, tmp_path, capfdbinary):
    def sampled(place, *extra):
        assert run(["sample", str(place), "--device", "cpu", "--length", "20", "--policy", "fp32", *extra]) == 0
        return capfdbinary.readouterr().out

    capfdbinary.readouterr()
    unnamed = sampled(trained)
    assert sampled(trained, "--weights", "ema") == unnamed
    assert sampled(trained, "--weights", "model") != unnamed
    copy = shutil.copytree(trained / "checkpoints" / "step-000003", tmp_path / "best")
    assert sampled(copy) == unnamed


def test_a_copy_of_a_checkpoint_is_one_whatever_its_name(trained, tmp_path, capsys, monkeypatch):
    best = shutil.copytree(trained / "checkpoints" / "step-000003", tmp_path / "best")
    _, before = run_json(capsys, "eval", trained)
    assert run_json(capsys, "eval", best) == (0, before)
    monkeypatch.chdir(best)
    assert run_json(capsys, "eval", ".") == (0, before)
    assert run_json(capsys, "artifact", best)[1]["path"] == str(tmp_path / "model.int8z")  # next to it
    (tmp_path / "made").touch()  # as mktemp does
    assert run_json(capsys, "artifact", best, "--out", tmp_path / "made")[0] == 0
    assert run_json(capsys, "eval", best) == (0, before)


@pytest.mark.parametrize("name", ["step-000003", "step-000003.damaged", "best"])
def test_a_copy_of_a_checkpoint_that_is_damaged_is_refused(trained, tmp_path, capsys, name):
    copy = shutil.copytree(trained / "checkpoints" / "step-000003", tmp_path / name)
    state = bytearray((copy / "state.safetensors").read_bytes())
    state[-1] ^= 1
    (copy / "state.safetensors").write_bytes(state)
    assert run(["eval", str(copy), "--device", "cpu"]) == 2
    assert "is damaged: its SHA-256 is" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step-000009", "step-000009.damaged"])
def test_a_checkpoint_under_the_name_of_another_step_is_refused(trained, tmp_path, capsys, monkeypatch, name):
    copy = shutil.copytree(trained / "checkpoints" / "step-000003", tmp_path / name)
    monkeypatch.chdir(copy)
    for named in (str(copy), "."):
        assert run(["eval", named, "--device", "cpu"]) == 2
        assert "it holds step 3, expected the step in its name" in capsys.readouterr().err


def test_a_missing_folder_is_not_called_empty(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    said = {"empty": "holds no checkpoint", "gone": "there is no such folder",
            "step-000001": "there is no such folder", "file": "is a file"}  # fmt: skip
    for name, words in said.items():
        for command in ("eval", "sample", "artifact"):
            assert run([command, str(tmp_path / name), "--device", "cpu"]) == 2
            err = capsys.readouterr().err
            assert words in err
            assert "name a run folder" in err
