"""Findings as machines read them: SARIF, annotations, JUnit, and edits that mend a script."""

import gzip
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from halfstep.core.audit.engine import check, registry
from halfstep.core.audit.finding import Finding
from halfstep.tools.audit.channels import github, junit, sarif
from halfstep.tools.audit.fixes import MECHANICAL, edit_of
from halfstep.torch.instruments.collect.watch import Watch

ODD = Finding("HS502", "50 %,\nof `x`: <all>", "note", "weak", "a, b: c.", "p", place="dir/my train.py:3")
NO_LINE = Finding("HS701", "gains", "error", "certain", "f.", "p", place="out/model.safetensors", where=["a", "b"])
NOWHERE = Finding("HS101", "m", "warning", "likely", "f.", "p", where=["a"], evidence={"lost": 2.0})
FOUND = [ODD, NO_LINE, NOWHERE]

# As OASIS publishes it.
SCHEMA = json.loads(gzip.decompress((Path(__file__).parent / "sarif-schema-2.1.0.json.gz").read_bytes()))
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
FORMATS = {"uri": r"\w+:\S+", "uri-reference": r"[!#-;=?-Z\[\]_a-z~%]*", "date-time": r"\d{4}-\d\d-\d\dT.*Z"}

KEYWORDS = {"$schema", "$id", "title", "description", "default", "definitions", "enum", "required", "properties"}
KEYWORDS |= {"additionalProperties", "items", "minItems", "uniqueItems", "minimum", "maximum", "pattern", "format"}


def faults(value, schema, at="log"):
    """Yields what breaks a JSON schema; a keyword that is not known here is a fault of this function."""
    for keyword, rule in schema.items():
        match keyword:
            case "$ref":
                yield from faults(value, SCHEMA["definitions"][rule.removeprefix("#/definitions/")], at)
            case "type":
                kinds = [rule] if isinstance(rule, str) else rule
                right = any(isinstance(value, KINDS[kind]) for kind in kinds)
                if not right or (isinstance(value, bool) and "boolean" not in kinds):
                    yield f"{at}: {value!r} is not of type {rule}"
            case "enum" if value not in rule:
                yield f"{at}: {value!r} is none of {rule}"
            case "required" if isinstance(value, dict):
                yield from (f"{at}: no {key}" for key in rule if key not in value)
            case "properties" if isinstance(value, dict):
                for key in rule.keys() & value.keys():
                    yield from faults(value[key], rule[key], f"{at}.{key}")
            case "additionalProperties" if isinstance(value, dict) and rule is not True:
                for key in value.keys() - schema.get("properties", {}).keys():
                    yield from faults(value[key], rule, f"{at}.{key}") if rule else [f"{at}: no place for {key}"]
            case "items" if isinstance(value, list):
                for i, each in enumerate(value):
                    yield from faults(each, rule, f"{at}[{i}]")
            case "anyOf" | "oneOf":
                fit = sum(not [*faults(value, each)] for each in rule)
                if not fit or (keyword == "oneOf" and fit > 1):
                    yield f"{at}: {value!r} fits {fit} of {len(rule)}"
            case "minItems" if isinstance(value, list) and len(value) < rule:
                yield f"{at}: {len(value)} items, at least {rule}"
            case "uniqueItems" if isinstance(value, list) and len({*map(json.dumps, value)}) < len(value):
                yield f"{at}: one item twice"
            case "minimum" | "maximum" if isinstance(value, int | float):
                if value < rule if keyword == "minimum" else value > rule:
                    yield f"{at}: {value} is beyond {rule}"
            case "pattern" | "format" if isinstance(value, str):
                if not re.search(rule if keyword == "pattern" else f"^{FORMATS[rule]}$", value):
                    yield f"{at}: {value!r} is no {rule}"
            case _:
                assert keyword in KEYWORDS, keyword


BROKEN = {
    "no version": lambda log: log.pop("version"),
    "another version": lambda log: log.update(version="2.0.0"),
    "a level of ours": lambda log: log["runs"][0]["results"][0].update(level="notice"),
    "a key of ours": lambda log: log["runs"][0]["results"][0].update(confidence="weak"),
    "a result without a message": lambda log: log["runs"][0]["results"][0].pop("message"),
    "line 0": lambda log: _region(log).update(startLine=0),
    "a line as text": lambda log: _region(log).update(startLine="3"),
    "a file with a space": lambda log: _place(log)["artifactLocation"].update(uri="my train.py"),
    "one rule twice": lambda log: log["runs"][0]["tool"]["driver"]["rules"].append(
        log["runs"][0]["tool"]["driver"]["rules"][0]
    ),
    "an edit that changes nothing": lambda log: log["runs"][0]["results"][0].update(
        fixes=[{"artifactChanges": [{"artifactLocation": {"uri": "a.py"}, "replacements": []}]}]
    ),
}


def _place(log):
    return log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]


def _region(log):
    return _place(log)["region"]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_log_is_not_sarif(how):
    log = json.loads(json.dumps(sarif(FOUND, complete=True)))
    BROKEN[how](log)
    assert [*faults(log, SCHEMA)]


def test_every_rule_is_sarif():
    found = [Finding(id, "m", rule.severity, "certain", rule.fix, "p") for id, rule in registry().items()]
    assert [*faults(json.loads(json.dumps(sarif(found, complete=True))), SCHEMA)] == []


def test_sarif_is_what_its_schema_allows():
    log = json.loads(json.dumps(sarif(FOUND, complete=True, unseen=["compiled code"])))
    assert [*faults(log, SCHEMA)] == []
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["HS101", "HS502", "HS701"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    first, second, third = run["results"]
    physical = first["locations"][0]["physicalLocation"]
    assert physical == {"artifactLocation": {"uri": "dir/my%20train.py"}, "region": {"startLine": 3}}
    assert [each["fullyQualifiedName"] for each in second["locations"][0]["logicalLocations"]] == ["a", "b"]
    assert "physicalLocation" not in third["locations"][0]
    assert [*faults(sarif([], complete=False), SCHEMA)] == []


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
        assert [*faults(json.loads(json.dumps(sarif(found, complete=True))), SCHEMA)] == []
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
