"""What the tests of training share."""

import pytest


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"
