"""Findings for machines: SARIF for code scanning, annotations of GitHub's workflows, JUnit for test reports."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from halfstep import __version__
from halfstep.core.audit.engine import registry
from halfstep.core.audit.finding import Finding
from halfstep.core.errors import printable
from halfstep.tools.audit.fixes import edit_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# The levels of each severity.
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


def split_place(finding: Finding) -> tuple[str | None, int]:
    """Returns file and line of a finding; a file that is named without a line is at its first."""
    place = finding.place
    if place is None:
        return None, 1
    file, _, line = place.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (place, 1)


def sarif(findings: Sequence[Finding], *, complete: bool, unseen: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a log in SARIF 2.1.0, with the rules that were broken."""
    ids = sorted({finding.rule for finding in findings})
    notes = [{"level": "note", "message": {"text": f"not seen: {text}"}} for text in unseen]
    driver = {"name": "halfstep audit", "version": __version__, "rules": [_sarif_rule(id) for id in ids]}
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": complete, "toolExecutionNotifications": notes}],
        "results": [_sarif_result(finding, ids.index(finding.rule)) for finding in findings],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _sarif_rule(id: str) -> dict[str, Any]:
    rule = registry()[id]
    return {
        "id": id,
        "name": "".join(word.capitalize() for word in re.findall(r"\w+", rule.name)),
        "shortDescription": {"text": rule.name},
        "fullDescription": {"text": rule.what},
        "help": {"text": f"{rule.why}\n\nFix: {rule.fix}"},
        "defaultConfiguration": {"level": rule.severity},
    }


def _sarif_result(finding: Finding, index: int) -> dict[str, Any]:
    location: dict[str, Any] = {}
    file, line = split_place(finding)
    if file is not None:
        location["physicalLocation"] = {"artifactLocation": _artifact(file), "region": {"startLine": line}}
    if finding.where:
        location["logicalLocations"] = [{"fullyQualifiedName": name} for name in finding.where]
    result = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": f"{finding.message}\nFix: {finding.fix}"},
        "locations": [location] if location else [],
        "properties": {"confidence": finding.confidence, "evidence": finding.evidence},
    }
    if (edit := edit_of(finding)) is not None:
        # An empty region is a place to insert at; lines end before column 1 of the next.
        region = {"startLine": edit.line, "startColumn": 1, "endLine": edit.line + edit.remove, "endColumn": 1}
        text = "".join(f"{each}\n" for each in edit.insert)
        change = {
            "artifactLocation": _artifact(edit.file),
            "replacements": [{"deletedRegion": region, "insertedContent": {"text": text}}],
        }
        result["fixes"] = [{"description": {"text": finding.fix}, "artifactChanges": [change]}]
    return result


def _artifact(file: str) -> dict[str, str]:
    return {"uri": Path(file).as_uri() if Path(file).is_absolute() else quote(Path(file).as_posix())}


def github(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields a command of GitHub's workflows for each finding, which annotates the line."""
    for finding in findings:
        file, line = split_place(finding)
        title = f"{finding.rule} {registry()[finding.rule].name}"
        named = {"file": file, "line": str(line)} if file is not None else {}
        given = ",".join(f"{key}={_property(value)}" for key, value in {**named, "title": title}.items())
        message = _data(f"{finding.message}\nfix: {finding.fix}")
        yield f"::{_GITHUB[finding.severity]} {given}::{message}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def junit(findings: Sequence[Finding], target: str) -> str:
    """Returns a report in the XML of JUnit: each finding is a test that failed, and a note is one that did not."""
    failed = sum(finding.severity != "note" for finding in findings)
    suite = ElementTree.Element(
        "testsuite", name="halfstep audit", tests=str(max(len(findings), 1)), failures=str(failed), errors="0"
    )
    for finding in findings:
        file, line = split_place(finding)
        name = f"{registry()[finding.rule].name}: {finding.place or target}"
        case = ElementTree.SubElement(suite, "testcase", classname=finding.rule, name=printable(name))
        if file is not None:
            case.set("file", printable(file))
            case.set("line", str(line))
        text = printable(f"{finding.message}\nfix: {finding.fix}", lines=True)
        kind = "system-out" if finding.severity == "note" else "failure"
        element = ElementTree.SubElement(case, kind)
        element.text = text
        if kind == "failure":
            element.set("type", finding.severity)
            element.set("message", printable(finding.message))
    if not findings:
        ElementTree.SubElement(suite, "testcase", classname="halfstep", name=printable(f"audit {target}"))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode")
