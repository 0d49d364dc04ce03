"""What can be known of any tensor with torch alone: its format, this rank's part, and how an optimizer holds it.

An audit runs in the user's environment, perhaps with a torch too old for halfstep's engine, so nothing in this
folder imports the engine. What the engine has prepared is recognized by the attributes that it leaves on
parameters, modules and optimizers; tests/torch/instruments/collect/test_prepared.py compares them with the engine.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# Code in these packages is not the user's; what it does is reported at the line that called it.
LIBRARIES = ["torch", "accelerate", "transformers", "lightning", "lightning_fabric", "halfstep"]
LIBRARIES += ["pytorch_lightning"]
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


@cache
def is_library(file: str) -> bool:
    """Whether a file belongs to a library that trains or to Python's own, or is not a file at all."""
    if file.startswith("<"):
        return True
    modules = [module for name in LIBRARIES if (module := sys.modules.get(name)) is not None]
    folders = [os.path.join(folder, "") for module in modules for folder in getattr(module, "__path__", ())]
    return file.startswith(tuple(folders)) or (file.startswith(_STDLIB) and "-packages" not in file)


def place() -> str | None:
    """Returns `file:line` of the user's code that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else name_of(frame)


def name_of(frame: FrameType) -> str:
    """Returns `file:line` of a frame, relative to the working folder if the file is below it."""
    here = os.path.join(os.getcwd(), "")
    return f"{frame.f_code.co_filename.removeprefix(here)}:{frame.f_lineno}"


_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
_SPLIT = "halfstep_split"  # of a bf16 half of a master: its `remainder` has the 16 bits that the half leaves out
# A split master refuses some uses of `parameter.detach()`; torch's own method is not watched.
_detach: Any = torch._C.TensorBase.detach


def format_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in a record: of a format if it is one, else torch's own."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating-point and has fewer bits than fp32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor; does not import torch's module for sharded ones, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor.to_local() if module is not None and isinstance(tensor, module.DTensor) else tensor


def tensors_of(*trees: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors among arguments, and in lists, tuples and dictionaries of them."""
    for tree in trees:
        if isinstance(tree, Tensor) and tree.is_floating_point():
            yield tree
        elif isinstance(tree, list | tuple):
            yield from tensors_of(*tree)
        elif isinstance(tree, dict):
            yield from tensors_of(*tree.values())


def is_split(parameter: Tensor) -> bool:
    """Whether a parameter is the bf16 half of a split master."""
    return parameter.dtype == torch.bfloat16 and hasattr(parameter, _SPLIT)


def stored_values(parameter: Tensor) -> Tensor:
    """Returns the values that an optimizer adds to; of a split master the bits of its fp32 values, as integers."""
    values: Tensor = _detach(parameter)
    if not is_split(parameter):
        return values
    return (values.view(torch.int16).int() << 16) + getattr(parameter, _SPLIT).remainder


def belongs_to_halfstep(thing: Any) -> bool:
    """Whether a class of halfstep's is among those of an object."""
    return any(kind.__module__.startswith("halfstep.") for kind in type(thing).__mro__)
