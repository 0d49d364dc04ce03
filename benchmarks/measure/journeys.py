"""How far `prepare`, a step, a save and a resume go through the package: files entered, calls, files opened.

    python benchmarks/measure/journeys.py [--policy bf16-mixed] [--json]

    step     one `Session.step` of a small decoder (2 layers, 2 micro-batches, Muon and AdamW, on the CPU), after
             three others: Python calls into files of this package, and how many files those are
    prepare  the first one of a process, of a model of three modules: Python calls, calls of `Policy.resolve`,
             `base_precision` and `check_model`, and how many files are opened
    save     from the loop's `save` to the end of the thread that writes: files entered
    resume   `halfstep train --resume` of a run with more steps to do: times run.toml and manifest.json are read

Exit code 1 if one is longer than BARS allows. Calls are counted by `sys.setprofile`, files that are read by an
audit hook, so the numbers do not depend on the machine. One `open` with an opener, as `open_regular` has it, is
two events: that of the opener has no mode.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import halfstep
from halfstep.cli.main import run as halfstep_command
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch import prepare
from halfstep.training.session import open_session

PACKAGE = str(Path(halfstep.__file__).parent) + os.sep
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "training.batch=2"]
TWO = [*SMALL, "training.micro_batches=2"]
# The longest each may be.
BARS = {
    "prepare": {"Python calls": 900, "Policy.resolve": 1, "base_precision": 1, "check_model": 1},
    "step": {"Python calls": 750},
    "save": {"files entered": 16},
    "resume": {"run.toml read": 1, "manifest.json read": 2},
}


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


class Prepares(Calls):
    """Counts calls, and the files that are opened meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    def times(self, function: str) -> int:
        """How many times a function was called, by its qualified name."""
        return sum(number for (_, name), number in self.of.items() if name == function)


def prepared(policy: str) -> Prepares:
    """One `prepare` of a model of three modules, in a process that has prepared nothing yet."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    calls, watching = Prepares(), True

    def hook(event: str, _: tuple[Any, ...]) -> None:
        calls.opened += watching and event == "open"

    sys.addaudithook(hook)
    with profiled(calls):
        prepare(model, optimizer, policy)
    watching = False
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


def save_and_resume() -> dict[str, dict[str, int]]:
    """A run that saves, and one that resumes it from the checkpoint in the middle."""
    read: Counter[str] = Counter()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and arguments[1] == "r" and watching:
            read[Path(arguments[0]).name] += 1

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
            shutil.rmtree(path)
        watching = True
        train(out, text, "--resume")
        watching = False
        resumed = len(list((out / "checkpoints").glob("step-*4")))
    assert resumed == 1, "the run did not resume to its end"
    return {
        "save": {"files entered": len(saves.files)},
        "resume": {f"{name} read": read[name] for name in ("run.toml", "manifest.json")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="bf16-mixed", help="of `prepare` and the step")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="the N functions a step calls most")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    first, calls = prepared(options.policy), step(options.policy)
    counted = {name: first.times(name) for name in ("Policy.resolve", "base_precision", "check_model")}
    result = {
        "prepare": {"Python calls": first.of.total(), **counted, "files opened": first.opened},
        "step": {"Python calls": calls.of.total(), "files entered": len(calls.files)},
        **save_and_resume(),
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for journey, numbers in result.items():
            print(f"{journey:8} " + ", ".join(f"{number:,} {name}" for name, number in numbers.items()))
        for (file, name), number in calls.of.most_common(options.list):
            print(f"{number:6}  {file}:{name}")
    too_long = [
        f"{journey}: {result[journey][name]} {name}, at most {bar}"
        for journey, bars in BARS.items()
        for name, bar in bars.items()
        if result[journey][name] > bar
    ]
    print(*too_long, sep="\n", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
