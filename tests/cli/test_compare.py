"""`halfstep compare`: what it prints, its page, its exit codes, and what it refuses."""

import pytest

from halfstep.cli import train
from halfstep.cli.main import run
from tests.tools.compare.made_up import make_run, make_runs


def test_folders_of_runs_are_compared_in_words_as_data_and_on_a_page(tmp_path, capsys, data_of):
    b = make_runs(tmp_path / "b")
    assert run(["compare", str(make_runs(tmp_path / "same")), str(b)]) == 0
    assert "SAME" in capsys.readouterr().out
    a = make_runs(tmp_path / "a", worse=0.5)
    assert run(["compare", str(a), str(b), "--page", str(tmp_path / "page.html")]) == 1
    output = capsys.readouterr()
    assert "DIFFERENT" in output.out
    assert "21, in the loss" in output.out
    assert f"page {tmp_path / 'page.html'}" in output.err
    assert "DIFFERENT" in (tmp_path / "page.html").read_text()
    data = data_of("compare", str(a), str(b), code=1)
    assert (data["verdict"]["kind"], data["parting"]["step"], data["page"]) == ("different", 21, None)


def test_one_pair_cannot_tell(tmp_path, capsys):
    assert run(["compare", str(make_run(tmp_path / "a", worse=1.0)), str(make_run(tmp_path / "b"))]) == 3
    assert "CANNOT TELL" in capsys.readouterr().out


def test_other_data_has_no_verdict_and_says_what_can_be_compared(tmp_path, capsys):
    a, b = make_runs(tmp_path / "a", digest="other"), make_runs(tmp_path / "b")
    assert run(["compare", str(a), str(b)]) == 2
    output = capsys.readouterr()
    assert "tokens per second" in output.out
    assert "error: the losses cannot be compared" in output.err


def test_two_settings_are_trained_and_compared(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr(train, "RUNS", tmp_path / "runs")
    small = ["model.layers=1", "model.width=16", "model.heads=1", "model.context=16", "training.batch=2"]
    small += ["training.validation_tokens=64", "optimizer.name=adamw", "monitor.on=false", f"data.source={text}"]
    words = ["fp32", "fp32", "--steps", "2", "--seeds", "2", "--device", "cpu"]
    words += [word for each in small for word in ("--set", each)]
    assert run(["compare", *words, "--set-a", "optimizer.rate=0.00301"]) in (0, 1, 3)
    output = capsys.readouterr()
    assert "fp32, optimizer.rate=0.00301 against fp32" in output.out
    assert "8 of 8 steps" in output.err
    page = tmp_path / "runs" / "compare-tiny" / "compare.html"
    assert "optimizer.rate" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fp32", "fp32"], "A and B are the same"),
        (["fp32", "bf16-mxied"], "neither a file or folder nor a policy"),
        (["fp32", "bf16-mixed", "--seeds", "1"], "a verdict needs 2"),
        (["fp32", "bf16-mixed", "--steps", "0"], "is no training"),
        (["fp32", "bf16-mixed", "--ranks-a", "0"], "0 ranks train nothing"),
        (["fp32", "bf16-mixed", "--delta", "-1"], "is not a gap"),
        (["fp32", "bf16-mixed", "--column", "x"], "--column is of loss logs"),
        (["fp32", "bf16-mixed", "--set", "seed=3"], "--seeds says how many"),
        (["fp32", "fp32", "--set-a", "model.layers=2"], "different settings of model"),
        (["fp32", "fp32", "--set-a", "backend=jax", "--ranks-a", "2"], "the backend is jax"),
        (["absent/run", "other/run"], "there is no file or folder `absent/run`"),
        (["absent.csv", "fp32"], "names a file or folder, and `fp32` a policy to train"),
        (["a.csv", "b.csv", "--steps", "3"], "--steps is about training"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line_with_what_to_do(words, message, capsys):
    assert run(["compare", *words]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "hint: " in output.err
    assert output.out == ""
