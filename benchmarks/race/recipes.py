"""`speedrun` and `golf` on an NVIDIA GPU: halfstep's bf16-mixed against the autocast form of the same recipe.

    python benchmarks/race/recipes.py --recipe speedrun [--steps 200] [--source-steps 60] [--json FILE]
    python benchmarks/race/recipes.py --recipe golf [--steps 200] [--source-steps 200]

Each arm is a process. They take turns of `--turn` updates on the same tokens from the same initial weights, so
that a change of the device's speed affects both. `source` is the recipe as its source trains it
(recipe_sources.py), `halfstep` is the recipe as `halfstep train` runs it. Both run the first steps of the
recipe's own schedule. The source may get fewer updates, because each costs a second: its turns are then spread
over those of the other arm, and the held-out losses are compared after equally many updates.

Time is per update, by device events, without the first update of each turn. Memory is the most allocated in any
turn but the first, which compiles. `golf` ends with its int8 + zlib artifact, scored on the same held-out
tokens. Without `--tokens`, recipe_tokens.py makes them. The source's earlier figures are printed for comparison.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.race import recipe_tokens
from benchmarks.race.workers import FailedError, Worker
from halfstep.config.load import load
from halfstep.config.run import RunConfig

Answer = dict[str, Any]
# The source on an H200: milliseconds per update of 524,288 tokens, and MiB.
ANCHORS = {"speedrun": (1091.0, 35463), "golf": (313.5, 10940)}
TOLERANCE = 0.03
SOURCE_STEPS = 60  # for speedrun, whose updates take a second each
ARMS = ("halfstep", "source")
SPARE_SECONDS = 30.0  # kept for the last evaluations


def main() -> int:
    options = arguments()
    if options.worker:
        from benchmarks.race import recipe_arms  # imports torch, which the parent does not need

        return recipe_arms.serve(options, configuration(options))
    started = time.perf_counter()
    config = configuration(options)
    with tempfile.TemporaryDirectory() as folder:
        options.tokens = options.tokens or Path(folder) / "tokens"
        # 50,257 as GPT-2 has them: the rest of 50,304 is padding
        vocabulary = min(config.model.vocabulary, 50257)
        tokens = recipe_tokens.make(options.tokens, vocabulary, options.megabytes)
        say(f"tokens: {tokens}, {time.perf_counter() - started:.0f} s")
        results = race(options, started, Path(folder))
    results |= {"recipe": options.recipe, "tokens": tokens, "tokens_per_step": tokens_per_step(config)}
    results["seconds"] = time.perf_counter() - started
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print("\n".join(table(results, options.recipe)))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", choices=ANCHORS, default="speedrun")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=200, help="updates of halfstep")
    parser.add_argument(
        "--source-steps", type=int, default=None, help="updates of the source (default: as many; speedrun 60)"
    )
    parser.add_argument("--turn", type=int, default=10, help="updates of one turn")
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="stop after so many seconds and report what there is"
    )
    parser.add_argument("--policy", default="bf16-mixed", help="policy of halfstep")
    parser.add_argument("--held-out", type=int, default=1 << 20, help="held-out tokens per evaluation")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=Path, help="a folder of recipe_tokens.py (created if missing)")
    parser.add_argument("--megabytes", type=int, default=200, help="at most so much text")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="a setting of the recipe")
    parser.add_argument("--recompute-far", action="store_true", help="run halfstep with less memory, but slower")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=ARMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def configuration(options: argparse.Namespace) -> RunConfig:
    config = load(options.recipe, options.overrides)
    training = replace(config.training, validation_tokens=options.held_out)
    data = replace(config.data, source=str(options.tokens or ""))
    return replace(config, training=training, data=data)


def tokens_per_step(config: RunConfig) -> int:
    return config.training.batch * config.training.micro_batches * config.model.context


def race(options: argparse.Namespace, started: float, logs: Path) -> Answer:
    """Runs turn by turn: next is the arm with the smallest share of its updates."""
    by_default = min(options.steps, SOURCE_STEPS) if options.recipe == "speedrun" else options.steps
    wanted = {"halfstep": options.steps, "source": options.source_steps or by_default}
    wanted = {arm: wanted[arm] for arm in options.arms}
    common = min(wanted.values())
    command = [sys.executable, __file__, "--tokens", str(options.tokens), *worker_options()]
    workers: dict[str, Worker] = {}
    arms: dict[str, Answer] = {arm: {"seconds": [], "losses": [], "evaluations": {}} for arm in wanted}
    try:
        for arm in wanted:  # one after another: compiling takes all cores
            workers[arm] = Worker([*command, "--worker", arm], logs / f"{arm}.log", os.environ)
            with keep_other_arms(arm, workers, arms):
                arms[arm] |= workers[arm].hear(300.0)
        while left := [arm for arm in wanted if len(arms[arm]["losses"]) < wanted[arm] and arm in workers]:
            arm = min(left, key=lambda name: len(arms[name]["losses"]) / wanted[name])
            in_time = True
            with keep_other_arms(arm, workers, arms):
                in_time = take_turn(arm, workers[arm], arms[arm], wanted[arm], common, options, started)
            if not in_time:
                break
        for arm in [name for name in workers if arms[name]["losses"]]:
            limit, done = max(left_of(options, started), 0.0) + 2 * SPARE_SECONDS, len(arms[arm]["losses"])
            with keep_other_arms(arm, workers, arms):
                if done not in arms[arm]["evaluations"]:  # the time was over
                    arms[arm]["evaluations"][done] = workers[arm].ask({"do": "evaluate"}, limit)["loss"]
                arms[arm] |= workers[arm].ask({"do": "finish"}, limit)
    finally:
        for worker in workers.values():
            worker.close()
    return {"arms": arms, "common": common}


@contextlib.contextmanager
def keep_other_arms(arm: str, workers: dict[str, Worker], arms: dict[str, Answer]) -> Iterator[None]:
    """Inside, an arm that fails is ended, and what there is of it and of the other is kept."""
    try:
        yield
    except FailedError as error:
        arms[arm]["failed"] = error.message
        workers.pop(arm).end()
        say(f"{arm} failed: {error.message}")


def take_turn(
    name: str, worker: Worker, arm: Answer, wanted: int, common: int, options: argparse.Namespace, started: float
) -> bool:
    """Runs one turn of an arm, at most up to the next evaluation; returns whether there is time for another."""
    done = len(arm["losses"])
    until = min(done + options.turn, wanted, common if done < common else wanted)
    left = left_of(options, started)
    if left < 2 * options.turn * (statistics.median(arm["seconds"]) if arm["seconds"] else 0.0):
        say(f"{options.seconds:.0f} s are nearly over")
        return False
    answer = worker.ask({"do": "train", "steps": until - done}, max(left, 1.0))
    arm["seconds"] += answer["seconds"]
    arm["losses"] += answer["losses"]
    arm["memory"] = answer["memory"]
    if until in (common, wanted):
        arm["evaluations"][until] = worker.ask({"do": "evaluate"}, 120.0)["loss"]
    pace = f"{1000 * statistics.median(arm['seconds']):.1f} ms" if arm["seconds"] else "not timed yet"
    say(f"{name}: {until} of {wanted} updates, loss {arm['losses'][-1]:.4f}, {pace}")
    return True


def left_of(options: argparse.Namespace, started: float) -> float:
    return float(options.seconds - SPARE_SECONDS - (time.perf_counter() - started))


def worker_options() -> list[str]:
    """Returns the options for a worker: all but those that name files."""
    kept, skip = list[str](), False
    for word in sys.argv[1:]:
        if skip:
            skip = False
        elif word in ("--json", "--tokens"):
            skip = True
        elif not word.startswith(("--json=", "--tokens=")):
            kept.append(word)
    return kept


def table(results: Answer, recipe: str) -> list[str]:
    """Returns the results as lines of text."""
    lines = [f"{recipe}: {results['tokens_per_step']:,} tokens per update", ""]
    lines.append(
        f"{'arm':10} {'updates':>8} {'ms/update':>10} {'spread':>8} {'MiB':>8}  held-out loss after updates"
    )
    pace = {}
    for name, arm in results["arms"].items():
        if not arm["seconds"]:
            reason = arm.get("failed", "no update was timed: one more turn is needed")
            lines.append(f"{name:10} {len(arm['losses']):8} {reason}")
            continue
        pace[name] = 1000 * statistics.median(arm["seconds"])
        low, high = (1000 * value for value in (min(arm["seconds"]), max(arm["seconds"])))
        losses = ", ".join(f"{loss:.4f} ({steps})" for steps, loss in arm["evaluations"].items())
        memory = arm["memory"] / 2**20
        lines.append(
            f"{name:10} {len(arm['losses']):8} {pace[name]:10.1f} {high - low:8.1f} {memory:8,.0f}  {losses}"
        )
    if len(pace) == 2:
        arms = results["arms"]
        memory = arms["halfstep"]["memory"] / arms["source"]["memory"] - 1
        lines += [
            "",
            f"halfstep against source: time {pace['halfstep'] / pace['source'] - 1:+.1%}, memory {memory:+.1%}",
        ]
    if "source" in pace:
        anchor, memory = ANCHORS[recipe]
        off = pace["source"] / anchor - 1
        verdict = "within" if abs(off) <= TOLERANCE else "NOT within"
        lines.append(
            f"the source against its anchor, {anchor} ms and {memory:,} MiB: time {off:+.1%}, {verdict} 3 %"
        )
    artifact = results["arms"].get("halfstep", {}).get("artifact")
    if artifact:
        before, after = artifact["bits_per_byte_before"], artifact["bits_per_byte_after"]
        lines.append(
            f"int8 + zlib: {artifact['bytes']:,} of {artifact['limit']:,} bytes; {before:.4f} -> {after:.4f} bpb"
        )
    return lines


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
