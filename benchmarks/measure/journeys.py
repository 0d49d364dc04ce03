"""How far a step, a save and a resume travel through the package: files entered, Python calls, files opened.

    python benchmarks/measure/journeys.py [--policy bf16-mixed] [--json]

    step     one `Session.step` of a small decoder (2 layers, 2 micro-batches, Muon and AdamW, on the CPU), after
             three others: Python calls into files of this package, and how many files those are
    save     from the loop's `save` to the end of the thread that writes: files entered
    resume   `halfstep train --resume` of a finished run with more steps to do: times run.toml is opened

Calls are counted by `sys.setprofile`, opened files by an audit hook, so the numbers do not depend on the
machine.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import halfstep
from halfstep.cli.main import run as halfstep_command
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.training.session import open_session

PACKAGE = str(Path(halfstep.__file__).parent) + os.sep
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "training.batch=2"]
TWO = [*SMALL, "training.micro_batches=2"]


class Calls:
    """Counts the calls of Python functions that stand in this package, by file and function."""

    def __init__(self) -> None:
        self.of: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function, as `sys.setprofile` takes it."""
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.of[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    @property
    def files(self) -> list[str]:
        """The files entered, sorted."""
        return sorted({file for file, _ in self.of})


@contextlib.contextmanager
def profiled(profile: Callable[..., Any]) -> Iterator[None]:
    """Inside, every call of this thread, and of threads started inside, reaches `profile`."""
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def step(policy: str) -> Calls:
    """One step, after others."""
    config = load("tiny", TWO)
    session = open_session(config, Policy.parse(policy), "cpu")
    rng = np.random.default_rng(0)
    for _ in range(3):
        tokens = rng.integers(0, 256, (2, 2, config.model.context + 1), dtype=np.int32)
        session.read(session.step(tokens))
    calls = Calls()
    with profiled(calls):
        session.step(tokens)
    return calls


class Saves(Calls):
    """Counts only between the loop's call of `save` and its return, and in threads that were started."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.inside = threading.main_thread(), 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Watches for the method that the loop calls to save."""
        if threading.current_thread() is not self.main:
            if "training" in frame.f_code.co_filename and self.inside_writer(frame):
                super().__call__(frame, event, argument)
            return
        code = frame.f_code
        saves = code.co_name == "save" and code.co_filename.endswith(("checkpointing.py", "keeping.py"))
        if saves:
            self.inside += (event == "call") - (event == "return")
        if self.inside:
            super().__call__(frame, event, argument)

    def inside_writer(self, frame: FrameType) -> bool:
        """Whether the thread is the one that writes checkpoints, not the one that fetches batches."""
        while frame.f_back is not None:
            if frame.f_code.co_filename.endswith(("writer.py", "saving.py")):
                return True
            frame = frame.f_back
        return frame.f_code.co_filename.endswith(("writer.py", "saving.py"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def train(out: Path, text: Path, *more: str) -> None:
    """One `halfstep train` in this process."""
    settings = [*SMALL, f"data.source={text}", "training.steps=4", "training.save_every=2"]
    settings += ["training.validate_every=100"]
    words = [word for setting in settings for word in ("--set", setting)] if not more else []
    with quiet(), contextlib.suppress(SystemExit):
        halfstep_command(["train", *words, "--policy", "fp32", "--device", "cpu", "--out", str(out), *more])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="bf16-mixed", help="of the step")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="the N functions a step calls most")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    calls = step(options.policy)
    opened: Counter[str] = Counter()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and watching:
            opened[Path(arguments[0]).name] += 1

    watching = False
    sys.addaudithook(hook)
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder) / "text.txt", Path(folder) / "run"
        text.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(400)))
        saves = Saves()
        with profiled(saves):
            train(out, text)
        # A run that was stopped halfway: its newest checkpoint is of step 2.
        for path in sorted((out / "checkpoints").glob("step-*"))[1:]:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        watching = True
        train(out, text, "--resume")
        watching = False
        resumed = len(list((out / "checkpoints").glob("step-*4")))
    assert resumed == 1, "the run did not resume to its end"
    result = {
        "step": {"calls": calls.of.total(), "files": len(calls.files)},
        "save": {"files": len(saves.files)},
        "resume": {"run.toml opened": opened["run.toml"]},
    }
    if options.json:
        print(json.dumps(result | {"step files": calls.files, "save files": saves.files}, indent=2))
        return 0
    print(f"step     {calls.of.total():,} Python calls in {len(calls.files)} files ({options.policy})")
    print(f"save     {len(saves.files)} files")
    print(f"resume   run.toml opened {opened['run.toml']} times, manifest.json {opened['manifest.json']} times")
    for (file, name), number in calls.of.most_common(options.list):
        print(f"{number:6}  {file}:{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
