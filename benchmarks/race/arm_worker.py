"""The process of one arm: it holds its model, waits its turn, trains, measures.

It answers each request, and says hello before the first (workers.py):

    (start)                    ->  {"device", "kind", "versions", "compiled"}
    {"do": "train", "steps"}   ->  {"seconds", "losses", "memory"}                    seconds of one step
    {"do": "finish"}           ->  {"held_out", "syncs", "kernels", "profile", "summary"}

Each turn begins with one update that is not timed and ends by releasing unused memory, so the arms need not fit on
the device together. `memory` is the peak of what the arm itself allocated in its timed updates.
"""

import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.race.arms import MAKERS, Batch
from benchmarks.race.contract import ARMS, CEILING, CEILING_SIZE, Setting
from benchmarks.race.workers import serve
from halfstep.core.errors import DeviceError

# Matmuls of the ceiling in one timed step: long enough to be a measurement, about 15 ms on an H200.
PRODUCTS = 10
# Steps of a profile, and the time between its kernels.
PROFILED, IDLE = 4, "(idle)"
# Part of the name of every attention kernel.
ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)

Answer = dict[str, Any]


class Ceiling:
    """Not an arm but the device's limit: bf16 matmuls of one large size, of random numbers."""

    def __init__(self, device: torch.device):
        # On a CPU a small one, which only exercises the code.
        size = CEILING_SIZE if device.type != "cpu" else 64
        self.device, self.size = device, size
        self.left, self.right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.product = torch.empty_like(self.left)

    def train(self, steps: int) -> Answer:
        self._multiply(PRODUCTS)
        seconds = _timed(lambda: self._multiply(PRODUCTS * steps), self.device)
        return {"flops": 2 * self.size**3 * PRODUCTS * steps / seconds}

    def finish(self) -> Answer:
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
            if self.arm.counts_memory:
                answer["memory"] = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.empty_cache()
        return answer

    def finish(self) -> Answer:
        """Scores held-out text, then trains two more updates, one watched for waits and one for kernels."""
        held_out = np.load(self.setting.held_out)
        size = max(1, self.setting.batch // 4)  # logits take more room when not compiled
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, len(held_out), size):
            windows = held_out[first : first + size]
            total += self.arm.evaluate(_batch(windows, self.device)).double() * len(windows)
        answer = {"held_out": float(total) / len(held_out), "summary": self.arm.summary()}
        if self.device.type == "cuda":
            update = self._update(self.position - 1)
            torch.cuda.empty_cache()
            answer["syncs"] = _syncs(lambda: self.arm.step(update))
            profile = _profile(lambda: self.arm.step(update))
            answer |= {"profile": profile, "kernels": [name for name in profile if ATTENTION.search(name)]}
            torch.cuda.empty_cache()
        return answer

    def _update(self, index: int) -> list[Batch]:
        return [_batch(micro, self.device) for micro in self.tokens[index]]


def main(argument: str) -> int:
    """Answers requests until there are no more."""
    setting = Setting(**json.loads(argument))

    def begin() -> tuple[Answer, Callable[[Answer], Answer]]:
        racer, hello = start(setting)
        return hello, lambda asked: racer.finish() if asked["do"] == "finish" else racer.train(asked["steps"])

    return serve(begin)


def start(setting: Setting) -> "tuple[Ceiling | Trainer, Answer]":
    """Returns the racer and its hello."""
    device = _device(setting.device)
    setting = replace(setting, device=str(device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    hello: Answer = {"device": name, "kind": device.type, "versions": {"torch": torch.__version__}}
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
            raise DeviceError(
                "there is no NVIDIA GPU here to race on",
                hint="`--device cpu` runs there, with a small model: --layers 2 --width 64 --context 64 --batch 4",
            )
        name = "cuda"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"`{name}` is not a torch device", hint="such as `cpu`, `cuda` or `cuda:1`") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"the race runs on `cuda` or `cpu`, not on `{device.type}`")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"there is no `{name}`: this machine has {torch.cuda.device_count()} NVIDIA GPUs")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _version(package: str) -> str:
    for name in (package, f"{package}.fabric", f"{package}_fabric"):
        if version := getattr(sys.modules.get(name), "__version__", None):
            return str(version)
    return ""


def _batch(windows: NDArray[np.uint16], device: torch.device) -> Batch:
    tokens = torch.from_numpy(windows.astype(np.int64)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _syncs(work: Callable[[], Any]) -> int:
    """Counts how often the host waits for the device, by torch's sync debug mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Switching the mode on warns as well, that it may miss some.
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _profile(work: Callable[[], Any]) -> dict[str, float]:
    """Returns the milliseconds of each kernel of a step, longest first, and those in which none ran (`IDLE`).

    Of several steps in a row, because a device that was idle runs faster than one that is hot. Nothing if this
    machine cannot be profiled.
    """
    work()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED):
                work()
            torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()
        return {}
    taken: dict[str, float] = {}
    begins, ends, busy = float("inf"), 0.0, 0.0
    for kernel in profile.events():
        if kernel.device_type.name == "CUDA":
            begun, ended = kernel.time_range.start, kernel.time_range.end
            begins, ends, busy = min(begins, begun), max(ends, ended), busy + ended - begun
            taken[kernel.name[:100]] = taken.get(kernel.name[:100], 0.0) + (ended - begun) / PROFILED / 1e3
    taken[IDLE] = max(0.0, ends - begins - busy) / PROFILED / 1e3
    return {name: round(taken[name], 4) for name in sorted(taken, key=lambda name: -taken[name])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
