"""`training.deterministic`: the same run gives the same bits again, in another process too.

On a CPU every backend does so by default. On an NVIDIA GPU three things prevent it, each with a switch of PyTorch:

    kernels that add in any order     torch.use_deterministic_algorithms(True): another kernel, or an error
    cuBLAS workspaces by stream       CUBLAS_WORKSPACE_CONFIG=:4096:8, read when the first matmul runs
    kernels chosen by their speed     TORCHINDUCTOR_DETERMINISTIC=1; RUN/cache keeps what was tuned, for resuming

The last two are read before a session exists, when `halfstep train` measures matmuls: `prepare` comes first. JAX
and MLX promise no determinism on an accelerator.
"""

import os
from pathlib import Path

from halfstep.config.run import RunConfig
from halfstep.core.errors import ConfigError
from halfstep.training.paths import CACHE

WORKSPACES = (":4096:8", ":16:8")


def prepare(config: RunConfig, folder: Path) -> None:
    """Sets what must be set before the framework computes, if determinism is requested. Idempotent."""
    if not config.training.deterministic or config.backend != "torch":
        return
    given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if given not in WORKSPACES:
        raise ConfigError(
            f"training.deterministic = true, but CUBLAS_WORKSPACE_CONFIG is `{given}`, with which matmuls are not",
            hint=f"set it to {WORKSPACES[0]} or {WORKSPACES[1]}, or leave it unset",
        )
    cache = folder.absolute() / CACHE
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def check(config: RunConfig, kind: str) -> None:
    """Refuses a device that cannot do it. `kind` is the device's: cpu, nvidia, ..."""
    if not config.training.deterministic or kind == "cpu" or (config.backend, kind) == ("torch", "nvidia"):
        return
    raise ConfigError(
        f"training.deterministic = true, but {config.backend} on {kind} does not promise the same bits twice",
        hint="use --device cpu, or --backend torch on an NVIDIA GPU; or leave the setting out",
    )
