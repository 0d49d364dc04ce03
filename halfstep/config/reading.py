"""Reads files that anyone may have written: regular ones only, no more of them than fits, and JSON and TOML.

A pipe may block forever and a device may never end, so neither is opened. Whatever cannot be read raises an
OSError whose `strerror` says why, and what is not JSON or TOML a ValueError: brackets nested thousands deep and
numbers of thousands of digits too.
"""

import errno
import json
import os
import re
import stat
import tomllib
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any

from halfstep.core import host

MEBIBYTE = 1 << 20
# More than any file of settings, any index or manifest, and any tokenizer has.
MOST_SETTINGS, MOST_TABLE, MOST_TOKENIZER = 1 * MEBIBYTE, 256 * MEBIBYTE, 256 * MEBIBYTE
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
# Reading a key takes the square of its parts. (Lookbehind and possessive repeats: each place is looked at once.)
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){32,}""")


def open_regular(path: str | Path) -> BufferedReader:
    """Opens a regular file to read its bytes."""
    return open(path, "rb", opener=_open)


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """Returns the content of a regular file; refuses more than `most` bytes, by default more than memory."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        limit = most if most is not None else host.memory() or size
        content = file.read(min(limit, max(size, MEBIBYTE)) + 1) if size <= limit else b""  # /proc has no sizes
    if max(size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes, which is too large", str(path))
    return content


def fits_in_memory(num_bytes: int) -> bool:
    """Whether this machine has memory for that many bytes; True if its memory is unknown."""
    return num_bytes <= (host.memory() or num_bytes)


def parse_json(content: str | bytes, *, unique: bool = True) -> Any:
    """Parses JSON; refuses what is nested too deeply, and if `unique` a key that stands twice in an object."""
    try:
        return json.loads(content, object_pairs_hook=_table_of if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"`{twice}` stands twice in an object")
    return table


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML; refuses what is nested too deeply."""
    try:
        if not _LONG_KEY.search(text):
            return tomllib.loads(text)
    except RecursionError:
        pass
    raise ValueError("it is nested too deeply")


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe is opened without a writer
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, f"it is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file", path)
