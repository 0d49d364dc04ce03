"""Short runs that are trained to be compared, and what makes no difference to a training."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from halfstep.cli.main import run
from halfstep.config.load import load
from halfstep.config.run import RunConfig
from halfstep.tools.compare.judge import judge
from halfstep.tools.compare.runs import StoppedError, Way, shorten, train_policies, train_ways
from halfstep.training.loop import Loop
from halfstep.training.telemetry.events import read_events
from tests.tools.compare.made_up import CUT


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
    return load("tiny", [*CUT, f"data.source={text}"])


def trained(config: RunConfig, out: Path, policies: Sequence[str] = ("fp32",)) -> list[tuple[int, str]]:
    reports: list[tuple[int, str]] = []
    train_policies(config, policies, [0, 1], 4, lambda *each: reports.append(each), out=out)
    return reports


def test_policies_begin_with_the_same_weights_and_see_the_same_data(config: RunConfig, tmp_path: Path) -> None:
    policies = ("fp32", "fp32,moments=bf16")
    curves = train_policies(config, policies, [0, 1], 4, out=tmp_path / "out")
    assert [list(curves[policy]) for policy in policies] == [[0, 1], [0, 1]]
    one, other = (curves[policy] for policy in policies)
    for seed in (0, 1):
        assert one[seed].series["loss"][1][0] == other[seed].series["loss"][1][0]  # before any update, bit for bit
        assert one[seed].held_out != other[seed].held_out
        assert list(one[seed].series["loss"][0]) == [1, 2, 3, 4]
    assert one[0].series["loss"][1][0] != one[1].series["loss"][1][0]
    assert any(name.startswith("gradient norm of blocks.0") for name in one[0].series)


def test_what_is_trained_is_not_trained_again(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    first = train_policies(config, ["fp32"], [0, 1], 4, out=tmp_path / "out")
    monkeypatch.setattr(Loop, "run", None)  # would be called
    again = train_policies(config, ["fp32"], [0, 1], 4, out=tmp_path / "out")
    for seed in (0, 1):
        assert again["fp32"][seed].held_out == first["fp32"][seed].held_out
        np.testing.assert_array_equal(again["fp32"][seed].series["loss"][1], first["fp32"][seed].series["loss"][1])


def test_an_interrupted_run_continues(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    whole = train_policies(config, ["fp32"], [0], 4, out=tmp_path / "whole")
    record = Loop._record

    def interrupted(self: Loop, result: object) -> None:
        record(self, result)
        if self.tally.step == 2:
            self.stop.requested = "SIGINT"

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_record", interrupted)
        with pytest.raises(StoppedError, match="stopped at step 2"):
            train_policies(config, ["fp32"], [0], 4, out=tmp_path / "cut")
    rest = train_policies(config, ["fp32"], [0], 4, out=tmp_path / "cut")
    assert rest["fp32"][0].held_out == whole["fp32"][0].held_out
    starts = [
        event for event in read_events(Path(rest["fp32"][0].name) / "events.jsonl") if event["event"] == "start"
    ]
    assert [event["resumed_from"] for event in starts] == [None, 2]


def test_progress_counts_the_steps_of_all_runs(config: RunConfig, tmp_path: Path) -> None:
    reports = trained(config, tmp_path / "out")
    assert [done for done, _ in reports] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert reports[1][1] == "fp32, seed 0"


@pytest.mark.prove
def test_a_warning_of_all_runs_is_passed_on_once(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("halfstep.training.run.opening.slow_formats", lambda policy, device: ["bf16 is slow here"])
    warnings: list[str] = []
    train_ways([Way("fp32", shorten(config, 1))], [0, 1], out=tmp_path / "out", on_warning=warnings.append)
    assert warnings == ["warning: bf16 is slow here"]


# Real runs of `tiny`, cut to what takes seconds


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One folder for all: the reference is trained once."""
    folder = tmp_path_factory.mktemp("ways")
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
    return folder


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--set-a", "training.compile=true"], {"training.compile": [True, False]}),
        (["--set-a", "backend=jax"], {"backend": ["jax", "torch"]}),
        (["--ranks-a", "2"], {"ranks": [2, 1]}),
    ],
    ids=["compiled against eager", "jax against torch", "two ranks against one"],
)
def test_it_is_the_same(words, setting, shared, capsys):
    cut = (*CUT, "monitor.on=false", f"data.source={shared / 'text.txt'}")
    settings = [word for each in cut for word in ("--set", each)]
    short = ["--steps", "4", "--seeds", "2", "--device", "cpu", "--out", str(shared / "out"), "--json"]
    assert run(["compare", "fp32", "fp32", *words, *settings, *short]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"]["kind"] == "same"
    assert data["settings"] == setting


@pytest.mark.prove
def test_bf16_mixed_is_the_same_and_bf16_true_is_different_at_a_low_rate(tmp_path):
    policies = ["bf16-mixed", "bf16-true", "fp32"]
    low = ("training.validation_tokens=1024", "monitor.on=false", "optimizer.rate=1e-4")
    curves = train_policies(load("tiny", [*CUT, *low]), policies, range(4), 60, out=tmp_path)
    runs = {policy: list(by_seed.values()) for policy, by_seed in curves.items()}
    mixed, true = (judge((name, "fp32"), runs[name], runs["fp32"]) for name in policies[:2])
    assert mixed.verdict.kind == "same"
    assert (mixed.parting, mixed.seeds) == (None, (0, 1, 2, 3))
    assert true.verdict.kind == "different"
    assert true.verdict.mean > 0  # it lost updates, and so learned less
