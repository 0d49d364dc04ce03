"""The wheel builds, and works in an environment that holds nothing but its own dependencies."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

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
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel):
    """The `bin` folder of a new virtual environment with the wheel in it."""
    folder = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    install = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-compile")
    run(*install, "-c", ROOT / "constraints.txt", wheel)
    return folder / "bin"


def run(*command, code=0):
    """Returns what a command prints; it runs outside the checkout, where nothing points Python back to it."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(list(map(str, command)), cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    paths = [p for p in (ROOT / "halfstep").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = {p.relative_to(ROOT).as_posix() for p in paths}
    assert {"halfstep/py.typed", "halfstep/config/recipes/tiny.toml", "halfstep/report/assets/page.js"} <= files
    assert files == {name for name in packed if not name.startswith("halfstep-")}


def test_the_wheel_works_without_a_framework(environment):
    assert "Usage: halfstep COMMAND" in run(environment / "halfstep", "--help")
    assert "e4m3" in run(environment / "halfstep", "formats")
    assert run(environment / "python", "-c", SCRIPT) == "4 bf16-mixed []\n"


def test_training_without_a_framework_says_what_to_install(environment, wheel):
    assert "pip install '.[torch]'" in run(
        environment / "halfstep", "train", "--out", wheel.parent / "run", "--policy", "fp32", code=2
    )
