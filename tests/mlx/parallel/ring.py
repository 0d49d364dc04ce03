"""Processes on one ring of mx.distributed, kept for all tests of a module; each rank is one worker."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]


def addresses(count):
    """Free ports, as mlx.launch writes them into its hostfile."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets])


def start(folder, words, ranks=2):
    """Starts a command on every rank, with what mlx.launch sets; each prints to a log of its own."""
    hosts, started = folder / "hosts.json", []
    hosts.write_text(addresses(2))
    for rank in range(ranks):
        given = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts), "PYTHONPATH": str(ROOT)}
        with log_of(folder, rank).open("w") as log:
            started.append(subprocess.Popen(words, env=os.environ | given, stdout=log, stderr=subprocess.STDOUT))
    return started


def log_of(folder, rank):
    return folder / f"rank-{rank}.txt"


@contextlib.contextmanager
def ring(folder, count=2):
    """Yields a function that calls another one on every rank and returns what each returned."""
    hosts = folder / "hosts.json"
    hosts.write_text(addresses(count))
    with contextlib.ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        pools = [ProcessPoolExecutor(1, spawn, _join, (rank, str(hosts))) for rank in range(count)]
        for pool in pools:
            stack.callback(_end, pool)

        def call(function, *given):
            return [future.result(60) for future in [pool.submit(function, *given) for pool in pools]]

        yield call


def _end(pool):
    """Ends a rank, which after a failure waits for others."""
    for process in [*(pool._processes or {}).values()]:
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _join(rank, hosts):
    os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts}
