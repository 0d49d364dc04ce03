"""An audit looks for models among all objects of the process: those that other tests left would take it long."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def objects_of_other_tests_are_set_aside():
    gc.collect()
    gc.freeze()
