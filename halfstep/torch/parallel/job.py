"""The processes of a job: starting them by torchrun, their store, their devices, and a gloo group on the host.

Control messages have a group of their own, so that none of them waits for a device. The store is torchrun's, which
outlives a worker; a thread has a connection of its own, because a wait holds the connection.
"""

import datetime
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from halfstep.config import session
from halfstep.core.errors import DeviceError, ParallelError, RankError
from halfstep.torch.measure import devices

OPENING = 600.0  # seconds that ranks wait for rank 0 to open the run
GRACE = 60.0  # seconds that the engine waits longer than the watchdog, which knows more
GREETING = 0.5  # seconds after which a rank asks again which attempt this is
ANSWER = 10.0  # seconds for the store to answer


def _agree_on_attempt(store: Any, rank: int, ranks: int) -> str:
    """Returns a name for this attempt that no other has: torchrun's store still holds what killed workers wrote.

    Rank 0 names it. The others greet under the name that they read; only a rank 0 that lives answers.
    """
    if rank == 0:
        attempt = secrets.token_hex(8)
        store.set("halfstep/attempt", attempt)
        for other in range(1, ranks):
            try:
                greeting = store.get(f"{attempt}/greeting/{other}")
            except RuntimeError:
                raise RankError(
                    f"rank {other} has not started within {OPENING:g} s of rank 0",
                    hint="torchrun must start on every machine, with the same --rdzv-endpoint and --nnodes",
                ) from None
            store.set(f"{attempt}/answer/{other}", greeting)
        return attempt
    own, over = secrets.token_hex(8), time.monotonic() + OPENING
    while time.monotonic() < over:
        attempt = str(store.get("halfstep/attempt").decode())
        store.set(f"{attempt}/greeting/{rank}", own)
        try:
            store.wait([f"{attempt}/answer/{rank}"], datetime.timedelta(seconds=GREETING))
        except RuntimeError:
            continue  # the name of an attempt that is over
        if store.get(f"{attempt}/answer/{rank}").decode() == own:
            return attempt
    raise RankError(f"rank 0 has not answered rank {rank} within {OPENING:g} s", hint="see what rank 0 printed")


class Host(session.Host):
    """This process among those of its job; alone, unless torchrun started others."""

    backend, launcher, has_notes = "torch", "torchrun", True

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        self._num_broadcasts = 0
        self._group: Any = None
        self._store: Any = HashStore()
        self._notes: Any = self._store
        if "RANK" in os.environ:
            store = next(rendezvous("env://", timeout=datetime.timedelta(seconds=OPENING)))[0]
            attempt = _agree_on_attempt(store, self.rank, self.ranks)
            self._store = PrefixStore(attempt, store)
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            answer = datetime.timedelta(seconds=ANSWER)
            notes = TCPStore(address, port, None, False, answer, wait_for_workers=False)
            self._notes = PrefixStore(f"{attempt}/notes", notes)

    def connect(self, device: str | None, timeout: float) -> str:
        name = self._device(device or devices()[0])
        wait = datetime.timedelta(seconds=timeout + GRACE)
        cuda = name.startswith("cuda")
        options: dict[str, Any] = {"device_id": torch.device(name)} if cuda else {}
        if cuda:
            torch.cuda.set_device(torch.device(name))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=wait,
            **options,
        )
        self._group = dist.new_group(backend="gloo", timeout=wait)
        return name

    def _device(self, name: str) -> str:
        """Returns the device of this process, given the kind of all; refuses one for several."""
        kind, _, index = name.partition(":")
        if kind == "cuda":
            there = torch.cuda.device_count()
            if index and self.local_ranks > 1:
                raise ParallelError(
                    f"--device {name} is one GPU, and this machine runs {self.local_ranks} processes",
                    hint="use --device cuda: each process takes the GPU of its number",
                )
            if self.local_ranks > there:
                raise ParallelError(
                    f"torchrun has started {self.local_ranks} processes here, and there "
                    f"{'is 1 GPU' if there == 1 else f'are {there} GPUs'}: NCCL needs one for each",
                    hint=f"start it with --nproc-per-node={there}; or use --device cpu, which connects by gloo"
                    if there
                    else "use --device cpu, which connects by gloo",
                )
            return name if index else f"cuda:{self.local_rank}"
        if kind != "cpu" and self.ranks > 1:
            raise ParallelError(
                f"processes on {kind} cannot exchange gradients: torch.distributed has no engine for it",
                hint="start one process there, or use --device cpu or cuda",
            )
        return name

    def broadcast(self, text: str | None) -> str:
        key = f"said/{self._num_broadcasts}"
        self._num_broadcasts += 1
        if self.rank == 0:
            assert text is not None
            self._store.set(key, text)
            return text
        return str(self._store.get(key).decode())

    def gather(self, text: str) -> list[str]:
        texts: list[Any] = [None] * self.ranks
        dist.all_gather_object(texts, text, group=self._group)
        return texts

    def exchange(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(rows, own, group=self._group)
        return [tuple(row.tolist()) for row in rows]

    def note(self, key: str, text: str) -> None:
        self._notes.set(f"{key}/{self.rank}", text)

    def notes(self, key: str) -> list[str | None]:
        keys = [f"{key}/{rank}" for rank in range(self.ranks)]
        return [self._notes.get(name).decode() if self._notes.check([name]) else None for name in keys]

    def claim(self, key: str) -> bool:
        return bool(self._notes.add(key, 1) == 1)

    def has_lost(self, error: BaseException) -> bool:
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
        )

    def close(self) -> None:
        if self._group is not None:  # whatever holds one (DDP) must be gone, or this may wait forever
            self._group = None
            dist.destroy_process_group()


def launch(gpus: int, arguments: Sequence[str]) -> int:
    """Runs `halfstep ARGUMENTS` in one process per GPU, by torchrun's own engine; returns the exit code of all.

    A signal to this process reaches all of them; they save and stop.
    """
    there = torch.cuda.device_count()
    if not 1 <= gpus <= there:
        command = f"torchrun --nproc-per-node={max(1, gpus)} -m halfstep train ... --device cpu"
        raise DeviceError(
            f"--gpus {gpus}, and this machine has {there or 'no'} GPU{'' if there == 1 else 's'} for torch",
            hint=f"name 1 to {there}" if there else f"`{command}` starts processes on the CPU",
        )
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = ["--standalone", f"--nproc-per-node={gpus}", "-m", "halfstep", *arguments]
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0
