"""`halfstep eval` in any policy and with averages, and `halfstep artifact`, as people type them."""

import json

import pytest

from halfstep.cli.main import run
from halfstep.training.artifact import decode

GIVEN = [
    "model.vocabulary=256",
    "model.context=16",
    "model.layers=2",
    "model.width=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.mlp_width=32",
    "training.batch=2",
    "training.micro_batches=1",
    "training.steps=3",
    "training.compile=false",
    "training.validation_tokens=64",
]


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


def asked(capsys, *words):
    code = run([*map(str, words), "--device", "cpu", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "policy",
    [
        "fp32",
        "bf16-mixed,emulate=true",
        "bf16-mixed,param=fp32:split",
        "bf16-true",
        "fp16-mixed,emulate=true",
        "fp8-mixed,emulate=true",
        "fp8-mixed,emulate=true,eval=fp32",
    ],
)
def test_a_checkpoint_is_evaluated_in_any_policy(trained, capsys, policy):
    _, trained_in = asked(capsys, "eval", trained)
    code, found = asked(capsys, "eval", trained, "--policy", policy)
    assert code == 0
    assert found["weights"] == "ema"
    assert found["loss"] == pytest.approx(trained_in["loss"], rel=2**-7)
    if policy == "fp32":
        assert found["loss"] != trained_in["loss"]  # it did run in another precision


def test_averages_or_weights_as_asked_for(trained, capsys):
    _, average = asked(capsys, "eval", trained, "--weights", "ema")
    _, plain = asked(capsys, "eval", trained, "--weights", "model")
    _, unnamed = asked(capsys, "eval", trained)
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
    code, told = asked(capsys, "artifact", trained)
    data = (trained / "model.int8z").read_bytes()
    assert (code, told["bytes"], told["limit"], told["over"]) == (0, len(data), 16_000_000, 0)
    _, before = asked(capsys, "eval", trained)
    assert told["loss_before"] == before["loss"]
    assert told["loss_after"] != told["loss_before"]
    assert told["bits_per_byte_after"] == pytest.approx(told["bits_per_byte_before"], rel=0.01)
    # the policy to evaluate in does not change what is written
    out = tmp_path / "other.int8z"
    asked(capsys, "artifact", trained, "--policy", "bf16-true", "--out", out)
    assert out.read_bytes() == data
    asked(capsys, "artifact", trained, "--weights", "model", "--out", out)
    assert out.read_bytes() != data
    assert decode(out.read_bytes())[0].layers == 2


def test_an_artifact_over_its_limit_is_an_exit_code(trained, tmp_path, capsys):
    code, told = asked(capsys, "artifact", trained, "--limit", "100", "--out", tmp_path / "x")
    assert (code, told["over"]) == (1, told["bytes"] - 100)
    assert (tmp_path / "x").exists()
    assert run(["artifact", str(trained), "--limit", "-1"]) == 2
    assert "not negative" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(trained, tmp_path, capsys):
    assert run(["artifact", str(trained), "--device", "cpu", "--out", str(tmp_path / "no" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_artifact_of_a_checkpoint_lies_in_the_run_from_wherever_it_is_named(trained, capsys, monkeypatch):
    (trained / "model.int8z").unlink(missing_ok=True)
    monkeypatch.chdir(trained / "checkpoints")
    asked(capsys, "artifact", "step-000003")
    assert (trained / "model.int8z").is_file()
    assert not (trained / "checkpoints" / "model.int8z").exists()
