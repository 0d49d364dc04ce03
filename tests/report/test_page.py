"""The page, from runs that never happened. Their makers come first, then what must hold of every page."""

import base64
import dataclasses
import hashlib
import json
import math
import random
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise

import pytest

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.roles import ROLES
from halfstep.report.charts import charts
from halfstep.report.history import History
from halfstep.report.page import render, write
from halfstep.training.telemetry.events import Events

BEGAN = 1_760_000_000.0
STEPS = load("tiny").training.steps
REASON = (
    "bf16 matmuls are 286x slower than fp32 (1.09 s against 3.8 ms at 512x512x512); "
    "fp16 is not supported: `float16` & <half> are not the same"
)


def start(policy="fp32", *, time=BEGAN, choice=None, resumed_from=None, overrides=()):
    config = dataclasses.asdict(load("tiny", overrides))
    return {
        "event": "start", "time": time, "halfstep": "0.1.0",
        "config": config | {"policy": policy if choice is None else "auto"}, "policy": policy, "choice": choice,
        "backend": {"name": "torch", "version": "2.13.0"}, "device": {"kind": "cpu", "name": "Neoverse-N1"},
        "parameters": 820_352, "tokens_per_step": 4096, "resumed_from": resumed_from,
        "data": {"description": "standard library of Python 3.11 (730 texts): 1,000 bytes to learn, 100 held out",
                 "digest": "5f1d0c2a9be34d7f", "train_tokens": 12_345_678, "validation_tokens": 1_371_742,
                 "bigram_bits": 4.0},
    }  # fmt: skip


def learned(number):
    return 1.42 + 4.1 * math.exp(-number / 28) + 1.1 * math.exp(-number / 260)


def step(number, time, **more):
    return {"event": "step", "time": time, "step": number, "loss": learned(number), "tokens": 4096 * number,
            "seconds": 0.25, "tokens_per_second": 16384.0, "learning_rate": 3e-3 * min(1.0, number / 20),
            "grad_norm": 0.5, "scale": 1.0, "skipped": 0, "memory": 512 * 2**20} | more  # fmt: skip


def run(steps=60, policy="fp32", *, first=1, overflows=(), finished=True, seed=0, **begin):
    """Events of one session: an evaluation and a checkpoint every 20 steps; the scale halves at `overflows`."""
    chance, now = random.Random(seed), begin.get("time", BEGAN)
    events = [start(policy, **begin)]
    scale, skipped = (65536.0 if policy.startswith("fp16") else 1.0), 0
    for number in range(first, first + steps):
        now += 0.25
        skipped += number in overflows
        noise = {"loss": learned(number) + 0.05 * chance.gauss(0, 1), "grad_norm": chance.uniform(0.3, 0.6)}
        events.append(step(number, now, scale=scale, skipped=skipped, **noise))
        scale = scale / 2 if number in overflows else scale
        if number % 20 == 0:
            events.append(evaluation(number, now, learned(number)))
            events.append(checkpoint(number, now))
    last = first + steps - 1
    if finished:
        result = {"loss": learned(last), "validation_loss": math.log(2) * 2, "bits_per_byte": 2.0}
        events.append(
            {"event": "end", "time": now, "step": last, "seconds": 134.0, "tokens_per_second": 16000.0} | result
        )
    return events


def evaluation(number, time, loss):
    bits = loss / math.log(2)
    return {"event": "validation", "time": time, "step": number, "loss": loss, "bits_per_byte": bits,
            "tokens": 65536}  # fmt: skip


def checkpoint(number, time):
    path = f"checkpoints/step-{number:06d}"
    return {"event": "checkpoint", "time": time, "step": number, "path": path, "seconds": 0.04, "bytes": 9_848_320}


def eventful():
    """A run to which one of everything happened: a NaN, a spike and a rollback, a full disk, a stop, a resume."""

    def event(kind, number, **more):
        return {"event": kind, "time": BEGAN + number / 4, "step": number, **more}

    where = [{"file": "shards/b.bin", "offsets": [512, 8192]}]
    return [
        *run(29, finished=False),
        step(30, BEGAN + 7.5, loss=math.nan, grad_norm=math.nan, skipped=1),
        event("skip", 30, loss=math.nan, grad_norm=math.nan, in_a_row=1, scale=1.0, where=where),
        step(31, BEGAN + 7.75, loss=9.0, skipped=1),
        event("spike", 31, loss=9.0, median=2.0, in_a_row=1, where=where),
        event("rollback", 31, to=20, skipped_data=11, message="back from step 31 to the checkpoint of step 20"),
        *[step(number, BEGAN + 8) for number in range(21, 41)],
        event("save_failed", 40, message="no space is left in `runs/x`"),
        event("stop", 40, reason="SIGTERM", saved=20),
        *run(40, first=21, resumed_from=20, time=BEGAN + 3600, seed=1),
    ]


VOID = {"meta", "br", "hr", "col"}


class Page(HTMLParser):
    """A page as a browser would see it: elements in order, text as it reads, and what each <script> holds."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.faults = [], [], []
        self.words, self.raw, self.parts = [], {"script": [], "style": []}, {}
        self.feed(html)
        self.close()
        self.faults += [f"<{name}> is never closed" for name in self.open]

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name in self.raw:
            self.raw[name].append((dict(attributes), []))

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.faults.append(f"</{name}> closes something else")

    def handle_data(self, data):
        inside = self.open[-1] if self.open else None
        if inside in self.raw:
            self.raw[inside][-1][1].append(data)
        else:
            self.words.append(data)
            for name in ("h1", "h2", "figcaption", "blockquote", "pre"):
                if name in self.open:
                    self.parts.setdefault(name, []).append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    @property
    def headline(self):
        return "".join(self.parts["h1"])

    @property
    def data(self):
        (result,) = [pieces for attributes, pieces in self.raw["script"] if attributes.get("id") == "data"]
        return json.loads("".join(result))

    def line(self, chart, label):
        (result,) = [line for line in self.data[chart]["lines"] if line["label"] == label]
        return dict(zip(result["x"], result["y"], strict=True))


FP16 = run(200, "fp16-mixed; lm_head: compute=fp32", overflows=(3, 4, 5, 180))
RUNS = {
    "fp32": run(200, choice={"preset": "fp32", "reason": REASON}), "fp16": FP16,
    "fp8": run(60, "fp8-mixed", finished=False),
    "resumed": [*run(50, finished=False),
                *run(25, first=41, resumed_from=40, time=BEGAN + 3600, seed=1, finished=False)],
    "just started": [start("bf16-mixed")], "one step": run(1, "bf16-mixed", finished=False),
    "eventful": eventful(),
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def page(request):
    return Page(render(RUNS[request.param], request.param))


def test_a_page_is_whole_and_loads_nothing(page):
    assert page.faults == []
    assert page.elements[0] == ("html", {"lang": "en"})
    for name, attributes in page.elements:
        assert not {"src", "href", "srcset", "action", "poster", "style"} & attributes.keys(), name
        assert name not in {"link", "img", "iframe", "object", "embed", "base", "form"}
    for attributes, pieces in page.raw["style"]:
        assert not re.search(r"@import|url\(", "".join(pieces)), attributes
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for key in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(key, ids[0]) in ids


def test_only_the_scripts_and_styles_of_the_page_may_run_and_they_have_their_license(page):
    (guard,) = [a["content"] for n, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert guard.startswith("default-src 'none'; ")
    programs = [pieces for a, pieces in page.raw["script"] if a.get("type") != "application/json"]
    styles = [pieces for _, pieces in page.raw["style"]]
    assert len(programs) == len(styles) == 1
    for kind, (pieces,) in {"script-src": programs, "style-src": styles}.items():
        digest = hashlib.sha256("".join(pieces).encode()).digest()
        assert f"{kind} 'sha256-{base64.b64encode(digest).decode()}'" in guard
    for words in ("Copyright (c) 2022 Leon Sorokin", "THE SOFTWARE IS PROVIDED"):
        assert words in "".join(programs[0])


def test_every_section_chart_and_role_is_there_in_order(page):
    assert page.parts["h2"] == ["Precision", "Step by step", "What happened", "The run", "Repeat it"]
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    figures = [a["data-chart"] for n, a in page.elements if n == "figure"]
    assert figures == list(page.data)
    captions = page.parts.get("figcaption", [])
    assert len(captions) == len(figures)
    assert all(re.search(r"\d.* at step \d|stayed at .*\d", caption) for caption in captions)
    for role, spec in ROLES.items():
        assert f"{role}" in page.text
        assert spec.meaning.replace("`", "") in page.text


def test_a_page_is_light():
    events = run(30_000, "fp16-mixed", overflows=range(0, 30_000, 4000))
    for event in events[1:]:
        event |= {"tokens_per_second": 16000 + event["step"] / 7, "memory": 2**30 + event["step"] ** 2}
    html = render(events, "long")
    assert len(html.encode()) < 350_000
    for chart in Page(html).data.values():
        assert all(len(line["x"]) <= 2000 for line in chart["lines"])
    assert len(render(RUNS["fp32"], "short")) < 130_000


def test_a_page_says_what_was_trained_how_why_and_with_what_result():
    page = Page(render(RUNS["fp32"], "runs/first"))
    assert page.headline == (
        "A decoder of 820k parameters trained in fp32 for 200 steps and 2 min 14 s on standard library of "
        "Python 3.11 (730 texts). "
        "Held-out text takes 2 bits per byte; its bigram entropy is 4, a ratio of 0.5."
    )
    assert "runs/first" in page.text
    assert "(730 texts): 1,000 bytes to learn, 100 held out" in page.text
    assert "unfinished" not in page.text
    assert page.line("loss", "bigram entropy") == pytest.approx(
        {1: 4.0 * math.log(2), 200: 4.0 * math.log(2)}, rel=1e-5
    )
    assert page.parts["blockquote"] == [REASON]
    assert "The configuration asked for auto; a measurement chose fp32:" in page.text


def test_an_fp16_run_shows_its_rules_its_scale_and_marks_skipped_steps():
    page = Page(render(FP16, "x"))
    assert "trained in fp16-mixed with 1 rule for" in page.headline
    assert "The run used fp16-mixed; lm_head: compute=fp32, as requested." in page.text
    assert "Rules: other formats for some modules" in page.text
    assert "lm_head" in page.text
    assert "No rules: the table holds for every module." in Page(render(RUNS["fp32"], "x")).text
    scale = page.line("scale", "scale")
    assert [scale[s] for s in (1, 3, 4, 5, 6, 180, 181)] == [65536, 65536, 32768, 16384, 8192, 8192, 4096]
    assert page.line("scale", "skipped steps") == {3: 65536, 4: 32768, 5: 16384, 180: 8192}
    caption = next(c for c in page.parts["figcaption"] if "loss scale" in c)
    assert "from 65,536 (2^16) at step 1 to 4,096 (2^12) at step 200" in caption
    assert "4 steps were skipped" in caption
    assert "the first by step 3 and the last by step 180" in caption


def test_without_bits_per_byte_the_loss_is_the_result():
    events = [
        event | ({"bits_per_byte": None} if event["event"] in ("validation", "end") else {}) for event in run(40)
    ]
    page = Page(render(events, "x"))
    assert "The loss on held-out text is 1.386." in page.headline
    assert "bits per byte" not in page.text
    assert [line["label"] for line in page.data["loss"]["lines"]] == ["training", "smooth", "held-out"]


def test_a_resumed_run_keeps_the_reason_it_was_started_with():
    chosen = run(20, choice={"preset": "fp32", "reason": REASON}, finished=False)
    assert Page(render([*chosen, *run(20, first=21, resumed_from=20)], "x")).parts["blockquote"] == [REASON]
    # A reason for another precision is no reason for this one.
    assert "blockquote" not in Page(render([*chosen, *run(20, "bf16-mixed", resumed_from=20)], "x")).parts


def test_warnings_are_shown_once_each_and_so_is_their_absence():
    events = run(20)
    events.insert(1, {"event": "warning", "time": BEGAN, "message": "bf16 is slow here"})
    events.insert(3, {"event": "warning", "time": BEGAN, "message": "the scale is low and falling"})
    before, after = Page(render(events, "x")).text.split("What happened")
    assert "1 warning" in before
    assert "bf16 is slow here 2025-10-09 08:53 UTC" in before
    assert "the scale is low and falling 2025-10-09 08:53 UTC" in after
    calm = Page(render(run(20), "x")).text
    assert "The run started without warnings." in calm
    assert "Nothing out of the ordinary." in calm
    events = run(20)
    events[1:1] = [{"event": "warning", "time": BEGAN + i, "message": "again"} for i in range(300)]
    events[1:1] = [{"event": "warning", "time": BEGAN, "message": f"message {i}"} for i in range(30)]
    page = Page(render(events, "x"))
    assert "330 warnings" in page.text
    assert "message 19" in page.text
    assert "message 20" not in page.text
    assert "and 11 other messages, in events.jsonl" in page.text
    page = Page(render([event for event in events if "message " not in event.get("message", "")], "x"))
    assert "again 300 times, first 2025-10-09 08:53 UTC" in page.text


def test_the_rate_of_every_optimizer_is_shown_as_it_was_in_each_session():
    own = ["optimizer.embedding_rate=0.06", "optimizer.muon_rate=0.01"]
    events = [*run(20, finished=False), *run(20, first=21, resumed_from=20, overrides=own)]
    chart = next(chart for chart in charts(_history(events), None) if chart.id == "rate")
    last = {line.label: (line.series.values[19], line.series.values[-1]) for line in chart.lines}
    # 0.003 is recorded for the matrices; AdamW has 0.003 beside Muon's 0.02, then beside 0.01
    assert last.keys() == {"Muon, matrices in blocks", "AdamW, embeddings", "AdamW, gains and biases"}
    assert last["Muon, matrices in blocks"] == pytest.approx((3e-3, 3e-3))
    assert last["AdamW, embeddings"] == pytest.approx((3e-3 * 3e-3 / 0.02, 3e-3 * 6))
    assert last["AdamW, gains and biases"] == pytest.approx((3e-3 * 3e-3 / 0.02, 3e-3 * 0.3))
    assert "AdamW, embeddings: 2.25e-05 to 0.018." in Page(render(events, "x")).text
    together = next(chart for chart in charts(_history(run(20)), None) if chart.id == "rate")
    assert [line.label for line in together.lines] == [
        "Muon, matrices in blocks", "AdamW, embeddings and gains and biases"]  # fmt: skip
    strange = run(20)
    strange[0]["config"]["optimizer"]["rate"] = "of another version"
    assert "Learning rate went from" in Page(render(strange, "x")).text


def _history(events):
    history = History()
    for event in events:
        history.take(event)
    return history.finish()


def test_settings_the_title_and_the_last_checkpoints_are_listed():
    page = Page(render(run(600), "x"))
    assert "Checkpoints written: the last 20 of 30" in page.text
    assert "step-000200" not in page.text
    assert "step-000220" in page.text
    page = Page(render(run(5, overrides=["training.batch=8"]), "x"))
    assert "training.batch 8 default 16 Sequences in a micro-batch." in page.text
    assert "optimizer.betas [0.9, 0.95] Decay of AdamW's two moments." in page.text
    title = load("gpt2").title
    begun = run(20)
    begun[0]["config"]["title"] = title
    assert f"<p>Recipe: {title}</p>" in render(begun, "x")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("fp32", "No loss scale: everything is computed in fp32, where no gradient is lost to range."),
        ("bf16-mixed", "No loss scale: bf16 has fp32's range."),
        ("fp8-mixed", "No loss scale: bf16 has fp32's range and e4m3 and e5m2 operands have their own scales."),
        ("fp16-mixed", None),
    ],
)
def test_a_run_without_a_loss_scale_says_why(policy, reason):
    page = Page(render(run(20, policy), "x"))
    assert ("scale" in page.data) == (reason is None)
    assert ("No loss scale" in page.text) == (reason is not None)
    if reason:
        assert reason in page.text


def test_how_a_run_ended_is_said_until_a_later_session_resumes():
    page = Page(render(RUNS["fp8"], "x"))
    assert "This run is unfinished: its events end at step 60, 2025-10-09 08:53 UTC." in page.text
    assert "has trained in fp8-mixed" in page.headline
    assert f"for 60 of {STEPS} steps and 15 s" in page.headline
    stop = {"event": "stop", "time": BEGAN + 9, "step": 20, "reason": "the scale is stuck at its floor"}
    page = Page(render([*run(20, "fp16-mixed", finished=False), stop], "x"))
    assert "This run was stopped at step 20: the scale is stuck at its floor" in page.text
    assert "unfinished" not in page.text
    stop = {"event": "stop", "time": BEGAN + 9, "step": 20, "reason": "asked to by SIGTERM"}
    page = Page(render([*run(20, finished=False), stop, *run(20, first=21, resumed_from=20)], "x"))
    assert "This run was stopped" not in page.text
    assert "asked to by SIGTERM" in page.text  # in the table of sessions


def test_of_steps_recorded_twice_the_later_count_and_what_was_dropped_is_not_shown():
    earlier, later = run(50, finished=False), RUNS["resumed"][len(run(50, finished=False)) :]
    page = Page(render(RUNS["resumed"], "x"))
    shown = page.line("loss", "training")
    assert sorted(shown) == list(range(1, 66))
    for events, steps in ((earlier, range(1, 41)), (later, range(41, 66))):
        losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
        assert all(shown[s] == pytest.approx(losses[s], rel=1e-5) for s in steps)
    assert "resumed once" in page.text
    assert (
        f"for 65 of {STEPS} steps and 19 s" in page.headline
    )  # 12.5 s and 6.25 s; the hour between is no training
    events = [*run(50, finished=False), *run(3, first=41, resumed_from=40, finished=False)]
    page = Page(render(events, "x"))
    assert max(page.line("loss", "training")) == 43
    assert "step-000040" in page.text
    events = [*run(60, finished=False), *run(3, first=41, resumed_from=40, finished=False)]
    assert "step-000060" not in Page(render(events, "x")).text
    page = Page(render([*run(50, "fp16-mixed", overflows=(2,)), *run(30, "bf16-mixed")], "x"))
    assert max(page.line("loss", "training")) == 30
    assert "trained in bf16-mixed" in page.headline
    assert "resumed" not in page.text.replace("resume state", "")


def test_losses_that_are_not_finite_are_gaps_and_not_older_numbers():
    events = [
        event | ({"loss": math.nan} if event.get("step") in (11, 12) else {})
        for event in run(60)
        if event["event"] == "step" or event["event"] == "start"
    ]
    events[31]["loss"] = math.inf
    html = render(events, "x")
    shown = Page(html).line("loss", "training")
    assert [step for step, value in shown.items() if value is None] == [11, 12, 31]
    assert "3 values were not finite and left a gap." in Page(html).text
    assert "NaN" not in json.dumps(Page(html).data)
    events = run(40, finished=False)
    events[-1:] = [evaluation(40, BEGAN + 11, math.nan)]
    assert "The loss on held-out text is not a number." in Page(render(events, "x")).headline


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.steps=50", "training.compile=true", "data.source=my texts/all of them"),
        ("backend=jax", "optimizer.betas=[0.8, 0.99]", "model.mlp=gelu", "optimizer.epsilon=1e-12"),
    ],
)
def test_the_command_repeats_the_run(overrides):
    page = Page(render(run(5, "fp16-mixed; lm_head: compute=fp32", overrides=overrides), "x"))
    program, verb, recipe, *words = shlex.split("".join(page.parts["pre"]))
    assert (program, verb) == ("halfstep", "train")
    given = list(zip(words[::2], words[1::2], strict=True))
    repeated = load(recipe, [text for flag, text in given if flag == "--set"])
    flags = {flag.removeprefix("--"): text for flag, text in given if flag != "--set"}
    wanted = load("tiny", [*overrides, 'policy="fp16-mixed; lm_head: compute=fp32"'])
    assert dataclasses.replace(repeated, **flags) == wanted
    assert len(given) == len(overrides) + 1


HOSTILE = "</script><script>document.documentElement.className='owned'</script><img onerror=x src=x>\"'&`"


def poison(value):
    """The same event with every text in it hostile, keys of the configuration too."""
    if isinstance(value, dict):
        return {key: poison(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def hostile_run():
    kinds = [
        *run(40, choice={"preset": "fp32", "reason": "r"}, finished=False),
        {"event": "warning", "time": BEGAN, "message": "m"},
        {"event": "skip", "time": BEGAN, "step": 38, "where": [{"file": "f", "offsets": [16, "o"]}]},
        {"event": "spike", "time": BEGAN, "step": 39, "where": [{"file": "f", "offsets": [16, "o"]}]},
        {"event": "save_failed", "time": BEGAN, "step": 40, "message": "m"},
        checkpoint(40, BEGAN),
        {"event": "rollback", "time": BEGAN, "step": 40, "to": 40, "message": "m"},
        {"event": "stop", "time": BEGAN, "step": 40, "reason": "r"},
        start(resumed_from=40),
        step(41, BEGAN + 50),
    ]
    events = [{**poison(event), "event": event["event"]} for event in kinds]
    for event in events:
        if event["event"] == "start":
            event["config"][HOSTILE] = {HOSTILE: HOSTILE}
    return events


def test_text_of_a_run_is_text_on_the_page():
    page, calm = Page(render(hostile_run(), HOSTILE)), Page(render(RUNS["fp32"], "x"))
    assert page.faults == []
    happened = page.text.split("What happened")[1].split("; data: ")
    assert len(happened) == 3
    assert all(place.startswith(HOSTILE.strip("`")) for place in happened[1:])
    assert {name for name, _ in page.elements} <= {name for name, _ in calm.elements} | {"small"}
    assert len(page.raw["script"]) == 2
    assert not [a for _, a in page.elements if any(key.startswith("on") for key in a)]
    # title, headline, description, machine, reason, warning, checkpoint, settings, ...
    assert page.text.count("className='owned'") > 20


def test_a_policy_of_another_version_is_not_guessed_and_events_without_a_start_are_no_run():
    events = [event | ({"policy": "int4-mixed"} if event["event"] == "start" else {}) for event in run(20)]
    text = Page(render(events, "x")).text
    assert "The run used int4-mixed" in text
    assert "this version of halfstep cannot read the policy: in policy `int4-mixed`: unknown preset" in text
    with pytest.raises(HalfstepError, match="no `start` among the events"):
        render([step(1, BEGAN)], "x")


def test_write_puts_the_page_next_to_its_events(tmp_path):
    folder = tmp_path / "first-run"
    folder.mkdir()
    with Events(folder / "events.jsonl") as events:
        for event in FP16:
            fields = {key: value for key, value in event.items() if key not in ("event", "time")}
            events.write(event["event"], **fields)
    write(folder / "events.jsonl", folder / "report.html")
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "<title>first-run: halfstep report</title>" in html
    assert Page(html).data == Page(render(FP16, "x")).data
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "report.html"]


def test_a_page_is_replaced_whole_or_not_at_all(tmp_path):
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(HalfstepError):
        write(tmp_path / "events.jsonl", tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    with Events(tmp_path / "events.jsonl") as events:
        events.write("start", **{key: value for key, value in start().items() if key not in ("event", "time")})
    page = tmp_path / "report.html"
    with open(page) as reader:
        write(tmp_path / "events.jsonl", page)
        assert reader.read() == "old"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_notice_names_the_version_of_the_chart_library():
    assets = resources.files("halfstep.report") / "assets"
    (version,) = re.findall(r"\(v([\d.]+)\)", (assets / "uplot.min.js").read_text(encoding="utf-8")[:200])
    assert f"| {version} | MIT" in (assets / "NOTICE.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser():
    """Runs a page in a real browser: the document after its scripts, and what the console said."""
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium or google-chrome on this machine: the page's script is not tried")

    def visit(html, folder, *more):
        (folder / "page.html").write_text(html, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--virtual-time-budget=3000"]
        flags += ["--disable-background-networking", "--enable-logging=stderr", f"--user-data-dir={folder}/user"]
        command = [program, *flags, *more, "--dump-dom", (folder / "page.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return visit


@pytest.mark.parametrize("name", ["fp16", "one step", "just started", "eventful"])
def test_a_browser_draws_every_chart_without_complaint(browser, name, tmp_path):
    html = render(RUNS[name], name)
    document, complaints = browser(html, tmp_path)
    assert complaints == []
    assert re.search(r'<html lang="en" class="live">', document)
    drawn = re.findall(r'<canvas width="(\d+)" height="(\d+)"', document)
    assert len(drawn) == len(Page(html).data)
    assert all(int(width) > 200 and int(height) > 100 for width, height in drawn)


@pytest.mark.prove
def test_on_a_phone_the_columns_of_a_table_align(browser, tmp_path):
    """Each row is a grid of its own there: time and share end at the same place in all of them."""
    spent = {"wall": 100.0, "training": 80.0, "first_step": 3.0, "input": 1.5, "saving": 12.2, "evaluation": 7.0}
    *events, end = run(60)
    html = render([*events, end | {"spent": spent | {"other": 0.8}, "mfu": None, "busy": None}], "x")
    html = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    measure = "[...document.querySelectorAll('[aria-label=Time] tbody tr')].map(row => [...row.children]"
    measure += ".slice(1, 3).map(cell => [cell.getBoundingClientRect().right, cell.getBoundingClientRect().top]))"
    script = f"<script>document.body.dataset.places = JSON.stringify({measure})</script></body>"
    document, _ = browser(html.replace("</body>", script), tmp_path, "--window-size=390,800")
    places = json.loads(re.search(r'data-places="([^"]*)"', document)[1])
    assert len(places) == 6
    assert len({(time[0], share[0]) for time, share in places}) == 1
    assert all(time[1] == share[1] and time[0] < share[0] for time, share in places)


def test_a_browser_runs_nothing_that_a_run_brought(browser, tmp_path):
    document, complaints = browser(render(hostile_run(), HOSTILE), tmp_path)
    assert complaints == []
    assert re.search(r'<html lang="en" class="live">', document)


def test_first_weights_and_names_are_shown_as_text_and_code():
    first, *others = run(20)
    origin = {"path": "gpt2/<small>", "layout": "gpt2", "sha256": "ab12", "notes": ["12 tensors are held in bf16"]}
    said = "First weights: gpt2 from gpt2/<small>, SHA-256 ab12; 12 tensors are held in bf16"
    assert said in Page(render([first | {"init": origin}, *others], "x")).text
    assert "First weights" not in Page(render([first | {"init": None}, *others], "x")).text
    assert "First weights" not in Page(render([first, *others], "x")).text
    first, second = run(20, finished=False), run(20, first=21, resumed_from=20, finished=False)
    second[0]["data"]["description"] = "2 packed shards `d<m>g`: 100 tokens of `x`"
    second[0]["init"] = {"path": "a", "layout": "gpt2", "sha256": "0", "notes": ["`lm_head` is left out"]}
    stop = {"event": "stop", "time": BEGAN + 9, "step": 20, "reason": "`weights` are not finite"}
    html = render([*first, stop, *second, {**stop, "step": 40}], "x")
    assert " on 2 packed shards <code>d&lt;m&gt;g</code>. " in html
    assert "Data: 2 packed shards <code>d&lt;m&gt;g</code>: 100 tokens of <code>x</code></p>" in html
    assert "<code>lm_head</code> is left out</p>" in html
    assert "at step 40: <code>weights</code> are not finite</p>" in html
    assert html.count("<td><code>weights</code> are not finite</td>") >= 2
    assert "`" not in html[html.index("<body") : html.index("<script")]
