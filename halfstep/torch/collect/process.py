"""One process of a watched script: writes its record to a folder, and ends the script after its updates.

The record is written at the end, and before it after 1, 2, 4, 8 ... updates, so that a process that is killed, or
a fork that leaves without a word, is still seen. The script ends by `SystemExit`, raised where the next update
would begin: its `finally` blocks and `with` blocks run, and every update before it is whole. Ranks of one job make
the same updates, so they end together.
"""

import _thread
import atexit
import json
import os
import sys
import threading
from multiprocessing import util
from pathlib import Path

from halfstep.torch.collect.watch import Watch

PATIENCE = 3  # so often `SystemExit` may be caught before the process is ended without it


class Process:
    """The watch of this process, and where its record goes."""

    def __init__(self, folder: str, steps: int):
        self.folder, self.ended = Path(folder), 0
        self.watch = Watch(steps=steps, end=self.end, counted=self.counted)

    def counted(self, updates: int) -> None:
        """Called after each update."""
        if updates & (updates - 1) == 0:
            self.write()

    def write(self) -> None:
        """Writes what was seen so far."""
        if not self.folder.is_dir():  # the audit is over, and this process is not
            return
        record = self.watch.record()
        facts = {"pid": os.getpid(), "ended": bool(self.ended), "record": record.to_dict()}
        path = self.folder / f"record-{os.getpid()}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(facts), encoding="utf-8")
        part.replace(path)

    def end(self) -> None:
        """Ends the script."""
        self.ended += 1
        self.write()
        if self.ended > PATIENCE:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        here = threading.current_thread()
        # SystemExit ends a thread alone; autograd's own threads, though, raise it where backward was called.
        if here is not threading.main_thread() and not isinstance(here, threading._DummyThread):
            _thread.interrupt_main()
        raise SystemExit(0)

    def forked(self) -> None:
        """A fork has seen nothing yet. What multiprocessing has forked leaves without `atexit`."""
        self.watch.seen.forget()


def begin(folder: str, steps: int) -> None:
    """Watches this process from now on."""
    process = Process(folder, steps)
    process.watch.__enter__()
    atexit.register(process.write)
    os.register_at_fork(after_in_child=process.forked)
    util.register_after_fork(process, lambda its: util.Finalize(None, its.write, exitpriority=10))
