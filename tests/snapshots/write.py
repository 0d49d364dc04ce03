"""What programs and scripts of users rely on, as text: a change of any of it shows as a change of a file here.

    python tests/snapshots/write.py      writes the files of this folder again

Tests of their own keep the text of every `--help` in docs/cli.md, the fields of every event in docs/logging.md and
the codes of errors in tests/docs/error_codes.txt.
"""

import inspect
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = {
    "halfstep": None,
    "halfstep.torch": None,
    "halfstep.jax": None,
    "halfstep.mlx": None,
    # These have no __all__, because they export what docs/integrations.md names.
    "halfstep.integrations.accelerate": ["Accelerator"],
    "halfstep.integrations.transformers": ["Trainer", "PolicyMixin", "AuditCallback"],
    "halfstep.integrations.adapters": ["merge"],
    "halfstep.integrations.lightning": ["HalfstepPrecision", "Fabric", "ModelParallelStrategy", "AuditCallback"],
}
SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=2",
         "training.steps=3", "training.validation_tokens=64", "training.measure_ceiling=false"]  # fmt: skip


def signatures() -> str:
    """Returns every public name with its parameters, and every public method and field of ours of a class."""
    lines = []
    for package, names in PACKAGES.items():
        module = import_module(package)
        for name in sorted(names or module.__all__):
            lines += [f"{package}.{line}" for line in _describe(name, getattr(module, name))]
    return "\n".join(lines)


def _describe(name: str, what: Any) -> Iterator[str]:
    yield f"{name}{_parameters(what)}"
    if not inspect.isclass(what):
        return
    # What a class inherits from a framework depends on the version of it.
    ours = [kind for kind in what.__mro__ if kind.__module__.startswith("halfstep")]
    members = {key: value for kind in reversed(ours) for key, value in vars(kind).items() if not _is_private(key)}
    for key, value in sorted(members.items()):
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        yield f"{name}.{key}{_parameters(function) if inspect.isroutine(function) else ''}"


def _is_private(name: str) -> bool:
    return name.startswith(("_", "halfstep"))  # what we keep on a module of torch begins with our name


def _parameters(what: Any) -> str:
    """Returns the names, kinds and defaults of parameters; annotations are for docs/api.md."""
    try:
        signature = inspect.signature(what)
    except (ValueError, TypeError):
        return ""
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    plain = [
        each.replace(default=_Shown(each.default)) if each.default is not each.empty else each for each in plain
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


class _Shown:
    """A default as a signature shows it, without the address of an object or the module of a class."""

    def __init__(self, value: Any) -> None:
        plain = value is None or isinstance(value, str | int | float | bool | tuple)
        self.text = repr(value) if plain else getattr(value, "__qualname__", type(value).__qualname__)
        if len(self.text) > 60:
            self.text = f"{type(value).__name__}(...)"

    def __repr__(self) -> str:
        return self.text


def options() -> str:
    """Returns every command with its arguments and options, their types and their defaults."""
    from halfstep.cli.app import app

    lines = []
    for path in sorted(_commands(app, ())):
        command, collection = app, None
        for word in path:
            command = command[word]
        collection = command.assemble_argument_collection()
        for argument in sorted(collection, key=lambda each: each.name):
            if argument.name == "*":
                continue  # a group of options, which are listed themselves
            default = argument.field_info.default
            shown = "" if default is inspect.Parameter.empty else f" = {default!r}"
            lines.append(f"{' '.join(path)} {' '.join(argument.names)}{shown}")
    return "\n".join(lines)


def _commands(app: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name in app:
        if not name.startswith("-"):
            command = app[name]
            yield from _commands(command, (*path, name))
            if command.default_command is not None:
                yield (*path, name)


def files_and_json() -> dict[str, str]:
    """Returns the keys of what commands print with --json, of the events of a small run, and of its manifest."""
    with tempfile.TemporaryDirectory() as folder:
        return _of_a_run(Path(folder))


def _of_a_run(folder: Path) -> dict[str, str]:
    text, packed = folder / "text.txt", folder / "packed"
    text.write_text("".join(f"The {i}th line of a text to train on.\n" for i in range(2000)), encoding="utf-8")
    settings = [f"data.source={text}", *SMALL, "monitor.every=1", "monitor.sample_every=2"]
    chosen = ["--device", "cpu", *(word for each in settings for word in ("--set", each))]
    run, other = folder / "run", folder / "other"
    _printed(["train", "--policy", "fp32", "--out", str(other), *chosen])
    commands = {
        "train": ["train", "--policy", "bf16-true", "--out", str(run), *chosen],
        "eval": ["eval", str(run), "--device", "cpu"],
        "runs": ["runs", str(folder)],
        "compare": ["compare", str(run), str(other)],
        "audit of a run": ["audit", str(run)],
        "audit --rules": ["audit", "--rules"],
        "formats": ["formats", "e4m3"],
        "policy": ["policy", "fp8-mixed; lm_head: compute=fp32"],
        "policy --model": ["policy", "bf16-mixed", "--model", "tiny"],
        "plan": ["plan", "tiny", "--gpu", "h200"],
        "data pack": [
            "data",
            "pack",
            str(text),
            "--out",
            str(packed),
            "--tokenizer",
            "bytes",
            "--validation",
            "0",
        ],
        "data show": ["data", "show", str(packed)],
        "data verify": ["data", "verify", str(packed)],
        "export": ["export", str(run), "--to", "artifact", "--out", str(folder / "model.safetensors")],
    }
    printed = {name: _printed(command) for name, command in commands.items()}
    printed["an error"] = _printed(["formats", "e99m1"], (2,))
    manifest = json.loads(next(run.glob("checkpoints/*/manifest.json")).read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    by_kind = {event["event"]: event for event in events if event["event"] != "warning"}
    return {
        "json": "\n".join(f"{name}: {line}" for name, data in printed.items() for line in _keys(data)),
        "events": "\n".join(f"{kind}: {key}" for kind in sorted(by_kind) for key in sorted(by_kind[kind])),
        "manifest": "\n".join(_keys(manifest)),
    }


def _printed(command: list[str], expected: tuple[int, ...] = (0, 1, 3)) -> Any:
    """Returns what a command prints with --json; 1 and 3 are answers too: found, and cannot tell."""
    from halfstep.cli.main import run

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run([*command, "--json"])
    if code not in expected:
        raise RuntimeError(f"halfstep {' '.join(command)} ended with {code}: {err.getvalue()}")
    return json.loads(out.getvalue())


def _keys(data: Any, path: str = "") -> list[str]:
    """Returns the paths of the values in JSON; of a list, and of a table by name, those of all items together."""
    if isinstance(data, dict) and data:
        shapes = {tuple(each) if isinstance(each, dict) else None for each in data.values()}
        by_name = len(shapes) == 1 < len(data) and None not in shapes
        keys = [(f"{path}.{'<name>' if by_name else key}".lstrip("."), value) for key, value in data.items()]
        return list(dict.fromkeys(line for key, value in keys for line in _keys(value, key)))
    if isinstance(data, list):
        return list(dict.fromkeys(line for each in data or [None] for line in _keys(each, f"{path}[]")))
    return [path]


SNAPSHOTS: dict[str, Callable[[], dict[str, str]]] = {
    "signatures": lambda: {"signatures": signatures()},
    "options": lambda: {"options": options()},
    "files_and_json": files_and_json,
}


if __name__ == "__main__":
    os.environ["HALFSTEP_CACHE"] = "off"
    for snapshot in SNAPSHOTS.values():
        for name, text in snapshot().items():
            (HERE / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
