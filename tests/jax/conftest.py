import jax
import pytest


@pytest.fixture
def strict():
    """No array is promoted to another dtype unseen."""
    with jax.numpy_dtype_promotion("strict"):
        yield
