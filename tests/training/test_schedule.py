"""The schedule: its formula, its shape, and that it never reads a traced value."""

import operator
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.training.schedule import factor, momentum


class Traced:
    """A scalar that, like a tracer, can be computed with but never asked for its truth or its number."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        raise TypeError("the schedule read a traced value")

    __float__ = __int__ = __index__ = __bool__


def _plain(value):
    return value.value if isinstance(value, Traced) else value


def _lift(operation):
    return lambda self, other: Traced(operation(self.value, _plain(other)))


for _name in ("add", "sub", "mul", "truediv", "ge", "gt", "le", "lt"):
    setattr(Traced, f"__{_name}__", _lift(getattr(operator, _name)))
Traced.__rsub__ = _lift(lambda ours, other: other - ours)

traced = SimpleNamespace(where=lambda c, a, b: Traced(np.where(_plain(c), _plain(a), _plain(b))[()]))

NAMESPACES = {
    "numpy ints": (np, lambda n: np.asarray(n, dtype=np.int32)),
    "numpy floats": (np, np.float32),
    "python": (np, int),
    "strict": (array_api_strict, lambda n: array_api_strict.asarray(n, dtype=array_api_strict.float32)),
    "traced": (traced, lambda n: Traced(np.int32(n))),
}


def course(steps, warmup, share, name="python", count=None):
    xp, make = NAMESPACES[name]
    found = [
        factor(make(n), steps=steps, warmup=warmup, warmdown_share=share, xp=xp) for n in range(count or steps)
    ]
    return [float(_plain(value)) for value in found]


def test_a_course_by_hand_and_a_device_scalar_stays_one():
    assert course(10, 2, 0.4, count=12) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.25, 0.25]
    assert course(4, 0, 0.0) == [1, 1, 1, 1]
    assert course(1, 1, 1.0) == [1]
    assert course(4, 4, 1.0) == [0.25, 0.5, 0.5, 0.25]
    found = factor(np.asarray(3, np.int32), steps=9, warmup=2, warmdown_share=0.5, xp=np)
    assert found.shape == ()
    found = factor(NAMESPACES["strict"][1](3), steps=9, warmup=2, warmdown_share=0.5, xp=array_api_strict)
    assert found.dtype == array_api_strict.float32


runs = st.integers(1, 200).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(0, steps), st.floats(0, 1)))


@given(runs)
def test_it_rises_stays_at_one_and_falls(run):
    steps, warmup, share = run
    down = round(share * steps)
    values = course(steps, warmup, share)
    expected = [
        min(1, Fraction(n + 1, warmup) if warmup else 1, Fraction(steps - n, down) if down else 1)
        for n in range(steps)
    ]
    assert values == pytest.approx([float(value) for value in expected], rel=1e-15)
    assert all(0 < value <= 1 for value in values)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(value == 1 for value in values[max(0, warmup - 1) : steps - down + 1 if down else steps])
    if warmup + down <= steps:
        assert values[0] == (1 / warmup if warmup else 1)
        assert values[-1] == (1 / down if down else 1)
        if warmup > 1:
            assert all(a < b for a, b in pairwise(values[:warmup]))


@pytest.mark.parametrize("name", NAMESPACES)
@given(run=runs, data=st.data())
def test_every_namespace_computes_the_same(name, run, data):
    steps, warmup, share = run
    n = data.draw(st.integers(0, steps + 3))
    xp, make = NAMESPACES[name]
    found = factor(make(n), steps=steps, warmup=warmup, warmdown_share=share, xp=xp)
    assert float(_plain(found)) == pytest.approx(course(steps, warmup, share, count=n + 1)[n], rel=2**-23)


@pytest.mark.parametrize("name", NAMESPACES)
def test_momentum_rises_in_a_straight_line_and_stays(name):
    xp, make = NAMESPACES[name]
    found = [momentum(make(n), start=0.85, end=0.95, warmup=500, xp=xp) for n in (0, 1, 250, 499, 500, 9000)]
    expected = [0.85, 0.8502, 0.9, 0.9498, 0.95, 0.95]
    assert [float(_plain(value)) for value in found] == pytest.approx(expected, rel=2**-22)
