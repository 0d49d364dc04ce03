"""How tests say that something is refused."""

from contextlib import contextmanager

import pytest


@contextmanager
def refuses(error, said, *hints):
    """The block raises an error whose message matches, with a remedy that holds each of the hints."""
    with pytest.raises(error, match=said) as caught:
        yield
    assert caught.value.hint
    for hint in hints:
        assert hint in caught.value.hint
