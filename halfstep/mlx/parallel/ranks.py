"""Several processes that train one model, on mx.distributed: each has its share of an update's micro-batches.

Gradients of weights are summed in fp32, once per update; tokens weight them, so shares may be unequal. Every
process starts from the arrays of rank 0, and the same sums, scale and decision to skip keep them equal, bit for
bit.

Each exchange says what it is for. Processes that do different things are refused: a ring would add numbers that do
not belong together, or wait for ever. MLX cannot interrupt a wait, so a thread ends a process that waited longer
than its time-out. The sums are evaluated before anything depends on them: one that failed counts as evaluated.
"""

import json
import os
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from halfstep.core.errors import ArgumentError, ParallelError, RankError
from halfstep.mlx.convert.places import arrays

TIMEOUT = 600.0  # seconds
BUCKET = 2**23  # numbers that are summed together
_SHORT = 508  # bytes of an exchange that fit into its first message


class Ranks:
    """The processes of a group, as one of them sees them."""

    def __init__(self, group: mx.distributed.Group, timeout: float = TIMEOUT):
        self.group, self.timeout = group, timeout
        self.rank, self.size = group.rank(), group.size()
        self.doing = ""  # what the process is doing, for messages; empty if it was not set

    def exchange(self, what: str, given: Any) -> list[Any]:
        """Returns what each rank gave, by rank: anything that JSON can hold."""
        text = json.dumps([what, given]).encode()
        first = self._gather(what, len(text).to_bytes(4, "little") + text[:_SHORT], _SHORT + 4)
        lengths = [int.from_bytes(row[:4], "little") for row in first]
        texts = [row[4 : 4 + length] for row, length in zip(first, lengths, strict=True)]
        if max(lengths) > _SHORT:
            rest = self._gather(what, text[_SHORT:], max(lengths) - _SHORT)
            ends = [row[: max(length - _SHORT, 0)] for row, length in zip(rest, lengths, strict=True)]
            texts = [start + end for start, end in zip(texts, ends, strict=True)]
        said = [json.loads(each) for each in texts]
        for rank, (theirs, _) in enumerate(said):
            if theirs != what:
                raise RankError(
                    f"rank {self.rank} is at {what}, and rank {rank} at {theirs}",
                    hint="every process must make the same calls of its run, in the same order",
                )
        return [each for _, each in said]

    def agree(self, what: str, **given: Any) -> None:
        """Refuses processes that were not given the same."""
        for rank, theirs in enumerate(self.exchange(what, given)):
            for name, value in json.loads(json.dumps(given)).items():
                if theirs[name] != value:
                    raise RankError(
                        f"processes differ in {name}: {value} on rank {self.rank}, "
                        f"and {theirs[name]} on rank {rank}",
                        hint="start every process with the same settings, code and weights",
                    )

    def sum(self, what: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Returns the sums of arrays over ranks, in fp32."""
        return self._reduced(what, {name: array.astype(mx.float32) for name, array in arrays.items()})

    def from_rank_0(self, what: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Returns the arrays of rank 0, bit for bit: the others add zeros to their bytes."""
        shapes = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
        self.agree(what, arrays=zlib.crc32(json.dumps(shapes).encode()))
        byte = {name: array.reshape(-1).view(mx.uint8) for name, array in arrays.items() if array.size}
        if self.rank:
            byte = {name: mx.zeros_like(array) for name, array in byte.items()}
        sums = self._reduced(what, byte)
        return {name: sums[name].view(a.dtype).reshape(a.shape) if a.size else a for name, a in arrays.items()}

    def _reduced(self, what: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        sums: dict[str, mx.array] = {}
        for names in _buckets(arrays):
            flat = mx.concatenate([arrays[name].reshape(-1) for name in names])
            total = mx.distributed.all_sum(flat, group=self.group)
            self._wait(what, total)
            ends = np.cumsum([arrays[name].size for name in names])[:-1].tolist()
            parts = zip(names, mx.split(total, ends), strict=True)
            sums |= {name: part.reshape(arrays[name].shape) for name, part in parts}
        return sums

    def _gather(self, what: str, text: bytes, length: int) -> list[bytes]:
        row = np.frombuffer(text.ljust(length, b"\0"), np.uint8)
        rows = mx.distributed.all_gather(mx.array(row[None]), group=self.group)
        self._wait(what, rows)
        return [row.tobytes() for row in np.array(rows)]

    def _wait(self, what: str, array: mx.array) -> None:
        """Evaluates what other ranks have a part in."""
        timer = threading.Timer(self.timeout, self._give_up, [what])
        timer.daemon = True
        timer.start()
        try:
            mx.eval(array)
        except RuntimeError as error:
            raise RankError(
                f"the connection of rank {self.rank} to the others broke at `{self.doing or what}`: {error}",
                hint="one of them ended: what it printed says why. Start all of them again, from a saved state",
            ) from None
        finally:
            timer.cancel()

    def _give_up(self, what: str) -> None:
        others = f"rank {1 - self.rank}" if self.size == 2 else f"one of the {self.size - 1} others"
        place = f"`{self.doing or what}`"
        print(
            f"error: rank {self.rank} has waited for {self.timeout:g} s at {place}: {others} did not arrive\n\n"
            "hint: find out why that process hangs; or give it more time, with `timeout` of prepare or "
            "parallel.timeout of a recipe",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # the main thread is inside MLX, which cannot be interrupted


def is_launched() -> bool:
    """Whether mlx.launch has started this process and others; for one it writes an empty hostfile."""
    hosts = os.environ.get("MLX_HOSTFILE")
    return "MLX_RANK" in os.environ and (hosts is None or bool(Path(hosts).read_text().strip()))


def ranks_of(group: Any, timeout: float) -> Ranks | None:
    """Returns the processes to train with; None if there is one. `group` is from mx.distributed.init()."""
    if not isinstance(timeout, int | float) or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ArgumentError(f"timeout={timeout!r}: it is a number of seconds, above 0", hint="such as 600")
    if group is None:
        if is_launched():
            raise ParallelError(
                f"this is rank {os.environ['MLX_RANK']} of mlx.launch, and it would train alone",
                hint="pass group=mx.distributed.init(); or start one process, without mlx.launch",
            )
        return None
    if not isinstance(group, mx.distributed.Group):
        raise ArgumentError(
            f"the group is a `{type(group).__name__}`", hint="pass group=mx.distributed.init(backend='ring')"
        )
    return Ranks(group, timeout) if group.size() > 1 else None


def start_as_rank_0(run: Any, ranks: Ranks) -> None:
    """Takes the arrays of rank 0, and refuses processes that would not train as it does."""
    rates = [float(o.state["learning_rate"]) for o in run.optimizers if "learning_rate" in o.state]
    settings = {"policy": str(run.policy), "clip_norm": float(run.clip_norm), "seed": int(run.masters.seed)}
    trained = list(run.conversion.places)
    ranks.agree("the start", **settings, learning_rate=rates, trained_arrays=trained)
    places = arrays(run.model)
    first = ranks.from_rank_0("the first weights", {name: place.array for name, place in places.items()})
    for name, place in places.items():
        place.put(first[name])
    run.masters.remainders |= ranks.from_rank_0("the first weights", run.masters.remainders)
    run.masters.note_writes()


def _buckets(arrays: Mapping[str, mx.array]) -> Iterator[list[str]]:
    """Yields names whose arrays are summed together."""
    names, size = list[str](), 0
    for name, array in arrays.items():
        names.append(name)
        size += array.size
        if size >= BUCKET:
            yield names
            names, size = [], 0
    if names:
        yield names
