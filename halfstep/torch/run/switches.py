"""torch's process-wide switches for matmuls, which may contradict a policy.

By default torch lets cuBLAS sum parts of a bf16 or fp16 matmul in the operands' own format. A policy says fp32
sums, so that is switched off, which `summary` reports and `unprepare` undoes. TF32 for fp32 matmuls was the user's
choice, and is refused if the policy multiplies in fp32.
"""

from collections.abc import Iterable

import torch

from halfstep.core.errors import PolicyError
from halfstep.core.formats import FP32
from halfstep.core.precision import Precision

_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


class Switches:
    """Switches reduced-precision sums off, and remembers how they were."""

    def __init__(self, device: torch.device):
        self.before: dict[str, bool] = {}
        if device.type == "cuda":
            matmul = torch.backends.cuda.matmul
            self.before = {name: getattr(matmul, name) for name in _REDUCTIONS}
            self._set(dict.fromkeys(_REDUCTIONS, False))

    def restore(self) -> None:
        """Sets the switches as they were."""
        self._set(self.before)

    def _set(self, values: dict[str, bool]) -> None:
        for name, value in values.items():
            setattr(torch.backends.cuda.matmul, name, value)


def fp32_is_fp32() -> bool:
    """Whether fp32 matmuls of this process multiply fp32 numbers."""
    return torch.get_float32_matmul_precision() == "highest"


def check_fp32(wanted: Iterable[Precision]) -> None:
    """Refuses a policy that multiplies in fp32 if torch is set to multiply in less."""
    if not fp32_is_fp32() and any(FP32 in precision.formats and not precision.emulate for precision in wanted):
        raise PolicyError(
            "the policy multiplies in fp32, and with a float32_matmul_precision of "
            f"`{torch.get_float32_matmul_precision()}` fp32 matmuls round their operands to TF32 or bf16",
            hint='torch.set_float32_matmul_precision("highest") before prepare()',
        )
