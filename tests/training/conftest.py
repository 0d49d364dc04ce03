"""What the tests of training share."""

import pytest


@pytest.fixture
def out(tmp_path):
    """Where the run goes."""
    return tmp_path / "run"
