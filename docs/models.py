"""Writes the tables of docs/models.md from tiny models of each family; a test keeps them current.

python docs/models.py
"""

import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

from halfstep.core.audit.coverage import Row
from halfstep.torch.convert.functions.entry import Skip
from halfstep.torch.run import Run, prepare

HERE = Path(__file__).parent
KINDS = {
    "layers": ("multiplies", "computes", "looks up", "projects"),
    "islands": ("is an island",),
    "routers": ("is a router",),
    "experts": ("is a leaf of experts",),
    "leaves": ("is a leaf, it",),
}
_VERSIONS = r"transformers [\d.]+\d and diffusers [\d.]+\d"


def zoo():
    """Returns the module benchmarks/zoo.py."""
    if "halfstep_zoo" not in sys.modules:
        spec = importlib.util.spec_from_file_location("halfstep_zoo", HERE.parent / "benchmarks" / "zoo.py")
        sys.modules["halfstep_zoo"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["halfstep_zoo"]


def page() -> str:
    """Returns the page with its tables computed again."""
    text = (HERE / "models.md").read_text(encoding="utf-8")
    for name, rows in tables().items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = before + start + markdown(rows) + end + rest.partition(end)[2]
    return re.sub(_VERSIONS, installed(), text)


def tables() -> dict[str, list[list[str]]]:
    """Returns how the modules and the functions of each family run."""
    modules = [["model", *KINDS]]
    functions = [["model", "covered", "in compute", "unchanged"]]
    for family in zoo().FAMILIES.values():
        rows: list[Row] = []
        for attention in zoo().ATTENTION:
            model, loss = family.make(attention)
            run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
            rows += run.coverage(lambda _, model=model, loss=loss: loss(model), None).rows
        modules.append([family.name, *(_kinds(run, words) for words in KINDS.values())])
        functions.append([family.name, *_functions(rows)])
    return {"modules": modules, "functions": functions}


def markdown(rows: list[list[str]]) -> str:
    """Returns a Markdown table; the first row is its head."""
    marked = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in marked)


def installed() -> str:
    """Returns the installed versions, as the page names them."""
    return f"transformers {version('transformers')} and diffusers {version('diffusers')}"


def written_with() -> str:
    """Returns the versions that the page names."""
    return re.search(_VERSIONS, (HERE / "models.md").read_text(encoding="utf-8"))[0]


def _kinds(run: Run, words: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for _, kind, form in run.conversion.changes:
        if form.startswith(words):
            counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _functions(rows: Iterable[Row]) -> list[str]:
    columns: list[dict[str, None]] = [{}, {}, {}]
    for row in rows:
        name = f"`{row.function.rpartition('.')[2]}`"
        if row.how == "covered":
            columns[0][name] = None
        elif row.why == Skip.IN_COMPUTE:
            columns[1][name] = None
        else:
            columns[2][f"{name}: {row.why}"] = None
    return [", ".join(columns[0]), ", ".join(columns[1]), "; ".join(columns[2])]


if __name__ == "__main__":
    (HERE / "models.md").write_text(page(), encoding="utf-8")
