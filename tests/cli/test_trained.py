"""`halfstep eval` in any policy and with averages, and `halfstep export --to artifact`, as people type them."""

import json
import shutil

import numpy as np
import pytest

from halfstep.cli.main import run
from halfstep.core.policy import Policy
from halfstep.training.data.shards import header
from halfstep.training.weights.artifact import decode
from tests.training.runs import raising

GIVEN = ["model.vocabulary=256", "model.context=16", "model.layers=2", "model.width=16", "model.heads=4",
         "model.kv_heads=2", "model.mlp_width=32", "training.batch=2", "training.micro_batches=1",
         "training.steps=3", "training.compile=false", "training.validation_tokens=64"]  # fmt: skip
ARTIFACT = ("export", "--to", "artifact")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a small `golf` that keeps averages."""
    folder = tmp_path_factory.mktemp("golf")
    (folder / "text.txt").write_text("\n\n".join(f"line {i} of {i * i}" for i in range(400)))
    words = ["golf", "--policy", "bf16-mixed,emulate=true"]
    return train_on(folder / "text.txt", folder / "run", "training.ema=0.5", words=words)


def train_on(source, out, *more, words=("tiny", "--policy", "fp32")):
    settings = [word for setting in (*GIVEN, f"data.source={source}", *more) for word in ("--set", setting)]
    assert run(["train", *words, "--device", "cpu", "--out", str(out), *settings]) == 0
    return out


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


@pytest.mark.parametrize("command", ["eval", "sample", "export"])
def test_what_a_name_of_another_library_is_read_as_is_said(trained, tmp_path, capfd, command):
    other = ["--length", "1", "--prompt", "x"] if command == "sample" else []
    other = ["--to", "artifact", "--out", str(tmp_path / "a.int8z")] if command == "export" else other
    assert run([command, str(trained), "--policy", "32-true", "--device", "cpu", *other]) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "`32-true` is read as `fp32`, which is what it means in Lightning" in said
    assert run([command, str(trained), "--policy", "", "--device", "cpu", *other]) == 2
    assert "--policy is empty" in capfd.readouterr().err


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


def test_averages_that_were_not_kept_are_refused(text, tmp_path, refused):
    out = train_on(text, tmp_path / "run")
    assert "kept no average" in refused("eval", str(out), "--weights", "ema", "--device", "cpu")


def test_an_artifact_of_a_run(trained, tmp_path, capsys):
    code, result = run_json(capsys, *ARTIFACT, trained)
    data = (trained / "model.int8z").read_bytes()
    assert (code, result["bytes"], result["limit"], result["over"]) == (0, len(data), 16_000_000, 0)
    _, before = run_json(capsys, "eval", trained)
    assert result["loss_before"] == before["loss"]
    assert result["loss_after"] != result["loss_before"]
    assert result["bits_per_byte_after"] == pytest.approx(result["bits_per_byte_before"], rel=0.01)
    # the policy to evaluate in does not change what is written
    out = tmp_path / "other.int8z"
    run_json(capsys, *ARTIFACT, trained, "--policy", "bf16-true", "--out", out)
    assert out.read_bytes() == data
    run_json(capsys, *ARTIFACT, trained, "--weights", "model", "--out", out)
    assert out.read_bytes() != data
    assert decode(out.read_bytes())[0].layers == 2


def test_the_older_name_of_an_artifact_does_the_same(trained, tmp_path, capsys):
    places = [tmp_path / "older.int8z", tmp_path / "newer.int8z"]
    given = [("artifact",), ARTIFACT]
    older, newer = (run_json(capsys, *c, trained, "--out", p) for c, p in zip(given, places, strict=True))
    assert (older[0], {**older[1], "path": ""}) == (newer[0], {**newer[1], "path": ""})
    assert places[0].read_bytes() == places[1].read_bytes()
    assert run(["artifact", "--help"]) == 0
    assert "The same as halfstep export --to artifact" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("to", "option", "value"),
    [
        ("artifact", "--format", "fp32"),
        ("artifact", "--tokens", "64"),
        ("hf", "--limit", "100"),
        ("onnx", "--policy", "fp32"),
        ("safetensors", "--backend", "jax"),
    ],
)
def test_an_option_that_means_nothing_for_a_target_is_refused(trained, refused, to, option, value):
    assert f"error: {option} {value}: `--to {to}` takes no {option}" in refused(
        "export", str(trained), "--to", to, option, value
    )


def test_an_artifact_is_evaluated_sampled_from_and_trained_further(trained, tmp_path, capsysbinary):
    place = tmp_path / "model.int8z"
    _, result = run_json(capsysbinary, *ARTIFACT, trained, "--out", place)
    _, found = run_json(capsysbinary, "eval", place)
    assert (found["loss"], found["bits_per_byte"]) == (result["loss_after"], result["bits_per_byte_after"])
    assert (found["step"], found["policy"], found["weights"]) == (3, "bf16-mixed,emulate=true", "ema")
    capsysbinary.readouterr()
    assert run(["sample", str(place), "--device", "cpu", "--prompt", "line", "--length", "5"]) == 0
    assert len(capsysbinary.readouterr().out) == len(b"line") + 5 + 1
    words = ["golf", "--policy", "fp32", "--init", str(place)]
    train_on(trained.parent / "text.txt", tmp_path / "again", words=words)
    assert "its matrices were rounded to int8" in " ".join(capsysbinary.readouterr().err.decode().split())
    for wrong, said in (
        (["eval", str(place), "--weights", "model"], "was made of its run's ema weights"),
        ([*ARTIFACT, str(place)], "is an artifact already"),
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
    assert run_json(capsysbinary, *ARTIFACT, trained, "--backend", backend, "--out", place, *fp32)[0] == 0
    assert run_json(capsysbinary, *ARTIFACT, trained, "--out", tmp_path / "torch.int8z", *fp32)[0] == 0
    assert place.read_bytes() == (tmp_path / "torch.int8z").read_bytes()


def test_an_artifact_over_its_limit_is_an_exit_code_and_an_older_one_is_replaced(
    trained, tmp_path, capsys, refused
):
    code, result = run_json(capsys, *ARTIFACT, trained, "--limit", "100", "--out", tmp_path / "x")
    assert (code, result["over"]) == (1, result["bytes"] - 100)
    assert (tmp_path / "x").exists()
    assert "cannot be written" in refused(
        *ARTIFACT, str(trained), "--device", "cpu", "--out", str(tmp_path / "no" / "x")
    )
    assert "--limit must be from 0 to" in refused(*ARTIFACT, str(trained), "--limit", "-1")
    place = tmp_path / "x"
    place.write_bytes(b"HSINT8Z\1 of another run")
    assert run_json(capsys, *ARTIFACT, trained, "--out", place)[0] == 0
    assert decode(place.read_bytes())[0].layers == 2


def test_the_artifact_of_a_checkpoint_is_in_the_run_folder(trained, capsys, monkeypatch):
    (trained / "model.int8z").unlink(missing_ok=True)
    monkeypatch.chdir(trained / "checkpoints")
    assert run([*ARTIFACT, "step-000003", "--device", "cpu"]) == 0
    assert "before: held-out loss" in capsys.readouterr().err
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
def test_an_artifact_replaces_no_other_file(trained, untouched, refused, named, name):
    place = trained / name
    before = place.read_bytes() if place.is_file() else None
    err = refused(*ARTIFACT, str(trained / named), "--out", str(place))
    assert f"error: `{place}` " in err
    assert "name another file with --out" in err
    assert before == (place.read_bytes() if place.is_file() else None)


def test_an_artifact_is_written_neither_among_checkpoints_nor_over_a_users_file(
    trained, untouched, refused, tmp_path
):
    (tmp_path / "link").symlink_to(trained / "checkpoints")
    for place in (tmp_path / "link" / "x", trained / ".." / trained.name / "checkpoints" / "x"):
        assert "belongs to the run" in refused(*ARTIFACT, str(trained), "--out", str(place))
    (trained / "model.int8z").write_text("mine")
    assert "exists, and is not an artifact" in refused(*ARTIFACT, str(trained))
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
    assert run_json(capsys, *ARTIFACT, best)[1]["path"] == str(tmp_path / "model.int8z")  # next to it
    (tmp_path / "made").touch()  # as mktemp does
    assert run_json(capsys, *ARTIFACT, best, "--out", tmp_path / "made")[0] == 0
    assert run_json(capsys, "eval", best) == (0, before)


@pytest.mark.parametrize("name", ["step-000003", "step-000003.damaged", "best"])
def test_a_copy_of_a_checkpoint_that_is_damaged_is_refused(trained, tmp_path, refused, name):
    copy = shutil.copytree(trained / "checkpoints" / "step-000003", tmp_path / name)
    state = bytearray((copy / "state.safetensors").read_bytes())
    state[-1] ^= 1
    (copy / "state.safetensors").write_bytes(state)
    assert "is damaged: its SHA-256 is" in refused("eval", str(copy), "--device", "cpu")


@pytest.mark.parametrize("name", ["step-000009", "step-000009.damaged"])
def test_a_checkpoint_under_the_name_of_another_step_is_refused(trained, tmp_path, refused, monkeypatch, name):
    copy = shutil.copytree(trained / "checkpoints" / "step-000003", tmp_path / name)
    monkeypatch.chdir(copy)
    for named in (str(copy), "."):
        assert "it holds step 3, expected the step in its name" in refused("eval", named, "--device", "cpu")


def test_a_missing_folder_is_not_called_empty(tmp_path, refused):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    said = {"empty": "holds no checkpoint", "gone": "there is no such folder",
            "step-000001": "there is no such folder", "file": "is a file"}  # fmt: skip
    for name, words in said.items():
        for command in (["eval"], ["sample"], ARTIFACT):
            err = refused(*command, str(tmp_path / name), "--device", "cpu")
            assert words in err
            assert "name a run folder" in err


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """A text to train on and one to hold out."""
    folder = tmp_path_factory.mktemp("text")
    for name, start in (("train", 0), ("valid", 1000)):
        lines = (f"line {i} of {name}, {i * i}" for i in range(start, start + 200))
        (folder / f"{name}.txt").write_text("\n\n".join(lines))
    return folder


@pytest.fixture
def packed(halves, tmp_path):
    """Packed data with a tokenizer of its own."""
    pytest.importorskip("tokenizers")
    names = [str(tmp_path / name) for name in ("tokenizer.json", "packed")]
    texts = [str(halves / "train.txt"), "--validation", str(halves / "valid.txt")]
    assert run(["data", "train-tokenizer", *texts, "--vocabulary", "280", "--out", names[0]]) == 0
    assert run(["data", "pack", *texts, "--tokenizer", names[0], "--out", names[1], "--workers", "1"]) == 0
    return tmp_path / "packed"


def test_a_model_of_packed_data_is_evaluated_on_any_text_as_if_it_had_been_packed(
    halves, packed, tmp_path, capsysbinary
):
    out, valid = train_on(packed, tmp_path / "run", "model.vocabulary=384"), halves / "valid.txt"
    capsysbinary.readouterr()
    _, own = run_json(capsysbinary, "eval", out)
    assert run_json(capsysbinary, "eval", out, "--validation", valid) == (0, own)
    records = tmp_path / "valid.jsonl"
    records.write_text(json.dumps({"text": valid.read_text()}))
    assert run_json(capsysbinary, "eval", out, "--validation", records) == (0, own)
    _, written = run_json(capsysbinary, *ARTIFACT, out, "--validation", valid)
    assert written["loss_before"] == own["loss"]
    # Elsewhere the index and the tokenizer are enough.
    for path in [*packed.glob("*.bin"), *packed.glob("*.crc"), packed / "token_bytes.npy"]:
        path.unlink()
    there = packed.rename(tmp_path / "there")
    for model, loss in ((out, own["loss"]), (out / "model.int8z", written["loss_after"])):
        _, found = run_json(capsysbinary, "eval", model, "--validation", valid, "--data", there)
        assert (found["loss"], found["bits_per_byte"] is None) == (loss, False)
    assert run(["sample", str(out), "--data", str(there), "--validation", str(valid), "--length", "1"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"line 1000 of valid")
    assert run(["eval", str(out), "--validation", str(valid)]) == 2
    said = " ".join(capsysbinary.readouterr().err.decode().split())
    assert f"the tokenizer of the run is not here: there is no `{packed}`" in said
    assert "index.json and its tokenizer are enough" in said


def test_a_model_with_a_held_out_text_of_its_own_is_evaluated_without_the_text_it_was_trained_on(
    halves, tmp_path, capsysbinary
):
    folder = shutil.copytree(halves, tmp_path / "text")
    train, valid = folder / "train.txt", folder / "valid.txt"
    out = train_on(train, tmp_path / "run", f"data.validation={valid}")
    capsysbinary.readouterr()
    assert run(["eval", str(out), "--device", "cpu"]) == 0
    said = capsysbinary.readouterr().err.decode()
    assert f"evaluating on held-out text `{valid}`" in " ".join(said.split())
    _, own = run_json(capsysbinary, "eval", out)
    _, written = run_json(capsysbinary, *ARTIFACT, out)
    train.unlink()
    for model, loss in ((out, own["loss"]), (out / "model.int8z", written["loss_after"])):
        assert run_json(capsysbinary, "eval", model)[1]["loss"] == loss
        assert run_json(capsysbinary, "eval", model, "--validation", valid)[1]["loss"] == loss
        assert run(["sample", str(model), "--length", "1", "--device", "cpu"]) == 0
        assert capsysbinary.readouterr().out.startswith(b"line 1000 of valid")
    valid.write_text(valid.read_text() + "\n\nmore of it")
    for model in (out, out / "model.int8z"):
        assert run(["eval", str(model), "--device", "cpu"]) == 0
        assert "warning: the held-out text changed" in " ".join(capsysbinary.readouterr().err.decode().split())
    assert run(["eval", str(out), "--validation", str(valid), "--device", "cpu"]) == 0
    assert b"warning" not in capsysbinary.readouterr().err  # another text was asked for


def test_a_wrong_text_or_place_is_refused_without_a_hint_that_is_refused_too(
    trained, tmp_path, capsys, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    for words, said, hint, never in (
        (["--validation", "0.3"], "there is no file or folder `0.3`", "text file or a folder", "share"),
        (["--validation", "short.txt"], "shorter than one sequence", "more text", "data.validation"),
        (["--data", "gone"], "there is no file or folder `gone`", "--validation PATH", "share"),
    ):
        printed = refused("eval", str(trained), "--device", "cpu", *words)
        assert said in printed
        assert hint in printed.partition("hint: ")[2]
        assert never not in printed.partition("hint: ")[2]
    assert run(["eval", str(trained / "checkpoints")]) == 2
    assert str(trained / "checkpoints" / "step-000003") in capsys.readouterr().err.partition("hint: ")[2]
    assert "--prompt and --validation both say how the text begins" in refused(
        "sample", str(trained), "--prompt", "x", "--validation", "short.txt"
    )


def test_a_model_of_shards_without_a_tokenizer_takes_no_text(halves, tmp_path, refused):
    tokens = np.random.default_rng(0).integers(0, 256, 4000).astype("<u2")
    (tmp_path / "a.bin").write_bytes(header(len(tokens), tokens.dtype) + tokens.tobytes())
    out = train_on(tmp_path / "a.bin", tmp_path / "run")
    assert run(["eval", str(out), "--device", "cpu"]) == 0
    said = refused("eval", str(out), "--validation", str(halves / "valid.txt"))
    assert "was trained on token shards without an index, and which tokenizer made them is unknown" in said


SPLIT = [
    "bf16-mixed,param=fp32:split,emulate=true",
    "bf16-mixed,moments=bf16,grad=fp32; blocks.*: param=fp32:split",
]


@pytest.mark.prove
@pytest.mark.parametrize("policy", SPLIT)
def test_what_only_training_needs_keeps_no_backend_from_evaluating(trained, capsys, policy):
    pytest.importorskip("jax")
    options = ["--policy", policy, "--backend", "jax"]
    code, there = run_json(capsys, "eval", trained, *options)
    _, whole = run_json(capsys, "eval", trained, "--policy", "bf16-mixed,emulate=true", "--backend", "jax")
    assert (code, there["policy"]) == (0, str(Policy.parse(policy)))
    assert there["loss"] == pytest.approx(whole["loss"], rel=0 if "emulate" in policy else 2**-7)


def test_a_policy_whose_evaluation_a_device_can_run_is_evaluated_and_sampled_from(trained, capsysbinary):
    _, bf16 = run_json(capsysbinary, "eval", trained, "--policy", "bf16-mixed")
    _, found = run_json(capsysbinary, "eval", trained, "--policy", "fp8-mixed")
    assert (found["policy"], found["loss"]) == ("fp8-mixed", bf16["loss"])
    written = []
    for policy in ("bf16-mixed", "fp8-mixed"):
        assert run(["sample", str(trained), "--device", "cpu", "--policy", policy, "--length", "20"]) == 0
        written.append(capsysbinary.readouterr().out)
    assert written[0] == written[1]
    assert run(["eval", str(trained), "--device", "cpu", "--policy", "fp8-mixed,eval=compute"]) == 2
