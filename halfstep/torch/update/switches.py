"""torch's process-wide switches for matmuls, which may contradict a policy.

By default torch lets cuBLAS sum parts of a bf16 or fp16 matmul in the operands' own format. A policy says fp32
sums, so that is switched off, which `summary` reports and `unprepare` undoes. TF32 for fp32 matmuls was the user's
choice, and is refused if the policy multiplies in fp32.
"""

from collections.abc import Iterable

import torch

from halfstep.core.errors import PolicyConflictError
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
    return not _fp32_rounding()


def check_fp32(wanted: Iterable[Precision]) -> None:
    """Refuses a policy that multiplies in fp32 if torch is set to multiply in less."""
    if (less := _fp32_rounding()) and any(FP32 in p.formats and not p.emulate for p in wanted):
        raise PolicyConflictError(
            f"the policy multiplies in fp32, and torch is set to round the operands of fp32 matmuls to {less}",
            hint='torch.set_float32_matmul_precision("highest") before prepare(); TrainingArguments that compile '
            "allow TF32",
        )


def _fp32_rounding() -> str:
    """Returns what fp32 operands are rounded to; empty if they are not.

    torch has two ways to set it, and the getter of the older one raises if the newer one was used.
    """
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    set_to = [place.fp32_precision for place in places]
    return " or ".join(dict.fromkeys(each.upper() for each in set_to if each not in ("ieee", "none")))
