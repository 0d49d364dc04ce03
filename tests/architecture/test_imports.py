"""Imports point one way, frameworks stay in their folders, backends have the same files, nothing is a cycle.

The checks are functions of a folder, so that each can be shown a tree with a planted fault and must find it.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "halfstep"

# A layer may import the layers before it. The backends stand side by side and do not see each other.
LAYERS = [{"core"}, {"config"}, {"torch", "jax", "mlx"}, {"training"}, {"tools"}, {"report"}, {"cli"}]
BACKENDS = ("torch", "jax", "mlx")
# The frameworks, and what belongs to each.
FRAMEWORKS = {
    "torch": {"torch", "triton", "torchao"},
    "jax": {"jax", "jaxlib", "flax", "optax", "equinox"},
    "mlx": {"mlx"},
}
# What core may import besides the standard library.
CORE_MAY = {"numpy", "halfstep"}
# Files that one backend has and the others do not, each with its reason.
ONE_BACKEND_ONLY: dict[str, str] = {
    "interpret.py": "JAX: a loss function is opaque, so its jaxpr is evaluated by policy",
    "primitives.py": "JAX: what the interpreter knows of primitives",
    "lazy.py": "JAX: a parameter that is cast where it is used, for the interpreter",
    "checks.py": "torch, JAX: there is much that users hand over and that cannot be taken",
    "matmul.py": "torch, JAX: the matmuls outgrew layers.py; MLX's have fewer forms",
    "tracing.py": "torch: what dynamo puts into its graph as it is must be told that it is compiled",
    "fp8.py": "torch: the hardware's own fp8 matmul, and its three layouts; elsewhere XLA, or emulation, has it",
    "delayed.py": "torch: as above, where scales come from earlier updates",
    "narrow.py": "torch: as above, what it refuses, and what is worth it",
    "masters.py": "torch, MLX: masters stand beside the model; in JAX they are the state's own pytree",
    "modules.py": "torch, MLX: modules of others change their class; JAX has functions instead",
    "convert.py": "torch: many more kinds of module than MLX has",
    "norms.py": "torch: as above",
    "multihead.py": "torch: as above",
    "halves.py": "torch: autograd must be told that half of a split master has an fp32 gradient",
    "gradients.py": "torch: gradients are left on parameters by a tape, and summed there",
    "seam.py": "torch: optimizers change parameters in place, and skip a step each in its own way",
    "summary.py": "torch: there is more to tell",
    "takeover.py": "torch: there is a torch.amp to move in from",
    "blame.py": "torch: modules have hooks",
    "made.py": "torch: modules change their class, and keep its name; JAX has none, MLX swaps the module",
    "reach.py": "torch: functions between modules are reached by a mode; JAX interprets them, MLX has no way in",
    "functions.py": "as above: what is done with each",
    "products.py": "as above: matmuls, einsum and grouped_mm of parameters",
    "entries.py": "as above: what both are made of",
    "record.py": "as above: the table of what was reached",
    "foreign.py": "torch: models of other packages, known by the names of their classes",
    "islands.py": "torch: its functions and modules have no fp32 inside; there is a torch.nn to stand in for",
    "muon.py": "torch: optim.py would have outgrown a file; the others have it in there",
    "numbers.py": "torch: a copy that is queued behind its own step; JAX and MLX wait for an array, not a queue",
    "spans.py": "torch: CUDA's events time a step without a wait; JAX and MLX have none",
    "sums.py": "torch: what matmuls sum in is a switch of the process there",
    "kernels/__init__.py": "torch: JAX compiles a whole step, and MLX has no such kernels yet",
    "kernels/adamw.py": "as above",
    "race/__init__.py": "the race is on torch, where the recipes of others are; backends.py compares backends",
    "race/arms.py": "as above",
    "race/model.py": "as above",
    "race/worker.py": "as above",
}
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in package.rglob("*.py"):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, module: str) -> list[tuple[str, bool]]:
    """(what is imported, whether that happens when the module is), imports inside functions included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _type_checking(outer)
        for node in ast.walk(outer)
        if node is not outer
    }
    is_package = path.name == "__init__.py"
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                steps = module.split(".") if is_package else module.split(".")[:-1]
                steps = steps[: len(steps) - node.level + 1]
                base = ".".join([*steps, base] if base else steps)
            found += [(f"{base}.{alias.name}", id(node) not in late) for alias in node.names]
    return found


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    for depth, names in enumerate(LAYERS):
        if len(parts) > 1 and parts[1] in names:
            return depth
    return None


def wrong_way(package: Path) -> list[str]:
    faults = []
    for module, path in modules(package).items():
        here = layer_of(module)
        for target, _ in imports(path, module):
            there = layer_of(target) if target.startswith(package.name + ".") else None
            if here is None or there is None:
                continue
            sideways = here == there and module.split(".")[1] != target.split(".")[1]
            if there > here or sideways:
                faults.append(f"{module} imports {target}")
    return faults


def unknown_folders(package: Path) -> list[str]:
    known = set().union(*LAYERS)
    return [p.name for p in package.iterdir() if p.is_dir() and p.name not in known and p.name != "__pycache__"]


def strayed_frameworks(package: Path) -> list[str]:
    faults = []
    for module, path in modules(package).items():
        folder = [*module.split("."), ""][1]
        for target, _ in imports(path, module):
            top = target.split(".")[0]
            for backend, names in FRAMEWORKS.items():
                if top in names and folder != backend:
                    faults.append(f"{module} imports {target}, which belongs in halfstep.{backend}")
    return faults


def heavy_core(package: Path) -> list[str]:
    import sys

    faults = []
    for module, path in modules(package).items():
        if layer_of(module) == 0:
            for target, _ in imports(path, module):
                top = target.split(".")[0]
                if top not in CORE_MAY and top not in sys.stdlib_module_names:
                    faults.append(f"{module} imports {target}")
    return faults


def uneven_backends(package: Path) -> list[str]:
    present = [name for name in BACKENDS if (package / name).is_dir()]
    if len(present) < 2:
        return []
    files = {
        name: {p.relative_to(package / name).as_posix() for p in (package / name).rglob("*.py")}
        for name in present
    }
    everything = set().union(*files.values())
    return [
        f"halfstep/{name} lacks {file}"
        for name in present
        for file in sorted(everything - files[name])
        if file not in ONE_BACKEND_ONLY
    ]


def cycles(package: Path) -> list[str]:
    known = modules(package)
    edges = {
        module: {
            target if target in known else target.rpartition(".")[0]
            for target, at_import in imports(path, module)
            if at_import
        }
        & known.keys() - {module}
        for module, path in known.items()
    }
    faults, done = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            faults.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in sorted(edges[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return faults


def banned_names(package: Path) -> list[str]:
    return [module for module in modules(package) if BANNED_NAMES & set(module.split("."))]


def undocumented(package: Path) -> list[str]:
    return [m for m, path in modules(package).items() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]


CHECKS = [
    wrong_way,
    unknown_folders,
    strayed_frameworks,
    heavy_core,
    uneven_backends,
    cycles,
    banned_names,
    undocumented,
]


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_is_in_order(check):
    assert check(PACKAGE) == []


# (check, files of a small tree, a part of the fault it must report)
PLANTED = [
    (wrong_way, {"core/a.py": "from halfstep.config import b"}, "core.a imports halfstep.config.b"),
    (wrong_way, {"core/a.py": "def f():\n    import halfstep.cli.main"}, "halfstep.cli.main"),
    (wrong_way, {"core/a.py": "from ..training import loop"}, "halfstep.training.loop"),
    (wrong_way, {"torch/a.py": "from halfstep.jax import b"}, "torch.a imports halfstep.jax.b"),
    (wrong_way, {"core/a.py": "from halfstep import tools"}, "halfstep.tools"),
    (unknown_folders, {"extras/a.py": ""}, "extras"),
    (strayed_frameworks, {"training/a.py": "import torch"}, "belongs in halfstep.torch"),
    (strayed_frameworks, {"torch/a.py": "import jax.numpy as jnp"}, "belongs in halfstep.jax"),
    (strayed_frameworks, {"core/a.py": "def f():\n    import mlx.core"}, "belongs in halfstep.mlx"),
    (heavy_core, {"core/a.py": "import rich"}, "imports rich"),
    (uneven_backends, {"torch/a.py": "", "torch/b.py": "", "jax/a.py": ""}, "halfstep/jax lacks b.py"),
    (
        cycles,
        {"core/a.py": "from halfstep.core import b", "core/b.py": "from halfstep.core.a import x"},
        "core.a ->",
    ),
    (banned_names, {"core/utils.py": ""}, "core.utils"),
    (undocumented, {"core/a.py": "x = 1"}, "core.a"),
]


@pytest.mark.parametrize(("check", "files", "fault"), PLANTED)
def test_a_planted_fault_is_found(check, files, fault, tmp_path):
    for name, text in files.items():
        path = tmp_path / "halfstep" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = check(tmp_path / "halfstep")
    assert any(fault in line for line in found), found


def test_every_check_has_a_planted_fault():
    assert {check for check, _, _ in PLANTED} == set(CHECKS)
