"""The formats of one module: a policy, resolved for a name and spelled out for a backend.

The activations around a module and the operands inside its matmuls have one format unless a rule makes the
operands narrow; then the activations stay in the compute format of the whole model:

    bf16-mixed; lm_head: compute=fp32         at lm_head   activations fp32, operands fp32
    bf16-mixed; **.mlp.*: compute=e4m3        in the MLP   activations bf16, operands e4m3

**A linear layer is three matmuls**, named by their results. With x of shape (tokens, in), W of (out, in) and the
incoming gradient g of (tokens, out), each summed in fp32:

    output      = x W^T      operands in `operand`,                    rounded to `compute`
    grad_input  = g W        operands in `grad_operand`, `operand`,    rounded to `grad`
    grad_weight = g^T x      operands in `grad_operand`, `operand`,    in `grad_weight`, fp32 as a rule
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from halfstep.core.formats import FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.roles import Accumulator, Operand, is_narrow
from halfstep.core.rules import Resolved


@dataclass(frozen=True)
class Precision:
    """The formats of one module."""

    compute: Format = FP32  # activations, and what a matmul's result is rounded to
    operand: Operand = Operand(FP32)  # operands of the forward matmul
    grad: Format = FP32  # gradients of activations
    grad_operand: Operand = Operand(FP32)  # the incoming gradient as an operand of the backward matmuls
    grad_weight: Format = FP32
    matmul: Accumulator = Accumulator()
    norm: Format = FP32
    softmax: Format = FP32
    loss: Format = FP32
    rope: Format = FP32
    emulate: bool = False

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats that matmuls run in, each once."""
        return tuple(dict.fromkeys([self.compute, self.operand.format, self.grad, self.grad_operand.format]))

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """The operands of the forward matmul, and the gradient in the backward ones."""
        return self.operand, self.grad_operand

    @property
    def narrow(self) -> bool:
        """Whether a matmul has an operand that is narrower than the activations, with its own scale."""
        return any(is_narrow(operand.format) for operand in self.operands)

    @property
    def measured(self) -> bool:
        """Whether the operands are narrow only if that makes the layer faster."""
        return any(operand.measured for operand in self.operands)

    @property
    def delayed(self) -> bool:
        """Whether a narrow operand is scaled by the amax of earlier updates."""
        return any(operand.amax == "delayed" for operand in self.operands)

    @property
    def kept_bits(self) -> int:
        """The bits of mantissa that are left of a narrow incoming gradient; 0 if it is wide, or emulated.

        A loss rounds the gradient of such a layer's logits to these, stochastically (torch/loss/fp8.py).
        """
        fmt = self.grad_operand.format
        return fmt.mantissa_bits if is_narrow(fmt) and not self.emulate else 0

    @classmethod
    def in_format(cls, fmt: Format) -> "Precision":
        """Returns activations, their gradients and matmul operands in one format, everything else in fp32."""
        return cls(compute=fmt, operand=Operand(fmt), grad=fmt, grad_operand=Operand(fmt))

    def widened(self) -> "Precision":
        """Returns the same with operands in the formats of the activations and of their gradients."""
        return replace(self, operand=Operand(self.compute), grad_operand=Operand(self.grad))


def operand_formats(policy: Policy) -> list[Format]:
    """Returns the formats that matmuls multiply under a policy and its rules, each once."""
    ruled = [value for rule in policy.rules for _, value in rule.changes if isinstance(value, Operand)]
    return list(dict.fromkeys(operand.format for operand in (policy.compute, policy.grad, *ruled)))


def precisions(policy: Policy, names: Sequence[str]) -> dict[str, Precision]:
    """Returns the formats at each of a model's names; a rule that matches none, or a tie, is an error."""
    return precisions_of(policy, policy.resolve(names))


def precisions_of(policy: Policy, values: Mapping[str, Resolved]) -> dict[str, Precision]:
    """Returns the formats at each name, from what the policy's rules say there."""
    return {name: _precision(policy, resolved) for name, resolved in values.items()}


def base_precision(policy: Policy) -> Precision:
    """Returns the formats where no rule applies."""
    return _precision(policy, Resolved(policy.roles(), {}))


def _precision(policy: Policy, resolved: Resolved) -> Precision:
    values = resolved.values
    operand, grad = cast(Operand, values["compute"]), cast(Operand, values["grad"])
    return Precision(
        compute=policy.compute.format if is_narrow(operand.format) else operand.format,
        operand=operand,
        grad=policy.grad.format if is_narrow(grad.format) else grad.format,
        grad_operand=grad,
        grad_weight=cast(Format, values["grad_weight"]),
        matmul=cast(Accumulator, values["matmul"]),
        norm=cast(Format, values["norm"]),
        softmax=cast(Format, values["softmax"]),
        loss=policy.loss,
        rope=policy.rope,
        emulate=policy.emulate,
    )
