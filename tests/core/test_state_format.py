"""A state that another policy saved: what was learned keeps every bit, or the policy is refused by name."""

import numpy as np
import pytest

from halfstep.core import split
from halfstep.core.errors import PolicyChangeError
from halfstep.core.formats import BF16
from halfstep.core.state_format import Stored, convert, widen

NUMBERS = np.float32([1.0, -1 / 3, 3e38, 1e-40, 0.0])
EXACT = np.float32([1.0, -0.5, 256.0, 2.0**-14, 0.0])  # also in bf16 and fp16


def stored(numbers, dtype="F32"):
    if dtype == "BF16":
        return Stored(dtype, numbers.shape, (numbers.view(np.uint32) >> 16).astype("<u2").tobytes())
    return Stored(dtype, numbers.shape, numbers.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes())


def halves(numbers):
    hi, lo = split.split(numbers)
    return {
        "model.w": Stored("BF16", hi.shape, hi.tobytes()),
        "remainder.w": Stored("I16", lo.shape, lo.tobytes()),
    }


def test_masters_are_split_and_joined_exactly():
    whole, parts = {"model.w": stored(NUMBERS)}, halves(NUMBERS)
    assert convert(whole, parts) == parts
    assert convert(parts, whole) == whole
    assert convert(parts, halves(EXACT)) == parts
    assert np.array_equal(widen(parts["model.w"], parts["remainder.w"]), NUMBERS)


@pytest.mark.parametrize("name", ["model.w", "optimizer.0.w.exp_avg"])
@pytest.mark.parametrize("narrow", ["BF16", "F16"])
def test_what_is_narrower_is_widened_and_never_rounded(name, narrow):
    assert convert({name: stored(EXACT, narrow)}, {name: stored(NUMBERS)}) == {name: stored(EXACT)}
    assert convert({name: stored(EXACT)}, {name: stored(EXACT, narrow)}) == {name: stored(EXACT, narrow)}
    given = {name: stored(NUMBERS)} if name != "model.w" else halves(NUMBERS)
    said = rf"`{name}` .* {narrow[0].lower()}.*: \d of its 5"
    with pytest.raises(PolicyChangeError, match=said) as caught:
        convert(given, {name: stored(EXACT, narrow)})
    assert "--init" in caught.value.hint
    with pytest.raises(PolicyChangeError, match="bf16"):  # emulated: the numbers are held wider
        convert(given, {name: stored(EXACT)}, {name: BF16})


def test_what_belongs_to_the_policy_starts_anew_and_the_rest_is_kept():
    count = Stored("I32", (), np.int32(7).tobytes())
    given = {"scale.scale": stored(np.float32([4.0])), "amax.a": stored(EXACT), "applied": count, "rng.cpu": count}
    ours = {"scale.scale": stored(np.float32([65536.0])), "narrow.b": count, "applied": Stored("I32", (), b"0000")}
    assert convert(given, ours) == {**ours, "applied": count, "rng.cpu": count}
