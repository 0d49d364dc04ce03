"""Ranks for tests: processes in a group of gloo, which serve all tests that want as many."""

from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.processes import SERVER, free_port, set_rank


class Pool:
    """So many processes in one process group. If one fails, others wait for it: then all are started anew."""

    def __init__(self, count):
        self.count, self.workers = count, []

    def __call__(self, function, *args):
        try:
            if not self.workers:
                self.workers = [ProcessPoolExecutor(1, SERVER) for _ in range(self.count)]
                self._on_each(join, self.count, free_port())
            return self._on_each(called, function, *args)
        except BaseException:
            self.end()
            raise

    def _on_each(self, function, *args):
        futures = [worker.submit(function, rank, *args) for rank, worker in enumerate(self.workers)]
        return [future.result() for future in futures]

    def end(self):
        for worker in self.workers:
            for process in [*(worker._processes or {}).values()]:
                process.kill()
            worker.shutdown()
        self.workers = []


def join(rank, count, port):
    set_rank(rank, count, port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def called(rank, function, *args):
    return function(*args)


@pytest.fixture(scope="session")
def ranks():
    """ranks(function, number, *args) calls a function on so many ranks, and returns what each returned."""
    pools = {}
    yield lambda function, number, *args: pools.setdefault(number, Pool(number))(function, *args)
    for pool in pools.values():
        pool.end()
