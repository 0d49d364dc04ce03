"""The sdist and the wheel are whole, and work in an environment that holds nothing but their dependencies."""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from trove_classifiers import classifiers

import halfstep

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.prove  # asks the package index for hatchling and the dependencies

# Imports what reads the package's data files, and prints which frameworks that imported: none.
SCRIPT = """
import sys
import halfstep
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.report import page

assert halfstep.__file__.startswith(sys.prefix), halfstep.__file__
frameworks = {"torch", "jax", "mlx"} & set(sys.modules)
print(load("tiny", []).model.layers, Policy.parse("bf16-mixed"), sorted(frameworks))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (wheel,) = built.glob("*.whl")
    return wheel


def install(folder, *requirements):
    """Returns the `bin` folder of a new virtual environment with these in it."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-compile")
    run(*pip, "-c", ROOT / "constraints.txt", *requirements)
    return folder / "bin"


@pytest.fixture(scope="module")
def environment(wheel):
    return install(wheel.parent / "environment", wheel)


@pytest.fixture(scope="module")
def with_torch(wheel):
    return install(wheel.parent / "with_torch", f"halfstep[torch] @ file://{wheel}")


def run(*command, code=0, cwd=None):
    """Returns what a command prints; it runs outside the checkout, where nothing points Python back to it."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        place = cwd or folder
        done = subprocess.run(list(map(str, command)), cwd=place, env=variables, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    paths = [p for p in (ROOT / "halfstep").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = {p.relative_to(ROOT).as_posix() for p in paths}
    assert {"halfstep/py.typed", "halfstep/config/recipes/tiny.toml", "halfstep/report/assets/page.js"} <= files
    assert files == {name for name in packed if not name.startswith("halfstep-")}


def test_the_sdist_holds_the_package_and_builds_the_same_wheel(built, wheel, tmp_path):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    beside = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert {each.name for each in folder.iterdir()} == {"halfstep"} | beside
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=folder)
    (again,) = tmp_path.glob("*.whl")
    assert contents(again) == contents(wheel)


def contents(wheel):
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def test_an_index_would_take_the_metadata(wheel):
    (name,) = [name for name in contents(wheel) if name.endswith(".dist-info/METADATA")]
    metadata = Metadata.from_email(contents(wheel)[name])  # refuses what the specification does not allow
    assert str(metadata.version) == halfstep.__version__ in wheel.name
    assert set(metadata.classifiers) <= classifiers
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_wheel_works_without_a_framework(environment):
    assert "Usage: halfstep COMMAND" in run(environment / "halfstep", "--help")
    assert "e4m3" in run(environment / "halfstep", "formats")
    assert run(environment / "python", "-c", SCRIPT) == "4 bf16-mixed []\n"


def test_training_without_a_framework_says_what_to_install(environment, wheel):
    assert "pip install '.[torch]'" in run(
        environment / "halfstep", "train", "--out", wheel.parent / "run", "--policy", "fp32", code=2
    )


LOOP = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(30):
    loss = model(torch.randn(4, 8).bfloat16()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TWO_LINES = {
    "import torch\n": "import torch\nfrom halfstep.torch import prepare\n",
    ".bfloat16()\n": "\n",
    "randn(4, 8).bfloat16()": "randn(4, 8)",
    "lr=1e-5)\n": 'lr=1e-5)\nprepare(model, optimizer, "bf16-mixed,emulate=true")\n',
}


def test_with_torch_it_audits_trains_compares_exports_and_loads(with_torch, tmp_path):
    command, python = with_torch / "halfstep", with_torch / "python"
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(LOOP)
    text = LOOP
    for old, new in TWO_LINES.items():
        assert old in text
        text = text.replace(old, new)
    after.write_text(text)
    assert "HS101" in run(command, "audit", "--", python, before, code=1)
    assert "nothing is wrong" in run(command, "audit", "--", python, after)
    small = ("--policy", "fp32", "--set", "training.steps=20", "--set", "model.width=32")
    for seed in (1, 2):
        for folder in ("a", "b"):
            run(command, "train", *small, "--set", f"seed={seed}", "--out", tmp_path / folder / f"{seed}")
    run(command, "compare", tmp_path / "a", tmp_path / "b")  # exit code 0: they are the same
    run(command, "export", tmp_path / "a" / "1", "--to", "safetensors", "--out", tmp_path / "model")
    load = "import sys, halfstep; print(halfstep.load_model('tiny', sys.argv[1], settings=sys.argv[2:]).config)"
    assert "width=32" in run(python, "-c", load, tmp_path / "model", "model.width=32")
