"""Watches whatever trains in this process, by hooks that every torch script runs through.

    with Watch() as watch:
        train()
    record = watch.record()

No number of the script changes. Outside the `with` block nothing of it is left in torch. An error in a hook ends
the watching, not the script (guard.py); the record says so.

**A process of a script** (`begin`) writes its record to a folder, and ends the script after its updates.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.core.audit.record import Record
from halfstep.core.errors import FactoryError
from halfstep.torch.instruments.collect import loop_hooks, system_hooks
from halfstep.torch.instruments.collect.formats import Formats
from halfstep.torch.instruments.collect.guard import Guard
from halfstep.torch.instruments.collect.log import TrainingLog
from halfstep.torch.instruments.collect.patches import Patches
from halfstep.torch.instruments.collect.weights import buffers_of, weights_of

PATIENCE = 3  # how often the script may catch `SystemExit` before the process is ended without it


class Watch:
    """The hooks, from `with` to its end.

    Without `formats`, only the calls of the loop are logged, not what the model computes. `settings` are those of
    the log.
    """

    def __init__(self, *, formats: bool = True, **settings: Any):
        self.log = TrainingLog(Formats() if formats else None, **settings)
        self.guard = Guard()
        self.patches = Patches(self.guard)

    def __enter__(self) -> "Watch":
        try:
            if self.log.formats is not None:
                self.log.formats.install(self.patches)
            for hooks in (loop_hooks, system_hooks):
                hooks.install(self.log, self.patches)
        except Exception as error:
            self.patches.undo()
            self.guard.fail(error)
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.undo()

    def record(self) -> Record:
        """Returns everything logged so far."""
        record = self.log.record()
        if self.guard.failure is not None:
            record.unseen.append(f"what came after update {record.updates}: {self.guard.failure}")
        return record


def record_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_fn: Callable[[Any], Any] | None = None,
    batch: Any = None,
    *,
    steps: int = 20,
) -> Record:
    """Returns the record of a model and its optimizers; with a loss, of `steps` updates on the same batch."""
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if not isinstance(model, nn.Module) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise FactoryError(
            f"the factory returned {type(model).__name__} and {type(optimizer).__name__}",
            hint="the first is a torch.nn.Module, the second an optimizer of torch or a list of them",
        )
    if loss_fn is None:
        record = Record("factory", weights=weights_of(model, optimizers), buffers=buffers_of(model))
        record.unseen.append("no step was made: the factory returned neither a loss function nor a batch")
        return record
    with Watch() as watch:
        for _ in range(steps):
            loss_fn(batch).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    record = watch.record()
    record.source = "factory"
    return record


class Process:
    """The watch of one process, which writes its record to a folder."""

    def __init__(self, folder: str, steps: int):
        self.folder, self.ended = Path(folder), 0
        self.watch = Watch(steps=steps, end=self.end, on_update=self.on_update)
        self.watch.guard.on_failure = self.note_failure

    def on_update(self, updates: int) -> None:
        """Writes the record after 1, 2, 4, 8 ... updates."""
        if updates & (updates - 1) == 0:
            self.write()

    def write(self) -> None:
        """Writes the record of everything logged so far; of an error only its note."""
        try:
            self._write()
        except Exception as error:  # on a full disk, for one
            self.watch.guard.fail(error)

    def note_failure(self, failure: str) -> None:
        """Notes that the watching has ended; the script continues without it."""
        with suppress(OSError):
            (self.folder / f"unwatched-{os.getpid()}.txt").write_text(failure, encoding="utf-8")

    def _write(self) -> None:
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
