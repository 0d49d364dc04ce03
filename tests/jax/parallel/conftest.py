"""Four devices for tests: a process of its own, since JAX cannot change their number once it is used."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.jax.parallel.jobs import four_devices


@pytest.fixture(scope="session")
def devices():
    """devices(function, *args) calls a function in a process of four devices, which serves all tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=four_devices) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()
