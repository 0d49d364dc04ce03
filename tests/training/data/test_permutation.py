"""An order by key: every thing once, whatever the number, and different for every key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.training.data.batches import Permutation


def order(size, *key):
    return Permutation(size, np.random.Philox(key=np.array(key or [0, 0], dtype=np.uint64)))


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_item_comes_once(size, seed):
    assert np.array_equal(np.sort(order(size, seed, 0)[np.arange(size)]), np.arange(size))


def test_an_order_needs_no_table_and_separates_neighbors():
    whole = order(1000)[np.arange(1000)]
    places = np.array([999, 3, 500, 3])
    assert np.array_equal(order(1000)[places], whole[places])
    places = np.arange(10**12, 10**12 + 2000)
    found = order(3 * 10**12)[places]
    assert len(np.unique(found)) == 2000
    assert found.min() >= 0
    assert found.max() < 3 * 10**12
    assert abs(found.mean() / (1.5 * 10**12) - 1) < 5 / (3**0.5 * 2000**0.5)  # five standard deviations
    found = order(100_000)[np.arange(100_000)]
    assert np.count_nonzero(np.abs(np.diff(found)) < 100) < 400  # 200 are expected of chance
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / 100_000**0.5


@pytest.mark.parametrize("size", [2, 5, *(pytest.param(size, marks=pytest.mark.prove) for size in (8, 13))])
def test_every_place_is_equally_likely(size):
    """Chi-square over 1500 keys; (size - 1)^2 degrees of freedom, five standard deviations."""
    counts, keys = np.zeros((size, size)), 1500
    for key in range(keys):
        counts[np.arange(size), order(size, 1, key)[np.arange(size)]] += 1
    freedom = (size - 1) ** 2
    assert ((counts - keys / size) ** 2 / (keys / size)).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_the_order_is_pinned():
    """A change of it would let resumed runs repeat and leave out windows."""
    assert order(10, 7, 1)[np.arange(10)].tolist() == [3, 4, 0, 5, 7, 9, 8, 2, 1, 6]
    assert order(5_000_000, 7, 1)[np.arange(4)].tolist() == [1741929, 3916293, 4877954, 3684975]
