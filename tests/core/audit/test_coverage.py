"""What a pass says of each function: lines by kind, the functions that no role covers, and the older name."""

import pytest

from halfstep.core.audit.coverage import IN_COMPUTE, Coverage, Row

FOUND = Coverage(
    (
        Row("softmax", "a", "covered", "fp32 inside"),
        Row("softmax", "b", "covered", "fp32 inside", 2),
        Row("matmul", "a", "unchanged", IN_COMPUTE),
        Row("sum", "c", "unchanged", "no role reaches it"),
    )
)


def test_functions_are_grouped_and_those_in_compute_are_not_uncovered():
    assert "3 softmax (a, b): covered, fp32 inside" in str(FOUND)
    assert [row.function for row in FOUND.uncovered] == ["sum"]


def test_the_older_name_still_works_and_warns():
    with pytest.warns(UserWarning, match="`uncovered`"):
        assert FOUND.missed == FOUND.uncovered
