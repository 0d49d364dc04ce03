"""The generated pages are current, the README's code runs, and what pages name exists: links, paths and tests."""

import importlib.util
import re
from importlib import import_module
from pathlib import Path

import pytest

from halfstep.cli.policy import policy
from halfstep.cli.probe import probe
from halfstep.cli.train import train
from halfstep.config.load import load, recipe_names
from halfstep.config.run import RunConfig
from halfstep.config.schema import rows
from halfstep.core.errors import code_of
from halfstep.core.policy import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
# Pages of today; CHANGELOG.md and the measurements name what there was.
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md" and "measurements" not in page.parts]


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return module_at(ROOT / "docs" / "generate.py")


def test_the_generated_pages_are_current(generate):
    pages = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in generate.PAGES}
    stale = [name for name, text in pages.items() if text != generate.PAGES[name]()]
    assert stale == [], "run `python docs/generate.py`"
    assert {name for name in pages if name.startswith("api/")} == {
        f"api/{path.name}" for path in (ROOT / "docs" / "api").iterdir()
    }


def test_the_site_stays_small_enough_to_be_read():
    """A new page replaces one, or becomes part of one; the generated pages of the API do not count."""
    assert len([page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "api"]) <= 57


def test_error_codes_are_unique_and_none_vanishes(generate):
    """Programs compare them. A new code is added to the list; one that is there stays."""
    codes = [code_of(name) for name in generate.error_families()]
    assert len(codes) == len(set(codes))
    promised = (ROOT / "tests/docs/error_codes.txt").read_text(encoding="utf-8").split()
    assert set(promised) <= set(codes)
    assert all(meaning.count(".") == 1 for _, meaning in generate.error_families().values())


@pytest.mark.parametrize("package", ["halfstep", "halfstep.torch", "halfstep.jax", "halfstep.mlx"])
def test_the_api_has_every_public_name(package, generate):
    assert sorted(generate.API[package]) == sorted({*import_module(package).__all__} - {"__version__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", CURRENT, ids=lambda p: p.name)
def test_paths_and_tests_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"(?<![\w/.])(?:halfstep|tests|docs|examples|benchmarks)/[\w./-]*\w/?", text):
        assert (ROOT / path).exists(), path
    tests = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    for name in re.findall(r"\btest_\w+(?=`| |$)", text):
        assert f"def {name}(" in tests or any(ROOT.glob(f"tests/**/{name}.py")), name


def test_the_page_of_events_has_every_kind_that_is_written():
    code = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("halfstep/training/**/*.py"))
    page = (ROOT / "docs" / "logging.md").read_text("utf-8").split("\n## Events\n")[1]
    kinds = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.M))
    written = set(re.findall(r'events\.write\(\s*"(\w+)"', code))
    assert {"start", "checkpoint", "end"} <= written <= kinds


def test_the_page_of_examples_has_every_example():
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert set(re.findall(r'^--8<-- "examples/(.+)"$', text, flags=re.M)) == {
        path.name for path in (ROOT / "examples").iterdir() if path.is_file()
    }


def test_the_readme_examples_run_and_say_what_is_true(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        scope = {}
        exec(block, scope)
        *_, last = block.strip().splitlines()
        if shown := re.search(r"# (\[.*\])", last):
            assert str(eval(last, scope).tolist()) == shown[1]
    assert "converted 3 of" in capsys.readouterr().out


def test_the_page_of_recipes_has_each_with_its_size():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    sizes = {name: f"{load(name).model.num_parameters:,}" for name in recipe_names()}
    assert dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", text, flags=re.M)) == sizes
    for command in (probe, train):
        assert all(name in command.__doc__ for name in recipe_names())
    for command in (policy, train):
        assert all(name in command.__doc__ for name in PRESETS)


def test_pages_that_give_a_default_give_that_of_the_schema():
    defaults = {row.key: row.shown for row in rows(RunConfig)}
    given = [
        (page.name, key, value)
        for page in CURRENT
        for key, value in re.findall(r"\| `([a-z_]+\.[a-z_]+) = ([^`]+)` \|", page.read_text(encoding="utf-8"))
    ]
    assert len(given) >= 4
    assert [(page, key, value) for page, key, value in given if defaults[key] != value] == []


@pytest.mark.parametrize("package", ["torch", "training"])
def test_the_architecture_page_has_the_order_of_rooms_that_is_tested(package):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    arrow = re.search(rf"^    {package}:(.*?)(?=\n    \w|\n\n)", text, flags=re.S | re.M)[1]
    rooms = module_at(ROOT / "tests" / "architecture" / "test_imports.py").ROOMS[package]
    exists = {path.stem for path in (ROOT / "halfstep" / package).iterdir()}
    tested = [names & exists for names in rooms if names & exists]
    assert [set(re.split(r"[,\s]+", names.strip())) for names in arrow.split("<-")] == tested
