"""An audit looks for models among all objects of the process: those that other tests left would take it long."""

import gc

import pytest

from halfstep.torch.instruments.collect.guard import Guard


@pytest.fixture(autouse=True, scope="module")
def objects_of_other_tests_are_set_aside():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def an_error_of_the_collector_fails_the_test(request, monkeypatch):
    if request.module.__name__.endswith("test_never_harm"):
        return

    def fail(guard, error):
        raise error

    monkeypatch.setattr(Guard, "fail", fail)
