"""What tests on MLX share."""

import mlx.core as mx
import pytest


@pytest.fixture
def uncompiled():
    """mlx.nn compiles its activations and softmax functions, by a call of g++ on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()
