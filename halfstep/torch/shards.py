"""Tensors that are spread over ranks (DTensor), and what this rank has of them."""

import sys

from torch import Tensor


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks. Without importing torch's module for such, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined,no-any-return]
