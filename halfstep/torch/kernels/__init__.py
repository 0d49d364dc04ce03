"""Kernels of our own, in Triton, where torch and its compiler have none that does the same work in as few passes.

Each is imported when it is first needed: only torch's builds for NVIDIA GPUs come with Triton. Its interpreter
(`TRITON_INTERPRET=1`) runs them on a CPU, which is how the tests check their bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

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
