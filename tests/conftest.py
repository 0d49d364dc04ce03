"""Settings of the whole suite."""

import contextlib
import math
import os
from importlib.metadata import PackageNotFoundError, version

import pytest

from halfstep.training.run import checkpointing

# XLA's time to compile is what most tests of JAX take. What is computed stays the same: what is left out is below
# XLA's own passes, in how loops are written and in LLVM. Compiling takes a third to a sixth of the time.
_LESS = ["xla_backend_optimization_level=0", "xla_llvm_disable_expensive_passes=true"]
with contextlib.suppress(PackageNotFoundError):
    if version("jax").startswith("0.10."):  # later ones do not know it, and stop
        _LESS.append("xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(f"--{flag}" for flag in _LESS))

# Property tests import it themselves; a GPU machine without it runs the others.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    # A slow or busy machine is no failure; what must be fast is timed by its own test.
    settings.register_profile("halfstep", deadline=None)
    settings.load_profile("halfstep")

# Nor is a slow disk: the warning of one would stand among those that tests count. Its own test sets this itself.
checkpointing.LONG = math.inf


@pytest.fixture
def text(tmp_path):
    """A file of text that a small run learns something from: 400 documents, each its own."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(400)))
    return path
