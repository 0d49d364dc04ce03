"""What the order of summation explains."""

import pytest
import torch

from tests.torch.parallel import jobs

UNITS = {"fp32": 2.0**-23, "bf16-mixed": 2.0**-8, "fp16-mixed": 2.0**-11, "fp8-mixed": 2.0**-3}  # that round


def assert_same(policy, alone, together):
    """Ranks have the same bits as each other. What differs from one process is the order of fp32 sums.

    In the first step nothing but the sums over ranks and rows differs: at most as many units in the last place as
    there are terms. After that a weight may differ in its last bit, and its cast be the next number of the format:
    losses then differ by the format's unit at most, and a weight by what AdamW makes of it, lr times that for
    each step. In fp8 operands are scaled by the largest number of a batch, and ranks have batches of their own:
    there the unit bounds the first step too.
    """
    (rows, weights), terms = alone, jobs.ROWS * 11
    unit = UNITS[policy.partition(",")[0]]
    for other, found in together:
        assert [row[2:] for row in other] == [row[2:] for row in rows]
        first = unit if "fp8" in policy else terms * UNITS["fp32"]
        assert other[0][:2] == pytest.approx(rows[0][:2], rel=first)
        for one, two in zip(rows, other, strict=True):
            assert two[:2] == pytest.approx(one[:2], rel=max(unit, terms * UNITS["fp32"]))
        for name, weight in weights.items():
            assert torch.equal(found[name], together[0][1][name])
            bound = len(rows) * 0.1 * unit + terms * UNITS["fp32"] * weight.abs().max()
            assert (found[name] - weight).abs().max() <= bound, name
