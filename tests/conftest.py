"""Settings of the whole suite, made before numpy or any framework is imported."""

import contextlib
import gc
import math
import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version

import pytest

# One thread per worker: pytest-xdist already keeps every core busy, and pools of threads would fight over them.
# NPROC is the size of XLA's pool.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
    os.environ.setdefault(_name, "1")

# Nothing is timed or kept outside of a test's own folder.
os.environ["HALFSTEP_CACHE"] = "off"

# JAX tests spend most of their time in XLA's compiler. These flags cut that to a third or less. They change how
# loops are written and what LLVM does, not what is computed.
_FLAGS = ["xla_backend_optimization_level=0", "xla_llvm_disable_expensive_passes=true"]
with contextlib.suppress(PackageNotFoundError):
    if version("jax").startswith("0.10."):  # later versions reject the first
        _FLAGS += ["xla_cpu_use_fusion_emitters=false", "xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(f"--{flag}" for flag in _FLAGS))

# Many tests compile the same programs. What took a while is kept for all workers, in the first's folder.
_COMPILED = "" if "JAX_COMPILATION_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="halfstep-jax-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _COMPILED)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

# A GPU machine without hypothesis still runs the tests that do not use it.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    # A slow or busy machine is not a failure; what must be fast is timed by its own test.
    settings.register_profile("halfstep", deadline=None)
    settings.load_profile("halfstep")


# Tracing and compiling make many objects that stay: looking for garbage after each 700 takes a tenth of the time.
gc.set_threshold(20_000)


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look at it again and again."""
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # libraries complain of what is left at the end
    if _COMPILED:
        shutil.rmtree(_COMPILED, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def no_warning_of_a_slow_disk():
    """Tests count warnings, and a busy disk must not add one. The warning's own test sets its threshold itself."""
    from halfstep.training.run import checkpointing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "LONG", math.inf)
        yield


@pytest.fixture(autouse=True, scope="session")
def small_matmuls_for_a_ceiling():
    """A run times matmuls for its utilization: the small ones take a quarter of the time."""
    from halfstep.tools import probe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "CPU_CEILING", probe.CPU_CEILING[:2])
        yield


@pytest.fixture
def text(tmp_path):
    """A text file with 400 distinct documents, enough for a small run to learn from."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(400)))
    return path
