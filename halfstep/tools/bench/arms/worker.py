"""The process of one arm: it holds its model, waits its turn, trains, measures.

    python -m halfstep.tools.bench.arms.worker '{"arm": "autocast", ...}'

Messages are lines of JSON, one answer to each request and one before the first:

    (start)                    ->  {"device", "kind", "versions", "compiled"}
    {"do": "train", "steps"}   ->  {"seconds", "losses", "memory"}                    seconds of one step
    {"do": "finish"}           ->  {"held_out", "syncs", "kernels", "summary"}
    any of these               ->  {"missing", "hint"}  or  {"failed", "hint"}        and it is over

Each turn begins with one update that is not timed and ends by giving unused memory back: so the arms need not fit
on the device together, and each runs as if it were alone. `memory` is the peak of what the arm itself allocated in
its timed updates. What libraries print goes to stderr: stdout is the line to whoever asks.
"""

import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.core.errors import HalfstepError
from halfstep.tools.bench.arms.recipes import MAKERS, Batch, MissingError
from halfstep.tools.bench.contract import ARMS, CEILING, CEILING_SIZE, Setting

# Matmuls of the ceiling in one timed step: long enough to be a measurement, about 15 ms on an H200.
PRODUCTS = 10
# What a name of an attention kernel holds.
ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)

Answer = dict[str, Any]


class Racer(Protocol):
    """What takes turns."""

    def train(self, steps: int) -> Answer:
        """A turn."""

    def finish(self) -> Answer:
        """What is told after the last turn."""


class Ceiling:
    """No arm but the device's own limit: bf16 matrix products of one large size, of random numbers."""

    def __init__(self, device: torch.device):
        # On a CPU a small one: there it stands for nothing but the path through the code.
        size = CEILING_SIZE if device.type != "cpu" else 256
        self.device, self.size = device, size
        self.left, self.right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.product = torch.empty_like(self.left)

    def train(self, steps: int) -> Answer:
        """Multiplies; `flops` is what it reached."""
        self._multiply(PRODUCTS)
        seconds = _timed(lambda: self._multiply(PRODUCTS * steps), self.device)
        return {"flops": 2 * self.size**3 * PRODUCTS * steps / seconds}

    def finish(self) -> Answer:
        """Nothing to tell."""
        return {}

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.left, self.right, out=self.product)


class Trainer:
    """An arm and its place in the data."""

    def __init__(self, setting: Setting, device: torch.device, compile: bool):
        self.setting, self.device = setting, device
        self.tokens = np.load(setting.tokens, mmap_mode="r")
        self.arm = MAKERS[setting.arm](setting, device, compile)
        self.compile = self.arm.compile
        self.position = 0

    def train(self, steps: int) -> Answer:
        """One update that is not timed, then `steps` that are."""
        updates = [self._update(self.position + i) for i in range(steps + 1)]
        self.position += steps + 1
        losses = [self.arm.step(updates[0])]
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = _timed(lambda: losses.extend(self.arm.step(update) for update in updates[1:]), self.device)
        answer = {"seconds": seconds / steps, "losses": [float(loss) for loss in losses], "memory": None}
        if on_cuda:
            answer["memory"] = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.empty_cache()
        return answer

    def finish(self) -> Answer:
        """The loss on held-out text; then two more updates, one watched for waits and one for kernels."""
        held_out = np.load(self.setting.held_out)
        size = max(1, self.setting.batch // 4)  # not compiled, logits take more room
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, len(held_out), size):
            windows = held_out[first : first + size]
            total += self.arm.evaluate(_batch(windows, self.device)).double() * len(windows)
        answer = {"held_out": float(total) / len(held_out), "summary": self.arm.summary()}
        if self.device.type == "cuda":
            update = self._update(self.position - 1)
            torch.cuda.empty_cache()
            answer["syncs"] = _syncs(lambda: self.arm.step(update))
            answer["kernels"] = _kernels(lambda: self.arm.step(update))
            torch.cuda.empty_cache()
        return answer

    def _update(self, index: int) -> list[Batch]:
        return [_batch(micro, self.device) for micro in self.tokens[index]]


def main(argument: str) -> int:
    """Answers until there are no more requests."""
    # Whatever is printed from here on, by whom it may be, must not come between the answers.
    line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        racer, hello = start(Setting(**json.loads(argument)))
        _tell(line, hello)
        for text in sys.stdin:
            request = json.loads(text)
            _tell(line, racer.finish() if request["do"] == "finish" else racer.train(request["steps"]))
    except MissingError as error:
        _tell(line, {"missing": error.message, "hint": error.hint})
    except HalfstepError as error:
        _tell(line, {"failed": error.message, "hint": error.hint})
        return 1
    except Exception as error:
        traceback.print_exc()
        _tell(line, {"failed": _told(error), "hint": None})
        return 1
    return 0


def start(setting: Setting) -> tuple[Racer, Answer]:
    """The racer, and what it says first."""
    device = _device(setting.device)
    setting = replace(setting, device=str(device))
    hello: Answer = {"device": _device_name(device), "kind": device.type, "versions": {"torch": torch.__version__}}
    if setting.arm == CEILING:
        return Ceiling(device), hello
    wanted = device.type != "cpu" if setting.compile is None else setting.compile
    trainer = Trainer(setting, device, wanted)
    if package := ARMS[setting.arm].package:
        hello["versions"][package] = _version(package)
    return trainer, {**hello, "compiled": trainer.compile}


def _device(name: str | None) -> torch.device:
    if name is None:
        if not torch.cuda.is_available():
            raise HalfstepError(
                "there is no NVIDIA GPU here to race on",
                hint="`--device cpu` runs there, with a small model: --layers 2 --width 64 --context 64 --batch 4",
            )
        name = "cuda"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HalfstepError(f"`{name}` is no torch device", hint="as `cpu`, `cuda` or `cuda:1`") from None
    if device.type not in ("cpu", "cuda"):
        raise HalfstepError(f"the race runs on `cuda` or `cpu`, not on `{device.type}`")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise HalfstepError(f"there is no `{name}`: {torch.cuda.device_count()} NVIDIA GPUs are here")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _version(package: str) -> str:
    for name in (package, f"{package}.fabric", f"{package}_fabric"):
        if found := getattr(sys.modules.get(name), "__version__", None):
            return str(found)
    return ""


def _batch(windows: NDArray[np.uint16], device: torch.device) -> Batch:
    """Sequences of context + 1 tokens as inputs and targets, on the device."""
    tokens = torch.from_numpy(windows.astype(np.int64)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device has done the work."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _syncs(work: Callable[[], Any]) -> int:
    """How often the host waited for the device, by torch's sync debug mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Switching the mode on warns as well, that it may miss some.
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _kernels(work: Callable[[], Any]) -> list[str]:
    """The names of the attention kernels that ran; none where this machine cannot be profiled."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()
        return []
    return sorted({event.key[:100] for event in profile.key_averages() if ATTENTION.search(event.key)})


def _told(error: Exception) -> str:
    """An error in a line: memory errors go on for many."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def _tell(line: Any, answer: Answer) -> None:
    print(json.dumps(answer), file=line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
