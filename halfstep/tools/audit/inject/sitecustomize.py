"""Run by Python at the start of each process of a script that `halfstep audit -- COMMAND` watches.

It imports nothing heavy: when the process imports torch, if it ever does, the hooks are installed right after. A
`sitecustomize` of the environment runs as it would have. A crash leaves its last lines for the report.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from contextlib import suppress
from typing import Any

FOLDER, STEPS, PACKAGE = "HALFSTEP_AUDIT_FOLDER", "HALFSTEP_AUDIT_STEPS", "HALFSTEP_AUDIT_PACKAGE"
LAST_LINES = 12  # of a traceback


class AfterTorch:
    """Finds torch as Python would, and installs the hooks when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Called by Python for every import, and by packages that ask whether torch is there."""
        if name != "torch":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_watch(module: Any) -> None:
                sys.meta_path.remove(self)
                run(module)
                watch()

            spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


class Halfstep:
    """Finds the collector where the audit runs, for a Python that has no halfstep, or not what halfstep needs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Called by Python for every import. The public names of both packages need what may be missing here."""
        if name not in ("halfstep", "halfstep.torch"):
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [os.path.join(os.environ[PACKAGE], *name.split(".")[1:])]
        return spec


def watch() -> None:
    """Installs the hooks. A process that cannot be watched runs as it would have, and the audit says why."""
    finder = Halfstep()
    if any(importlib.util.find_spec(name) is None for name in ("halfstep", "lazy_loader")):
        sys.meta_path.insert(0, finder)
    try:
        from halfstep.torch.instruments.collect.watch import begin

        begin(os.environ[FOLDER], int(os.environ[STEPS]))
    except Exception as error:  # an old Python, an old torch, a package that is missing
        sys.meta_path[:] = [each for each in sys.meta_path if each is not finder]
        write("unwatched", f"{type(error).__name__}: {error}; its Python is {sys.executable}")


def write(kind: str, text: str) -> None:
    """Leaves a note for the audit, unless that is over or the disk is full."""
    path = os.path.join(os.environ[FOLDER], f"{kind}-{os.getpid()}.txt")
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        file.write(text)


def note_first_words() -> None:
    """Notes when the process prints something: until then the audit says that it still works."""
    for stream in filter(None, (sys.stdout, sys.stderr)):

        def write_first(text: str, stream: Any = stream) -> Any:
            vars(stream).pop("write", None)  # from here on the stream is as it was
            write("words", "")
            return stream.write(text)

        stream.write = write_first


def leave_last_lines() -> None:
    """Notes the last lines of an exception that nobody catches; Python then prints it as usual."""
    before = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        import traceback

        lines = "".join(traceback.format_exception(kind, error, trace)).strip().splitlines()
        write("crash", "\n".join(lines[-LAST_LINES:]))
        before(kind, error, trace)

    sys.excepthook = hook


def run_the_next() -> None:
    """Runs the `sitecustomize` that this one stands before."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


if FOLDER in os.environ:
    write("python", sys.executable)
    leave_last_lines()
    note_first_words()
    sys.meta_path.insert(0, AfterTorch())
    run_the_next()
