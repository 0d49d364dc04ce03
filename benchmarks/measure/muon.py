"""Times a step of Muon on the matrices of `golf` and `speedrun`, and the memory that it needs beside them.

    python benchmarks/measure/muon.py [--rounds 8]

The arms take turns, in reverse order every other time: every matrix alone; those of one shape together, with
torch's products; and with our kernel, which computes half of the symmetric ones. Printed are the median of a step
in ms, the fastest, the host's share of it, and the peak of memory beside parameters, gradients and momenta. `off`
is how far a direction is from that of fp32, relative to its norm: the kernel must not be further off than torch.
Needs an NVIDIA GPU and half a minute.
With `--tiny` it runs on any machine, only to show that it does.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from halfstep.config.groups import parameter_groups
from halfstep.config.load import load
from halfstep.config.model import parameter_shapes
from halfstep.core.formats import BF16, FP32
from halfstep.torch.optim import muon

ARMS = {"one by one": (1, False), "batched": (muon.CHUNK, False), "batched, kernel": (muon.CHUNK, True)}


def shapes_of(recipe: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the matrices that Muon updates."""
    config = load(recipe)
    shapes = parameter_shapes(config.model)
    groups = parameter_groups(config.model, config.optimizer)
    return [tuple(shapes[name]) for group in groups if group.muon for name in group.names]


class Arm:
    """Parameters, gradients and an optimizer, with how many are taken together and who multiplies."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str, chunk: int, kernel: bool):
        torch.manual_seed(0)
        self.chunk, self.kernel, self.device = chunk, kernel, device
        params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        self.grads = {p: torch.randn_like(p) for p in params}
        self.optimizer = muon.Muon(params, iteration=BF16)
        self.flags = {"found_inf": torch.zeros((), device=device), "scale": torch.ones((), device=device)}

    def step(self) -> None:
        """Makes one update."""
        with mock.patch.object(muon, "CHUNK", self.chunk), use_products(kernel=self.kernel):
            self.optimizer.step(self.grads, **self.flags)

    def timed(self, repeats: int) -> tuple[float, float]:
        """Returns milliseconds per step, and milliseconds until the host had launched it."""
        return timed(self.step, repeats, self.device)

    def peak(self) -> float:
        """Returns the MiB that a step needs."""
        if self.device == "cpu":
            return 0.0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def off(self) -> float:
        """Returns the relative distance of the first matrix's direction from that in fp32."""
        given = next(iter(self.grads.values()))[None]
        with use_products(kernel=self.kernel):
            found = muon.orthogonalize(given, BF16).float()
        exact = muon.orthogonalize(given, FP32)
        return float((found - exact).norm() / exact.norm())


def use_products(*, kernel: bool) -> mock._patch:  # type: ignore[type-arg]
    """Inside, symmetric products are computed by torch or, where it can, by the kernel."""
    real = muon.why_torch
    return mock.patch.object(muon, "why_torch", real if kernel else lambda *_: "it was asked to")


def timed(work: Callable[[], object], repeats: int, device: str) -> tuple[float, float]:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    launched = time.perf_counter() - begun
    wait()
    return 1000 * (time.perf_counter() - begun) / repeats, 1000 * launched / repeats


def compare(recipe: str, shapes: list[tuple[int, ...]], device: str, rounds: int) -> None:
    arms = {name: Arm(shapes, device, *how) for name, how in ARMS.items()}
    if why := muon.why_torch(torch.device(device), torch.bfloat16):
        print(f"the kernel is not used: {why}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for arm in arms.values():
        arm.timed(2)
    for index in range(rounds):
        for name in [*arms][:: -1 if index % 2 else 1]:
            times[name].append(arms[name].timed(5))
    count = sum(rows * columns for rows, columns in shapes)
    print(f"\n{recipe}: {len(shapes)} matrices, {count:,} numbers")
    for name, arm in arms.items():
        whole, host = zip(*times[name], strict=True)
        figures = (
            f"{statistics.median(whole):8.2f} ms, fastest {min(whole):8.2f}, host {statistics.median(host):7.2f}"
        )
        print(f"  {name:16} {figures}, {arm.peak():7.0f} MiB, off {arm.off():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="use small matrices on the CPU")
    options = parser.parse_args()
    if options.tiny:
        compare("tiny", [(8, 8), (8, 8), (4, 8), (8, 4)], "cpu", 1)
        return
    for recipe in ("golf", "speedrun"):
        compare(recipe, shapes_of(recipe), "cuda", options.rounds)


if __name__ == "__main__":
    main()
