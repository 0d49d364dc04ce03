"""`halfstep train --gpus N`: torchrun's own engine, on this machine."""

from collections.abc import Sequence

import torch

from halfstep.core.errors import HalfstepError


def launch(gpus: int, arguments: Sequence[str]) -> int:
    """Runs `halfstep ARGUMENTS` in one process for each of so many GPUs; returns the exit code of all.

    A signal to this process reaches all of them; they save and stop.
    """
    there = torch.cuda.device_count()
    if not 1 <= gpus <= there:
        command = f"torchrun --nproc-per-node={max(1, gpus)} -m halfstep train ... --device cpu"
        raise HalfstepError(
            f"--gpus {gpus}, and this machine has {there or 'no'} GPU{'' if there == 1 else 's'} for torch",
            hint=f"name 1 to {there}" if there else f"`{command}` starts processes on the CPU",
        )
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = ["--standalone", f"--nproc-per-node={gpus}", "-m", "halfstep", *arguments]
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0
