"""`halfstep data` as people type it, and a run on what it packed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from halfstep.cli.main import run
from halfstep.training.data.index import read_index

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "runs", "far", "away"]


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(rng.choice(WORDS, 60))}) + "\n" for _ in range(200)))
    return str(path)


@pytest.fixture
def packed(text, tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = str(tmp_path / "tokenizer.json")
    assert run(["data", "train-tokenizer", text, "--out", tokenizer, "--vocabulary", "300"]) == 0
    assert run(pack_command(text, tmp_path)) == 0
    return str(tmp_path / "packed")


def pack_command(text, folder):
    options = ["--validation", "0.2", "--workers", "1", "--shard-tokens", "4000"]
    return ["data", "pack", text, "--out", f"{folder}/packed", "--tokenizer", f"{folder}/tokenizer.json", *options]


SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=2",
         "training.steps=3", "training.validation_tokens=64", "model.vocabulary=384"]  # fmt: skip


def train(source, out, *settings):
    chosen = [word for each in (*SMALL, f"data.source={source}", *settings) for word in ("--set", each)]
    return run(["train", "tiny", "--policy", "fp32", "--device", "cpu", "--out", str(out), *chosen])


def test_from_text_to_a_run_to_text(packed, text, tmp_path, out, capfd):
    assert "nothing to do" not in capfd.readouterr().err
    Path(packed, "link").symlink_to(tmp_path / "nowhere")
    assert run(pack_command(text, tmp_path)) == 0  # done already: it says the same again
    printed = capfd.readouterr()
    assert f"nothing to do: `{packed}` is complete" in printed.err
    assert "bytes per token" in printed.out
    assert f"data.source={packed}" in printed.err
    assert "not lossless" not in printed.err
    assert train(packed, out) == 0
    printed = capfd.readouterr()
    assert "held-out bits per byte" in printed.out
    assert "packed shards" in printed.err
    sampling = ["sample", str(out), "--device", "cpu", "--prompt", "the quick", "--length", "12", "--seed", "3"]
    assert run(sampling) == 0
    first = capfd.readouterr().out
    assert first.startswith("the quick")
    assert run(sampling) == 0
    assert capfd.readouterr().out == first
    assert run(["sample", str(out), "--device", "cpu", "--length", "1"]) == 0  # begins as held-out text does
    assert " ".join(capfd.readouterr().out.split()[:8]) in Path(text).read_text()
    assert run(["eval", str(out), "--device", "cpu", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["bits_per_byte"] > 0


@pytest.mark.prove
def test_a_text_of_ones_own_is_held_out_by_all_commands(text, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    valid, tokenizer, out = tmp_path / "valid.txt", str(tmp_path / "tokenizer.json"), str(tmp_path / "packed")
    valid.write_text("\n\n".join(f"jumps over {n}" for n in range(300)))
    own = ["--validation", str(valid)]
    assert run(["data", "train-tokenizer", text, "--out", tokenizer, "--vocabulary", "300", *own]) == 0
    assert run(["data", "pack", text, "--out", out, "--tokenizer", tokenizer, "--workers", "1", *own]) == 0
    index = read_index(Path(out))
    assert (index.train.documents, index.val.text_bytes) == (200, valid.stat().st_size)
    capsys.readouterr()
    assert run(["data", "show", out]) == 0
    assert str(valid) in capsys.readouterr().out.replace("\n", "")
    assert train(out, tmp_path / "run", f"data.validation={valid}") == 2
    assert "hold out a text while packing" in " ".join(capsys.readouterr().err.split())


def test_a_run_neither_samples_nor_resumes_with_other_data(packed, text, tmp_path, out, refused):
    assert train(packed, out) == 0
    os.rename(packed, packed + ".old")
    assert "the tokenizer of the run is not here" in refused("sample", str(out), "--device", "cpu")
    options = ["--validation", "0.3", "--workers", "1", "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert run(["data", "pack", text, "--out", packed, *options]) == 0
    assert "is not the data that the run learned from" in refused("sample", str(out), "--device", "cpu")
    assert "was saved with other data" in refused("train", "--resume", "--out", str(out), "--device", "cpu")


def test_data_that_moved_can_be_named(packed, tmp_path, capfdbinary):
    out, moved = tmp_path / "step-by-step", str(tmp_path / "moved")
    assert train(packed, out) == 0
    Path(packed).rename(moved)
    for command in ("eval", "sample", "artifact"):
        capfdbinary.readouterr()
        assert run([command, str(out), "--device", "cpu"]) == 2
        assert run([command, str(out), "--device", "cpu", "--data", moved]) == 0
        assert b"the data changed" not in capfdbinary.readouterr().err


def test_a_run_in_the_folder_of_its_text_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for n in range(20):
        (tmp_path / f"{n}.txt").write_text(f"some text {n} " * 40 + "\n")
    assert train(".", "runs/one") == 0
    assert "(20 texts)" in capsys.readouterr().err
    assert run(["train", "--resume", "--out", "runs/one", "--device", "cpu"]) == 0
    assert "(20 texts, 1 run folder skipped)" in capsys.readouterr().err
    assert run(["eval", "runs/one", "--device", "cpu"]) == 0
    assert "the data changed" not in capsys.readouterr().err
    assert train(".", "runs/two") == 0
    assert "(20 texts, 1 run folder skipped)" in capsys.readouterr().err
    digests = [
        json.loads((tmp_path / "runs" / name / "events.jsonl").read_text().splitlines()[0])["data"]["digest"]
        for name in ("one", "two")
    ]
    assert digests[0] == digests[1]


def test_relative_data_is_searched_in_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some text\n\n" * 400)
    assert train("t.txt", "one") == 0
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    for command, said, named in (
        (["train", "--resume", "--out", "../one"], "--set data.source=PATH", ["--set", "data.source=../t.txt"]),
        (["eval", "../one"], "--data PATH", ["--data", "../t.txt"]),
        (["artifact", "../one"], "--data PATH", ["--data", "../t.txt"]),
    ):
        capsys.readouterr()
        assert run([*command, "--device", "cpu"]) == 2
        printed = capsys.readouterr().err
        assert f"`t.txt` in `{tmp_path / 'sub'}`" in printed
        assert said in printed
        assert run([*command, *named, "--device", "cpu"]) == 0


def test_show_and_verify(packed, capsys, data_of):
    assert run(["data", "show", packed]) == 0
    printed = capsys.readouterr().out
    index = read_index(Path(packed))
    for shard in index.shards:
        assert shard.name in printed
        assert f"{shard.tokens:,}" in printed
    assert index.digest in printed
    assert data_of("data", "show", packed)["digest"] == index.digest
    assert run(["data", "verify", packed]) == 0
    assert "every byte" in capsys.readouterr().err
    with open(os.path.join(packed, "train_000001.bin"), "r+b") as file:
        file.seek(3000)
        file.write(b"\xff\xff")
    assert run(["data", "verify", packed]) == 1
    assert "train_000001.bin" in capsys.readouterr().out
    (damage,) = data_of("data", "verify", packed, code=1)
    assert (damage["file"], damage["first"], damage["last"]) == ("train_000001.bin", 0, 9024)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pack", "TEXT", "--out", "OUT", "--tokenizer", "bytes", "--workers", "0"], "--workers is 0"),
        (["pack", "--out", "OUT", "--tokenizer", "bytes"], "no source is given"),
        (["pack", "TEXT", "--out", "OUT", "--tokenizer", "nowhere"], "tokenizer `nowhere` does not exist"),
        (["pack", "TEXT", "--out", "OUT", "--tokenizer", "bytes", "--validation", "0.9"], "--validation is 0.9"),
        (["pack", "TEXT", "--out", "TEXT/x", "--tokenizer", "bytes"], "cannot write to"),
        (["pack", "TEXT", "--out", "OUT", "--tokenizer", "bytes", "--shard-tokens", "999"],
         "--shard-tokens is 999"),
        (["pack", "TEXT", "TEXT", "--out", "OUT", "--tokenizer", "bytes"], "is named twice"),
        (["pack", "TEXT", "--out", "OUT", "--tokenizer", "bytes", "--validation", "TEXT"], "is to be held out, but"),
        (["pack", "TEXT", "--out", "OUT", "--tokenizer", "bytes", "--validation", "1%"],
         "--validation is neither a share, such as 0.01, nor a text: source `1%` does not exist"),
        (["pack", "TEXT", "--out", "OUT", "--tokenizer", "bytes", "--only", "*.py"],
         "--only selects files in folders, and no source is a folder"),
        (["pack", "stdlib", "--out", "OUT", "--tokenizer", "bytes", "--field", "body"],
         "--field names where records hold their text, and no source holds records"),
        (["train-tokenizer", "stdlib", "--out", "OUT.json", "--field", "body"], "no source holds records"),
        (["train-tokenizer", "TEXT", "--out", "OUT", "--validation", "TEXT"], "is to be held out, but"),
        (["train-tokenizer", "TEXT", "--out", "TEXT.txt"], "--out must end in .json"),
        (["show", "OUT"], "there is no folder"),
        (["verify", "OUT"], "there is no folder"),
        (["show", "TEXT"], "is not a folder of packed data"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(arguments, said, text, tmp_path, refused):
    out = str(tmp_path / "out")
    assert said in refused("data", *(word.replace("TEXT", text).replace("OUT", out) for word in arguments))


def test_a_worker_reports_a_broken_line(text, tmp_path, capsys):
    with open(text, "a") as file:
        file.write('{"text": \n')
    assert run(["data", "pack", text, "--out", str(tmp_path / "o"), "--tokenizer", "bytes", "--workers", "1"]) == 2
    printed = capsys.readouterr().err
    assert f"error: `{text}`:201 is not JSON" in printed
    assert "hint: fix or remove the line" in printed
