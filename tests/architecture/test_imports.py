"""Imports point one way, files form no cycle, frameworks stay in their folders, and backends have the same rooms.

The checks are functions of a folder, so that each can be given a tree with a planted fault and must report it.
"""

import ast
import re
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
    {"tools"},
    {"report"},
    {"cli"},
]
# The order of the rooms (modules and sub-packages) inside a package: a room may import those before it, and those
# on its own line as long as files form no cycle. A room that is not listed is an error: a new one needs a place.
BACKEND_ROOMS = [
    {"jaxpr", "pytree"},  # what JAX gives us, by name
    {"numerics", "kernels", "fp8", "loss"},  # formats, casts and matmuls, and the kernels that compute them
    {"layers"},
    {"fusion"},  # passes over the graph of compiled code, which know what layers put into it
    {"model"},
    {"measure"},
    {"timers"},
    {"convert"},  # modules and functions, and what a policy puts in their place
    {"islands"},
    {"optim"},
    {"parallel"},
    {"update", "state"},  # the engine: it calls hooks, and knows no instrument
    {"instruments"},  # what looks at a run: audit, monitor, shadow, planning, tuning
    {"run", "session"},  # the faces above both
    {"export"},
]
ROOMS = {
    "torch": BACKEND_ROOMS,
    "jax": BACKEND_ROOMS,
    "mlx": BACKEND_ROOMS,
    "training": [
        {"files", "paths", "schedule"},
        {"data", "checkpoints", "telemetry"},
        {"memory"},
        {"session"},
        {"job"},
        {"evaluation"},
        {"run", "weights"},
        {"loop"},
    ],
    "integrations": [
        {"state", "refusals", "first_steps", "testing"},
        {"parts", "adapters"},
        {"stock"},
        {"fsdp"},
        {"accelerate"},
        {"transformers", "lightning"},
    ],
}
BACKENDS = ("torch", "jax", "mlx")
# Backends whose audit collects without the engine: it may import core, and these, which import core alone too.
COLLECTORS = {
    "torch": {},
    "jax": {
        "halfstep.jax.jaxpr": "the kinds of primitives, which the engine opens as an audit does",
        "halfstep.jax.pytree": "the names of parameters, which are those of rules",
    },
}
# Rooms that a backend lacks, each with its reason.
ABSENT_ROOMS = {
    "fp8": "torch, JAX: the hardware's own fp8 matmul, and amaxes of earlier updates; MLX emulates",
    "kernels": "torch alone: JAX compiles a whole step, and MLX has no such kernels yet",
    "loss": "torch alone: cross-entropy in one kernel over narrow logits; the others fuse it by themselves",
    "fusion": "torch alone: XLA and MLX compile whole programs, and are given no passes",
    "timers": "torch alone: processes that each compile a layer; the others compile all that is timed at once",
    "jaxpr": "JAX alone: the others trace no programs of this kind",
    "pytree": "JAX alone: the others hold parameters in modules",
    "islands": "torch alone: there is a torch.nn whose names people expect",
    "export": "torch alone: the libraries that read an export run on it",
}
# The frameworks, and the folder that may import each.
FRAMEWORKS = {
    "torch": {"torch", "triton", "torchao"},
    "jax": {"jax", "jaxlib", "flax", "optax", "equinox"},
    "mlx": {"mlx"},
    "integrations": {"accelerate", "transformers", "lightning"},
}
# The policy inside frameworks on torch.
MAY_IMPORT_TORCH = ("halfstep.integrations",)
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


def entangled_collectors(package: Path) -> list[str]:
    """What an audit brings into a user's script: it must run beside a framework that the engine cannot use."""
    faults = []
    for backend, extra in COLLECTORS.items():
        own = f"{package.name}.{backend}.instruments.collect."
        allowed = (f"{package.name}.core.", own)
        for module, path in modules(package).items():
            allows = (*allowed, *extra) if module.startswith(own) else allowed
            if module.startswith(own) or module in extra:
                faults += [
                    f"{module} imports {target}"
                    for target in imports(path, module)
                    if target.startswith(f"{package.name}.") and not target.startswith(allows)
                ]
    return faults


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


def stale_paths(package: Path) -> list[str]:
    """Files that a comment or a docstring names and that are not there: after a move, words stay behind."""
    folders = (package, *(package.parent / name for name in ("tests", "benchmarks", "docs", "examples")))
    files = [f"/{path.as_posix()}" for folder in folders for path in folder.rglob("*.py")]
    return [
        f"{module} names {named}"
        for module, path in modules(package).items()
        for named in re.findall(r"(?<![\w/.{}-])([\w/]+\.py)\b(?!i)", path.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{named}") for file in files)
    ]


CHECKS = [
    wrong_way,
    unplaced,
    cycles,
    strayed_frameworks,
    heavy_core,
    entangled_collectors,
    uneven_backends,
    crowded_folders,
    banned_names,
    undocumented,
    stale_paths,
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
    (
        wrong_way,
        {"torch/numerics/cast.py": "from halfstep.torch import run"},
        "torch.numerics.cast imports halfstep.torch.run",
    ),
    (
        wrong_way,
        {"torch/update/step.py": "def f():\n    from halfstep.torch.instruments.monitor import Monitor"},
        "torch.update.step imports halfstep.torch.instruments.monitor",
    ),
    (
        wrong_way,
        {"jax/instruments/shadow.py": "from halfstep.jax.run import Run"},
        "jax.instruments.shadow imports halfstep.jax.run",
    ),
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
    (
        entangled_collectors,
        {"torch/instruments/collect/a.py": "def f():\n    from halfstep.torch import layers"},
        "collect.a imports halfstep.torch.layers",
    ),
    (
        entangled_collectors,
        {"jax/jaxpr.py": "from halfstep.jax import layers"},
        "jaxpr imports halfstep.jax.layers",
    ),
    (uneven_backends, {"torch/a.py": "", "torch/b/c.py": "", "jax/a.py": ""}, "halfstep/jax lacks b"),
    (crowded_folders, {f"core/a{i}.py": "" for i in range(23)}, "holds 23 files"),
    (banned_names, {"core/utils.py": ""}, "core.utils"),
    (undocumented, {"core/a.py": "x = 1"}, "core.a"),
    (stale_paths, {"core/a.py": '"""As in core/b.py, and not as in core/a.py."""'}, "core.a names core/b.py"),
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
