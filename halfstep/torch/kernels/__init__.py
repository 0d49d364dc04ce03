"""Kernels of our own, in Triton, where torch and its compiler have none that does the same work in as few passes.

Each is imported when it is first needed: only torch's builds for NVIDIA GPUs come with Triton. Its interpreter
(`TRITON_INTERPRET=1`) runs them on a CPU, which is how the tests check their bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_FOUND = find_spec("triton") is not None  # known before torch.compile reads code that asks


def has_triton() -> bool:
    """Whether Triton is installed."""
    return _FOUND


def reachable(tensors: Sequence[Tensor]) -> list[bool]:
    """Returns which tensors a kernel may reach by address: dense, contiguous, aligned, on an NVIDIA GPU."""
    return [t.is_cuda and t.is_contiguous() and t.data_ptr() % 16 == 0 and has_triton() for t in tensors]


class Captured:
    """What CUDA graphs of steps do to tables of addresses: a replay writes those of its capture again.

    So code that remembers what it wrote to a table must also remember the `epoch` then.
    """

    epoch = 0
    held: list[Tensor] | None = None  # host memory that the graph being captured reads at every replay

    @contextmanager
    def capturing(self, held: list[Tensor]) -> Iterator[None]:
        """Inside, a graph is captured; `held` gets what must live as long as it."""
        self.epoch, self.held = self.epoch + 1, held
        try:
            yield
        finally:
            self.epoch, self.held = self.epoch + 1, None

    def note_replay(self) -> None:
        """Notes that a graph was replayed."""
        self.epoch += 1


CAPTURED = Captured()

_COMPILED: dict[Any, Any] = {}
# What is called instead of a launch, by type of device: for `meta`, while a step is planned.
INSTEAD: dict[str, Callable[..., None]] = {}


def launch(kernel: Any, key: Any, beside: Tensor, programs: int, *args: Any, **options: Any) -> None:
    """Launches `programs` programs of a kernel on the device of a tensor, with its parameters in order.

    Triton's own launch looks at every argument to find the code it has compiled for arguments of that kind; on the
    host that takes longer than a small kernel runs. Here the caller says what kind they are, by the `key`: what
    code Triton makes depends on dtypes, on whether an address or an integer is a multiple of 16, and on constants
    and options, so that all of these must be in it that differ from call to call.
    """
    device = beside.get_device()
    known = _COMPILED.get((kernel.fn, key, device))
    if known is not None and torch._C._cuda_getDevice() == device:
        stream = torch._C._cuda_getCurrentRawStream(device)
        # Triton's own profilers, which the Nones stand for, do not see this launch.
        known.run(programs, 1, 1, stream, known.function, known.packed_metadata, None, None, None, *args)
    elif beside.device.type in INSTEAD:
        INSTEAD[beside.device.type](kernel, key, beside, programs, *args, **options)
    elif device < 0:
        kernel[(programs,)](*args, **options)  # interpreted
    else:
        with torch.cuda.device(device):
            _COMPILED[kernel.fn, key, device] = kernel[(programs,)](*args, **options)
