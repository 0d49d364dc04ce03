"""Accelerate keeps its settings for the whole process; here a test begins and ends without any."""

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


def reset():
    """Forgets them, as a new process would."""
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Forgets them before and after each test of the module that imports this."""
    reset()
    yield
    reset()
