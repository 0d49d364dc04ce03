"""Writing a page next to the events of its run."""

import pytest

from halfstep.core.errors import HalfstepError
from halfstep.report.page import render, write
from halfstep.training.telemetry.events import Events
from tests.report.page.made_up_runs import FP16, start
from tests.report.page.parsed_page import Page


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
