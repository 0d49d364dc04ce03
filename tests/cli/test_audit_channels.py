"""Where `halfstep audit` puts its findings: formats for machines, what was known before, and rules explained."""

import json
from xml.etree import ElementTree

import pytest

from halfstep.cli.main import run
from halfstep.core.audit.record import Record, UpdateCounts, Weight
from halfstep.tools.audit import targets
from halfstep.tools.audit.targets import Collected

LOST = UpdateCounts(steps=20, intended=1000, lost=988, arrived_sum=0.02, intended_sum=1.0, moved=True)


@pytest.fixture
def bad(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    record = Record("script", updates=20, weights=[Weight("a.weight", "bf16", optimizer="SGD", updates=LOST)])
    monkeypatch.setattr(targets, "collect", lambda *_: Collected([record]))
    return record


@pytest.mark.parametrize("channel", ["json", "sarif", "github", "junit"])
def test_every_channel_is_printed_alone(channel, bad, capsys):
    assert run(["audit", "x:y", "--format", channel]) == 1
    out = capsys.readouterr().out
    if channel in ("json", "sarif"):
        json.loads(out)
    elif channel == "junit":
        ElementTree.fromstring(out.encode())
    else:
        assert out.startswith("::error title=HS101")
    bad.weights = []
    assert run(["audit", "x:y", "--format", channel]) == 0


def test_two_formats_are_refused(bad, refused):
    assert "name two formats" in refused("audit", "x:y", "--json", "--format", "sarif")


def test_only_new_findings_fail(bad, tmp_path, capsys, refused):
    assert run(["audit", "x:y", "--json"]) == 1
    (tmp_path / "known.json").write_text(capsys.readouterr().out)
    assert run(["audit", "x:y", "--accept", "known.json"]) == 0
    assert "1 accepted" in capsys.readouterr().err
    bad.weights.append(Weight("b.weight", "bf16", optimizer="SGD", updates=LOST))
    assert run(["audit", "x:y", "--accept", "known.json"]) == 1
    assert "`a.weight`" not in capsys.readouterr().out
    (tmp_path / "other.json").write_text("[]")
    assert "is not what `halfstep audit --json` prints" in refused("audit", "x:y", "--accept", "other.json")


def test_a_rule_is_explained(capsys, data_of, refused):
    assert run(["audit", "--explain", "hs101"]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0].strip() for line in out.splitlines()[:5]] == [
        "HS101 error", "what", "why", "evidence", "fix",
    ]  # fmt: skip
    assert [each["id"] for each in data_of("audit", "--explain", "HS701")] == ["HS701"]
    assert "there is no rule `HS999`" in refused("audit", "--explain", "HS999")
