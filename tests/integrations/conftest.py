"""What the tests of integrations share."""

import io
import logging

import pytest

from tests.torch.parallel.conftest import ranks  # noqa: F401


@pytest.fixture
def log():
    """What third-party packages log during a test."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    loggers = [logging.getLogger(), logging.getLogger("transformers")]  # the latter passes nothing on
    for logger in loggers:
        logger.addHandler(handler)
    yield written
    for logger in loggers:
        logger.removeHandler(handler)
