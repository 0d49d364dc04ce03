"""What halfstep leaves on the user's modules and tensors: a few names, each with an owner.

A new fact about a module is a field of its record (torch/numerics/record.py).
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "halfstep"
FOLDERS = ("torch", "integrations")
ON_MODULES = {
    "halfstep": "numerics/record.py",
    "halfstep_watch": "instruments/observe/slots.py",
}
ON_TENSORS = {
    "halfstep_split": "numerics/split/operand.py",
    "halfstep_name": "numerics/split/parameter.py",
    "halfstep_cast": "numerics/lowering.py",
    "halfstep_codes": "fp8/linear.py",
    "halfstep_wide": "convert/functions/narrow_logits.py",
    "halfstep_viewed": "convert/functions/narrow_logits.py",
}
ELSEWHERE = {
    "halfstep_subclass": "a class that subclass.py made",
    "halfstep_wrapped": "an autograd function that custom.py has wrapped",
    "halfstep_mode": "the context of such a function",
    "__halfstep_watched__": "a function of torch that an audit has wrapped",
    "halfstep_causal": "no attribute: an implementation of attention, by its name in transformers",
}
NAME = re.compile(r"_*halfstep_[a-z_]+")


def hidden_names(package: Path) -> set[str]:
    """Returns every attribute, and every string, that is such a name."""
    names = set()
    for folder in FOLDERS:
        for path in (package / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                kinds = {ast.Attribute: "attr", ast.Name: "id", ast.Constant: "value"}
                name = getattr(node, kinds.get(type(node), ""), None)
                if isinstance(name, str) and NAME.fullmatch(name):
                    names.add(name)
    return names


def test_modules_and_tensors_carry_no_more_than_this():
    assert hidden_names(PACKAGE) == {*ON_MODULES, *ON_TENSORS, *ELSEWHERE} - {"halfstep"}


def test_each_name_is_in_the_file_that_owns_it():
    for name, path in {**ON_MODULES, **ON_TENSORS}.items():
        assert name in (PACKAGE / "torch" / path).read_text(encoding="utf-8"), name


def test_a_planted_name_is_found(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/a.py").write_text('module.halfstep_one = 1\nsetattr(module, "halfstep_two", 2)\n')
    assert hidden_names(tmp_path) == {"halfstep_one", "halfstep_two"}
