"""A precision in a framework's own terms: which dtype carries each role of a module.

**Emulated**, an array is carried in fp32 and holds values of its format. Every array that hardware would store in
the format is rounded by the reference cast, gradients included; matmuls of such operands are exact products
summed in fp32, in an order that may differ from the hardware's. What a fused kernel keeps to itself is not
rounded: attention's probabilities stay fp32 here, where some kernels narrow them before they meet the values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from halfstep.core.formats import FP32, Format
from halfstep.core.precision import Precision

DType = TypeVar("DType")


@dataclass(frozen=True)
class Casts(Generic[DType]):
    """The dtypes of one module. Compiled code reads them and never hashes a format."""

    precision: Precision
    emulate: bool
    plain: bool  # fp32 throughout: the framework's own matmul will do
    compute: DType
    operand: DType
    grad: DType
    grad_operand: DType
    grad_weight: DType
    norm: DType
    softmax: DType
    loss: DType
    fused_softmax: bool  # fused attention keeps scores and softmax in fp32 whatever its inputs are

    @classmethod
    def lower(cls, precision: Precision, dtype_of: Callable[[Format], DType], **own: Any) -> Self:
        """Returns what a precision means in a framework; `own` are the fields that a backend adds."""

        def carrier(fmt: Format) -> DType:
            return dtype_of(FP32 if precision.emulate else fmt)

        return cls(
            precision=precision,
            emulate=precision.emulate,
            plain=precision.formats == (FP32,) and precision.grad_weight == FP32,
            compute=carrier(precision.compute),
            operand=carrier(precision.operand.format),
            grad=carrier(precision.grad),
            grad_operand=carrier(precision.grad_operand.format),
            grad_weight=carrier(precision.grad_weight),
            norm=carrier(precision.norm),
            softmax=carrier(precision.softmax),
            loss=carrier(precision.loss),
            fused_softmax=precision.softmax == FP32,
            **own,
        )

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # frozen, and the dtypes of some frameworks cannot be copied
