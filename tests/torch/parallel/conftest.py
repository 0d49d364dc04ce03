"""The server of processes, one for the whole session of tests."""

import os
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests import ranks as server


@pytest.fixture(scope="session")
def ranks():
    """ranks(function, number, *args) calls a function on so many ranks, and returns what each returned."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    socket = Path(tempfile.gettempdir(), f"halfstep-{session}.ranks")
    server.connect(socket, session)
    return partial(server.run, socket)
