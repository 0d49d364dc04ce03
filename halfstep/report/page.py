"""The page: sections in order, style and script inside, nothing to load.

What keeps it safe to open: all text of the run is escaped (template.py), and a Content-Security-Policy lets only
the scripts and styles run whose digests it names, and lets nothing be fetched.
"""

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from halfstep.core.audit.finding import SEVERITIES
from halfstep.core.roles import ROLES
from halfstep.core.stats.what_if import BLOCK
from halfstep.report import summary
from halfstep.report.charts import charts, has_scale, why_unscaled
from halfstep.report.history import Event, History, nested, read_changes
from halfstep.report.incidents import IncidentReader, findings
from halfstep.report.layers import figures
from halfstep.report.shadows import shadows
from halfstep.report.summary import command, describe_policies, read_policy, settings, starting_warnings
from halfstep.report.template import fill
from halfstep.report.time_breakdown import describe_sampling, time_breakdown
from halfstep.report.what_if import as_data as what_if_data
from halfstep.report.what_if import what_if
from halfstep.training.files import write_whole
from halfstep.training.telemetry.events import stream_events

# Lists that grow with a run are cut to this many rows: a page is for reading, the folder has the rest.
SHOWN = 20


class Report:
    """The report of a run. Takes events one by one, since a long run has many; the page can be asked for often."""

    def __init__(self, title: str):
        self.title = title
        self._history, self._reader = History(), IncidentReader()

    def take(self, event: Event) -> None:
        """Adds one event."""
        self._history.take(event)
        self._reader.take(event)

    def html(self, *, live: bool = False) -> str:
        """Returns the report as one HTML document; a live one asks its server for newer ones."""
        history = self._history.finish()
        contents = _contents(history, self._reader)
        # A live page may get layers later.
        program = assets(maps=live or contents["layers"] is not None, live=live)
        return fill("page.html", title=self.title, live=live, **program, **contents)


def render(events: Iterable[Event], title: str) -> str:
    """Returns the report of a run as one HTML document."""
    report = Report(title)
    for event in events:
        report.take(event)
    return report.html()


def assets(*, maps: bool, live: bool) -> dict[str, str]:
    """Returns the style and the script of a page."""
    scripts = ["page.js", *["layers.js"] * maps, "start.js", *["watch.js"] * live]
    # The chart library under its license, then ours.
    license = f"/*!\n{_asset('uplot.LICENSE.txt')}\n*/"
    return {
        "style": "\n".join(map(_asset, ("uplot.min.css", "page.css"))),
        "script": "\n".join((license, _asset("uplot.min.js"), *map(_asset, scripts))),
    }


def _contents(history: History, reader: IncidentReader) -> dict[str, Any]:
    policy, policy_error = read_policy(history)
    incidents = reader.incidents(history)
    drawn = charts(history, policy, incidents.marks)
    beside = shadows(history)
    drawn[1:1] = [] if beside is None else [beside.chart]  # where the page has it
    by_id = {chart.id: chart for chart in drawn}
    layers, lost = figures(history.layers, describe_sampling(history)), what_if(history.layers)
    newest = history.layers.newest
    every, num_checkpoints = settings(history), len(history.checkpoints)
    cut = f": the last {SHOWN} of {num_checkpoints:,}" if num_checkpoints > SHOWN else ""
    return {
        "history": history,
        "headline": summary.headline(history),
        "result": summary.result(history),
        "status": summary.status(history),
        "particulars": summary.particulars(history),
        "initial_weights": summary.initial_weights(history),
        "data_description": nested(history.start, "data", "description"),
        "data_digest": nested(history.start, "data", "digest"),
        "tiles": summary.tiles(history),
        "policy_text": history.policies[-1][1],
        "policy_name": history.name_of(history.policies[-1][1]),
        "policies": describe_policies(history),
        "changed": bool(read_changes(history.start)),
        "requested": str(history.config.get("policy")),
        "choice_preset": nested(history.choice, "preset"),
        "choice_reason": nested(history.choice, "reason"),
        "warnings": starting_warnings(history),
        "shown": SHOWN,
        "policy": policy,
        "policy_error": policy_error,
        "roles": ROLES,
        "block": BLOCK,
        "loss_chart": by_id.get("loss"),
        "scale_chart": by_id.get("scale"),
        "others": [chart for chart in drawn if chart.id not in ("loss", "shadow", "scale")],
        "data": {
            "charts": {chart.id: chart.data() for chart in drawn},
            "layers": layers and layers.data,
            "what_if": [] if lost is None or newest is None else what_if_data(lost, newest),
        },
        "shadows": beside,
        "layers": layers,
        "what_if": lost,
        "findings": findings(history.findings),
        "severities": SEVERITIES,
        "no_scale_reason": why_unscaled(policy) if policy and not has_scale(history, policy) else None,
        "incidents": incidents,
        "time": time_breakdown(history),
        "changed_settings": [one for one in every if one.default is not None],
        "default_settings": [one for one in every if one.default is None],
        "checkpoints": list(history.checkpoints.items())[-SHOWN:],
        "checkpoints_caption": f"Checkpoints written{cut}",
        "command": command(history),
    }


def write(events_path: Path, page_path: Path) -> None:
    """Writes the report of `events_path` to `page_path`: the old page or the new one, never a part of it."""
    # The folder's name distinguishes one report from the next in a row of tabs.
    page = render(stream_events(events_path, skip_damage=True), events_path.resolve().parent.name or "run")
    write_whole(page_path, page.encode("utf-8", errors="backslashreplace"))  # JSON can hold half a surrogate pair


def _asset(name: str) -> str:
    return (resources.files("halfstep.report") / "assets" / name).read_text(encoding="utf-8")
