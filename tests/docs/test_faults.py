"""Every planted fault still fits the source, so that benchmarks/prove/plant_faults.py plants what it says."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTED = [
    (file.stem, entry)
    for file in sorted((ROOT / "benchmarks" / "prove" / "faults").glob("*.toml"))
    for entry in tomllib.loads(file.read_text("utf-8"))["fault"]
]


@pytest.mark.parametrize(("backend", "fault"), LISTED, ids=[f"{b}: {e['what']}" for b, e in LISTED])
def test_a_planted_fault_fits_the_source_and_names_a_test(backend, fault):
    source = (ROOT / fault["file"]).read_text("utf-8")
    assert source.count(fault["old"]) == 1
    ast.parse(source.replace(fault["old"], fault["new"]))
    for test in fault["test"].split():
        if test.startswith("-"):
            continue
        path, _, name = test.partition("::")
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8")))
            if isinstance(node, ast.FunctionDef)
        ]
        assert not name or name.partition("[")[0] in functions
