"""What must hold of every page: it is whole and light, loads nothing, has every section."""

import base64
import hashlib
import re
from importlib import resources
from itertools import pairwise

import pytest

from halfstep.core.errors import HalfstepError
from halfstep.core.roles import ROLES
from halfstep.report import tune
from halfstep.report.page import render, write
from halfstep.tools.tune.tune import Tuner
from halfstep.training.telemetry.events import Events
from tests.report.page.made_up_runs import FP16, HOSTILE, RUNS, hostile_run, run, start
from tests.report.page.parsed_page import Page
from tests.tools.tune.test_tune import FRAGILE, SETTINGS, Fake


def tune_page(folder):
    return tune.html(Tuner(Fake({FRAGILE: 0.5}), SETTINGS, folder, lambda *_: None).run())


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


def test_a_page_without_a_script_allows_its_styles_and_nothing_else(tmp_path):
    page = Page(tune_page(tmp_path))
    assert (page.faults, page.raw["script"]) == ([], [])
    (guard,) = [a["content"] for n, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    digests = [hashlib.sha256("".join(pieces).encode()).digest() for _, pieces in page.raw["style"]]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    assert guard == f"default-src 'none'; style-src {allowed}"


def test_every_section_chart_and_role_is_there_in_order(page):
    # What people look for first comes first.
    sections = [
        "Loss",
        "What happened",
        "Precision",
        *(["Step by step"] if page.data else []),
        "Settings",
        "The run",
    ]
    assert page.parts["h2"] == [*sections, "Repeat it"]
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    figures = [a["data-chart"] for n, a in page.elements if "data-chart" in a]
    assert figures == list(page.data)
    maps = [a["data-map"] for n, a in page.elements if "data-map" in a]
    assert maps == (["exponents", "headroom", "updates"] if page.embedded["layers"] else [])
    assert len([n for n, _ in page.elements if n == "figcaption"]) == len(figures) + len(maps)
    captions = [part for part in page.parts.get("figcaption", []) if not maps]
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


def test_the_notice_names_the_version_of_the_chart_library():
    assets = resources.files("halfstep.report") / "assets"
    (version,) = re.findall(r"\(v([\d.]+)\)", (assets / "uplot.min.js").read_text(encoding="utf-8")[:200])
    assert f"| {version} | MIT" in (assets / "NOTICE.md").read_text(encoding="utf-8")


# Writing it next to the events of its run


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


def test_a_damaged_line_is_skipped_and_named(tmp_path):
    record = tmp_path / "events.jsonl"
    with Events(record) as events:
        for event in FP16:
            fields = {key: value for key, value in event.items() if key not in ("event", "time")}
            events.write(event["event"], **fields)
    lines = record.read_bytes().split(b"\n")
    record.write_bytes(b"\n".join([*lines[:9], b'{"event": "step", "loss": 1', *lines[9:]]))
    write(record, tmp_path / "report.html")
    assert "events.jsonl:10: this line is not JSON" in (tmp_path / "report.html").read_text(encoding="utf-8")


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
