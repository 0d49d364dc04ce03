"""How long until the first step is done, with a cold and a warm cache and resumed, and how long later ones take.

    python benchmarks/measure/first_step.py --size 124M|1.3B [--arms autocast train-bf16 ...] [--steps 20]
                                            [--kinds cold warm resumed] [--rounds 1]

Every arm runs in processes of its own: cold with an empty folder for what torch compiles and tunes and what
halfstep times, warm with what the cold one left there, and resumed, which also loads the state that it saved.
Arms take turns, in as many rounds as asked for. Each run is printed as a line of JSON: the seconds from the start
of its process to the end of the first step, those of `prepare` alone (which times layers for fp8) and of loading,
of a later step (the median), how many graphs there were and how many of them torch's cache of autograd's graphs
had, and the peak of memory. The table of medians comes last. `--size tiny --device cpu` tries it.

    autocast      torch.autocast in bf16, torch.compile, fused AdamW: the same model, without halfstep; its weights
                  are drawn on the GPU
    bf16          halfstep, bf16-mixed with split masters, the whole model compiled
    bf16-lean     bf16 with memory="lean"
    fp8           halfstep, fp8-mixed, the whole model compiled
    ...-block     the same, each block compiled by itself, the rest not
    train-...     `halfstep train gpt2` in that precision with these sizes, all else as it comes, killed after its
                  last step. `prepare` is all before its first; graphs are not counted, and it is not resumed
    ...-whole     the same with training.compile=whole
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class Size(NamedTuple):
    """The sizes of a GPT-2, and of a micro-batch."""

    layers: int
    width: int
    heads: int
    batch: int
    context: int = 1024
    vocabulary: int = 50304


SIZES = {"124M": Size(12, 768, 12, 32), "1.3B": Size(24, 2048, 16, 16), "tiny": Size(2, 32, 2, 2, 16, 256)}
SPLIT = "bf16-mixed,param=fp32:split"
FP8 = "fp8-mixed,param=fp32:split"
POLICIES = {"bf16": SPLIT, "bf16-block": SPLIT, "bf16-lean": SPLIT, "fp8": FP8, "fp8-block": FP8}
TRAIN = {f"train-{name}{how}": POLICIES[name] for name in ("bf16", "fp8") for how in ("", "-whole")}
ARMS = ("autocast", *POLICIES, *TRAIN)
GIVEN = ("layers", "width", "heads", "vocabulary", "context")
KINDS = ("cold", "warm", "resumed")


def main() -> None:
    """Runs every arm, cold, warm and resumed, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--steps", type=int, default=20, help="later steps that are timed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="the first of them finds nothing")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)  # when this process was started
    parser.add_argument("--one", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options)))
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for arm in options.arms:
            with tempfile.TemporaryDirectory() as cache:
                for kind in options.kinds if arm not in TRAIN else [k for k in options.kinds if k != "resumed"]:
                    verb = "--load" if kind == "resumed" else "--save"
                    wanted = kind == "resumed" or (kind == options.kinds[0] and "resumed" in options.kinds)
                    state = [verb, f"{cache}/state.pt"] if wanted else []
                    row = in_process(arm, options, Path(cache), more=state)
                    print(json.dumps({"arm": arm, "cache": kind, **row}), flush=True)
                    found.setdefault((arm, kind), []).append(row)
    print("\n".join(["", *table(found)]))


def table(found: dict[tuple[str, str], list[dict[str, float]]]) -> list[str]:
    """Returns the medians of each arm and kind as lines, with the first step over that of autocast."""
    times = f"{'first step, s':>15}{'/ autocast':>12}{'prepare, s':>12}{'load, s':>9}{'step, ms':>10}"
    lines = [f"{'arm':18}{'cache':>8}{times}{'graphs':>8}{'kept':>6}{'MiB':>8}{'loss':>9}"]
    rows = {key: {name: median(run[name] for run in runs) for name in runs[0]} for key, runs in found.items()}
    for (arm, kind), row in rows.items():
        theirs = rows.get(("autocast", kind))
        ratio = f"{row['first'] / theirs['first']:12.3f}" if theirs else " " * 12
        times = f"{row['first']:15.1f}{ratio}{row['prepare']:12.1f}{row['load']:9.1f}{row['step'] * 1000:10.1f}"
        counts = f"{row['graphs']:8.0f}{row['kept']:6.0f}{row['memory'] / 2**20:8,.0f}"
        lines.append(f"{arm:18}{kind:>8}{times}{counts}{row['loss']:9.4f}")
    return lines


def in_process(
    arm: str, options: argparse.Namespace, cache: Path, seconds: float | None = None, more: Sequence[str] = ()
) -> dict[str, float]:
    """Runs an arm in a new process with its caches in a folder, within a time limit in seconds."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "HALFSTEP_CACHE": "halfstep"}
    folders = {name: str(cache / folder) for name, folder in folders.items()}
    environment = {**os.environ, **folders}
    if arm in TRAIN:
        return train(arm, options, cache / "run", environment, seconds)
    given = ["--size", options.size, "--steps", str(options.steps), "--device", options.device, "--one", arm]
    made = subprocess.run(
        [sys.executable, __file__, *given, "--begun", str(time.time()), *more],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=seconds,
    )
    return json.loads(made.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def train(
    arm: str, options: argparse.Namespace, out: Path, environment: dict[str, str], seconds: float | None
) -> dict[str, float]:
    """Runs `halfstep train` for some steps, within a time limit in seconds, and kills it before it saves."""
    size, root = SIZES[options.size], str(Path(__file__).parents[2])
    settings = [f"model.{name}={getattr(size, name)}" for name in GIVEN]
    settings += [f"training.batch={size.batch}", "training.micro_batches=1", "training.save_every=1000000"]
    settings += ["training.validate_every=1000000"] + ["training.compile=whole"] * arm.endswith("-whole")
    words = ["train", "gpt2", "--policy", TRAIN[arm], "--device", options.device, "--out", str(out)]
    words += [word for setting in settings for word in ("--set", setting)]
    paths = os.pathsep.join(path for path in (root, environment.get("PYTHONPATH", "")) if path)
    shutil.rmtree(out, ignore_errors=True)  # of the run with the cold cache
    out.mkdir()
    with (out.parent / "log").open("wb") as log:
        begun = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "halfstep", *words],
            env={**environment, "PYTHONPATH": paths},
            stdout=log,
            stderr=log,
        )
        try:
            while len(steps := events_of(out, "step")) < options.steps + 2:
                if process.poll() is not None or (seconds is not None and time.time() - begun > seconds):
                    sys.stderr.write(Path(log.name).read_text())
                    if process.returncode is None:
                        raise subprocess.TimeoutExpired(process.args, seconds or 0.0)
                    raise subprocess.CalledProcessError(process.returncode, process.args)
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    taken = [later["time"] - before["time"] for before, later in pairwise(steps[1:])]
    (start,) = events_of(out, "start")
    times = {"first": steps[0]["time"] - begun, "prepare": start["time"] - begun, "step": median(taken)}
    unknown = {"load": 0.0, "graphs": math.nan, "kept": math.nan}
    return {**times, **unknown, "memory": steps[-1]["memory"], "loss": steps[-1]["loss"]}


def events_of(out: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a kind that a run has written so far."""
    path = out / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == kind]


def run(options: argparse.Namespace) -> dict[str, float]:
    """Trains one arm; returns its times in seconds, its memory in bytes, and its last loss."""
    import torch
    from torch._dynamo.utils import counters

    sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
    from benchmarks.gpt2 import GPT2

    size, device = SIZES[options.size], torch.device(options.device)
    torch.manual_seed(0)
    with device:  # to draw 1.3 billion numbers on a CPU would be a large part of every arm's time
        model = GPT2(**{name: getattr(size, name) for name in GIVEN})
    before = time.perf_counter()
    make = make_autocast_update if options.one == "autocast" else make_halfstep_update
    update, saved, load = make(model, options.one, size)
    prepared = time.perf_counter() - before
    if options.load:
        load(torch.load(options.load, mmap=True))
    loaded = time.perf_counter() - before - prepared
    seconds: list[float] = []
    for _ in range(options.steps + 2):
        tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1)).to(device)
        begin = time.perf_counter()
        loss = float(update((tokens[:, :-1], tokens[:, 1:])))  # waits for the step
        seconds.append(time.perf_counter() - begin)
        if len(seconds) == 1:
            first = time.time() - options.begun
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if options.save:
        torch.save(saved(), options.save)
    times = {"first": first, "prepare": prepared, "load": loaded, "step": median(seconds[2:])}
    counts = {"graphs": counters["stats"]["unique_graphs"], "kept": counters["aot_autograd"]["autograd_cache_hit"]}
    return {**times, **counts, "memory": memory, "loss": loss}


def make_autocast_update(model: Any, _: str, __: Size) -> Any:
    """Returns three functions: an update as most recipes write it, and what saves and loads its state."""
    import torch

    forward, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    device = next(model.parameters()).device.type

    def update(batch: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return update, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, load


def make_halfstep_update(model: Any, arm: str, size: Size) -> Any:
    """Returns an update by halfstep, compiled whole or block by block, and what saves and loads its state."""
    import torch

    from halfstep.torch import AdamW, prepare

    optimizer, memory = AdamW(model.parameters(), lr=1e-4), "lean" if arm == "bf16-lean" else "fast"
    given: dict[str, Any] = {"clip_norm": 1.0, "tokens": size.batch * size.context, "memory": memory}
    run = prepare(model, optimizer, POLICIES[arm], **given)
    forward = model
    if arm.endswith("-block"):
        for block in model.h:
            block.compile()
    else:
        forward = torch.compile(model)
    return lambda batch: run.step(lambda pair: forward(*pair), [batch]).loss, run.state_dict, run.load_state_dict


if __name__ == "__main__":
    main()
