"""Functions in processes of their own: to be killed, or to train together.

They start fast: a server imports the packages once, and each process is a fork of it, made before any thread.
"""

import multiprocessing
import os
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preload"])


def preload_integrations():
    """Has the server import the packages of others, too; one that runs already leaves that to each process."""
    SERVER.set_forkserver_preload(["tests.integrations.preload"])


def run_alone(function, *given):
    """Calls a function in a new process; raises BrokenProcessPool if that is killed."""
    with ProcessPoolExecutor(1, SERVER) as pool:
        return pool.submit(function, *given).result()


def run_ranks(function, *given, count=2):
    """Calls a function in processes that find each other as those of torchrun do; returns what each returned."""
    port = free_port()
    with ProcessPoolExecutor(count, SERVER) as pool:
        return [f.result() for f in [pool.submit(_rank, r, count, port, function, given) for r in range(count)]]


@contextmanager
def killed_ranks(victims, function, *given, count=2):
    """Starts such processes; kills the victims after the block, and then the others."""
    port = free_port()
    ranks = [SERVER.Process(target=_rank, args=(r, count, port, function, given)) for r in range(count)]
    for rank in ranks:
        rank.start()
    try:
        yield
    finally:
        for victim in victims:
            ranks[victim].kill()
        time.sleep(0.1)  # others go on for a while
        for rank in ranks:
            rank.kill()
            rank.join()


def free_port():
    """Returns a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def set_rank(rank, count, port):
    """Sets the variables that torchrun sets."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _rank(rank, count, port, function, given):
    set_rank(rank, count, port)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks train on the CPU: sharing one GPU, they would wait forever
    return function(*given)
