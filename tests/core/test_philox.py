"""The counter generator: known answers, its layout, and agreement of shards."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.errors import RoundingError
from halfstep.core.philox import philox4x32, random_bits, tensor_id

# Random123's kat_vectors, philox 4x32-10: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    result = philox4x32(tuple(np.array([word], np.uint32) for word in words(counter)), tuple(words(key)))
    assert [int(word[0]) for word in result] == words(answer)


def test_the_layout_puts_element_tensor_step_and_seed_where_it_says_and_a_shape_is_row_major():
    block = 2**32 + 5
    result = random_bits(4, seed=3 + (9 << 32), step=7, tensor=11, start=4 * block)
    counter = tuple(np.array([word], np.uint32) for word in (5, 1, 11, 7))
    assert result.tolist() == [int(word[0]) for word in philox4x32(counter, (3, 9))]
    assert random_bits(4, seed=0, step=0, tensor=0).tolist() == words(KNOWN[0][2])
    assert np.array_equal(random_bits((10, 5, 100), seed=1, step=2, tensor=3), WHOLE.reshape(10, 5, 100))
    assert random_bits((), seed=1, step=2, tensor=3) == WHOLE[0]
    assert random_bits((3, 0), seed=1, step=2, tensor=3).shape == (3, 0)


WHOLE = random_bits(5000, seed=1, step=2, tensor=3)


@given(start=st.integers(0, 4999), count=st.integers(0, 200))
def test_a_shard_equals_the_slice_of_the_whole(start, count):
    shard = random_bits(min(count, 5000 - start), seed=1, step=2, tensor=3, start=start)
    assert np.array_equal(shard, WHOLE[start : start + count])


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"seed": 1 + 2**32}, {"step": 3}, {"tensor": 4}, {"start": 4}, {"start": 2**34}]
)
def test_everything_in_the_key_matters(other):
    result = random_bits(5000, **{"seed": 1, "step": 2, "tensor": 3, "start": 0, **other})
    # Independent words agree with probability 2^-32: one agreement in 5000 is a chance of one in a million.
    assert (result == WHOLE).sum() == 0


def test_tensor_id_is_the_same_in_every_process():
    assert tensor_id("blocks.0.mlp.up.weight") == 0x632B6C9F
    code = "from halfstep.core.philox import tensor_id; print(tensor_id('blocks.0.mlp.up.weight'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == tensor_id("blocks.0.mlp.up.weight")
    names = [f"blocks.{i}.{kind}.weight" for i in range(100) for kind in ("query", "key", "value", "up")]
    assert len({tensor_id(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"seed": -1}, "`seed` is -1"),
        ({"seed": 2**64}, "`seed`"),
        ({"shape": 2.0}, "`shape` is 2.0"),
        ({"seed": 1.5}, "`seed` is 1.5"),
        ({"seed": True}, "`seed` is True"),
        ({"step": -1}, "`step`"),
        ({"step": 2**32}, "`step`.*0 to 4294967295"),
        ({"tensor": 2**32}, "`tensor`.*tensor_id"),
        ({"tensor": "blocks.0"}, "`tensor` is 'blocks.0'.*tensor_id"),
        ({"start": -4}, "`start`"),
        ({"start": 2**63}, "`start`"),
        ({"shape": -1}, "`shape`"),
        ({"shape": (2, -1)}, "`shape`"),
    ],
)
def test_errors(given, text):
    arguments = {"shape": 8, "seed": 0, "step": 0, "tensor": 0, **given}
    with pytest.raises(RoundingError, match=text):
        random_bits(arguments.pop("shape"), **arguments)
