"""Every planted hazard names a function and a test that exist; `make prove` plants them."""

import ast

import pytest

from benchmarks.prove import hazards


@pytest.mark.parametrize("hazard", hazards.HAZARDS, ids=lambda hazard: hazard.name)
def test_a_hazard_names_a_function_and_a_test_that_exist(hazard):
    pytest.importorskip("mlx.core" if ".mlx." in hazard.where else "torch")
    assert callable(hazards.find(hazard.where)[2])
    path, _, name = hazard.test.partition("::")
    tests = ast.walk(ast.parse((hazards.ROOT / path).read_text("utf-8")))
    assert name in [node.name for node in tests if isinstance(node, ast.FunctionDef)]


def test_hazards_have_names_of_their_own():
    assert len({hazard.name for hazard in hazards.HAZARDS}) == len(hazards.HAZARDS)
