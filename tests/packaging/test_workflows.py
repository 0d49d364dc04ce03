"""Workflows and forms: each command is one that people run too, and checkers find nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
CHECKERS = ("check-jsonschema==0.39.0", "zizmor==1.32.0")
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")),
    "citation-file-format": [ROOT / "CITATION.cff"],
}
PUBLISH = "uv publish"  # needs the identity of a workflow


def commands():
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            for step in job["steps"]:
                if "run" in step and PUBLISH not in step["run"]:
                    yield pytest.param(step["run"], step.get("env", {}), id=f"{path.stem}: {step['run']}")


@pytest.mark.parametrize(("command", "variables"), [*commands()])
def test_every_command_makes_a_target(command, variables):
    program, *words = command.split()
    assert program == "make"
    parts = variables.get("PARTS", "")
    shown = subprocess.run(
        ["make", "-n", *(word for word in words if "$" not in word), f"PARTS={parts}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()


@pytest.mark.prove
def test_checkers_find_nothing(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "bin" / "python"]
    subprocess.run([*pip, "install", "-q", *CHECKERS], check=True)
    for name, paths in SCHEMAS.items():
        subprocess.run(
            [tmp_path / "bin" / "check-jsonschema", "--builtin-schema", f"vendor.{name}", *paths], check=True
        )
    subprocess.run([tmp_path / "bin" / "zizmor", "--offline", GITHUB], check=True)
