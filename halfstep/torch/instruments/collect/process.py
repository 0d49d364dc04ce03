"""One process of a tracked script: writes its record to a folder, and ends the script after its updates.

The record is written at the end, and before it after 1, 2, 4, 8 ... updates, so that a process that is killed, or
a fork that leaves without a word, still leaves a record. The script ends by `SystemExit`, raised where the next
update would begin: its `finally` blocks and `with` blocks run, and every update before it is whole. Ranks of one
job make the same updates, so they end together.
"""

import _thread
import atexit
import json
import os
import sys
import threading
from multiprocessing import util
from pathlib import Path

from halfstep.torch.instruments.collect.watch import Watch

PATIENCE = 3  # how often the script may catch `SystemExit` before the process is ended without it


class Process:
    """The watch of one process, which writes its record to a folder."""

    def __init__(self, folder: str, steps: int):
        self.folder, self.ended = Path(folder), 0
        self.watch = Watch(steps=steps, end=self.end, on_update=self.on_update)

    def on_update(self, updates: int) -> None:
        """Writes the record after 1, 2, 4, 8 ... updates."""
        if updates & (updates - 1) == 0:
            self.write()

    def write(self) -> None:
        """Writes the record of everything logged so far."""
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


def begin(folder: str, steps: int) -> None:
    """Watches this process from now on."""
    process = Process(folder, steps)
    process.watch.__enter__()
    atexit.register(process.write)
    os.register_at_fork(after_in_child=process.watch.log.forget)  # the record of a child is its own
    util.register_after_fork(process, lambda its: util.Finalize(None, its.write, exitpriority=10))
