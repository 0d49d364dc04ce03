"""`halfstep bench` as people see it, with a faked race."""

import json

import pytest

from halfstep.cli.main import run
from halfstep.tools.bench import run as bench
from halfstep.tools.bench.contract import ARMS, CEILING, Setting
from halfstep.tools.bench.standings import ArmResult, BenchResult


def arm(name, *seconds, **facts):
    return ArmResult(name, ARMS[name].words, ARMS[name].ours, seconds=seconds, **facts)


def played(*arms, stopped=""):
    setting = Setting(CEILING, None, 12, 768, 12, 50304, 1024, 32, 1, None, 0, "", "")
    return BenchResult(setting, "NVIDIA H200", "cuda", "a text", arms, (7.6e14, 7.8e14), 3, 10, stopped)


USUAL = arm("autocast", 0.0613, 0.0612, 0.0615, memory=15503 * 2**20, held_out=2.34567, syncs=0)
OURS = arm(
    "halfstep", 0.0585, 0.0584, 0.0588, memory=14100 * 2**20, held_out=2.345, syncs=0, kernels=("cudnn_flash",)
)
NONE = arm("accelerate", missing="accelerate is not installed", hint="pip install accelerate")
BROKEN = arm("fabric", 0.06, failed="RuntimeError: no")


@pytest.fixture
def race(monkeypatch):
    """Fakes the race; returns the options of each call."""
    calls = []

    def play(*arms, **facts):
        def ran(names, *, log, **options):
            calls.append((names, options))
            log("NVIDIA H200, torch 2.11")
            return played(*arms, **facts)

        monkeypatch.setattr(bench, "run", ran)
        return calls

    return play


def test_tables_for_people(race, capsys):
    race(USUAL, OURS, NONE)
    assert run(["bench", "--bars"]) == 0
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines() if line.strip()] == [
        " arm       tokens/s  ms/step  spread  x autocast  peak MiB  x its memory  share  held-out loss  waits",
        " " + "─" * 100,
        " halfstep   560,137    58.50    0.7%       1.048    14,100         0.910   0.62         2.3450      0",
        " autocast   534,551    61.30    0.5%       1.000    15,503         1.000   0.59         2.3457      0",
        " did not race  why",
        " " + "─" * 41,
        " accelerate    accelerate is not installed",
        " bar                                             ratio  reached",
        " " + "─" * 107,
        " speed of halfstep over autocast, at least 1.04  1.048  yes",
        " memory of halfstep over autocast, at most 0.92  0.910  yes",
        " speed of halfstep over accelerate, at least 1          not checked: accelerate: accelerate is not installed",
    ]
    assert err.splitlines() == ["NVIDIA H200, torch 2.11", "attention of halfstep: cudnn_flash"]


def test_the_options_reach_the_race(race, capsys):
    calls = race(USUAL)
    arguments = "bench --arms fp32 autocast --micro-batches 8 --rounds 2 --steps 3 --layers 2 --width 64 --batch 4"
    arguments += (
        " --context 32 --vocabulary 300 --device cpu --no-compile --source . --seconds 9.5 --at-once 2 --json"
    )
    assert run(arguments.split()) == 0
    given = {"layers": 2, "width": 64, "context": 32, "vocabulary": 300, "micro_batches": 8, "rounds": 2,
             "steps": 3}  # fmt: skip
    given |= {"batch": 4, "device": "cpu", "compile": False, "source": ".", "seconds": 9.5, "at_once": 2}
    assert calls == [(["fp32", "autocast"], given)]
    data = json.loads(capsys.readouterr().out)
    assert data["arms"][0]["name"] == "autocast"
    assert "bars" not in data


def test_by_default_it_races_gpt2_on_a_gpu(race, capsys):
    calls = race(USUAL)
    assert run(["bench"]) == 0
    ((names, options),) = calls
    assert names == list(bench.DEFAULT_ARMS)
    assert (options["layers"], options["width"], options["context"], options["batch"]) == (12, 768, 1024, 32)
    assert (options["device"], options["compile"], options["seconds"]) == (None, None, None)


def test_data_and_picture_are_written(race, capsys, tmp_path):
    race(USUAL, OURS, arm("pure-bf16", 0.058, held_out=float("nan")))
    save, picture, page = tmp_path / "race.json", tmp_path / "race.svg", tmp_path / "race.html"
    assert run(["bench", "--bars", "--save", str(save), "--picture", str(picture), "--json"]) == 0
    data = json.loads(save.read_text())
    assert data == json.loads(capsys.readouterr().out)
    assert [bar["reached"] for bar in data["bars"]] == [True, True]
    assert data["arms"][2]["held_out"] is None
    assert picture.read_text().startswith("<svg")
    assert run(["bench", "--picture", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arms", "bars", "code"),
    [
        ((USUAL, OURS), True, 0),
        ((USUAL, arm("halfstep", 0.060)), True, 1),  # 1.02 of the speed
        ((USUAL, arm("halfstep", 0.060)), False, 0),
        ((OURS, NONE), True, 1),  # nothing was checked
        ((OURS, NONE), False, 0),
        ((USUAL, BROKEN), False, 1),
        ((NONE,), False, 1),  # nothing was raced
    ],
)
def test_exit_codes(arms, bars, code, race, capsys):
    race(*arms)
    assert run(["bench", *(["--bars"] if bars else [])]) == code


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--arms", "autocats"],
            "error: unknown arm `autocats`; arms are fp32, tf32, autocast-eager, autocast, autocast-fp16, accelerate, "
            "fabric, hf, torchao, casted, pure-bf16, halfstep, halfstep-lean, halfstep-graph, halfstep-fp32-masters, "
            "halfstep-stock, halfstep-fp16, halfstep-fp8, halfstep-fp8-all\n\n"
            "hint: did you mean `autocast`?\n",
        ),
        (
            ["--bars", "--width", "64"],
            "error: the bars are for GPT-2 124M, whose width is 768, and it is 64 here\n\n"
            "hint: leave --bars out, or the sizes; those of fp8 are also for a width of 2048 and more\n",
        ),
        (["--picture", "race.png"], "error: --picture must end in `.svg` or `.html`: `race.png`\n"),
        (
            ["--save", "no/such/race.json"],
            "error: cannot write `no/such/race.json`: there is no folder `no/such`\n",
        ),
        (["--steps", "0"], "error: `steps` is 0; it must be 1 or more\n"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr("halfstep.tools.bench.race.Worker", None)
    assert run(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", expected)


def test_the_help_names_every_arm(capsys):
    assert run(["bench", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(f"{name}" in out for name in ARMS)
