"""The verbs of a run take the same arguments on torch and MLX. Read from the sources: needs neither."""

import ast
from pathlib import Path

import pytest

import halfstep

VERBS = ("audit", "monitor", "check", "coverage", "step", "evaluation")


def arguments(backend: str, name: str) -> dict[str, str]:
    """The arguments of a method of `Run` that may be passed by place, each with its default."""
    folder = Path(halfstep.__file__).parent / backend
    trees = [ast.parse(path.read_text("utf-8")) for path in (folder / "run.py", *(folder / "update").glob("*.py"))]
    classes = [
        n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef) and n.name in ("Run", "Engine")
    ]
    (found,) = (n.args for c in classes for n in c.body if isinstance(n, ast.FunctionDef) and n.name == name)
    assert None not in found.kw_defaults, "a backend may add arguments by keyword, with a default"
    names, defaults = [each.arg for each in found.args], [*map(ast.unparse, found.defaults)]
    return dict(zip(names, ["required"] * (len(names) - len(defaults)) + defaults, strict=True))


@pytest.mark.parametrize("name", VERBS)
def test_torch_and_mlx_take_the_same_arguments(name):
    assert list(arguments("torch", name).items()) == list(arguments("mlx", name).items())
