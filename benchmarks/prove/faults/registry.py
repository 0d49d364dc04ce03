"""The list of hazards, and how each names its function, its fault and its test."""

from collections.abc import Callable
from typing import Any, NamedTuple

TORCH, MLX = "tests/torch/test_hazards.py", "tests/mlx/test_faults.py"
STEP = "tests/conformance/test_step.py"
Function = Callable[..., Any]


class Hazard(NamedTuple):
    """A fault and the test that must notice it."""

    name: str
    where: str  # module:function or module:Class.method
    test: str  # a pytest node id
    fault: Callable[[Function], Function]  # makes the faulty function from the good one


HAZARDS: list[Hazard] = []


def hazard(name: str, where: str, test: str) -> Callable[[Callable[[Function], Function]], Function]:
    """Registers a function that makes a faulty function from the good one."""

    def register(fault: Callable[[Function], Function]) -> Function:
        HAZARDS.append(Hazard(name, where, test, fault))
        return fault

    return register


def nothing(good: Function) -> Function:
    """Returns a function that checks nothing."""
    return lambda *args, **kwargs: None
