"""Checks what a job of several processes survives: kills of random workers and of whole jobs, under torchrun.

    python benchmarks/prove/job_kills.py [--kills 50] [--steps 24] [--ranks 2] [--seed 0] [--seconds 90]

Two jobs train at the same time, one whose ranks hold everything (DDP) and one whose ranks hold shares (FSDP2),
each under torchrun's own engine, which starts all workers again when one dies. The script sends SIGKILL at random
moments: three times out of four to a random worker, else to the engine and all workers, and then starts the same
command again. A finished job must have the weights of an uninterrupted one with as many ranks, bit for bit, and no
checkpoint that was reported may be missing: the next session begins at it or after it. Then a new job begins.

Processes are forked from one that has imported everything, so a kill takes a second or two. It
makes as many kills as fit into the time, and at most those asked for. Exit code 1 if anything was lost.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kills import final_state

from halfstep.training import job as jobs
from halfstep.training.checkpoints import checkpoint
from halfstep.training.telemetry.events import read_events

SMALL = [
    "model.context=16",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "optimizer.name=adamw",
    "training.batch=4",
    "training.validate_every=12",
    "training.validation_tokens=128",
    "training.save_every=2",
    "training.measure_ceiling=false",
]
SERVER = multiprocessing.get_context("forkserver")


def worker(out: str, arguments: list[str]) -> None:
    """One rank: the command that every start and every restart runs."""
    import torch

    from halfstep.cli.main import run

    torch.set_num_threads(1)
    jobs.REPORTED_WITHIN = 0.1
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    Path(f"{out}.pids", os.environ["RANK"]).write_text(str(os.getpid()))
    if code := run(arguments):
        raise SystemExit(code)


def engine(out: str, arguments: list[str], ranks: int) -> None:
    """torchrun's engine, with a worker for each rank; in a session of its own, to be killed as a whole."""
    os.setsid()
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.set_forkserver_preload(
        ["halfstep.cli.app", "halfstep.torch.session", "halfstep.training.loop"]
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="kills",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1000,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(config, worker)(out, arguments)


class Killed:
    """One kind of job, killed again and again in a thread of its own."""

    def __init__(self, folder: Path, shard: str, options: argparse.Namespace, over: float):
        self.folder, self.shard, self.options, self.over = folder, shard, options, over
        self.random = random.Random(f"{options.seed} {shard}")
        self.kills = {"worker": 0, "job": 0}
        self.finished, self.wrong = 0, list[str]()

    def start(self, out: Path) -> Any:
        """Starts the engine."""
        Path(f"{out}.pids").mkdir(exist_ok=True)
        settings = [*SMALL, f"data.source={self.folder}/text.txt", f"training.steps={self.options.steps}"]
        words = [word for each in (*settings, f"parallel.shard={self.shard}") for word in ("--set", each)]
        command = ["train", "tiny", "--policy", "fp32", "--device", "cpu", "--out", str(out), "--resume", *words]
        process = SERVER.Process(target=engine, args=(str(out), command, self.options.ranks))
        process.start()
        return process

    def run(self) -> None:
        """Trains once without kills, then kills until there were enough."""
        whole = self.folder / f"{self.shard}-whole"
        started = time.monotonic()
        process = self.start(whole)
        process.join()
        took = time.monotonic() - started
        if process.exitcode:
            self.wrong.append(f"the uninterrupted job failed:\n{Path(f'{whole}.log').read_text()}")
            return
        number = 0
        while self.has_more():
            out = self.folder / f"{self.shard}-{number}"
            self.train(out, took)
            if self.finished > number:
                number = self.finished
                self.check(out, whole)

    def has_more(self) -> bool:
        """Whether more kills are asked for, and fit into the time."""
        return (
            sum(self.kills.values()) < self.options.kills / 2 and time.monotonic() < self.over and not self.wrong
        )

    def train(self, out: Path, took: float) -> None:
        """Trains one job to its end through kills."""
        process = self.start(out)
        while True:
            seen = saved(out)
            process.join(self.random.uniform(0, 0.5 * took) if self.has_more() else None)
            if process.exitcode is not None:
                if process.exitcode == 0:
                    self.finished += 1
                else:
                    self.wrong.append(f"a job gave up:\n{Path(f'{out}.log').read_text()[-3000:]}")
                return
            if saved(out) < seen:
                self.wrong.append(f"step {seen} was saved in `{out}`, and is gone")
            if self.random.random() < 0.25:
                self.kills["job"] += 1
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                self.kill_workers(out)
                process = self.start(out)
            else:
                rank = self.random.randrange(self.options.ranks)
                self.kills["worker"] += self.kill(out, rank)

    def kill_workers(self, out: Path) -> None:
        """Kills workers that were not in the engine's session yet."""
        for rank in range(self.options.ranks):
            self.kill(out, rank)

    def kill(self, out: Path, rank: int) -> bool:
        """Kills a worker; returns whether there was one."""
        try:
            pid = int(Path(f"{out}.pids", str(rank)).read_text())
            os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            return False
        return True

    def check(self, out: Path, whole: Path) -> None:
        """Compares what a job that was killed has left with the uninterrupted one."""
        if final_state(out) != final_state(whole):
            self.wrong.append(f"`{out}` has other weights than the uninterrupted job")
        for start in (event for event in read_events(out / "events.jsonl") if event["event"] == "start"):
            if start["ranks"] != self.options.ranks:
                self.wrong.append(f"`{out}` ran with {start['ranks']} ranks")


def saved(out: Path) -> int:
    """Returns the step of the newest checkpoint; 0 if there is none."""
    folders = checkpoint.step_folders(out / "checkpoints")
    return checkpoint.parse_step(folders[-1]) if folders else 0


def main() -> int:
    """Runs both kinds of jobs and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    SERVER.set_forkserver_preload(["torch.distributed.launcher.api", "halfstep.cli.app", "halfstep.torch.session",
                                   "halfstep.training.loop"])  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="job-kills-"))
    text = "\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(2000))
    (folder / "text.txt").write_text(text)
    began = time.monotonic()
    kinds = [Killed(folder, shard, options, began + options.seconds) for shard in ("none", "full")]
    threads = [threading.Thread(target=kind.run) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in kinds:
        kills = ", ".join(f"{number} of a {what}" for what, number in kind.kills.items())
        print(
            f"parallel.shard={kind.shard}: kills {kills}; {kind.finished} jobs finished, {len(kind.wrong)} wrong"
        )
        for line in kind.wrong:
            print(line)
    total, wrong = sum(sum(kind.kills.values()) for kind in kinds), sum(len(kind.wrong) for kind in kinds)
    print(f"{total} kills in {time.monotonic() - began:.0f} s: {'nothing lost' if not wrong else 'LOST'}")
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong or not all(kind.finished and any(kind.kills.values()) for kind in kinds) else 0


if __name__ == "__main__":
    sys.exit(main())
