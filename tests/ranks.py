"""Processes that wait for work, for tests of several ranks: importing torch takes seconds, forking does not.

    python -m tests.ranks SOCKET PID       serves one caller after another as long as the process PID is there

One server is for all workers of a test session: the first that needs it starts it (`connect`). A job is the name
of a function, how many ranks run it, and its arguments. The server, which has imported everything and computed
nothing, forks a process for each rank. They form a process group of gloo, call the function, and end. A job that
takes longer than its limit is killed, and the error says where each of its ranks was.
"""

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Listener, wait
from pathlib import Path
from typing import Any

LIMIT = 120.0  # seconds for a job, on a busy machine
ROOT = Path(__file__).parent.parent


class Failed(Exception):
    """A rank raised an error, ended, or did not come back in time."""


def run(socket: Path, function: Any, ranks: int, *args: Any, limit: float = LIMIT) -> list[Any]:
    """Calls a function, which is on the top level of a module of tests, on each rank; returns what they return."""
    module = Path(sys.modules[function.__module__].__file__).resolve()
    with Client(str(socket), "AF_UNIX") as server:
        server.send((str(module), function.__name__, ranks, args, limit))
        results, errors = server.recv()
    if errors:
        raise Failed("\n".join(errors))
    return [pickle.loads(result) for result in results]


def connect(socket: Path, session: int) -> None:
    """Starts the server of a session, which is a process, if nobody did, and waits until it serves."""
    try:
        socket.with_suffix(".lock").touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        command = [sys.executable, "-m", "tests.ranks", str(socket), str(session)]
        subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + LIMIT
    while not socket.exists():
        if time.monotonic() > deadline:
            raise Failed(f"no server at {socket}")
        time.sleep(0.05)


def serve(socket: Path, session: int) -> None:
    threading.Thread(target=end_with, args=(session, socket), daemon=True).start()
    import torch._dynamo  # what FSDP and DTensor import in their first use
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import halfstep.torch  # noqa: F401

    ready = socket.with_suffix(".new")
    with Listener(str(ready), "AF_UNIX", backlog=16) as listener:
        ready.rename(socket)
        while True:
            with listener.accept() as caller:
                caller.send(answer(*caller.recv()))


def end_with(session: int, socket: Path) -> None:
    while Path(f"/proc/{session}").exists():
        time.sleep(0.5)
    for path in (socket, socket.with_suffix(".lock")):
        path.unlink(missing_ok=True)
    os._exit(0)


def answer(module: str, function: str, ranks: int, args: Any, limit: float) -> tuple[list[bytes], list[str]]:
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = fork.Pipe(duplex=False)
            processes.append(fork.Process(target=be, args=(theirs, folder, module, function, rank, ranks, args)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        answers, deadline = dict[Any, Any](), time.monotonic() + limit
        failed = False
        while len(answers) < ranks and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([p for p in pipes if p not in answers], min(left, 5.0) if failed else left):
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    answers[pipe] = (None, "the process ended")
                failed |= answers[pipe][1] is not None
            if failed:
                deadline = min(deadline, time.monotonic() + 5.0)  # others may wait for the one that failed
        errors = []
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            if pipe not in answers:
                process.terminate()  # prints where it is
                process.join(5.0)
                process.kill()
                where = Path(folder, f"where{rank}").read_text()
                errors.append(f"rank {rank} did not come back:\n{where}")
            elif answers[pipe][1] is not None:
                errors.append(f"rank {rank}: {answers[pipe][1]}")
            process.join()
        return [answers.get(pipe, (b"", ""))[0] for pipe in pipes], errors


def be(pipe: Any, folder: str, module: str, function: str, rank: int, ranks: int, args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGTERM, file=open(f"{folder}/where{rank}", "w"), chain=True)  # noqa: SIM115
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        found = load(module)
        pipe.send((pickle.dumps(getattr(found, function)(*args)), None))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
