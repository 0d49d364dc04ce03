from benchmarks.prove.same_bits import differences


def test_a_changed_a_missing_and_a_new_value_are_named():
    old = {"train torch fp32": {"loss": "a", "weight": "b"}, "loop jax fp32": {"loss": "a"}}
    assert differences(old, old) == []
    (line,) = differences(old, old | {"train torch fp32": {"loss": "a", "weight": "c", "moment": "d"}})
    assert line == "train torch fp32: 2 of 3 differ: moment, weight"
    assert differences(old, {"train torch fp32": old["train torch fp32"]}) == [
        "loop jax fp32: 1 of 1 differ: loss"
    ]
