"""The same recipe on several backends and policies, interleaved in one run: throughput, memory, loss.

    python benchmarks/race/backends.py [--recipe gpt2] [--set training.micro_batches=2]
        [--arms torch:bf16-mixed jax:bf16-mixed jax:fp32] [--rounds 5] [--steps 4] [--json FILE]

Each arm is a process that holds its model and optimizer and waits for the number of steps to train next. So an
arm's peak memory is its own, and no framework takes the device away from another. The arms take turns, one
working at a time, in reverse order each round. Every arm sees the same batches from the same initial weights. A
ratio compares the medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

BARS = {("jax:bf16-mixed", "jax:fp32"): 6.0, ("jax:bf16-mixed", "torch:bf16-mixed"): 0.85}


def work(recipe: str, overrides: list[str], arm: str, device: str | None) -> None:
    """Runs one arm: reads the number of steps to train from stdin, writes their results to stdout."""
    from halfstep.config.load import load
    from halfstep.core.policy import Policy
    from halfstep.training.data.batches import make_batches
    from halfstep.training.data.load import load_corpus
    from halfstep.training.session import backend_version, open_session

    backend, _, policy = arm.partition(":")
    config = load(recipe, [*overrides, f"backend={backend}", f"policy={policy}"])
    session = open_session(config, Policy.parse(policy), device)
    data, training = config.data, config.training
    corpus = load_corpus(data.source, data.validation, config.model.vocabulary)
    batches = make_batches(config, corpus.train)
    position, tokens = 0, training.batch * training.micro_batches * config.model.context
    send({"version": backend_version(config), "device": session.description.name, "tokens": tokens})
    for line in sys.stdin:
        count = int(line)
        ready = [batches.at(position + i) for i in range(count)]
        start = time.perf_counter()
        results = [session.step(batch) for batch in ready]
        losses = [session.read(result)["loss"] for result in results]
        seconds = time.perf_counter() - start
        position += count
        send({"seconds": seconds / count, "losses": losses, "memory": session.memory()})


def send(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Arm:
    """A worker process, seen from its parent."""

    def __init__(self, name: str, command: list[str]):
        # Otherwise JAX reserves three quarters of the device's memory at its first allocation.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.name, self.seconds, self.losses, self.memory = name, [], [], 0
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._receive()

    def train(self, steps: int, *, timed: bool = True) -> None:
        """Makes the arm train `steps` steps, and waits for the results."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self._receive()
        self.losses += answer["losses"]
        self.memory = answer["memory"]
        if timed:
            self.seconds.append(answer["seconds"])

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} stopped with code {self.process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--arms", nargs="+", default=["torch:bf16-mixed", "jax:bf16-mixed", "jax:fp32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device")
    parser.add_argument("--json")
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        work(options.recipe, options.overrides, options.worker, options.device)
        return 0
    common = ["--recipe", options.recipe, *(part for o in options.overrides for part in ("--set", o))]
    common += ["--device", options.device] if options.device else []
    arms = []
    for name in options.arms:
        start = time.perf_counter()
        arms.append(Arm(name, [sys.executable, __file__, *common, "--worker", name]))
        arms[-1].train(2, timed=False)  # compiles
        print(f"{name}: ready after {time.perf_counter() - start:.0f} s, {arms[-1].about}", flush=True)
    for turn in range(options.rounds):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            arm.train(options.steps)
    return report(arms, options)


def report(arms: list[Arm], options: argparse.Namespace) -> int:
    """Prints the table and the ratios; returns 1 if a ratio misses its bar."""
    tokens = arms[0].about["tokens"]
    speed = {arm.name: tokens / statistics.median(arm.seconds) for arm in arms}
    print(f"\n{options.recipe}, {tokens} tokens per step, {options.rounds} rounds of {options.steps} steps each")
    print(f"{'arm':<22}{'tokens/s':>12}{'ms/step':>10}{'spread':>8}{'GiB':>8}{'first loss':>12}{'last loss':>11}")
    for arm in arms:
        middle = statistics.median(arm.seconds)
        spread = (max(arm.seconds) - min(arm.seconds)) / middle
        row = f"{arm.name:<22}{speed[arm.name]:>12,.0f}{middle * 1e3:>10.1f}{spread:>8.1%}"
        print(row + f"{arm.memory / 2**30:>8.2f}{arm.losses[0]:>12.4f}{arm.losses[-1]:>11.4f}")
    reached = True
    for (one, other), bar in BARS.items():
        if one in speed and other in speed:
            ratio = speed[one] / speed[other]
            reached &= ratio >= bar
            print(f"{one} / {other}: {ratio:.2f} (bar {bar:g})")
    if options.json:
        with open(options.json, "w") as file:
            keys = ("name", "about", "seconds", "losses", "memory")
            json.dump([{key: getattr(arm, key) for key in keys} for arm in arms], file, indent=1)
    for arm in arms:
        assert arm.process.stdin is not None
        arm.process.stdin.close()
        arm.process.wait()
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
