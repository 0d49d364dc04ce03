"""The goals for speed and memory, each a ratio of two arms in one run on one NVIDIA H200: measured, row by row.

    python benchmarks/measure/goals.py [--rows bf16 lean fp8 ...] [--seconds 540] [--save FILE]
    python benchmarks/measure/goals.py --print --save docs/measurements/goals.json    # only the table so far

    bf16 lean fp8               GPT-2 124M, 32 x 1024 tokens: one race for all that are asked for together
    fp8-1.3b                    24 layers of width 2048, 16 x 1024 tokens, with torchao's float8
    speedrun golf               against the forms of their sources
    eager-2 eager-32            not compiled, 2 x 1024 and 32 x 1024 tokens; `eager-2` also as a CUDA graph
    first-step                  at 1.3B, each arm with an empty cache; `first-step-train` of `halfstep train`
    fp8-loss fp8-1.3b-loss      held-out losses over three seeds, after 1000 and 300 steps
    golf-loss                   the same of golf and its source, after 60 updates

Arms of a row take turns (benchmarks/race/bench.py and recipes.py), each in a process that holds its model, so
that a peak of memory is its own; first steps and seeds run one after the other (first_step.py, race/seeds.py). A
speed is the ratio of median turns, with that of the fastest beside it. An arm that fails, or is not ready in time,
is named, and the others continue. The result of a row is printed, and kept in `--save`, as soon as it exists; the
table of all rows, also of those that the file has from before, comes last. Seeds that the file has are not run
again. Exit code 1 if a goal of the rows is missed. `--dry` runs tiny models on the CPU, only to show that it runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.measure import first_step
from benchmarks.race import race as bench
from halfstep.core.compare.gaps import Verdict, verdict
from halfstep.core.errors import HalfstepError

RACE = Path(__file__).parents[1] / "race"
Arm = dict[str, Any]  # seconds of turns, memory in bytes, held_out (by seed in rows of losses), failed: why
Measure = Callable[[Sequence[str], dict[str, Any], float, dict[str, Arm]], dict[str, Arm]]


@dataclass(frozen=True)
class Goal:
    """A bound on the ratio of two arms, and the value to aim for."""

    ours: str
    theirs: str
    what: Literal["speed", "memory", "first step", "loss"]
    bound: float
    aim: float | None = None

    def ratios(self, ours: Arm, theirs: Arm) -> tuple[float, float | None] | str:
        """Returns the ratio, and that of the fastest turns if there are several; or why there is none."""
        for name, arm in ((self.ours, ours), (self.theirs, theirs)):
            if arm.get("failed"):
                return f"{name}: {arm['failed']}"
        if self.what == "memory":
            both = ours["memory"] and theirs["memory"]
            return (ours["memory"] / theirs["memory"], None) if both else "memory is not counted on this device"
        times = ours["seconds"], theirs["seconds"]
        if self.what == "first step":
            return median(times[0]) / median(times[1]), None
        return median(times[1]) / median(times[0]), min(times[1]) / min(times[0])

    def reached(self, ratio: float) -> bool:
        """Says whether a ratio is on the right side of the bound."""
        return ratio >= self.bound if self.what == "speed" else ratio <= self.bound

    def said(self, ours: Arm, theirs: Arm) -> Verdict | str:
        """Returns the verdict of `halfstep compare` on two arms' losses; or why there is none."""
        for name, arm in ((self.ours, ours), (self.theirs, theirs)):
            if arm.get("failed"):
                return f"{name}: {arm['failed']}"
        losses = [(ours["held_out"][seed], loss) for seed, loss in theirs["held_out"].items()]
        return verdict([a - b for a, b in losses], self.bound * mean(loss for _, loss in losses))

    def __str__(self) -> str:
        if self.what == "loss":
            return f"the same loss, within {self.bound:.1%}"
        return f"{self.what} {'at least' if self.what == 'speed' else 'at most'} {self.bound:.2f}"


@dataclass(frozen=True)
class Row:
    """How a row is measured: rows with the same measure and setting share a run."""

    title: str
    measure: Measure
    setting: dict[str, Any]
    goals: tuple[Goal, ...]
    estimate: int  # seconds on an H200, alone
    also: tuple[str, ...] = field(default=())  # arms without a goal

    @property
    def arms(self) -> list[str]:
        """The arms that the goals of the row compare, and those that have no goal."""
        return [*dict.fromkeys(name for goal in self.goals for name in (goal.ours, goal.theirs)), *self.also]


def race(arms: Sequence[str], setting: dict[str, Any], seconds: float, known: dict[str, Arm]) -> dict[str, Arm]:
    """Races arms of benchmarks/race/bench.py."""
    result = bench.run(arms, seconds=seconds, log=say, **setting)
    return {
        arm.name: {
            "seconds": list(arm.seconds),
            "memory": arm.memory,
            "held_out": arm.held_out,
            "ready": arm.ready_seconds,
            "profile": dict(list(arm.profile.items())[:40]),
            "failed": arm.missing or arm.failed or ("" if arm.seconds else "it was not timed"),
        }
        for arm in result.arms
    }


def recipe(arms: Sequence[str], setting: dict[str, Any], seconds: float, known: dict[str, Arm]) -> dict[str, Arm]:
    """Races a recipe and its source."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        given = [f"--{name}={value}" for name, value in setting.items() if name != "set"]
        given += [f"--set={value}" for value in setting["set"]]
        failed = _run("recipes.py", [*given, f"--seconds={seconds}", f"--json={results}"], seconds + 60)
        found = json.loads(results.read_text())["arms"] if results.exists() else {}
    return {name: _of_recipe(found.get(name), failed) for name in arms}


def _of_recipe(found: dict[str, Any] | None, failed: str) -> Arm:
    if found is None or not found["seconds"]:
        return {"failed": (found or {}).get("failed") or failed or "no update was timed"}
    losses = list(found["evaluations"].values())
    arm = {"seconds": found["seconds"], "memory": found["memory"], "held_out": losses[-1] if losses else None}
    return {**arm, "updates": len(found["losses"]), "failed": ""}


def recipe_seeds(
    arms: Sequence[str], setting: dict[str, Any], seconds: float, known: dict[str, Arm]
) -> dict[str, Arm]:
    """Races a recipe and its source with several seeds, except those whose losses are on record."""
    end = time.monotonic() + seconds
    losses = {name: dict(known.get(name, {}).get("held_out") or {}) for name in arms}
    for seed in setting["seeds"]:
        if all(str(seed) in of_arm for of_arm in losses.values()):
            continue
        given = {name: value for name, value in setting.items() if name != "seeds"}
        given["set"] = [*setting["set"], f"seed={seed}"]
        for name, arm in recipe(arms, given, max(1.0, end - time.monotonic()), {}).items():
            if arm.get("updates") == setting["steps"]:
                losses[name][str(seed)] = arm["held_out"]
    return {name: _of_seeds(setting["seeds"], of_arm) for name, of_arm in losses.items()}


def first_steps(
    arms: Sequence[str], setting: dict[str, Any], seconds: float, known: dict[str, Arm]
) -> dict[str, Arm]:
    """Times the first step of each arm in a process with an empty cache."""
    end, found, options = time.monotonic() + seconds, dict[str, Arm](), argparse.Namespace(**setting)
    for name in reversed(arms):  # the slowest last
        with tempfile.TemporaryDirectory() as cache:
            try:
                took = first_step.in_process(name, options, Path(cache), max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                found[name] = {"failed": f"no first step within {error.timeout:.0f} s"}
            except subprocess.CalledProcessError as error:
                found[name] = {"failed": f"it stopped with code {error.returncode}"}
            else:
                memory = int(took["memory"]) or None
                found[name] = {**took, "seconds": [took["first"]], "memory": memory, "failed": ""}
                say(f"{name}: {took['first']:.1f} s")
    return found


def seeds(arms: Sequence[str], setting: dict[str, Any], seconds: float, known: dict[str, Arm]) -> dict[str, Arm]:
    """Trains policies with several seeds, except those whose losses are on record."""
    end, found = time.monotonic() + seconds, dict[str, Arm]()
    given = [f"--{name}={value}" for name, value in setting.items() if name != "seeds"]
    for name in arms:
        losses = dict(known.get(name, {}).get("held_out") or {})
        if missing := [seed for seed in setting["seeds"] if str(seed) not in losses]:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log.jsonl"
                asked = ["--policies", first_step.POLICIES[name], "--seeds", *map(str, missing)]
                _run("seeds.py", [*given, *asked, f"--log={log}"], max(1.0, end - time.monotonic()))
                events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            losses |= {str(event["seed"]): event["held_out"] for event in events if "held_out" in event}
        found[name] = _of_seeds(setting["seeds"], losses)
    return found


def _of_seeds(wanted: Sequence[int], losses: dict[str, float]) -> Arm:
    late = [seed for seed in wanted if str(seed) not in losses]
    return {"held_out": losses, "failed": f"not done: seeds {late}" if late else ""}


def _run(script: str, arguments: list[str], seconds: float) -> str:
    """Runs a script of benchmarks/race; returns why it failed, if it did."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH", "")) if path)
    try:
        done = subprocess.run(
            [sys.executable, str(RACE / script), *arguments],
            timeout=seconds,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=sys.stderr,
        )
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    return f"{script} stopped with code {done.returncode}" if done.returncode else ""


GPT2 = {"layers": 12, "width": 768, "context": 1024, "batch": 32, "vocabulary": 50304}
WIDE = {**GPT2, "layers": 24, "width": 2048, "batch": 16}
# Bytes of torch's own Python source: some 45 MB, on every machine, and more than the steps read.
TEXT = str(Path(str(find_spec("torch").origin)).parent / "**" / "*.py")  # type: ignore[union-attr]
LOSSES = {"source": TEXT, "seeds": [0, 1, 2]}
MARGIN = 0.005  # of the other arm's loss
SMALL_RACE = {**GPT2, "rounds": 8, "steps": 8, "at_once": 5, "compile": None}
EAGER = {**SMALL_RACE, "compile": False}


def _recipe(name: str, steps: int) -> dict[str, Any]:
    return {"recipe": name, "steps": steps, "source-steps": steps, "turn": 10, "megabytes": 60, "set": []}


ROWS = {
    "bf16": Row(
        "bf16-mixed, 124M",
        race,
        SMALL_RACE,
        (Goal("halfstep", "autocast", "speed", 1.12, 1.17), Goal("halfstep", "casted", "speed", 1.06, 1.11)),
        estimate=95,
    ),
    "lean": Row(
        "the same, lean",
        race,
        SMALL_RACE,
        (
            Goal("halfstep-lean", "autocast", "memory", 0.60, 0.54),
            Goal("halfstep-lean", "autocast", "speed", 1.05),
        ),
        estimate=75,
    ),
    "fp8": Row(
        "fp8-mixed, 124M",
        race,
        SMALL_RACE,
        (Goal("halfstep-fp8", "autocast", "speed", 1.20, 1.25),),
        estimate=130,
    ),
    "fp8-1.3b": Row(
        "fp8-mixed, 1.3B",
        race,
        {**WIDE, "rounds": 6, "steps": 4, "at_once": 3, "compile": None},
        (
            Goal("halfstep-fp8", "autocast", "speed", 1.31, 1.38),
            Goal("halfstep-fp8", "torchao", "speed", 1.12, 1.18),
            Goal("halfstep-fp8", "torchao", "memory", 1.0),
        ),
        estimate=330,
        also=("halfstep",),
    ),
    "speedrun": Row(
        "`speedrun`",
        recipe,
        _recipe("speedrun", 30),
        (Goal("halfstep", "source", "speed", 1.16, 1.22), Goal("halfstep", "source", "memory", 0.85, 0.78)),
        estimate=290,
    ),
    "golf": Row(
        "`golf`",
        recipe,
        _recipe("golf", 60),
        (Goal("halfstep", "source", "speed", 1.35, 1.45), Goal("halfstep", "source", "memory", 1.0)),
        estimate=220,
    ),
    "eager-2": Row(
        "eager, 2 x 1024",
        race,
        {**EAGER, "batch": 2, "rounds": 40, "steps": 6},
        (
            Goal("halfstep", "autocast", "speed", 1.0),
            Goal("halfstep-fp32-masters", "autocast", "speed", 1.0),
            Goal("halfstep-graph", "autocast", "speed", 1.0, 1.3),
        ),
        estimate=80,
    ),
    "eager-32": Row(
        "eager, 32 x 1024",
        race,
        {**EAGER, "steps": 4},
        tuple(
            Goal(ours, "autocast", what, bound, aim)
            for ours in ("halfstep", "halfstep-fp32-masters")
            for what, bound, aim in (("speed", 1.05, 1.10), ("memory", 0.75, None))
        ),
        estimate=60,
    ),
    "first-step": Row(
        "first step, 1.3B, cold cache",
        first_steps,
        {"size": "1.3B", "steps": 8, "device": "cuda"},
        (
            Goal("bf16", "autocast", "first step", 0.6, 0.4),
            Goal("bf16-block", "autocast", "first step", 0.6, 0.4),
            Goal("fp8", "autocast", "first step", 1.0, 0.6),
            Goal("fp8-block", "autocast", "first step", 1.0, 0.6),
        ),
        estimate=500,
    ),
    "first-step-train": Row(
        "first step of `halfstep train`, 1.3B, cold cache",
        first_steps,
        {"size": "1.3B", "steps": 8, "device": "cuda"},
        (
            Goal("train-bf16", "autocast", "first step", 0.6, 0.4),
            Goal("train-fp8", "autocast", "first step", 1.0, 0.6),
        ),
        estimate=200,
    ),
    "fp8-loss": Row(
        "fp8-mixed, 124M, 1000 steps",
        seeds,
        {**GPT2, "heads": 12, "steps": 1000, "rate": 6e-4, **LOSSES},
        (Goal("fp8", "bf16", "loss", MARGIN),),
        estimate=520,
    ),
    "fp8-1.3b-loss": Row(
        "fp8-mixed, 1.3B, 300 steps",
        seeds,
        {**WIDE, "heads": 32, "steps": 300, "rate": 3e-4, **LOSSES},
        (Goal("fp8", "bf16", "loss", MARGIN),),
        estimate=760,
    ),
    "golf-loss": Row(
        "`golf`, 60 updates",
        recipe_seeds,
        {**_recipe("golf", 60), "seeds": [0, 1, 2]},
        (Goal("halfstep", "source", "loss", MARGIN),),
        estimate=420,
    ),
}

TINY = {"layers": 1, "width": 32, "context": 16, "batch": 2, "vocabulary": 256, "device": "cpu"}
TINY_RECIPE = ["model.vocabulary=320", "model.context=16", "model.width=32", "model.layers=2", "model.heads=2"]
TINY_RECIPE += ["training.batch=2", "training.micro_batches=2", "training.compile=false"]
TINY_GOLF = ["model.kv_heads=1", "model.mlp_width=64"]
DRY: dict[Measure, dict[str, Any]] = {
    race: {**TINY, "rounds": 2, "steps": 1, "at_once": 1, "compile": False},
    recipe: {"steps": 4, "source-steps": 4, "turn": 2, "megabytes": 1, "device": "cpu", "held-out": 64},
    first_steps: {"size": "tiny", "steps": 1, "device": "cpu"},
    seeds: {**TINY, "heads": 2, "steps": 4, "source": "stdlib", "seeds": [0, 1]},
}
DRY[recipe_seeds] = {**DRY[recipe], "seeds": [0, 1]}


def setting_of(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the setting of a row with what the options change."""
    setting = {**row.setting, **(DRY[row.measure] if options.dry else {})}
    if row.measure in (recipe, recipe_seeds):
        tiny = TINY_RECIPE + (TINY_GOLF if setting["recipe"] == "golf" else []) if options.dry else []
        setting["set"] = [*tiny, *options.set]
    return setting


def compile_order(arm: str) -> int:
    """Sorts those arms first that take longest to compile."""
    return 0 if "fp8" in arm else 1 if arm == "torchao" else 2


def group_rows(names: Sequence[str], options: argparse.Namespace) -> list[list[str]]:
    """Returns the rows that share a run, in the order of their first."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        row = ROWS[name]
        groups.setdefault((row.measure, json.dumps(setting_of(row, options))), []).append(name)
    return list(groups.values())


def measure(names: Sequence[str], options: argparse.Namespace, seconds: float, kept: dict[str, Any]) -> None:
    """Measures rows that share a run, prints them and adds them to what is kept."""
    rows = [ROWS[name] for name in names]
    setting, begun = setting_of(rows[0], options), time.monotonic()
    arms = sorted(dict.fromkeys(arm for row in rows for arm in row.arms), key=compile_order)
    estimate = max(row.estimate for row in rows) + 20 * (len(rows) - 1)
    if seconds < estimate / 2 and not options.dry:
        say(f"{', '.join(names)}: not measured, for {seconds:.0f} s are left and it takes about {estimate}")
        return
    say(f"\n{', '.join(names)}: {', '.join(arms)}; about {estimate} s on an H200, and {seconds:.0f} are left")
    before = kept.get(names[0], {})
    known = before.get("arms", {}) if before.get("setting") == setting else {}
    try:
        found = rows[0].measure(arms, setting, seconds, known)
    except HalfstepError as error:  # no arm could begin; other rows may
        found = {arm: {"failed": error.message} for arm in arms}
    took = time.monotonic() - begun
    for name, row in zip(names, rows, strict=True):
        own = {arm: found[arm] for arm in row.arms}
        kept[name] = {"date": str(date.today()), "took": took, "setting": setting, "arms": own}
    print("\n".join(describe(found)))
    print("\n".join(table(kept, names)), flush=True)


def describe(arms: dict[str, Arm]) -> list[str]:
    """Returns the figures of each arm as lines."""
    lines = [f"\n{'arm':24}{'median ms':>12}{'fastest':>12}{'MiB':>9}  held-out loss"]
    for name, arm in arms.items():
        taken = arm.get("seconds")
        times = f"{1e3 * median(taken):12.2f}{1e3 * min(taken):12.2f}" if taken else " " * 24
        mib = f"{arm['memory'] / 2**20:9,.0f}" if arm.get("memory") else " " * 9
        lines.append(f"{name:24}{times}{mib}  {_loss(arm)} {arm['failed']}".rstrip())
    return [*lines, ""]


def table(kept: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Returns goals and what was measured, as a table in Markdown."""
    head = "| | | goal | go for | measured | fastest turns | reached | MiB, ours / theirs | loss, ours / theirs |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for name in names:
        row, arms = ROWS[name], kept.get(name, {}).get("arms")
        for goal in row.goals:
            aim = f"{goal.aim:.2f}" if goal.aim else ""
            cells = [row.title, f"{goal.ours} / {goal.theirs}", str(goal), aim, *_measured(goal, arms)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _measured(goal: Goal, arms: dict[str, Arm] | None) -> list[str]:
    if arms is None:
        return ["not measured yet", "", "", "", ""]
    ours, theirs = arms[goal.ours], arms[goal.theirs]
    mib = [f"{arm['memory'] / 2**20:,.0f}" if arm.get("memory") else "" for arm in (ours, theirs)]
    losses = [_loss(arm) for arm in (ours, theirs)]
    beside = [" / ".join(pair) if any(pair) else "" for pair in (mib, losses)]
    if goal.what == "loss":
        return _decided(goal.said(ours, theirs), beside)
    ratios = goal.ratios(ours, theirs)
    if isinstance(ratios, str):
        return [ratios.replace("|", "/"), "", "", "", ""]
    ratio, fastest = ratios
    turns = "" if fastest is None else f"{fastest:.3f}"
    return [f"{ratio:.3f}", turns, "yes" if goal.reached(ratio) else "**no**", *beside]


def _decided(found: Verdict | str, beside: Sequence[str]) -> list[str]:
    if isinstance(found, str):
        return [found.replace("|", "/"), "", "", *beside]
    more = f", about {found.more_seeds} more pairs" if found.more_seeds else ""
    reached = {"same": "yes", "different": "**no**", "cannot tell": "unknown"}[found.kind]
    return [f"{found.mean:+.4f}: {found.kind.upper()}{more}", "", reached, *beside]


def _loss(arm: Arm) -> str:
    losses = arm.get("held_out")
    if isinstance(losses, dict):
        return " ".join(f"{loss:.4f}" for _, loss in sorted(losses.items()))
    return "" if losses is None else f"{losses:.4f}"


def say(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measures the rows of the command line; returns 1 if an arm failed or a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=540.0, help="of all rows together")
    parser.add_argument("--save", type=Path, help="a JSON file that keeps results, and is read first if it exists")
    parser.add_argument("--set", action="append", default=[], help="a setting of speedrun and golf")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--dry", action="store_true", help="run tiny models on the CPU")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    kept = json.loads(options.save.read_text()) if options.save and options.save.exists() else {}
    if options.dry:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    for names in [] if options.print else group_rows(options.rows, options):
        measure(names, options, end - time.monotonic(), kept)
        if options.save:
            options.save.write_text(json.dumps(kept, indent=1) + "\n")
    print()
    print("\n".join(table(kept, list(ROWS))))
    verdicts = [
        _measured(goal, kept.get(name, {}).get("arms"))[2] for name in options.rows for goal in ROWS[name].goals
    ]
    return 0 if options.print or all(verdict == "yes" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
