"""The script of the race with a faked race: its tables, files, bars, picture and exit codes."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks.race import race
from benchmarks.race.bars import BARS, GPT2, check_applicable, judge
from benchmarks.race.bench import main
from benchmarks.race.contract import ARMS, CEILING, Setting
from benchmarks.race.picture import SPEED_LENGTH, html, svg
from benchmarks.race.standings import ArmResult, BenchResult
from halfstep.core.errors import HalfstepError


def arm(name, *seconds, **facts):
    return ArmResult(name, ARMS[name].words, ARMS[name].ours, seconds=seconds, **facts)


def played(*arms, stopped="", device="NVIDIA H200", width=768, micro_batches=1):
    setting = Setting(CEILING, None, 12, width, 12, 50304, 1024, 32, micro_batches, None, 0, "", "")
    return BenchResult(setting, device, "cuda", "a text", arms, (7.6e14, 7.8e14), 3, 10, stopped)


USUAL = arm("autocast", 0.0613, 0.0612, 0.0615, memory=15503 * 2**20, held_out=2.34567, syncs=0)
OURS = arm(
    "halfstep", 0.0585, 0.0584, 0.0588, memory=14100 * 2**20, held_out=2.345, syncs=0, kernels=("cudnn_flash",)
)
NONE = arm("accelerate", missing="accelerate is not installed", hint="pip install accelerate")
BROKEN = arm("fabric", 0.06, failed="RuntimeError: no")


@pytest.fixture
def play(monkeypatch):
    """Fakes the race; returns the options of each call."""
    calls = []

    def fake(*arms):
        def ran(names, *, log, **options):
            calls.append((names, options))
            log("NVIDIA H200, torch 2.11")
            return played(*arms)

        monkeypatch.setattr(race, "run", ran)
        return calls

    return fake


def test_tables_for_people(play, capsys):
    play(USUAL, OURS, NONE)
    assert main(["--bars"]) == 0
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


def test_data_and_picture_are_written(play, capsys, tmp_path):
    play(USUAL, OURS, arm("pure-bf16", 0.058, held_out=float("nan")))
    save, picture, page = tmp_path / "race.json", tmp_path / "race.svg", tmp_path / "race.html"
    assert main(["--bars", "--save", str(save), "--picture", str(picture), "--json"]) == 0
    data = json.loads(save.read_text())
    assert data == json.loads(capsys.readouterr().out)
    assert [bar["reached"] for bar in data["bars"]] == [True, True]
    assert data["arms"][2]["held_out"] is None
    assert picture.read_text().startswith("<svg")
    assert main(["--picture", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arms", "arguments", "code"),
    [
        ((USUAL, OURS), ["--bars"], 0),
        ((USUAL, arm("halfstep", 0.060)), ["--bars"], 1),  # 1.02 of the speed
        ((USUAL, arm("halfstep", 0.060)), [], 0),
        ((OURS, NONE), ["--bars"], 1),  # nothing was checked
        ((OURS, NONE), [], 0),
        ((USUAL, BROKEN), [], 1),
        ((NONE,), [], 1),  # nothing was raced
    ],
)
def test_exit_codes(arms, arguments, code, play):
    play(*arms)
    assert main(arguments) == code


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--arms", "autocats"], "error: unknown arm `autocats`; arms are fp32, tf32, autocast-eager, autocast, "),
        (["--bars", "--width", "64"], "error: the bars are for GPT-2 124M, whose width is 768, and it is 64 here"),
        (["--picture", "race.png"], "error: --picture must end in `.svg` or `.html`: `race.png`\n"),
        (
            ["--save", "no/such/race.json"],
            "error: cannot write `no/such/race.json`: there is no folder `no/such`\n",
        ),
        (["--steps", "0"], "error: `steps` is 0; it must be 1 or more\n"),
        (["--no-such-option"], "error: Unknown option: --no-such-option."),
    ],
)
def test_mistakes_are_reported_before_anything_starts(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr(race, "Worker", None)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(expected)


def raced(*missing, **arms):
    """A race of arms with the given seconds and memory, or seconds alone."""
    options = {name: arms.pop(name) for name in ("width", "micro_batches") if name in arms}
    both = {name: given if isinstance(given, tuple) else (given, 1) for name, given in arms.items()}
    standings = [arm(name.replace("_", "-"), seconds, memory=memory) for name, (seconds, memory) in both.items()]
    return played(*standings, *(arm(name, missing=f"{name} is not installed") for name in missing), **options)


def verdicts(result):
    return {(v.bar.ours, v.bar.theirs, v.bar.what): v.reached for v in judge(result)}


def test_bars_are_reached_on_their_bound_where_they_apply():
    bars = [("halfstep", "autocast", "speed"), ("halfstep", "autocast", "memory")]
    for memory, seconds, reached in ((920, 1.04, True), (921, 1.039, False)):
        result = raced(halfstep=(1.0, memory), autocast=(seconds, 1000))
        assert verdicts(result) == dict.fromkeys(bars, reached)
    assert verdicts(raced(halfstep=1.0, halfstep_fp16=1.0, autocast_fp16=0.99, fabric=1.0, micro_batches=8)) == {
        ("halfstep-fp16", "autocast-fp16", "speed"): False,
        ("halfstep", "fabric", "speed"): True,
    }
    arms = {"halfstep": 1.0, "halfstep_stock": 1.0, "autocast": 1.03}
    assert verdicts(raced(**arms, micro_batches=8)) == {("halfstep", "autocast", "speed"): False}
    result = verdicts(raced(**arms))
    assert result[("halfstep-stock", "autocast", "speed")] is True
    assert result[("halfstep-stock", "autocast", "memory")] is False
    (verdict,) = judge(raced("accelerate", halfstep=1.0))
    assert (verdict.ratio, verdict.reached, verdict.why) == (None, None, "accelerate: accelerate is not installed")
    assert verdict.to_dict()["bar"] == "speed of halfstep over accelerate, at least 1"
    (speed, memory) = judge(raced(halfstep=(1.0, None), autocast=(2.0, None)))
    assert (speed.reached, memory.reached) == (True, None)


@pytest.mark.parametrize(
    ("width", "seconds", "reached"),
    [(768, 1.0, True), (768, 0.999, False), (2048, 1.15, True), (4096, 1.149, False)],
)
def test_fp8_may_lose_nothing_and_must_gain_where_the_model_is_wide(width, seconds, reached):
    result = verdicts(raced(halfstep_fp8=1.0, halfstep=seconds, autocast=1.0, width=width))
    assert result[("halfstep-fp8", "halfstep", "speed")] is reached
    assert (("halfstep", "autocast", "speed") in result) == (width == 768)


@pytest.mark.parametrize(
    ("arms", "device", "sizes", "said"),
    [
        (race.DEFAULT_ARMS, "cpu", {}, "the bars are for one NVIDIA GPU, and the device is `cpu`"),
        (race.DEFAULT_ARMS, None, {"width": 64}, "whose width is 768, and it is 64 here"),
        (["fp32", "halfstep"], "cuda:1", {}, "no bar compares any two of fp32, halfstep"),
        (
            ["autocast", "halfstep"],
            "cuda",
            {"width": 2048},
            "no bar compares any two of autocast, halfstep at a width of",
        ),
    ],
)
def test_bars_that_say_nothing_are_refused(arms, device, sizes, said):
    check_applicable(race.DEFAULT_ARMS, "cuda:1", GPT2)
    check_applicable(["halfstep", "halfstep-fp8"], "cuda", GPT2 | {"width": 2048, "layers": 24})
    with pytest.raises(HalfstepError, match=said):
        check_applicable(arms, device, GPT2 | sizes)


def test_the_default_arms_hold_both_sides_of_every_bar_and_flops_are_those_of_the_anchors():
    assert set(race.DEFAULT_ARMS) <= set(ARMS)
    assert {name for bar in BARS for name in (bar.ours, bar.theirs)} <= set(race.DEFAULT_ARMS)
    # fp8 is held against our own bf16: it is no bar for a peer to be slower than that.
    assert all(ARMS[bar.ours].ours and ARMS[bar.theirs].ours == (bar.ours == "halfstep-fp8") for bar in BARS)
    setting = played().setting
    assert setting.flops_per_token() == pytest.approx(854.7e6, rel=1e-4)
    assert setting.tokens_per_step() == 32768


DRAWN = (
    arm("autocast", 0.060, 0.061, 0.062, memory=2 * 2**30, held_out=2.34561),
    arm("halfstep", 0.0305, memory=2**30, held_out=2.3),
    arm("fabric", missing="lightning is not installed"),
)


def parts(picture, kind):
    return list(ElementTree.fromstring(picture).iter(f"{{http://www.w3.org/2000/svg}}{kind}"))


def test_the_picture_is_true_to_the_numbers_and_says_them():
    picture = svg(played(*DRAWN, device="NVIDIA <H200>"))
    bars = {(rect.get("class"), rect.get("x")): float(rect.get("width")) for rect in parts(picture, "rect")}
    assert bars[("ours", "192")] == SPEED_LENGTH
    assert bars[("base", "192")] == pytest.approx(SPEED_LENGTH / 2, abs=0.1)
    assert bars[("ours", "600")] == pytest.approx(bars[("base", "600")] / 2, abs=0.1)
    said = [text.text for text in parts(picture, "text")]
    assert said[0] == "GPT-2 of 12 layers and width 768, trained on NVIDIA <H200>"
    assert {"halfstep", "1.07M", "2.000x", "1.00 GiB", "0.500x", "2.3000", "2.3456"} <= {*said}
    assert said[-1] == "fabric: lightning is not installed"
    (desc,) = parts(picture, "desc")
    assert desc.text.startswith("halfstep: 1.07M tokens per second, 2.000 times autocast, 1.00 GiB at the peak")


def test_the_picture_without_memory_or_arms_and_that_nothing_comes_from_outside():
    assert "GiB" not in svg(played(arm("fp32", 1.0)))
    empty = svg(played(DRAWN[2], stopped="after 0 of 6 rounds: no arm is left"))
    said = [text.text for text in parts(empty, "text")]
    assert said[-1] == "fabric: lightning is not installed; stopped after 0 of 6 rounds: no arm is left"
    page = html(played(*DRAWN, device="NVIDIA <H200>"))
    assert page.startswith("<!doctype html>")
    assert page.count("http:") == 1  # the name of the SVG's own language
    assert "<script" not in page
    assert "NVIDIA &lt;H200&gt;" in page
