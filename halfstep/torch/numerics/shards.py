"""Tensors that are spread over ranks (DTensor), and what this rank has of them."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.core.errors import ParallelError


class ShardRows(NamedTuple):
    """Which rows of a tensor a rank has: the first, the one after the last, and how many there are."""

    start: int
    stop: int
    total: int


class ShardCast:
    """A shard in the narrow format that travels, valid until the shard is written to."""

    def __init__(self, version: Callable[[], tuple[int, ...]]):
        """`version` counts writes to the shard; kernels of ours are not counted, and say what they write."""
        self.values: Tensor | None = None
        self._version = version
        self._made_at: tuple[int, ...] = ()
        self._is_written = False  # by the optimizer, with the shard

    @property
    def dtype(self) -> torch.dtype | None:
        """The format, if there is a cast."""
        return None if self.values is None else self.values.dtype

    def current(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the cast to a format of what the shard holds now, if it was made."""
        return self.values if self.dtype == dtype and self._made_at == self._version() else None

    def hold(self, values: Tensor) -> None:
        """Takes the cast of what the shard holds now."""
        self.values, self._made_at = values, self._version()

    def note_written(self) -> None:
        """Says that the cast was written together with the shard."""
        self._made_at, self._is_written = self._version(), True

    def drop_unless_written(self) -> None:
        """Frees the cast, unless the last update wrote it."""
        self.values, self._is_written = self.values if self._is_written else None, False


def all_gather(whole: Tensor, part: Tensor) -> None:
    """Fills a flat tensor with the parts of all ranks."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has renamed it
    gather(whole, part)


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks. Without importing torch's module for such, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns what this rank has of each tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return [*tensors]
    return [t.to_local() if isinstance(t, module.DTensor) else t for t in tensors]


def shard_rows(shard: Any) -> ShardRows:
    """Returns which rows of a tensor that is spread over ranks this rank has."""
    here = shard.device_mesh.get_coordinate()
    cut = [axis for axis, placement in enumerate(shard.placements) if not placement.is_replicate()]
    if [shard.placements[axis].is_shard(0) for axis in cut] != [True]:
        raise ParallelError(
            f"a parameter is sharded as {shard.placements}, and a state has rows",
            hint="fully_shard without `shard_placement_fn`: it then shards the first dimension",
        )
    (axis,), total = cut, shard.shape[0]
    size = -(-total // shard.device_mesh.shape[axis])  # as torch.chunk: the last ranks may have none
    return ShardRows(min(here[axis] * size, total), min((here[axis] + 1) * size, total), total)


def is_first_copy(shard: Any) -> bool:
    """Whether this rank is the first of those that have the same rows."""
    here = shard.device_mesh.get_coordinate()
    return all(at == 0 for at, placement in zip(here, shard.placements, strict=True) if placement.is_replicate())


def shard_like(shard: Any, rows: Tensor) -> Tensor:
    """Returns rows that this rank has as a tensor that is spread as another one is."""
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(  # type: ignore[no-any-return]
        rows, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
