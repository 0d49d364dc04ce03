"""Imports point one way, files form no cycle, frameworks stay in their folders, and backends have the same rooms.

The checks are functions of a folder, so that each can be given a tree with a planted fault and must report it.
"""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "halfstep"

# A layer may import the layers before it. The backends do not import each other.
LAYERS = [
    {"core"},
    {"config"},
    {"torch", "jax", "mlx"},
    {"training"},
    {"integrations"},
    {"tools"},  # to come here: plan
    {"report"},
    {"cli"},
]
# The order of the rooms (modules and sub-packages) inside a package: a room may import those before it, and those
# on its own line as long as files form no cycle. A room that is not listed is an error: a new one needs a place.
BACKEND_ROOMS = [
    {"compile_cache", "dtypes", "memory", "shards", "tracing"},
    {"cast"},
    {"split", "kernels"},
    {"lowering"},
    {"matmul", "fp8", "norms", "recompute", "losses"},
    {"layers"},
    {"model"},
    {"measure"},
    {"functions", "islands"},
    {"convert"},
    {"apply"},
    {"optim"},
    {"observe"},  # statistics of every layer
    {"collect"},  # what an audit sees; `audit` itself is a public function of jax and mlx
    {"parallel"},
    {"run"},
    {"graph"},
    {"state"},
    {"step"},
    {"session"},
    {"tuning"},
    {"export"},
    {"planning"},
]
# JAX interprets a whole loss function by what `apply` decided; torch's `apply` plans with the table of functions.
JAX_ROOMS = [names for names in BACKEND_ROOMS if "functions" not in names]
JAX_ROOMS.insert(JAX_ROOMS.index({"apply"}) + 1, {"functions"})
ROOMS = {
    "torch": BACKEND_ROOMS,
    "jax": JAX_ROOMS,
    "mlx": BACKEND_ROOMS,
    "training": [
        {"files", "paths", "schedule"},
        {"data", "checkpoints", "telemetry"},
        {"memory"},
        {"session"},
        {"job"},
        {"evaluation", "sampling"},
        {"run", "weights"},
        {"loop"},
    ],
    "integrations": [{"state"}, {"accelerate"}, {"transformers", "lightning"}],
}
BACKENDS = ("torch", "jax", "mlx")
# Rooms that a backend lacks, each with its reason.
ABSENT_ROOMS = {
    "split": "torch alone: autograd must know that half of a split master has an fp32 gradient",
    "tracing": "torch alone: code that dynamo takes as it is asks whether it is being compiled",
    "compile_cache": "torch alone: JAX's own cache has whole programs, and MLX keeps none",
    "fp8": "torch, JAX: the hardware's own fp8 matmul, and amaxes of earlier updates; MLX emulates",
    "kernels": "torch alone: JAX compiles a whole step, and MLX has no such kernels yet",
    "recompute": "torch alone: JAX keeps by a policy of its own, and MLX cannot",
    "losses": "torch alone: cross-entropy in one kernel over narrow logits; the others fuse it by themselves",
    "norms": "torch alone: eager layers of narrow inputs call one kernel; the others fuse or compile",
    "islands": "torch alone: there is a torch.nn whose names people expect",
    "shards": "torch alone: JAX's arrays and MLX's have no class of their own for a part of one",
    "graph": "torch alone: a step is one program on JAX, and one graph on MLX if it is compiled",
    "planning": "torch alone: its meta device follows a step that no memory holds",
    "export": "torch alone: the libraries that read an export run on it",
    "tuning": "torch alone: `halfstep tune` tries formats module by module, and hardware has them on torch first",
    "convert": "torch, MLX: modules change their class; JAX has functions instead",
}
# The frameworks, and the folder that may import each.
FRAMEWORKS = {
    "torch": {"torch", "triton", "torchao"},
    "jax": {"jax", "jaxlib", "flax", "optax", "equinox"},
    "mlx": {"mlx"},
    "integrations": {"accelerate", "transformers", "lightning"},
}
# The recipes that `halfstep bench` races, each in a process of its own, and the policy inside frameworks on torch.
MAY_IMPORT_TORCH = ("halfstep.tools.bench.arms", "halfstep.integrations")
# What core may import besides the standard library.
CORE_MAY_IMPORT = {"numpy", "halfstep"}
# These load the public names of a package when they are used, and import for type checkers only.
PUBLIC_NAMES = {"halfstep", "halfstep.torch", "halfstep.jax", "halfstep.mlx"}
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def modules(package: Path) -> dict[str, Path]:
    named = {}
    for path in package.rglob("*.py"):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@cache
def imports(path: Path, module: str) -> list[str]:
    """Everything that a module imports, also inside functions and for types only."""
    is_package = path.name == "__init__.py"
    targets = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                steps = module.split(".") if is_package else module.split(".")[:-1]
                steps = steps[: len(steps) - node.level + 1]
                base = ".".join([*steps, base] if base else steps)
            targets += [f"{base}.{alias.name}" for alias in node.names]
    return targets


def edges(package: Path) -> dict[str, set[str]]:
    """Which files of the package import which."""
    known = modules(package)
    return {
        module: {t if t in known else t.rpartition(".")[0] for t in imports(path, module)}
        & known.keys() - {module}
        for module, path in known.items()
        if module not in PUBLIC_NAMES
    }


def depth_of(name: str, order: list[set[str]]) -> int | None:
    return next((depth for depth, names in enumerate(order) if name in names), None)


def wrong_way(package: Path) -> list[str]:
    """Imports of a later layer, of a backend beside, or of a later room of the same package."""
    faults = []
    for module, path in modules(package).items():
        if module in PUBLIC_NAMES:
            continue
        for target in imports(path, module):
            here, there = module.split("."), target.split(".")
            if there[0] != package.name or len(there) < 2:
                continue
            order, place = LAYERS, 1
            if here[1] == there[1] and here[1] in ROOMS:
                order, place = ROOMS[here[1]], 2
            if len(here) <= place or len(there) <= place:
                continue
            a, b = depth_of(here[place], order), depth_of(there[place], order)
            sideways = place == 1 and a == b and here[1] != there[1]
            if a is not None and b is not None and (b > a or sideways):
                faults.append(f"{module} imports {target}")
    return faults


def unplaced(package: Path) -> list[str]:
    """Folders and rooms that have no place in the order."""
    faults = []
    for folder, order in [("", LAYERS), *ROOMS.items()]:
        if (package / folder).is_dir():
            faults += [
                f"{package.name}/{folder}: {room}"
                for room in rooms(package / folder, folders_only=not folder)
                if depth_of(room, order) is None
            ]
    return faults


def rooms(folder: Path, *, folders_only: bool = False) -> set[str]:
    """The names of the modules and sub-packages of a folder: `optim.py` and `optim/` are one room."""
    packages = {path.parent.name for path in folder.glob("*/*.py")}
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return packages if folders_only else packages | files


def cycles(package: Path) -> list[str]:
    graph = edges(package)
    faults, done = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            faults.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return faults


def strayed_frameworks(package: Path) -> list[str]:
    faults = []
    for module, path in modules(package).items():
        folder = [*module.split("."), ""][1]
        for target in imports(path, module):
            for backend, names in FRAMEWORKS.items():
                allowed = folder == backend or (backend == "torch" and module.startswith(MAY_IMPORT_TORCH))
                if target.split(".")[0] in names and not allowed:
                    faults.append(f"{module} imports {target}, which belongs in halfstep.{backend}")
    return faults


def heavy_core(package: Path) -> list[str]:
    return [
        f"{module} imports {target}"
        for module, path in modules(package).items()
        if module.startswith(f"{package.name}.core.")
        for target in imports(path, module)
        if target.split(".")[0] not in CORE_MAY_IMPORT | sys.stdlib_module_names
    ]


def uneven_backends(package: Path) -> list[str]:
    present = {name: rooms(package / name) for name in BACKENDS if (package / name).is_dir()}
    every = set().union(*present.values())
    return [
        f"halfstep/{name} lacks {room}"
        for name, its in present.items()
        for room in sorted(every - its - ABSENT_ROOMS.keys())
    ]


def crowded_folders(package: Path) -> list[str]:
    """Folders of more than 22 files side by side: a floor plan nobody can read."""
    folders = {path.parent for path in package.rglob("*.py")}
    return [f"{folder} holds {n} files" for folder in folders if (n := len(list(folder.glob("*.py")))) > 22]


def banned_names(package: Path) -> list[str]:
    return [module for module in modules(package) if BANNED_NAMES & set(module.split("."))]


def undocumented(package: Path) -> list[str]:
    return [m for m, path in modules(package).items() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]


CHECKS = [
    wrong_way,
    unplaced,
    cycles,
    strayed_frameworks,
    heavy_core,
    uneven_backends,
    crowded_folders,
    banned_names,
    undocumented,
]


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_is_in_order(check):
    assert check(PACKAGE) == []


def test_every_absent_room_is_absent_somewhere():
    present = [rooms(PACKAGE / name) for name in BACKENDS]
    assert set.union(*present) - set.intersection(*present) == ABSENT_ROOMS.keys()


CYCLE = {"core/a.py": "from halfstep.core import b", "core/b.py": "from halfstep.core.a import x"}
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from halfstep.core.a import x"
# (check, files of a small tree, a part of the fault it must report)
PLANTED = [
    (wrong_way, {"core/a.py": "from halfstep.config import b"}, "core.a imports halfstep.config.b"),
    (wrong_way, {"core/a.py": "def f():\n    import halfstep.cli.main"}, "halfstep.cli.main"),
    (wrong_way, {"core/a.py": "from ..training import loop"}, "halfstep.training.loop"),
    (wrong_way, {"torch/a.py": "from halfstep.jax import b"}, "torch.a imports halfstep.jax.b"),
    (wrong_way, {"core/a.py": "from halfstep import tools"}, "halfstep.tools"),
    (
        wrong_way,
        {"training/data/a.py": "from halfstep.training.run import b"},
        "data.a imports halfstep.training.run",
    ),
    (wrong_way, {"torch/cast.py": "from halfstep.torch import step"}, "torch.cast imports halfstep.torch.step"),
    (unplaced, {"extras/a.py": ""}, "extras"),
    (unplaced, {"torch/novelty.py": ""}, "novelty"),
    (cycles, CYCLE, "core.a ->"),
    (cycles, CYCLE | {"core/b.py": FOR_TYPES}, "core.a ->"),
    (cycles, CYCLE | {"core/b.py": "def f():\n    from halfstep.core.a import x"}, "core.a ->"),
    (strayed_frameworks, {"training/a.py": "import torch"}, "belongs in halfstep.torch"),
    (strayed_frameworks, {"torch/a.py": "import jax.numpy as jnp"}, "belongs in halfstep.jax"),
    (strayed_frameworks, {"core/a.py": "def f():\n    import mlx.core"}, "belongs in halfstep.mlx"),
    (strayed_frameworks, {"torch/a.py": "import accelerate"}, "belongs in halfstep.integrations"),
    (unplaced, {"integrations/novelty.py": ""}, "novelty"),
    (heavy_core, {"core/a.py": "import rich"}, "imports rich"),
    (uneven_backends, {"torch/a.py": "", "torch/b/c.py": "", "jax/a.py": ""}, "halfstep/jax lacks b"),
    (crowded_folders, {f"core/a{i}.py": "" for i in range(23)}, "holds 23 files"),
    (banned_names, {"core/utils.py": ""}, "core.utils"),
    (undocumented, {"core/a.py": "x = 1"}, "core.a"),
]


@pytest.mark.parametrize(("check", "files", "fault"), PLANTED)
def test_a_planted_fault_is_found(check, files, fault, tmp_path):
    for name, text in files.items():
        path = tmp_path / "halfstep" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    faults = check(tmp_path / "halfstep")
    assert any(fault in line for line in faults), faults


def test_every_check_has_a_planted_fault():
    assert {check for check, _, _ in PLANTED} == set(CHECKS)
