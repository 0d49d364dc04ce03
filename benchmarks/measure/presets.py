"""Measures what each preset costs in quality: `tiny` in fp32 and in every preset, three seeds each.

    python benchmarks/measure/presets.py [--device cpu] [--steps 400] [--native] [--only fp32 bf16-true]

All runs take the same steps on the same data. Each preset gets the verdict of `halfstep compare` on its pairs with
fp32, at a margin of 0.5 % of fp32's bits per byte. bf16-true keeps no masters: beside its verdict stands the share
of its updates lost to rounding. Formats are emulated bit for bit unless --native asks for the device's own bf16
and fp16. Exit code 1 if a preset with masters is different.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from halfstep.config.load import load
from halfstep.core.compare.gaps import verdict
from halfstep.core.policy import Policy
from halfstep.torch.optim.masters import Masters
from halfstep.training.loop import Loop

SEEDS = (0, 1, 2)
JUDGED = ("bf16-mixed", "fp16-mixed", "fp8-mixed")
REPORTED = ("bf16-true",)
MARGIN = 0.005
Tensors = Sequence[torch.Tensor]


class LostUpdates:
    """Counts, inside a `with` block, the updates of narrow masters that rounding undid."""

    def __enter__(self) -> "LostUpdates":
        self.updates = self.lost = 0
        self.put = Masters.put
        counter = self

        def counted(masters: Masters, parameters: Tensors, wide: Tensors, counts: Tensors) -> None:
            for p, w in zip(parameters, wide, strict=True):
                if not masters.is_whole(p):
                    before, after = p.detach().float(), w.detach()
                    meant = after != before
                    counter.updates += int(meant.sum())
                    counter.lost += int((meant & (after.bfloat16() == before)).sum())
            counter.put(masters, parameters, wide, counts)

        Masters.put = counted
        return self

    def __exit__(self, *_: object) -> None:
        Masters.put = self.put


def train(policy: str, seed: int, options: argparse.Namespace) -> float:
    overrides = [f"seed={seed}", f"training.steps={options.steps}", "training.validation_tokens=262144"]
    overrides += ["training.validate_every=1000000", "training.save_every=1000000"]
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(load("tiny", overrides), Policy.parse(policy), Path(folder) / "run", device=options.device)
        outcome = loop.run()
    if not outcome.finished or outcome.held_out.bits_per_byte is None:
        sys.exit(f"stopped at step {outcome.step} of {policy}, seed {seed}")
    return outcome.held_out.bits_per_byte


def _lost(counter: LostUpdates) -> str:
    share = counter.lost / max(1, counter.updates)
    return f"; {share:.1%} of {counter.updates:,} updates lost" if counter.updates else ""


def spelled(preset: str, native: bool) -> str:
    emulated = preset != "fp32" and not (native and preset != "fp8-mixed")
    return f"{preset},emulate=true" if emulated else preset


def main() -> int:
    parser = argparse.ArgumentParser(description="presets against fp32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--only", nargs="+", default=["fp32", *JUDGED, *REPORTED])
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    lost = {}
    for preset in options.only:
        policy = spelled(preset, options.native)
        with LostUpdates() as counter:
            found[preset] = [train(policy, seed, options) for seed in SEEDS]
        lost[preset] = counter
        print(f"{policy}: {' '.join(f'{bits:.4f}' for bits in found[preset])}", flush=True)
    if "fp32" not in found:
        print("\n".join(f"{preset}: {_lost(counted)}" for preset, counted in lost.items()))
        return 0
    mean = statistics.mean(found["fp32"])
    print(f"\nfp32 mean {mean:.4f} bits per byte, margin {MARGIN * mean:.4f}")
    failed = False
    for preset in (name for name in options.only if name != "fp32"):
        said = verdict([a - b for a, b in zip(found[preset], found["fp32"], strict=True)], MARGIN * mean)
        failed |= preset in JUDGED and said.kind == "different"
        more = f", about {said.more_seeds} more pairs" if said.more_seeds else ""
        name = spelled(preset, options.native)
        print(f"{name:28} {said.mean:+.4f}  {said.kind.upper()}{more}{_lost(lost[preset])}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
