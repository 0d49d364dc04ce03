"""docs/models.md shows how these models run today."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_is_current():
    for package in ("transformers", "diffusers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    spec = importlib.util.spec_from_file_location("halfstep_docs_models", ROOT / "docs" / "models.py")
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    if models.installed() != models.written_with():
        pytest.skip(f"the page is of {models.written_with()}, and here is {models.installed()}")
    written = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == models.page(), "run `python docs/models.py`"


def test_make_docs_writes_every_page_that_code_writes():
    target = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")[2].partition("\n\n")[0]
    generators = {path.name for path in (ROOT / "docs").glob("*.py")} - {"check.py"}  # which reads the built site
    assert generators >= {"generate.py", "models.py"}
    assert all(f"python docs/{name}\n" in f"{target}\n" for name in generators)
