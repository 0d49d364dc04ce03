"""Where in the user's code something happened: the first frame outside the libraries that train."""

import os
import sys
import sysconfig
from functools import cache
from types import FrameType

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
