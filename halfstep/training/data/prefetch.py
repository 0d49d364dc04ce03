"""Makes the next items in a thread while the caller works on the current one.

`Prefetch(fetch, start, stop)` yields fetch(start), ..., fetch(stop - 1) in order, at most `depth` ahead. An
exception in fetch is raised in the caller at the place of its item.
"""

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.1  # how often a waiting caller checks `is_over`


class Prefetch(Generic[T]):
    """Items made ahead of time, until closed. When `is_over`, they end, and closing does not wait for a fetch."""

    def __init__(
        self,
        fetch: Callable[[int], T],
        start: int,
        stop: int,
        depth: int = 2,
        is_over: Callable[[], bool] = lambda: False,
    ):
        self._fetch, self._numbers, self._is_over = fetch, range(start, stop), is_over
        self._items: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()  # None: there are no more
        self._room, self._closed = threading.Semaphore(depth), threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
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
        self._closed.set()
        self._room.release()  # wakes the thread
        self._items.put(None)  # wakes a caller that waits in another thread
        while self._thread.is_alive() and not self._is_over():
            self._thread.join(POLL_SECONDS)

    def _work(self) -> None:
        try:
            for number in self._numbers:
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._items.put((self._fetch(number),))
            self._items.put(None)
        except BaseException as error:
            self._items.put(error)
