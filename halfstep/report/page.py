"""The page: sections in order, style and script inside, nothing to load.

A report is mailed, archived and opened years later from a disk, so it is one file. What keeps it safe to
open: all text of the run is escaped (markup.py), and a Content-Security-Policy lets only the scripts and
styles run whose digests it names, and lets nothing be fetched. Even a hole in the escaping would run no code.
"""

import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from halfstep.core.policy import Policy
from halfstep.report import tables
from halfstep.report.charts import Chart, charts, figure, scaled, why_unscaled
from halfstep.report.history import Event, History, Reader, nested
from halfstep.report.incidents import Teller, happened
from halfstep.report.markup import Html, content_hash, join, json_element, raw_element, tag
from halfstep.report.precision import precision, read_policy
from halfstep.report.summary import headline, particulars, status, tiles
from halfstep.report.time_breakdown import spending
from halfstep.training.telemetry.events import stream_events


def render(events: Iterable[Event], title: str) -> str:
    """The report of a run as one HTML document; events are taken one by one, for those of a long run are many."""
    reader, teller = Reader(), Teller()
    for event in events:
        reader.take(event)
        teller.take(event)
    history = reader.history()
    policy, story = read_policy(history), teller.story(history)
    drawn = charts(history, policy, story.marks)
    body = tag(
        "body",
        tag(
            "header",
            tag("p", "halfstep report: ", title, class_="name"),
            headline(history),
            status(history),
            particulars(history),
        ),
        tag(
            "main",
            tiles(history),
            precision(history, policy),
            _charts(history, policy, drawn),
            happened(story),
            spending(history),
            _run(history),
        ),
        _footer(history),
        json_element("data", {chart.id: chart.data() for chart in drawn}),
        raw_element("script", _script()),
    )
    return f"<!doctype html>\n{tag('html', _head(title), body, lang='en')}\n"


def write(events_path: Path, page_path: Path) -> None:
    """Writes the report of `events_path` to `page_path`: the old page or the new one, never a part of it."""
    # The folder's name is what tells one report from the next in a row of tabs.
    page = render(stream_events(events_path), events_path.resolve().parent.name or "run")
    beside = page_path.with_name(f".{page_path.name}.{os.getpid()}")
    try:
        # JSON can hold half a surrogate pair, UTF-8 cannot.
        beside.write_text(page, encoding="utf-8", errors="backslashreplace")
        beside.replace(page_path)
    finally:
        beside.unlink(missing_ok=True)


def _head(title: str) -> Html:
    style, script = _style(), _script()
    guard = f"default-src 'none'; style-src {content_hash(style)}; script-src {content_hash(script)}"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=guard),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title}: halfstep report"),
        raw_element("style", style),
    )


def _charts(history: History, policy: Policy | None, drawn: Sequence[Chart]) -> Html:
    note = "The charts share one cursor. Drag across one to look closer, double-click to come back."
    unscaled = why_unscaled(policy) if policy is not None and not scaled(history, policy) else None
    return tag(
        "section",
        tag("h2", "Course of the run", id="course"),
        tag("p", note, class_="scripted") if drawn else tag("p", "No step was recorded."),
        tag("div", *[figure(chart) for chart in drawn], class_="charts"),
        tag("p", unscaled) if unscaled else None,
        aria_labelledby="course",
    )


def _run(history: History) -> Html:
    return tag(
        "section",
        tag("h2", "The run", id="run"),
        tables.sessions(history),
        tables.settings(history),
        tables.checkpoints(history),
        aria_labelledby="run",
    )


def _footer(history: History) -> Html:
    digest = nested(history.start, "data", "digest")
    return tag(
        "footer",
        tag("h2", "Repeat it", id="repeat"),
        tag("pre", tag("code", tables.command(history)), tabindex="0"),
        tag("p", "The data it read has the digest ", tag("code", str(digest)), ".") if digest else None,
        tag("p", f"Trained with halfstep {history.start.get('halfstep')}. Charts by uPlot."),
    )


def _style() -> str:
    return join(Html(_asset("uplot.min.css")), Html(_asset("page.css")), between="\n")


def _script() -> str:
    """The chart library under its license, then ours."""
    notice = f"/*!\n{_asset('uplot.LICENSE.txt')}\n*/"
    return join(*map(Html, (notice, _asset("uplot.min.js"), _asset("page.js"))), between="\n")


def _asset(name: str) -> str:
    return (resources.files("halfstep.report") / "assets" / name).read_text(encoding="utf-8")
