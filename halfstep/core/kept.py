"""What is kept on this machine from one run to the next: in which folder, and by which code it was made.

The folder is HALFSTEP_CACHE, else `halfstep` in XDG_CACHE_HOME or in ~/.cache. HALFSTEP_CACHE=off keeps and reads
nothing. Everything there can be deleted: it is measured again. What torch and JAX compile is in their own folders.
"""

import hashlib
import os
from functools import cache
from pathlib import Path

VARIABLE, OFF = "HALFSTEP_CACHE", "off"


def folder() -> Path | None:
    """Returns the folder, which need not exist yet; None if nothing is kept."""
    given = os.environ.get(VARIABLE)
    if given:
        return None if given == OFF else Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfstep"


@cache
def code_digest(backend: str) -> str:
    """Returns a digest of the code of core and of a backend: other code computes, and takes, something else."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for part in ("core", backend) for path in (package / part).rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
