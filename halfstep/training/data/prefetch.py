"""The next items, made by a thread while the caller works on the last one.

`Prefetch(fetch, start, stop)` yields fetch(start), ..., fetch(stop - 1) in order, with at most `depth` made
and not yet taken. Because fetch is a function of the number alone, what was made ahead and never taken is no
loss: a resumed run makes it again.

Whoever waits for an item is not held by one that takes long: where `is_over` says so, the items end, and closing
waits for no fetch.

An exception in fetch reaches the caller at the place of the item it happened in, after all items before it.
The thread ends when the last item is made, when fetch fails, when the Prefetch is closed, or when it is
forgotten: the thread holds the shared state, never the Prefetch itself.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

T = TypeVar("T")
GLANCE = 0.1  # seconds between two looks at `is_over`


class _Shared(Generic[T]):
    """What the two threads see; every field is read and written under `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ready: deque[T] = deque()
        self.closed = False
        self.finished = False
        self.failure: BaseException | None = None

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()


@final
class Prefetch(Generic[T]):
    """Items made ahead. Use it as a context manager, or close it."""

    def __init__(
        self,
        fetch: Callable[[int], T],
        start: int,
        stop: int,
        depth: int = 2,
        is_over: Callable[[], bool] = lambda: False,
    ):
        if depth < 1:
            raise ValueError(f"a prefetch of depth {depth} makes nothing ahead")
        self._is_over = is_over
        self._shared: _Shared[T] = _Shared()
        self._thread = threading.Thread(
            target=_work, args=(self._shared, fetch, start, stop, depth), name="prefetch", daemon=True
        )
        self._forgotten = weakref.finalize(self, self._shared.close)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            while not shared.changed.wait_for(lambda: shared.ready or shared.finished or shared.closed, GLANCE):
                if self._is_over():
                    raise StopIteration
            if shared.ready:
                item = shared.ready.popleft()
                shared.changed.notify_all()
                return item
            failure, shared.failure = shared.failure, None
        if failure is not None:
            raise failure
        raise StopIteration

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and waits for it: for the one fetch it may be in, and no more. Idempotent."""
        self._shared.close()
        while self._thread.is_alive() and not self._is_over():
            self._thread.join(GLANCE)


def _work(shared: _Shared[T], fetch: Callable[[int], T], start: int, stop: int, depth: int) -> None:
    try:
        for number in range(start, stop):
            with shared.changed:
                shared.changed.wait_for(lambda: len(shared.ready) < depth or shared.closed)
                if shared.closed:
                    return
            item = fetch(number)  # outside the lock: the caller takes items meanwhile
            with shared.changed:
                if shared.closed:
                    return
                shared.ready.append(item)
                shared.changed.notify_all()
            del item  # the caller owns it now
    except BaseException as error:
        shared.failure = error
    finally:
        with shared.changed:
            shared.finished = True
            shared.changed.notify_all()
