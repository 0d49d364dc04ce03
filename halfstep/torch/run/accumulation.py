"""The sum of gradients over the micro-batches of one update.

With S the scale, w_i the weight (tokens) of micro-batch i, l_i its mean loss and g_i the gradient of l_i, the
gradient of the mean over all tokens is sum_i w_i g_i / sum_i w_i. The total is known only after the last
micro-batch, and summing un-normalized losses would multiply fp16 gradients by thousands. So each micro-batch
is weighted against the first,

    accumulated  G = sum_i (w_i / w_1) S g_i              in the accumulate format, fp32
    gradient       = G * inv_scale * w_1 / sum_i w_i      unscaled with the S that was used

autograd sums in the dtype of the parameter. Where that is not the accumulate format, each gradient is taken from
it after its backward pass and added to a sum of ours: a bf16 sum of 256 and ones stays at 256. Gradients that are
wider than their parameter (split.py) are taken away as well: torch.compile refuses a parameter that has one.

Sparse gradients stay sparse; their norm and their factor are those of their values, once the entries of a row that
was looked up twice are summed. That waits for the device, as torch's sparse optimizers do themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.policy import Policy
from halfstep.torch.dtypes import dtype_of

# The dtypes that a policy casts; parameters of others (float64, complex) keep their own gradients.
CAST = (torch.float32, torch.bfloat16, torch.float16)


class Gradients:
    """What `backward` adds to and `update` uses up."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.format = dtype_of(policy.accumulate)
        self._shapes: dict[Tensor, torch.Size] = {}  # of the model's parameters, as they were at first
        self._strange: list[Tensor] = []  # parameters that the model had not then, and that had a gradient
        self.clear([])

    def clear(self, parameters: Sequence[Tensor]) -> None:
        """Forgets everything, autograd's own gradients too. `parameters` are all that the model has."""
        if not self._shapes:
            self._shapes = {p: p.shape for p in parameters}
        for p in parameters:
            if p.grad is not None and p not in self._shapes:
                self._strange.append(p)
            p.grad = None
        self._sums: dict[Tensor, Tensor] = {}
        self._first_weight: Tensor | float | None = None
        self._complete = True
        self.weights: Tensor | float = 0.0  # summed, over the first
        self.losses: Tensor | float = 0.0  # summed, weighted alike

    def add(
        self, loss: Tensor, weight: Tensor | float, scale: Tensor, parameters: Sequence[Tensor], *, last: bool
    ) -> None:
        """Adds the gradient of a micro-batch's mean loss, times the scale."""
        loss = self._checked(loss)
        weight = _checked_weight(weight)
        self._complete = last
        if not isinstance(weight, Tensor) and not weight > 0.0:
            if weight == 0.0:
                return  # no tokens, no gradient
            raise HalfstepError(f"weight={weight!r}: a number of tokens is not negative", hint="0 adds nothing")
        if self._first_weight is None:
            self._first_weight = divisor(weight)
            for p in parameters:
                p.grad = None  # left by a backward pass that was not this run's, at a scale that nobody knows
        share = weight / self._first_weight  # a number stays a number: putting it on the device would wait
        (loss.float() * (share * scale)).backward()
        self.weights = self.weights + share
        self.losses = self.losses + share * loss.detach().float()
        taken: dict[Tensor, Tensor] = {}
        for p in parameters:
            if p.grad is not None and p.dtype in CAST and not p.grad.dtype == p.dtype == self.format:
                taken[p] = p.grad.to(self.format)
                p.grad = None
        again = [p for p in taken if p in self._sums]
        if again:
            torch._foreach_add_([self._sums[p] for p in again], [taken[p] for p in again])
        self._sums = taken | self._sums

    def of(self, parameters: Sequence[Tensor], model: nn.Module) -> dict[Tensor, Tensor]:
        """The sum of each parameter that has one: autograd's own, or ours where that would be too narrow."""
        if self._first_weight is None:
            raise HalfstepError(
                "there are no gradients to update with", hint="call backward() or step() before update()"
            )
        if not self._complete:
            raise HalfstepError(
                "the last micro-batch was handed over with last=False", hint="give it backward(loss, last=True)"
            )
        found: dict[Tensor, Tensor] = {}
        for p in parameters:
            grad = self._sums.get(p, p.grad)
            if grad is not None:
                found[p] = grad.coalesce() if grad.is_sparse else grad
        if not found and set(parameters).isdisjoint(model.parameters()):
            raise HalfstepError(
                "the model holds none of the parameters that it was prepared with: they were replaced since, "
                "as FSDP's fully_shard does",
                hint="FSDP is not implemented yet; DDP(model) keeps parameters, and takes `bf16-mixed`",
            )
        self._check_unchanged(parameters, model)
        if not found:
            raise HalfstepError(
                "no parameter of the optimizers has a gradient",
                hint="the loss does not depend on them, or they are frozen",
            )
        return found

    def _check_unchanged(self, parameters: Sequence[Tensor], model: nn.Module) -> None:
        """Refuses parameters that were resized or came with a module that is new, before anything is updated.

        Moments have the shape from before, and fused kernels go through memory by the one or the other.
        """
        changed = [p for p in parameters if p.shape != self._shapes.get(p, p.shape)]
        if any(p.grad is None and p not in self._sums for p in parameters):  # another may be in its place
            self._strange += [p for p in model.parameters() if p.grad is not None and p not in self._shapes]
        if not changed and not self._strange:
            return
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        again = "run.unprepare(), change the model, make its optimizer anew, and prepare both"
        if changed:
            told = f"had the shape {tuple(self._shapes[changed[0]])} when the model was prepared"
            raise HalfstepError(
                f"`{names.get(changed[0], 'a parameter')}` {told}, and has {tuple(changed[0].shape)} now",
                hint=again,
            )
        self._strange, strange = [], self._strange
        if left := [names[p] for p in strange if p in names]:
            raise HalfstepError(
                f"`{left[0]}` was not there when the model was prepared, and is not trained "
                f"({len(left)} such parameters)",
                hint=again,
            )

    def _checked(self, loss: Tensor) -> Tensor:
        if not isinstance(loss, Tensor):
            raise HalfstepError(
                f"the loss is a {type(loss).__name__}; it must be a tensor of one number",
                hint="give the mean loss, or (the sum of losses, the number of tokens)",
            )
        if loss.numel() != 1 or not loss.requires_grad:
            told = f"has the shape {tuple(loss.shape)}" if loss.numel() != 1 else "needs no gradient"
            raise HalfstepError(
                f"the loss {told}; it must be one number that depends on parameters",
                hint="take its mean, or give (sum, count); compute it outside of no_grad()",
            )
        wanted = torch.float32 if self.policy.emulate else dtype_of(self.policy.loss)
        if loss.dtype.itemsize < wanted.itemsize:
            raise PolicyError(
                f"the loss came out in {loss.dtype}, and the policy says loss={self.policy.loss}",
                hint="widen what it is computed from, as F.cross_entropy(logits.float(), targets); a "
                "CrossEntropyLoss that a compiled forward makes is out of reach: take it of the logits outside",
            )
        return loss.reshape(())


def checked_pair(given: tuple[Any, ...]) -> tuple[Tensor, Tensor | float]:
    """What a loss function gave, as (the sum of losses, the number of tokens)."""
    if len(given) != 2 or not isinstance(given[0], Tensor):
        kinds = ", ".join(type(item).__name__ for item in given)
        raise HalfstepError(
            f"the loss function gave ({kinds}); a tuple is (the sum of losses, the number of tokens)",
            hint="give the mean loss alone, and keep what else there is elsewhere",
        )
    return given[0], _checked_weight(given[1])


def _checked_weight(weight: Any) -> Tensor | float:
    """A number of tokens: a number, or a tensor of one on the device."""
    if isinstance(weight, Tensor):
        if weight.numel() == 1 and not weight.is_complex():
            return weight.detach().reshape(())
    elif isinstance(weight, int | float) and weight == weight:
        return weight
    told = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    raise HalfstepError(
        f"weight={told}: a number of tokens is one number", hint="as targets.numel(), or (y >= 0).sum()"
    )


def divisor(weight: Tensor | float) -> Tensor | float:
    """A weight to divide by: 1 where it is zero, because then there is nothing to divide."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight, 1)
    return weight or 1.0


def values_of(grad: Tensor) -> Tensor:
    """The numbers of a gradient, as real ones: the norm and the factor are theirs."""
    grad = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(grad) if grad.is_complex() else grad
