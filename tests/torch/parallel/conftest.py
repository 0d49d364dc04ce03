"""Ranks for tests: processes that are forked from one that has imported everything, in a group of gloo."""

import pytest
import torch
import torch.distributed as dist

from tests.processes import run_ranks


@pytest.fixture(scope="session")
def ranks():
    """ranks(function, number, *args) calls a function on so many ranks, and returns what each returned."""
    return lambda function, number, *args: run_ranks(grouped, function, *args, count=number)


def grouped(function, *args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
