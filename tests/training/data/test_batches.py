"""What an update sees: every window once per epoch, in an order of its own; the same for one seed and step."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.training.data import batches
from halfstep.training.data.batches import Batches, Permutation, bigram_bits, validation_readers
from halfstep.training.data.types import DataError, DataSizeError


def line(size):
    return np.arange(size, dtype=np.uint16)


@st.composite
def settings_of(draw):
    context, batch, micro = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    windows = draw(st.integers(batch * micro, batch * micro + 20))
    size = windows * context + 1 + draw(st.integers(0, context - 1))
    return line(size), {"context": context, "batch": batch, "micro_batches": micro}, windows


@given(settings_of(), st.integers(0, 2**64), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_each_epoch_takes_every_window_once(given_, seed, epochs):
    tokens, args, num_windows = given_
    feed = Batches(tokens, **args, seed=seed)
    assert feed.num_windows == num_windows
    an_update = args["batch"] * args["micro_batches"]
    steps = math.ceil(epochs * num_windows / an_update)
    starts = []
    for step in range(steps):
        found = feed.at(step)
        assert found.dtype == np.int32
        assert found.shape == (args["micro_batches"], args["batch"], args["context"] + 1)
        for row in found.reshape(an_update, -1):
            assert np.array_equal(row, tokens[row[0] : row[0] + args["context"] + 1])
            starts.append(int(row[0]))
    every = [window * args["context"] for window in range(num_windows)]
    for epoch in range(epochs):
        assert sorted(starts[epoch * num_windows : (epoch + 1) * num_windows]) == every


@given(settings_of(), st.integers(0, 2**64), st.lists(st.integers(0, 200), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_batch_is_a_function_of_seed_and_step(given_, seed, order):
    """A resumed run, which asks a new object for later steps first, gets what the first run got."""
    tokens, args, _ = given_
    feed = Batches(tokens, **args, seed=seed)
    for step in order:
        assert np.array_equal(feed.at(step), Batches(tokens, **args, seed=seed).at(step))


def test_each_seed_and_epoch_has_its_own_order_and_it_is_pinned():
    """A change of this order would let resumed runs repeat and leave out windows."""
    args = {"context": 4, "batch": 50, "micro_batches": 1}
    tokens = line(50 * 4 + 1)
    orders = {
        tuple(Batches(tokens, **args, seed=seed).at(step)[0, :, 0]) for seed in range(3) for step in range(3)
    }
    assert len(orders) == 9
    assert tuple(range(0, 200, 4)) not in orders
    feed = Batches(line(8 * 3 + 1), context=3, batch=8, micro_batches=1, seed=7)
    assert (feed.at(0)[0, :, 0] // 3).tolist() == [4, 1, 6, 3, 2, 7, 5, 0]
    assert (feed.at(1)[0, :, 0] // 3).tolist() == [3, 1, 6, 2, 5, 4, 0, 7]


@given(settings_of(), st.integers(0, 2**64), st.integers(0, 60), st.integers(1, 6))
def test_ranks_share_the_windows_of_an_update(given_, seed, step, ranks):
    tokens, args, _ = given_
    feed = Batches(tokens, **args, seed=seed)
    whole = feed.at(step)
    if args["batch"] % ranks and args["micro_batches"] % ranks:
        few = ranks > args["batch"] * args["micro_batches"]
        with pytest.raises(
            DataError, match=f"fewer than {ranks}" if few else f"cannot be divided among {ranks} ranks"
        ):
            feed.at(step, 0, ranks)
        return
    parts = [feed.at(step, rank, ranks) for rank in range(ranks)]
    assert all(part.size == whole.size // ranks for part in parts)
    assert all(part.shape[0] * part.shape[1] * ranks == feed.windows_per_step for part in parts)
    taken = np.concatenate([feed.rows(rank, ranks).ravel() for rank in range(ranks)])
    assert sorted(taken.tolist()) == list(range(feed.windows_per_step))
    rows = whole.reshape(feed.windows_per_step, -1)
    together = np.concatenate([part.reshape(-1, args["context"] + 1) for part in parts])
    assert np.array_equal(together, rows[taken])


def test_ranks_have_whole_micro_batches_or_rows_and_their_number_may_change():
    """Four ranks for a while, then two, then one: together an epoch has every window once."""
    feed = Batches(line(200), context=3, batch=4, micro_batches=3, seed=0)
    assert feed.rows(1, 3).tolist() == [[4, 5, 6, 7]]
    assert feed.rows(1, 2).tolist() == [[2, 3], [6, 7], [10, 11]]
    feed = Batches(line(96 * 3 + 1), context=3, batch=4, micro_batches=2, seed=5)
    taken = []
    for step in range(12):
        ranks = 4 if step < 4 else 2 if step < 9 else 1
        for rank in range(ranks):
            taken += (feed.at(step, rank, ranks)[..., 0].ravel() // 3).tolist()
    assert sorted(taken) == list(range(96))


def test_very_many_windows_are_ordered_by_key_and_a_run_resumes_in_no_other_order(monkeypatch):
    args = {"context": 2, "batch": 4, "micro_batches": 2, "seed": 3}
    old = Batches(line(81), **args)
    old.check_position(old.position(3))
    old.check_position({"epoch": 0, "window": 3, "tokens": 6})  # before the order was written down
    monkeypatch.setattr(batches, "SORTED_AT_MOST", 30)
    with pytest.raises(
        DataError, match="in the order `sorted`, but this version of halfstep would continue in `keyed`"
    ):
        Batches(line(81), **args).check_position(old.position(3))
    assert Batches(line(30 * 2 + 1), **args).order == "sorted"
    feed = Batches(line(40 * 2 + 1), **args)
    assert feed.order == feed.position(3)["order"] == "keyed"
    epochs = [
        [int(row[0]) // 2 for step in range(5) for row in feed.at(5 * e + step).reshape(8, -1)] for e in (0, 1)
    ]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert np.array_equal(Batches(line(40 * 2 + 1), **args).at(7), feed.at(7))
    assert feed.locate(7) == [{"file": "the training text", "offsets": feed.at(7)[..., 0].ravel().tolist()}]


@given(settings_of(), st.integers(0, 300))
def test_the_position_counts_epochs_windows_and_tokens(given_, step):
    tokens, args, num_windows = given_
    place = Batches(tokens, **args, seed=0).position(step)
    taken = step * args["batch"] * args["micro_batches"]
    assert place["epoch"] * num_windows + place["window"] == taken
    assert 0 <= place["window"] < num_windows
    assert place["tokens"] == taken * args["context"]


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(
        DataError, match=r"the training text is shorter than one sequence: it has 8 tokens.* needs 9"
    ):
        Batches(line(8), context=8, batch=1, micro_batches=1, seed=0)
    Batches(line(9), context=8, batch=1, micro_batches=1, seed=0)
    with pytest.raises(DataSizeError, match=r"2 x 2 = 4 sequences, but `a\.txt` has only 3: 30 tokens"):
        Batches(line(30), context=8, batch=2, micro_batches=2, seed=0, name="`a.txt`")
    with pytest.raises(DataSizeError):
        validation_readers(line(8), context=8, batch=1, limit_tokens=100)  # before any batch is asked for


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 120), st.integers(0, 100))
def test_validation_predicts_each_target_once_in_order(context, batch, limit, more):
    tokens = line(context + 1 + more)
    readers = validation_readers(tokens, context=context, batch=batch, limit_tokens=limit)
    found = [read() for read in readers]
    assert all(each.dtype == np.int32 for each in found)
    assert all(each.shape == (batch, context + 1) for each in found[:-1])
    assert 1 <= len(found[-1]) <= batch
    targets = np.concatenate([each[:, 1:].ravel() for each in found])
    assert np.array_equal(targets, np.arange(1, len(targets) + 1))
    assert len(targets) == min((len(tokens) - 1) // context, max(1, limit // context)) * context
    for each in found:
        assert np.array_equal(each[:, 0], each[:, 1] - 1)


def entropy(tokens):
    """The definition, pair by pair."""
    pairs = Counter(pairwise(tokens))
    firsts = Counter(tokens[:-1])
    return -sum(c / (len(tokens) - 1) * math.log2(c / firsts[a]) for (a, _), c in pairs.items())


def test_bigrams_by_hand():
    assert bigram_bits(np.frombuffer(b"abababab", dtype=np.uint8)) == 0.0
    assert math.copysign(1, bigram_bits(np.frombuffer(b"abab", dtype=np.uint8))) == 1
    # After a: a and b alike, one bit; after b: always a.
    assert bigram_bits(np.frombuffer(b"aabaab" + b"a", dtype=np.uint8)) == pytest.approx(4 / 6)
    assert bigram_bits(line(1)) == bigram_bits(line(0)) == 0.0


@pytest.mark.parametrize("high", [3, 255, 5000, 65535])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_bigrams_agree_with_the_definition(high, chunk, data):
    tokens = data.draw(
        st.lists(st.integers(0, high) | st.integers(max(0, high - 2), high), min_size=2, max_size=60)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_COUNTED_AT_ONCE", chunk)
        found = bigram_bits(np.array(tokens, dtype=np.uint16))
    assert found == pytest.approx(entropy(tokens), rel=1e-12, abs=1e-12)
    assert found >= 0


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
