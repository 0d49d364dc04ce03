"""Checks what a run survives: kills at any moment, damaged checkpoints, a full disk, a read-only folder.

    python benchmarks/prove/kills.py [--kills 100] [--steps 60] [--seed 0] [--only kills|damage|disk]
        [--device cpu] [--policy fp32] [--set KEY=VALUE ...] [--command]

**Kills.** The script kills a small run with SIGKILL again and again, and resumes it each time. Half of the
moments are spread evenly over a run, from opening the folder to the last step; half are aimed: the killer waits
until a save is under way and strikes within a few milliseconds. After each kill it verifies every checkpoint in
the folder by its digests, with code that shares nothing with ours. The next process must resume from the newest
checkpoint, and none that was reported as complete may be missing. A finished run must have the weights of an
uninterrupted one, bit for bit; then a new run begins. Processes are forked from one that has imported everything
and computed nothing, and every core has a run of its own to kill, so a hundred kills take a minute or two. With
--command each process is `halfstep train tiny --resume --out RUN`.

**Damage.** The script flips every byte of the manifest and of the header, and bytes of every tensor. It
truncates files at every boundary, lengthens, removes and exchanges them. Loading must refuse each with the
file's name, unless the content still means the same.

**Disk.** A full disk (a small tmpfs, filled to the last byte in the middle of a run and freed later), and a
folder that is mounted read-only for a while. Without the right to mount, a limit on file sizes replaces the
first and permissions replace the second; the table says which.

Exit code 1 if anything was lost. On a GPU: --device cuda --set training.deterministic=true.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from damaged_files import damage

from halfstep.config.load import load as load_config
from halfstep.core.policy import Policy
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import load
from halfstep.training.loop import Loop
from halfstep.training.run.folder import holds_run
from halfstep.training.run.resume import open_run
from halfstep.training.telemetry.events import read_events

SMALL = [
    "model.context=16",
    "model.layers=1",
    "model.width=64",
    "model.heads=2",
    "training.batch=2",
    "training.micro_batches=2",
    "training.validate_every=20",
    "training.validation_tokens=128",
    "training.save_every=2",
    "training.keep_every=20",
]

WORKERS = min(4, len(os.sched_getaffinity(0)))
STARTED: list[subprocess.Popen[bytes]] = []


class Bench:
    """A working folder, a text to train on, and how to start a process."""

    def __init__(
        self,
        folder: Path,
        device: str,
        overrides: list[str],
        steps: int,
        command: bool = False,
        policy: str = "fp32",
    ):
        self.folder, self.device, self.steps, self.command = folder, device, steps, command
        self.policy = policy
        self.text = folder / "text.txt"
        self.text.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(2000)))
        self.overrides = [f"data.source={self.text}", *SMALL, f"training.steps={steps}", *overrides]

    def loop(self, out: Path, resume: bool) -> Loop:
        """Opens a run."""
        config = load_config("tiny", self.overrides)
        opened = open_run(out, config) if resume else None
        return Loop(config, Policy.parse(self.policy), out, device=self.device, opened=opened)

    def session(self, out: Path, act: Callable[[Loop], None] | None = None) -> int:
        """Starts or resumes a run in a new process; returns its id. `act` may change the loop first."""
        if self.command and act is None:
            return self._command(out)
        resume = holds_run(out)
        if child := os.fork():
            return child
        code = 1
        try:
            self._quiet(out)
            loop = self.loop(out, resume)
            if act is not None:
                act(loop)
            code = 0 if loop.run().finished else 3
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _command(self, out: Path) -> int:
        settings = [word for setting in self.overrides for word in ("--set", setting)]
        settings += ["--policy", self.policy] if self.policy != "fp32" else []
        command = [sys.executable, "-m", "halfstep", "train", "tiny", "--resume", "--out", str(out), *settings]
        with open(out.with_suffix(".log"), "ab") as log:
            started = subprocess.Popen(
                [*command, "--policy", "fp32", "--device", self.device], stdout=log, stderr=log
            )
        STARTED.append(started)  # kept: it is waited for by its id
        return started.pid

    def _quiet(self, out: Path) -> None:
        with open(out.with_suffix(".log"), "ab") as log:
            os.dup2(log.fileno(), 2)
        import torch

        torch.set_num_threads(1)

    def uninterrupted(self) -> float:
        """Leaves the state that a run must end with; returns how long it takes."""
        out = self.folder / "uninterrupted"
        started = time.monotonic()
        assert os.waitpid(self.session(out), 0)[1] == 0, out.with_suffix(".log").read_text()
        return time.monotonic() - started


def final_state(out: Path) -> dict[str, bytes]:
    arrays, manifest = load(checkpoint.step_folders(out / "checkpoints")[-1])
    return {"step": str(manifest["step"]).encode()} | {n: bytes(a.data) for n, a in arrays.items()}


def verified(out: Path) -> tuple[list[int], list[str]]:
    """Returns the steps of the complete checkpoints in a folder, and what is wrong with the others."""
    whole, wrong = [], []
    for path in sorted((out / "checkpoints").glob("step-*")) if (out / "checkpoints").exists() else []:
        if not path.name.removeprefix("step-").isdigit():
            continue  # left by a killed save or removal
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            content = (path / "state.safetensors").read_bytes()
            expected = manifest["files"]["state.safetensors"]
            assert (len(content), hashlib.sha256(content).hexdigest()) == (expected["bytes"], expected["sha256"])
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            assert max(entry["data_offsets"][1] for entry in header.values()) == len(content) - 8 - length
            whole.append(int(manifest["step"]))
        except (OSError, ValueError, KeyError, AssertionError) as error:
            wrong.append(f"{path.name}: {error!r}")
    return sorted(whole), wrong


def kill_at(child: int, out: Path, aimed: bool, seconds: float, rng: random.Random) -> str | None:
    """Kills a process at some moment; returns what it was doing, or None if it had ended before."""
    give_up = time.monotonic() + 30
    stale = partials(out)  # left by the previous kill; the next save removes it
    if aimed:
        skipped = rng.randrange(8)  # not always the first save of a process
        seen: set[tuple[str, int]] = set()
        while time.monotonic() < give_up and os.waitpid(child, os.WNOHANG)[0] == 0:
            seen |= partials(out) - stale
            if len({name for name, _ in seen}) > skipped:
                time.sleep(rng.random() * 0.004)
                break
            time.sleep(0.0002)
        else:
            return None
    else:
        time.sleep(rng.random() * seconds)
    try:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return None
    if not os.WIFSIGNALED(status):
        return None
    return "saving" if partials(out) - stale else "training"


def partials(out: Path) -> set[tuple[str, int]]:
    """Returns the unfinished saves in a run folder, each with the time at which its last file was created."""
    saves = set()
    for path in out.glob("checkpoints/*.partial"):
        with contextlib.suppress(FileNotFoundError):
            saves.add((path.name, path.stat().st_mtime_ns))
    return saves


def kills(bench: Bench, count: int, seed: int, seconds: float) -> dict[str, object]:
    """Kills and resumes until `count` kills struck; returns what happened."""
    expected = final_state(bench.folder / "uninterrupted")
    rng, struck = random.Random(seed), Counter[str]()
    faults: list[str] = []
    runs = ended = resumed = 0
    out, newest = bench.folder / f"seed-{seed}-run-0", None

    def check_end() -> None:
        nonlocal ended
        ended += 1
        if final_state(out) != expected:
            faults.append(f"{out.name}: the weights differ from those of the uninterrupted run")

    while sum(struck.values()) < count:
        before = len(starts_of(out))
        child = bench.session(out)
        what = kill_at(child, out, rng.random() < 0.5, seconds, rng)
        if len(starts := starts_of(out)) > before and newest is not None:
            resumed += 1
            if starts[-1]["resumed_from"] != newest:
                faults.append(f"{out.name}: resumed at {starts[-1]['resumed_from']}, expected {newest}")
        if what is None:
            if (out / "events.jsonl").exists() and read_events(out / "events.jsonl")[-1]["event"] == "end":
                check_end()
            else:
                faults.append(f"{out.name}: a process failed: {out.with_suffix('.log').read_text()[-300:]}")
            runs, newest = runs + 1, None
            shutil.rmtree(out)
            out = bench.folder / f"seed-{seed}-run-{runs}"
            continue
        struck[what] += 1
        whole, wrong = verified(out)
        faults += [f"half-written: {one}" for one in wrong]
        saved = [e["step"] for e in events_of(out) if e["event"] == "checkpoint"]
        if saved and (not whole or whole[-1] < saved[-1]):
            faults.append(f"lost: step {saved[-1]} was reported as saved, the newest is {whole[-1:]}")
        if newest is not None and (not whole or whole[-1] < newest):
            faults.append(f"lost: step {newest} was there before the kill")
        newest = whole[-1] if whole else None
    os.waitpid(bench.session(out), 0)
    check_end()
    return {"struck": struck, "resumed": resumed, "runs": ended, "faults": faults}


def damage_last(bench: Bench) -> dict[str, object]:
    """Damages a copy of the newest checkpoint of the uninterrupted run in every way."""
    folders = checkpoint.step_folders(bench.folder / "uninterrupted" / "checkpoints")
    return damage(*folders[-2:], bench.folder / "copy")


def events_of(out: Path) -> list[dict[str, object]]:
    return read_events(out / "events.jsonl") if (out / "events.jsonl").exists() else []


def starts_of(out: Path) -> list[dict[str, object]]:
    return [event for event in events_of(out) if event["event"] == "start"]


def may_mount(folder: Path) -> bool:
    probe = folder / "probe"
    probe.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", probe], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", probe], check=True)
    return done.returncode == 0


def disturb(loop: Loop, begin: Callable[[], object], end: Callable[[], object], first: int, last: int) -> None:
    """Makes the loop call `begin` before step `first` and `end` after step `last`."""
    launch = loop.session.step

    def step(batch: object) -> object:
        if loop.tally.step == first:
            begin()
        if loop.tally.step == last:
            end()
        return launch(batch)

    loop.session.step = step  # type: ignore[method-assign]


def survive(bench: Bench, name: str, out: Path, act: Callable[[Loop], None]) -> dict[str, object]:
    expected = final_state(bench.folder / "uninterrupted")
    code = os.waitpid(bench.session(out, act), 0)[1]
    faults = [] if code == 0 else [f"{name}: the run failed: {out.with_suffix('.log').read_text()[-300:]}"]
    events = events_of(out)
    failed = [e for e in events if e["event"] == "save_failed"]
    steps = [e["step"] for e in events if e["event"] == "step"]
    _, wrong = verified(out)
    faults += [f"{name}: half-written: {one}" for one in wrong]
    if not failed:
        faults.append(f"{name}: no save failed, so nothing was shown")
    if steps != list(range(1, bench.steps + 1)):
        faults.append(f"{name}: {bench.steps - len(steps)} steps are missing in the record")
    if final_state(out) != expected:
        faults.append(f"{name}: the weights differ from those of the uninterrupted run")
    why = str(failed[0]["message"]).partition(": ")[2].partition(" (")[0] if failed else ""
    return {
        "failed": len(failed),
        "saved": sum(e["event"] == "checkpoint" for e in events),
        "why": why,
        "faults": faults,
    }


def disk(bench: Bench) -> dict[str, dict[str, object]]:
    """Runs with a full disk, and with a read-only folder, for a third of the steps each."""
    mounting, first, last = may_mount(bench.folder), bench.steps // 3, 2 * bench.steps // 3
    small = bench.folder / "small"
    small.mkdir()
    if mounting:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", small], check=True)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    ballast = small / "ballast"

    def fill() -> None:
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def full(loop: Loop) -> None:
        if mounting:
            disturb(loop, fill, ballast.unlink, first, last)
        else:
            limit = resource.RLIMIT_FSIZE
            disturb(loop, lambda: resource.setrlimit(limit, (1, hard)),
                   lambda: resource.setrlimit(limit, (hard, hard)), first, last)  # fmt: skip

    out = bench.folder / "read-only"

    def lock(loop: Loop) -> None:
        if mounting:
            loop.checkpointer.wait()  # a mount with an open file cannot become read-only
            subprocess.run(["mount", "--bind", out, out], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", out], check=True)
        else:
            (out / "checkpoints").chmod(0o555)

    def unlock() -> None:
        if mounting:
            subprocess.run(["umount", "-l", out], check=True)
        else:
            (out / "checkpoints").chmod(0o755)

    how = ("a tmpfs, filled to the last byte", "a read-only bind mount") if mounting else (
        "RLIMIT_FSIZE (no right to mount)", "permissions (no right to mount)")  # fmt: skip
    try:
        results = {f"full disk: {how[0]}": survive(bench, "full disk", small / "run", full)}
        if mounting or os.geteuid() != 0:
            results[f"read-only folder: {how[1]}"] = survive(
                bench, "read-only", out, lambda loop: disturb(loop, lambda: lock(loop), unlock, first, last)
            )
    finally:
        if mounting:
            subprocess.run(["umount", "-l", small], check=True)
            subprocess.run(["umount", "-l", out], capture_output=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="check what a run survives")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("kills", "damage", "disk"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", default="fp32")
    parser.add_argument("--command", action="store_true", help="kill `halfstep train` itself")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    import torch  # before the first fork, with all that a session imports; nothing is computed here
    import torch._dynamo

    import halfstep.torch.session  # noqa: F401

    rows: list[tuple[str, str]] = []
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        given = (options.device, options.overrides, options.steps, options.command, options.policy)
        bench = Bench(Path(folder), *given)
        seconds = bench.uninterrupted()
        wanted = {options.only} if options.only else {"kills", "damage", "disk"}
        damaged = pool.apply_async(damage_last, (bench,)) if "damage" in wanted else None
        disks = pool.apply_async(disk, (bench,)) if "disk" in wanted else None
        if "kills" in wanted:
            # Several runs, each killed in its turn: whichever core is free takes the next.
            shares = [len(range(part, options.kills, 2 * WORKERS)) for part in range(2 * WORKERS)]
            tasks = [(bench, share, options.seed + part, seconds) for part, share in enumerate(shares) if share]
            results = pool.starmap(kills, tasks, chunksize=1)
            struck = sum((result["struck"] for result in results), Counter[str]())
            resumed, ended = (sum(result[key] for result in results) for key in ("resumed", "runs"))
            rows.append((f"kills (from seed {options.seed})", f"{options.kills}: {dict(struck)}"))
            rows.append(("processes that resumed, at the newest checkpoint", str(resumed)))
            rows.append(("runs that ended, bit-identical to the uninterrupted one", str(ended)))
            faults += [fault for result in results for fault in result["faults"]]
            if options.kills >= 10 and "saving" not in struck:
                faults.append("no kill struck during a save, so nothing was shown about saves")
        if damaged is not None:
            result = damaged.get()
            for kind, number in result["found"].items():
                rest = result["same"].get(kind, 0)
                rows.append((kind, f"{number} found" + (f", {rest} mean the same" if rest else "")))
            faults += result["faults"]
        if disks is not None:
            for name, result in disks.get().items():
                counts = (
                    f"{result['failed']} saves failed ({result['why']}), {result['saved']} succeeded, same weights"
                )
                rows.append((name, counts))
                faults += result["faults"]
    print(f"torch {torch.__version__}, {options.device}, Python {sys.version.split()[0]}")
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
    print(f"{'lost, half-written or not noticed':<{width}}  {len(faults)}")
    for fault in faults:
        print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
