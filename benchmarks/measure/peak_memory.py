"""Lists the largest allocations at a step's peak of memory: the race's GPT-2 or a recipe, on an NVIDIA GPU.

    python benchmarks/measure/peak_memory.py [--policies bf16-mixed fp8-mixed,compute=e4m3] [--layers 2]
        [--width 768] [--batch 32] [--top 6]
    python benchmarks/measure/peak_memory.py --recipe golf [--policies bf16-mixed]
        [--set training.micro_batches=1 ...]

torch's allocator records every allocation and release of one compiled step after three. Replaying the record
shows what was alive at the peak, and which line of code allocated it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.gpt2 import GPT2
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch import AdamW, prepare
from halfstep.training.session import open_session

VOCABULARY, CONTEXT, HEAD = 50304, 1024, 64


def make_race_step(policy: str, options: argparse.Namespace) -> Callable[[], Any]:
    """Returns a function that takes a step of the race's model."""
    torch.manual_seed(0)
    shape = {"layers": options.layers, "width": options.width, "heads": options.width // HEAD}
    model = GPT2(vocabulary=VOCABULARY, context=CONTEXT, **shape).cuda()
    run = prepare(model, AdamW(model.parameters(), lr=1e-4), policy, clip_norm=1.0)
    forward = torch.compile(model)
    tokens = torch.randint(0, VOCABULARY, (options.batch, CONTEXT), device="cuda")
    return lambda: run.step(lambda pair: forward(*pair), [(tokens, tokens)])


def make_recipe_step(policy: str, options: argparse.Namespace) -> Callable[[], Any]:
    """Returns a function that takes a step of a recipe, as `halfstep train` does, on random tokens."""
    config = load(options.recipe, options.overrides)
    session = open_session(config, Policy.parse(policy), "cuda")
    training, model = config.training, config.model
    shape = (training.micro_batches, training.batch, model.context + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, shape).astype(np.int32)
    return lambda: session.step(tokens)


def history(step: Callable[[], Any]) -> tuple[int, list[dict[str, Any]]]:
    """Returns the bytes allocated before the fourth step, and what the allocator did in it."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python")
    step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    return before, events


def allocations_at_peak(events: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """Returns the most bytes allocated by the step at any time, and the allocations alive then."""
    live: dict[int, dict[str, Any]] = {}
    now, most, found = 0, 0, list[dict[str, Any]]()
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
            if now > most:
                most, found = now, list(live.values())
        elif event["action"] == "free_completed" and (freed := live.pop(event["addr"], None)):
            now -= freed["size"]
    return most, found


def allocated_by(event: dict[str, Any]) -> str:
    """Returns the line that asked for the memory: one that inductor wrote, or else the innermost one."""
    frames = event["frames"] or [{"filename": "?", "line": 0}]
    frame = next((f for f in frames if "inductor" in f["filename"] and "/torch/_" not in f["filename"]), frames[0])
    path = Path(frame["filename"])
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return lines[frame["line"] - 1].strip() if 0 < frame["line"] <= len(lines) else f"{path.name}:{frame['line']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["bf16-mixed", "fp8-mixed,compute=e4m3"])
    for name, value in {"layers": 2, "width": 768, "batch": 32, "top": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--recipe", help="measure this recipe instead of the race's model")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="a setting of the recipe")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU: torch records no other allocator", file=sys.stderr)
        return 2
    for policy in options.policies:
        before, events = history((make_recipe_step if options.recipe else make_race_step)(policy, options))
        most, found = allocations_at_peak(events)
        print(f"\n{policy}: {before / 2**20:,.0f} MiB before a step, {most / 2**20:,.0f} more at its peak")
        for event in sorted(found, key=lambda event: -event["size"])[: options.top]:
            print(f"{event['size'] / 2**20:8,.0f} MiB  {allocated_by(event)[:120]}")
        torch.compiler.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
