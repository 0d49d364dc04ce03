"""Compares `halfstep plan` with what a GPU does: peak memory and step time, three recipes and a Hugging Face one.

    python benchmarks/measure/plan.py [--seconds 270] [--layers 3] [--policies fp32 bf16-mixed ...]
        [--set KEY=VALUE ...] [--device cuda] [--cases gpt2 ...]

Each case is planned, then run: a session (or a prepared model) makes four updates, and `max_memory_allocated` is
read. Times are planned with a machine file that is measured first, at the shapes of each case, under bf16-mixed.
What does not fit into the seconds is left out, and said. The table is printed last. On a CPU, which has no such
counter, the bytes are those of the same tracker on real tensors.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from halfstep.config.load import load
from halfstep.config.machines import load_machine
from halfstep.core.policy import Policy
from halfstep.tools.plan.machine import measure_machine
from halfstep.tools.plan.plan import Plan, plan_factory, plan_recipe
from halfstep.torch import AdamW, prepare
from halfstep.torch.instruments.planning.step import force_measured
from halfstep.torch.instruments.planning.tracker import Tracker
from halfstep.torch.numerics.dtypes import describe
from halfstep.training.session import open_session

POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "fp8-mixed")
# And the batch of each, which takes the device longer than the host.
CASES = {"gpt2": 24, "speedrun": 24, "golf": 160, "hugging_face": 48}
UPDATES = 4


def hugging_face(batch: int, layers: int, device: str) -> Callable[[], Any]:
    """Returns a factory of a small Qwen3 from its configuration."""

    def made() -> Any:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": layers, "vocab_size": 32000}
        heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64}
        with torch.device(device):
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, use_cache=False))
            tokens = torch.zeros(batch, 512, dtype=torch.int64)
        return model, AdamW(model.parameters(), lr=1e-4), lambda x: model(input_ids=x, labels=x).loss, tokens

    return made


def run_recipe(config: Any, policy: Policy, device: str) -> Callable[[], Any]:
    """Returns a function that makes an update, as `halfstep train` does."""
    session = open_session(config, policy, device)
    training, model = config.training, config.model
    shape = (training.micro_batches, training.batch, model.context + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, shape).astype(np.int32)
    return lambda: session.step(tokens)


def run_factory(made: Callable[[], Any], policy: Policy, *, compiled: bool) -> Callable[[], Any]:
    """Returns a function that makes an update in your own loop."""
    model, optimizer, loss_fn, batch = made()
    run = prepare(model, optimizer, policy)
    called = torch.compile(loss_fn) if compiled else loss_fn
    return lambda: run.step(called, [batch])


def observed(make: Callable[[], Callable[[], Any]], device: str) -> tuple[float, float]:
    """Returns the peak in bytes and the seconds of an update."""
    gc.collect()
    torch.compiler.reset()
    if device == "cpu":
        with Tracker("cpu") as trace:
            step = make()
            for _ in range(2):
                step()
        return float(sum(trace.ledger.allocations[key].nbytes for key in trace.ledger.at_peak())), 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, step, taken = torch.cuda.memory_allocated(), make(), []
    for _ in range(4):
        step()
    for _ in range(3):  # as training does, which waits for no single update
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(UPDATES):
            step()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun) / UPDATES)
    return float(torch.cuda.max_memory_allocated() - before), median(taken)


def compared(case: str, policy: str, compiled: bool, options: argparse.Namespace, machine: Any) -> list[str]:
    """Plans and runs one case; returns its row."""
    parsed, batch = force_measured(Policy.parse(policy)), options.batch or CASES[case]
    if case == "hugging_face":
        given: dict[str, Any] = {"compiled": compiled, "steps": 1}
        plan = plan_factory(hugging_face(batch, options.layers, "meta"), parsed, machine, 1, 0.0, **given)
        make = lambda: run_factory(hugging_face(batch, options.layers, options.device), parsed, compiled=compiled)  # noqa: E731
    else:
        config = settings(case, batch, compiled, options)
        plan = plan_recipe(config, parsed, machine, 1, 0.0)
        make = lambda: run_recipe(config, parsed, options.device)  # noqa: E731
    peak, seconds = observed(make, options.device)
    return row(case, policy, compiled, plan, peak, seconds)


def settings(case: str, batch: int, compiled: bool, options: argparse.Namespace) -> Any:
    """Returns a recipe of fewer layers."""
    sizes = [f"model.layers={options.layers}", f"training.batch={batch}", "training.micro_batches=2"]
    return load(case, [*sizes, f"training.compile={str(compiled).lower()}", *options.overrides])


def row(case: str, policy: str, compiled: bool, plan: Plan, peak: float, seconds: float) -> list[str]:
    """Returns what is printed of a case."""
    low, high = plan.seconds
    shown = f"{low * 1e3:.1f} to {high * 1e3:.1f}" if high > 1.01 * low else f"{low * 1e3:.1f}"
    inside = "inside" if low <= seconds <= high else "outside"
    off = inside if high > 1.01 * low else f"{low / seconds - 1:+.1%}" if seconds else ""
    memory = [f"{plan.peak_bytes / 2**20:,.1f}", f"{peak / 2**20:,.1f}", f"{plan.peak_bytes / peak - 1:+.1%}"]
    return [case, policy, "compiled" if compiled else "eager", *memory, shown, f"{seconds * 1e3:.1f}", off]


def machine_of(options: argparse.Namespace) -> Any:
    """Returns this machine, with the shapes of every recipe timed."""
    if options.device == "cpu":
        return replace(load_machine("h200"), kind="cpu", capability=(), architecture=describe("cpu").architecture)
    machines = [
        measure_machine(settings(case, options.batch or CASES[case], False, options), options.device)
        for case in options.cases
        if case != "hugging_face"
    ]
    machines = machines or [measure_machine(load("gpt2"), options.device)]
    launch = min(m.launch[0] for m in machines), max(m.launch[1] for m in machines)
    timed = dict.fromkeys(t for machine in machines for t in machine.timed)
    return replace(machines[0], timed=tuple(timed), launch=launch)


def main() -> int:
    """Prints a row for each case as it is done, then all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=[*POLICIES])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun, rows, left = time.perf_counter(), list[list[str]](), list[str]()
    machine = machine_of(options)
    for mode in options.modes:
        for policy in options.policies:
            for case in options.cases:
                if time.perf_counter() - begun > options.seconds:
                    left.append(f"{case} {policy} {mode}")
                    continue
                rows.append(compared(case, policy, mode == "compiled", options, machine))
                print(*rows[-1], flush=True)
    columns = ["case", "policy", "mode", "planned MiB", "MiB", "off", "planned ms", "ms", "off"]
    lines = [" | ".join(line) for line in [columns, *rows]]
    print(f"\n{machine.name}, torch {torch.__version__}, {options.layers} layers")
    print(*lines, *(["left out for lack of time: " + ", ".join(left)] if left else []), sep="\n")
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
