"""Settings of the whole suite, made before numpy or any framework is imported."""

import contextlib
import math
import os
from importlib.metadata import PackageNotFoundError, version

import pytest

# One thread per worker: pytest-xdist already keeps every core busy, and pools of threads would fight over them.
# NPROC is the size of XLA's pool.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
    os.environ.setdefault(_name, "1")

# JAX tests spend most of their time in XLA's compiler. These flags cut that to a third or less. They change how
# loops are written and what LLVM does, not what is computed.
_FLAGS = ["xla_backend_optimization_level=0", "xla_llvm_disable_expensive_passes=true"]
with contextlib.suppress(PackageNotFoundError):
    if version("jax").startswith("0.10."):  # later versions reject the flag
        _FLAGS.append("xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(f"--{flag}" for flag in _FLAGS))

# A GPU machine without hypothesis still runs the tests that do not use it.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    # A slow or busy machine is not a failure; what must be fast is timed by its own test.
    settings.register_profile("halfstep", deadline=None)
    settings.load_profile("halfstep")


@pytest.fixture(autouse=True, scope="session")
def no_warning_of_a_slow_disk():
    """Tests count warnings, and a busy disk must not add one. The warning's own test sets its threshold itself."""
    from halfstep.training.run import checkpointing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "LONG", math.inf)
        yield


@pytest.fixture
def text(tmp_path):
    """A text file with 400 distinct documents, enough for a small run to learn from."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(400)))
    return path
