"""How large the package may be. It may shrink; it grows only where somebody changes a number here on purpose.

sizes.txt has the most files, lines and statements of each folder, two levels deep. After a change that is worth
its size:

    python tests/architecture/test_sizes.py
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = Path(__file__).parent / "sizes.txt"
UNITS = ("files", "lines", "statements")
LONGEST_FILE = 500
# Files over 500 lines, each with what keeps it whole.
LONG_FILES: dict[str, str] = {}
FUNCTIONS_P90 = 20  # lines: nine functions of ten are no longer


Sizes = dict[str, list[int]]


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """The syntax of each file."""
    return {path: list(ast.walk(ast.parse(path.read_text("utf-8")))) for path in (ROOT / "halfstep").rglob("*.py")}


@cache
def measured() -> Sizes:
    """Files, lines and statements of each folder, and of the package."""
    sizes: Sizes = defaultdict(lambda: [0, 0, 0])
    for path, parsed in nodes().items():
        lines = path.read_text("utf-8").count("\n")
        statements = sum(isinstance(node, ast.stmt) for node in parsed)
        for name in ("all", "/".join(path.relative_to(ROOT).parent.parts[:3])):
            sizes[name] = [a + b for a, b in zip(sizes[name], (1, lines, statements), strict=True)]
    return dict(sorted(sizes.items()))


def allowed() -> Sizes:
    lines = [line.split() for line in SIZES.read_text(encoding="utf-8").splitlines()[1:]]
    return {folder: [int(number) for number in numbers] for folder, *numbers in lines}


def grown(now: Sizes, most: Sizes) -> list[str]:
    """What is larger than it may be."""
    return [
        f"{folder}: {size} {unit}, at most {limit}"
        for folder, sizes in now.items()
        for unit, size, limit in zip(UNITS, sizes, most.get(folder, [0, 0, 0]), strict=True)
        if size > limit
    ]


def test_no_folder_grew():
    assert grown(measured(), allowed()) == [], "make it smaller; if it is worth its size, run this file"


def test_a_folder_that_grew_and_a_new_one_are_named():
    most = {"all": [3, 90, 40], "halfstep/core": [3, 90, 40]}
    assert grown({"all": [3, 80, 40], "halfstep/core": [3, 91, 40]}, most) == [
        "halfstep/core: 91 lines, at most 90"
    ]
    assert grown({"halfstep/new": [1, 9, 2]}, most)[0] == "halfstep/new: 1 files, at most 0"


def test_no_file_is_too_long_to_read_at_once():
    lengths = {
        path.relative_to(ROOT / "halfstep").as_posix(): path.read_text("utf-8").count("\n")
        for path in (ROOT / "halfstep").rglob("*.py")
    }
    assert {name for name, lines in lengths.items() if lines > LONGEST_FILE} == LONG_FILES.keys()


def test_nine_functions_of_ten_fit_half_a_screen():
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for parsed in nodes().values()
        for node in parsed
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert lengths[len(lengths) * 9 // 10] <= FUNCTIONS_P90


if __name__ == "__main__":
    rows = [("folder", *UNITS), *((folder, *sizes) for folder, sizes in measured().items())]
    SIZES.write_text("".join("{:38} {:>6} {:>6} {:>11}\n".format(*row) for row in rows), encoding="utf-8")
