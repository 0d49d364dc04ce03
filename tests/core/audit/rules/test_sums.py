"""HS302 and HS303 on records: what several ranks, or a GPU, would show."""

import pytest

from halfstep.core.audit.engine import check
from halfstep.core.audit.record import Call, Record

AUTOCAST = Call("autocast", format="bf16")


def rules(**facts):
    return [(f.rule, f.severity) for f in check(Record("script", **facts), select=["HS3"])]


@pytest.mark.parametrize(("format", "expected"), [("bf16", [("HS302", "warning")]), ("fp32", [])])
def test_a_reduction(format, expected):
    calls = [Call("reduce", target="reduce_scatter", format=format, numbers={"ranks": 8.0})]
    assert rules(calls=calls) == expected


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"device": "cuda", "bf16_reduced_sums": True}, [("HS303", "note")]),
        ({"device": "cuda", "bf16_reduced_sums": False, "fp16_reduced_sums": True}, []),
        ({"device": "cpu", "bf16_reduced_sums": True}, []),
    ],
)
def test_sums_of_matmuls(switches, expected):
    assert rules(calls=[AUTOCAST], switches=switches) == expected


def test_sums_in_fp16():
    switches = {"device": "cuda", "fp16_sums": True}
    assert rules(calls=[Call("autocast", format="fp16")], switches=switches) == [("HS303", "warning")]
    assert rules(calls=[AUTOCAST], switches=switches) == []
