"""Findings as machines read them: SARIF, annotations, JUnit, and edits that mend a script."""

import json
from xml.etree import ElementTree

import pytest

from halfstep.core.audit.engine import check
from halfstep.core.audit.finding import Finding
from halfstep.tools.audit.channels import github, junit, sarif
from halfstep.tools.audit.fixes import MECHANICAL, edit_of
from halfstep.torch.instruments.collect.watch import Watch

ODD = Finding("HS502", "50 %,\nof `x`: <all>", "note", "weak", "a, b: c.", "p", place="dir/my train.py:3")
NO_LINE = Finding("HS701", "gains", "error", "certain", "f.", "p", place="out/model.safetensors", where=["a", "b"])
NOWHERE = Finding("HS101", "m", "warning", "likely", "f.", "p", where=["a"], evidence={"lost": 2.0})
FOUND = [ODD, NO_LINE, NOWHERE]

# The objects of SARIF 2.1.0 that are written: what each must have, and what else it may have. A value is an object
# by name, [of objects], a type, or the words that are allowed. (OASIS, SARIF 2.1.0, sections 3.13 to 3.57)
OBJECTS = {
    "sarifLog": ({"version": ["2.1.0"], "runs": ["run"]}, {"$schema": str}),
    "run": ({"tool": "tool"}, {"invocations": ["invocation"], "results": ["result"]}),
    "tool": ({"driver": "toolComponent"}, {}),
    "toolComponent": ({"name": str}, {"version": str, "rules": ["reportingDescriptor"]}),
    "reportingDescriptor": (
        {"id": str},
        {
            "name": str,
            "shortDescription": "message",
            "fullDescription": "message",
            "help": "message",
            "defaultConfiguration": "reportingConfiguration",
        },
    ),
    "reportingConfiguration": ({}, {"level": ["none", "note", "warning", "error"]}),
    "message": ({"text": str}, {}),
    "invocation": ({"executionSuccessful": bool}, {"toolExecutionNotifications": ["notification"]}),
    "notification": ({"message": "message"}, {"level": ["none", "note", "warning", "error"]}),
    "result": (
        {"message": "message"},
        {
            "ruleId": str,
            "ruleIndex": int,
            "level": ["none", "note", "warning", "error"],
            "locations": ["location"],
            "fixes": ["fix"],
            "properties": dict,
        },
    ),
    "location": ({}, {"physicalLocation": "physicalLocation", "logicalLocations": ["logicalLocation"]}),
    "physicalLocation": ({"artifactLocation": "artifactLocation"}, {"region": "region"}),
    "artifactLocation": ({}, {"uri": str}),
    "region": ({}, {"startLine": int, "startColumn": int, "endLine": int, "endColumn": int}),
    "logicalLocation": ({}, {"fullyQualifiedName": str}),
    "fix": ({"artifactChanges": ["artifactChange"]}, {"description": "message"}),
    "artifactChange": ({"artifactLocation": "artifactLocation", "replacements": ["replacement"]}, {}),
    "replacement": ({"deletedRegion": "region"}, {"insertedContent": "message"}),
}


def check_object(value, kind):
    if isinstance(kind, type):
        assert isinstance(value, kind)
    elif isinstance(kind, list) and kind[0] in OBJECTS:
        assert isinstance(value, list)
        for each in value:
            check_object(each, kind[0])
    elif isinstance(kind, list):
        assert value in kind
    else:
        needed, others = OBJECTS[kind]
        assert needed.keys() <= value.keys() <= needed.keys() | others.keys(), kind
        for key, each in value.items():
            check_object(each, (needed | others)[key])


def test_sarif_has_the_objects_of_its_standard():
    log = json.loads(json.dumps(sarif(FOUND, complete=True, unseen=["compiled code"])))
    check_object(log, "sarifLog")
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["HS101", "HS502", "HS701"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    first, second, third = run["results"]
    physical = first["locations"][0]["physicalLocation"]
    assert physical == {"artifactLocation": {"uri": "dir/my%20train.py"}, "region": {"startLine": 3}}
    assert [each["fullyQualifiedName"] for each in second["locations"][0]["logicalLocations"]] == ["a", "b"]
    assert "physicalLocation" not in third["locations"][0]
    check_object(sarif([], complete=False), "sarifLog")


def test_annotations_have_file_and_line_and_are_one_line_each():
    lines = list(github(FOUND))
    assert lines[0] == (
        "::notice file=dir/my train.py,line=3,title=HS502 host waits for the device::"
        "50 %25,%0Aof `x`: <all>%0Afix: a, b: c."
    )
    assert lines[1].startswith("::error file=out/model.safetensors,line=1,title=HS701")
    assert lines[2].startswith("::warning title=HS101")
    assert not any("\n" in line for line in lines)


def test_junit_is_xml_and_a_note_is_no_failure():
    suite = ElementTree.fromstring(junit(FOUND, "train.py").encode())[0]
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    assert [[child.tag for child in case] for case in suite] == [["system-out"], ["failure"], ["failure"]]
    assert suite[0].get("line") == "3"
    assert ElementTree.fromstring(junit([], "train.py").encode())[0].get("failures") == "0"


HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
criterion = nn.CrossEntropyLoss()
for _ in range(4):
    optimizer.zero_grad()
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
"""
FORWARD = """
    with torch.autocast("cpu", torch.{dtype}):
        logits = model(x)
    loss = {loss}
"""
LOSS = "criterion(logits.float(), y)"
UNSCALED = """
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
# rule -> scripts that an edit mends
SCRIPTS = {
    "HS201": [HEAD + FORWARD.format(dtype="bfloat16", loss=LOSS) + UNSCALED.replace("    nn", "    # nn")],
    "HS202": [HEAD + FORWARD.format(dtype="float16", loss=LOSS) + UNSCALED],
    "HS203": [
        HEAD
        + FORWARD.format(dtype="float16", loss=LOSS)
        + "    scaler.scale(loss).backward()\n    optimizer.step()\n",
        HEAD + FORWARD.format(dtype="float16", loss=LOSS) + "    (loss * 4096).backward()\n    optimizer.step()\n",
    ],
    "HS404": [
        HEAD + FORWARD.format(dtype="bfloat16", loss=loss) + "    loss.backward()\n    optimizer.step()\n"
        for loss in (
            "nn.functional.mse_loss(logits, logits.detach() * 0)",
            "nn.functional.l1_loss(logits * 2, x[:, :3].bfloat16())",
        )
    ],
}


def test_the_listed_rules_are_tested():
    assert SCRIPTS.keys() == MECHANICAL.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rule", "script"), [(rule, each) for rule, scripts in SCRIPTS.items() for each in scripts]
)
def test_an_edit_mends_the_script(rule, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"

    def audit():
        with Watch() as watch:
            exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})
        return check(watch.record(), ignore=["HS502"])

    file.write_text(script)
    found = audit()
    assert rule in [finding.rule for finding in found]
    for _ in range(3):  # an edit moves the lines of the next
        edits = [edit for finding in found if (edit := edit_of(finding))]
        if not edits:
            break
        lines = file.read_text().splitlines()
        data = json.loads(json.dumps(edits[0].to_dict()))
        lines[data["line"] - 1 : data["line"] - 1 + data["remove"]] = data["insert"]
        file.write_text("\n".join(lines) + "\n")
        found = audit()
    assert [(finding.rule, finding.message) for finding in found] == []


def test_what_cannot_be_edited_has_no_edit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("x = (\n")
    for place in ("train.py:1", "gone.py:1", "train.py", None):
        assert edit_of(Finding("HS202", "m", "error", "certain", "f", "p", place=place)) is None
