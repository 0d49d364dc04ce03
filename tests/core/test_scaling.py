"""The law of scaling as a state machine, on several array libraries at once."""

import math
import operator
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from halfstep.core.errors import ScalingError
from halfstep.core.scaling import DynamicScale, ScaleState, StaticScale, is_power_of_two


class Traced:
    """A scalar that, like a tracer, can be computed with but never asked for its truth or its number."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        raise TypeError("the law looked at a traced value")

    __float__ = __int__ = __index__ = __bool__


def _lift(operation):
    def method(self, other):
        return Traced(operation(self.value, other.value if isinstance(other, Traced) else other))

    return method


for _name in ("add", "sub", "mul", "ge", "gt", "le", "lt", "and_"):
    setattr(Traced, f"__{_name.strip('_')}__", _lift(getattr(operator, _name)))
Traced.__rtruediv__ = _lift(lambda ours, other: other / ours)


def _untrace(value):
    return value.value if isinstance(value, Traced) else value


traced = SimpleNamespace(where=lambda c, a, b: Traced(np.where(_untrace(c), _untrace(a), _untrace(b))[()]))

# How each namespace makes its scalars, in the order of ScaleState's fields.
DTYPES = ("float32", "int32", "int32", "bool")
NAMESPACES = {
    "numpy": (np, lambda v, dtype: np.asarray(v, dtype=dtype)),
    "strict": (
        array_api_strict,
        lambda v, dtype: array_api_strict.asarray(v, dtype=getattr(array_api_strict, dtype)),
    ),
    "traced": (traced, lambda v, dtype: Traced(np.asarray(v, dtype=dtype)[()])),
}


def state_in(make, law):
    return ScaleState(*(make(v, dtype) for v, dtype in zip(law.init(), DTYPES, strict=True)))


def numbers(state):
    return tuple(kind(_untrace(value)) for kind, value in zip((float, int, int, bool), state, strict=True))


def powers(low, high):
    return st.integers(low, high).map(lambda e: 2.0**e)


@st.composite
def laws(draw):
    floor, init, ceiling = sorted(draw(st.lists(st.integers(-20, 40), min_size=3, max_size=3)))
    return DynamicScale(
        init_scale=2.0**init,
        growth=draw(powers(1, 3)),
        backoff=draw(powers(-3, -1)),
        interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        floor=2.0**floor,
        ceiling=2.0**ceiling,
    )


class ScalingMachine(RuleBasedStateMachine):
    """Random finite and non-finite steps, in three namespaces and against a plain-Python model."""

    @initialize(law=laws())
    def start(self, law):
        self.law = law
        self.states = {name: state_in(make, law) for name, (_, make) in NAMESPACES.items()}
        self.scale, self.good, self.tolerated, self.stuck = law.init_scale, 0, 0, False

    @rule(finite=st.booleans())
    def step(self, finite):
        used = self.scale
        for name, (xp, make) in NAMESPACES.items():
            verdict = self.law.judge(self.states[name], make(finite, "bool"), xp)
            # exactly the inverse of the scale that multiplied this step's loss
            assert float(_untrace(verdict.inv_scale)) * used == 1.0
            self.states[name] = verdict.state
        self.advance(finite)

    def advance(self, finite):
        law = self.law
        self.stuck = False
        if finite:
            self.good += 1
            if self.good == law.interval:
                self.scale, self.good, self.tolerated = min(self.scale * law.growth, law.ceiling), 0, 0
            return
        self.good = 0
        self.tolerated += 1
        if self.tolerated >= law.hysteresis:
            self.stuck = self.scale == law.floor
            self.scale = max(self.scale * law.backoff, law.floor)

    @invariant()
    def all_namespaces_agree_with_the_model(self):
        tolerance = max(self.law.hysteresis - self.tolerated, 1)
        for state in self.states.values():
            assert numbers(state) == (self.scale, self.good, tolerance, self.stuck)

    @invariant()
    def the_scale_stays_inside_and_a_power_of_two(self):
        for state in self.states.values():
            scale = numbers(state)[0]
            assert self.law.floor <= scale <= self.law.ceiling
            assert is_power_of_two(scale)

    @invariant()
    def types_do_not_drift(self):
        for name, dtypes in (("numpy", DTYPES), ("strict", DTYPES)):
            assert tuple(str(v.dtype).rpartition(".")[2] for v in self.states[name]) == dtypes


ScalingMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=40)
test_the_law_as_a_state_machine = ScalingMachine.TestCase


@pytest.mark.prove
def test_the_law_as_a_state_machine_for_longer():
    run_state_machine_as_test(ScalingMachine, settings=settings(max_examples=60, stateful_step_count=40))


def test_200_overflows_stop_at_the_floor_and_say_so():
    # Without a floor, 200 non-finite steps take a scale to exactly zero and training stands still in silence.
    law = DynamicScale()
    state = state_in(NAMESPACES["numpy"][1], law)
    for _ in range(200):
        state = law.judge(state, np.asarray(False), np).state
    assert float(state.scale) == 1.0
    assert bool(state.stuck)
    assert not bool(law.judge(state, np.asarray(True), np).state.stuck)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DynamicScale(growth=1.5), "growth is 1.5, which is not a power of two"),
        (lambda: DynamicScale(init_scale=1000.0), "a power of two, such as 1024"),
        (lambda: DynamicScale(growth=0.5), "must be above 1"),
        (lambda: DynamicScale(backoff=2.0), "must be below 1"),
        (lambda: DynamicScale(floor=2.0**17), "outside its floor"),
        (lambda: DynamicScale(ceiling=2.0**15), "outside its floor"),
        (lambda: DynamicScale(ceiling=2.0**126), "leave fp32's normal range"),
        (lambda: DynamicScale(interval=0), "interval is 0"),
        (lambda: DynamicScale(hysteresis=0), "hysteresis is 0"),
        (lambda: StaticScale(0.0), "from 2^-126 to 2^126"),
        (lambda: StaticScale(math.inf), "from 2^-126 to 2^126"),
        (lambda: StaticScale(math.nan), "from 2^-126 to 2^126"),
        (lambda: StaticScale(-2.0), "from 2^-126 to 2^126"),
        (lambda: StaticScale(2.0**127), "from 2^-126 to 2^126"),
    ],
)
def test_a_scale_that_cannot_work_is_refused(make, said):
    with pytest.raises(ScalingError) as caught:
        make()
    assert said in f"{caught.value.message} {caught.value.hint}"
