"""Prefetching keeps the order, raises errors in their place, and leaves no thread behind."""

import threading
import time

import pytest

from halfstep.training.data.batches import Prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == []


def until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_in_order_and_once(depth):
    with Prefetch(lambda n: n * n, 3, 60, depth=depth) as items:
        assert list(items) == [n * n for n in range(3, 60)]
        assert list(items) == []


def test_nothing_to_fetch():
    with Prefetch(pytest.fail, 5, 5) as items:
        assert list(items) == []


def test_it_works_ahead_up_to_depth_and_closes_while_it_waits_for_room():
    made = []
    with Prefetch(made.append, 0, 100, depth=3) as items:
        until(lambda: len(made) == 3)
        time.sleep(0.02)
        assert made == [0, 1, 2]
        next(items)
        until(lambda: len(made) == 4)
    made = []
    items = Prefetch(made.append, 0, 10**9)
    until(lambda: len(made) == 2)
    items.close()
    items.close()
    assert threads() == []
    assert list(items) == []
    with pytest.raises(RuntimeError), Prefetch(lambda n: n, 0, 10**9):
        raise RuntimeError
    assert threads() == []


def test_an_error_is_raised_in_its_place_with_its_traceback():
    def fetch(number):
        if number == 2:
            raise OSError("the disk is gone")
        return number

    with Prefetch(fetch, 0, 10) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(items)
        assert caught.traceback[-1].name == "fetch"
        with pytest.raises(StopIteration):
            next(items)


def test_a_reader_that_must_stop_does_not_wait_for_a_slow_fetch():
    release, over = threading.Event(), []
    began = time.monotonic()
    with Prefetch(lambda n: n if n < 2 else release.wait(20), 0, 5, is_over=lambda: bool(over)) as items:
        until(lambda: items._items.qsize() == 2)
        threading.Timer(0.05, over.append, [1]).start()
        assert list(items) == [0, 1]
    assert time.monotonic() - began < 10
    assert len(threads()) == 1  # still in its fetch, and ends after it
    release.set()


def test_closing_wakes_a_waiting_reader():
    release = threading.Event()
    items = Prefetch(lambda n: release.wait(5), 0, 1)
    seen = []
    reader = threading.Thread(target=lambda: seen.extend(items))
    reader.start()
    items._is_over = lambda: True  # closing does not wait for the fetch
    items.close()
    reader.join(5)
    assert not reader.is_alive()
    assert seen == []
    release.set()
