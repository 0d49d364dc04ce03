"""Files, lines and imports by folder; cycles between files; imports against the order; lines of package and tests.

    python benchmarks/measure/house.py [CHECKOUT]

CHECKOUT is another checkout, such as an older commit, to compare with. The rules, and what counts as an import
(inside functions and for types too), are those of tests/architecture/test_imports.py of this checkout.
"""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rules():
    """The architecture test, as a module."""
    path = ROOT / "tests" / "architecture" / "test_imports.py"
    spec = importlib.util.spec_from_file_location("architecture_rules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(paths) -> int:
    return sum(path.read_text("utf-8").count("\n") for path in paths)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    package, check = root / "halfstep", rules()
    files = check.modules(package)
    folder_of = {module: path.parent.relative_to(root).as_posix() for module, path in files.items()}
    within, outside = Counter(), Counter()
    for module, targets in check.edges(package).items():
        for target in targets:
            here, there = folder_of[module], folder_of[target]
            (within if here == there else outside)[here] += 1
    print(f"{'folder':38} {'files':>5} {'lines':>6} {'imports within':>14} {'of others':>9}")
    for folder in sorted(set(folder_of.values())):
        paths = [path for path in files.values() if path.parent == root / folder]
        print(f"{folder:38} {len(paths):5} {lines(paths):6} {within[folder]:14} {outside[folder]:9}")
    circles, wrong = check.cycles(package), check.wrong_way(package)
    print(f"\ncycles between files        {len(circles)}")
    print(f"imports against the order   {len(wrong)}")
    for line in (circles + wrong)[:40]:
        print(f"  {line}")
    print(
        f"lines of Python: package {lines(package.rglob('*.py'))}, tests {lines((root / 'tests').rglob('*.py'))}"
    )
    return 1 if circles or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
