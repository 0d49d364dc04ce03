"""Makes the next items in a thread while the caller works on the current one.

`Prefetch(fetch, start, stop)` yields fetch(start), ..., fetch(stop - 1) in order; at most `depth` of them are made
and not yet taken. Because fetch depends only on the number, unused items are no loss: a resumed run makes them
again.

An exception in fetch is raised in the caller at the place of its item, after all items before it. The thread ends
after the last item, when fetch fails, or when the Prefetch is closed or garbage-collected: the thread holds the
queue of items, never the Prefetch itself.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, final

T = TypeVar("T")
POLL_SECONDS = 0.1  # how often a waiting caller checks `is_over`


@final
class Prefetch(Generic[T]):
    """Items made ahead of time. Use it as a context manager, or close it.

    While the caller waits for a slow item, `is_over` is polled; when it returns True, the items end, and closing
    does not wait for the running fetch.
    """

    def __init__(
        self,
        fetch: Callable[[int], T],
        start: int,
        stop: int,
        depth: int = 2,
        is_over: Callable[[], bool] = lambda: False,
    ):
        if depth < 1:
            raise ValueError(f"a prefetch of depth {depth} makes nothing ahead of time")
        self._is_over = is_over
        self._items: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()  # None: there are no more
        self._room, self._closed = threading.Semaphore(depth), threading.Event()
        shared = (self._items, self._room, self._closed)
        self._thread = threading.Thread(
            target=_work, args=(*shared, fetch, start, stop), name="prefetch", daemon=True
        )
        self._close = weakref.finalize(self, _close, *shared)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._closed.is_set():
            try:
                item = self._items.get(timeout=POLL_SECONDS)
            except Empty:
                if self._is_over():
                    break
                continue
            if isinstance(item, tuple):
                self._room.release()
                return item[0]
            self._closed.set()
            if item is not None:
                raise item
        raise StopIteration

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and waits for the fetch it is running. Idempotent."""
        self._close()
        while self._thread.is_alive() and not self._is_over():
            self._thread.join(POLL_SECONDS)


def _work(
    items: SimpleQueue[tuple[T] | BaseException | None],
    room: threading.Semaphore,
    closed: threading.Event,
    fetch: Callable[[int], T],
    start: int,
    stop: int,
) -> None:
    try:
        for number in range(start, stop):
            room.acquire()
            if closed.is_set():
                return
            items.put((fetch(number),))
        items.put(None)
    except BaseException as error:
        items.put(error)


def _close(items: SimpleQueue[Any], room: threading.Semaphore, closed: threading.Event) -> None:
    closed.set()
    room.release()  # wakes the thread
    items.put(None)  # wakes the caller
