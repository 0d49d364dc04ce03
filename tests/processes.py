"""Functions in processes of their own: to be killed, or to train together.

They start fast: a server imports the packages once, and each process is a fork of it, made before any thread.
"""

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.integrations.preload"])


def run_alone(function, *given):
    """Calls a function in a new process; raises BrokenProcessPool if that is killed."""
    with ProcessPoolExecutor(1, _SERVER) as pool:
        return pool.submit(function, *given).result()


def run_ranks(function, *given, count=2):
    """Calls a function in processes that find each other as those of torchrun do; returns what each returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(count, _SERVER) as pool:
        return [f.result() for f in [pool.submit(_rank, r, count, port, function, given) for r in range(count)]]


def _rank(rank, count, port, function, given):
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return function(*given)
