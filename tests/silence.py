"""How long a command of halfstep is silent, on a terminal or in a pipe, while imports take long."""

import os
import pty
import select
import subprocess
import sys
import time

# A module that takes longer to import, as from a disk that is cold. No other thread runs meanwhile: while the file
# of a library is read, the interpreter is locked.
SLOW = """
import ctypes, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in {slow!r}:
            ctypes.PyDLL(None).sleep({slow!r}.pop(name))
sys.meta_path.insert(0, Finder())
"""


def silences(words, folder, slow, *, terminal=False, cwd=None):
    """Runs `halfstep WORDS`; returns its exit code, what it printed, and each silence with what was said before.

    `slow` has whole seconds by module: what importing it takes longer.
    """
    (folder / "sitecustomize.py").write_text(SLOW.format(slow=dict(slow)))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours, theirs = pty.openpty() if terminal else os.pipe()
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "halfstep", *words],
        stdout=theirs, stderr=theirs, env=os.environ | {"PYTHONPATH": path, "TERM": "xterm"}, cwd=cwd,
    )  # fmt: skip
    os.close(theirs)
    said, gaps = "", []
    while True:
        select.select([ours], [], [])
        try:
            text = os.read(ours, 65536).decode(errors="replace")
        except OSError:  # the terminal has no writer any more
            text = ""
        now = time.monotonic()
        gaps.append((now - begun, said[-200:]))
        begun, said = now, said + text
        if not text:
            os.close(ours)
            return process.wait(), said, gaps
