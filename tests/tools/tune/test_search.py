import math

import pytest

from halfstep.tools.tune.search import Option, Step, ladder, path_of, search

BASE = Option(cost=4)


def one(damage, cost=1.0, compute="e4m3", grad=""):
    return Option(compute, grad, damage, cost)


def modules(**damages):
    return {name: [BASE, one(damage)] for name, damage in damages.items()}


def test_ladder_takes_the_steps_that_save_most_per_damage():
    half, all_, worse = one(0.1, 3), one(0.2, 1, grad="e5m2"), one(0.3, 1, grad="e4m3")
    assert ladder([BASE, half, all_, worse]) == [BASE, all_]  # 3 for 0.2 beats 1 for 0.1
    cheap = one(0.01, 3)
    assert ladder([BASE, worse, all_, cheap]) == [BASE, cheap, all_]


def test_ladder_has_no_option_that_saves_nothing_or_destroys_the_gradient():
    assert ladder([BASE, one(0.0, 4), one(0.0, 5)]) == [BASE]
    assert ladder([BASE, one(math.inf)]) == [BASE]


def test_path_begins_with_what_saves_most_per_damage():
    options = modules(a=0.2, b=0.1, c=0.0) | {"large": [Option(cost=40), one(0.2, 10)]}
    assert [step.module for step in path_of(options)] == ["c", "large", "b", "a"]


def test_search_takes_everything_if_it_may():
    asked = []
    found = search(modules(a=0.1, b=0.2), lambda assignment: asked.append(assignment) or True, 9)
    assert found.finished
    assert found.asked == 1
    assert set(found.assignment) == {"a", "b"} == set(asked[0])


@pytest.mark.parametrize(
    ("fragile", "asked"),
    [
        ({"fragile": 0.5}, 2),
        ({"fragile": 0.0085}, 20),  # the prediction missed it
        ({"first": 0.5, "second": 0.004}, 30),
    ],
)
def test_search_leaves_out_fragile_modules(fragile, asked):
    options = modules(**{f"m{i}": 0.001 * (i + 1) for i in range(20)}, **fragile)
    found = search(options, lambda assignment: not fragile.keys() & assignment.keys(), asked)
    assert found.finished
    assert found.assignment.keys() == {f"m{i}" for i in range(20)}
    assert {step.module for step in found.left_out} == fragile.keys()


def test_search_stops_when_it_may_ask_no_more_with_what_it_knows():
    options = modules(**{f"m{i}": 0.001 * (i + 1) for i in range(64)})
    found = search(options, lambda assignment: len(assignment) <= 10, 4)
    assert not found.finished
    assert found.asked == 4
    assert len(found.assignment) <= 10


def test_search_returns_the_base_if_nothing_meets():
    found = search(modules(a=0.1, b=0.2), lambda _: False, 9)
    assert found.assignment == {}
    assert {step.module for step in found.left_out} == {"a", "b"}


def test_search_keeps_the_rungs_below_one_that_fails():
    low, high = one(0.001, 2, compute="bf16"), one(0.5, 1)
    found = search({"a": [BASE, low, high]}, lambda assignment: assignment["a"] != high, 9)
    assert found.assignment == {"a": low}
    assert found.left_out == [Step("a", low, high)]
