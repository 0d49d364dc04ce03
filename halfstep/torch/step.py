"""One update: accumulate, is it finite?, unscale, clip, step, rescale.

With S the scale, w_i the weight (tokens) of micro-batch i, l_i its mean loss and g_i the gradient of l_i, the
gradient of the mean over all tokens is sum_i w_i g_i / sum_i w_i. The total is known only after the last
micro-batch, and summing un-normalized losses would multiply fp16 gradients by thousands. So each micro-batch
is weighted against the first,

    accumulated  G = sum_i (w_i / w_1) S g_i              in the accumulate format, fp32
    gradient       = G * inv_scale * w_1 / sum_i w_i      unscaled with the S that was used

then clipped to `clip_norm`, then handed to the optimizers. One norm of G serves the finite check and the
clipping: it is finite exactly if every gradient is and none is beyond 1.8e19, which no step survives.

Nothing here reads a number from the device: losses, norms, scales and flags are device scalars until someone
asks. A step that is not finite changes nothing but the scale, under every policy.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.core.policy import Policy
from halfstep.core.scaling import ScaleState
from halfstep.torch.dtypes import dtype_of
from halfstep.torch.optim import Optimizer

Loss = Tensor | tuple[Tensor, Tensor | float]


@dataclass(frozen=True)
class StepResult:
    """What one update did, as device scalars: reading one waits for the device."""

    loss: Tensor  # mean over the tokens of all micro-batches
    skipped: Tensor  # bool: the gradients were not finite
    scale: Tensor  # the scale that was used
    grad_norm: Tensor  # after unscaling, before clipping
    stuck: Tensor  # bool: not finite, and the scale is at its floor


class Run:
    """A model, its optimizers and a policy: what training one step needs."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy, clip_norm: float = 0.0):
        self.model = model
        self.optimizers = list(optimizers)
        self.policy = policy
        self.clip_norm = clip_norm
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.scale_state = self._scalars(policy.scale.init())
        self.applied = torch.zeros((), dtype=torch.int32, device=self.device)  # updates that were not skipped
        self._accumulate = dtype_of(policy.accumulate)
        self._first_weight: Tensor | float | None = None
        self._weights: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0
        self._sums: dict[Tensor, Tensor] = {}
        self._reset()

    def step(self, loss_fn: Callable[[Any], Loss], micro_batches: Iterable[Any]) -> StepResult:
        """One update from micro-batches; `loss_fn` gives a mean loss, or (sum of losses, number of tokens)."""
        for batch in micro_batches:
            given = loss_fn(batch)
            if isinstance(given, tuple):
                total, weight = given
                self.backward(total / weight, weight=weight)
            else:
                self.backward(given)
        return self.update()

    def backward(self, loss: Tensor, *, weight: Tensor | float = 1.0) -> None:
        """Adds the gradient of a micro-batch's mean loss; `weight` is its number of tokens."""
        if self._first_weight is None:
            self._first_weight = weight
        share = weight / self._first_weight  # a number stays a number: putting it on the device would wait
        (loss.float() * (share * self.scale_state.scale)).backward()
        self._weights = self._weights + share
        self._loss = self._loss + share * loss.detach().float()
        self._fold()

    @torch.no_grad()
    def update(self) -> StepResult:
        """Finite? -> unscale -> clip -> step -> rescale. The accumulated gradients are used up."""
        if self._first_weight is None:
            raise HalfstepError(
                "there are no gradients to update with", hint="call backward() or step() before update()"
            )
        grads = self._gradients()
        scaled_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()))).float())
        finite = torch.isfinite(scaled_norm)
        used = self.scale_state.scale
        verdict = self.policy.scale.judge(self.scale_state, finite, torch)
        factor = verdict.inv_scale / self._weights
        norm = scaled_norm * factor
        if self.clip_norm:
            factor = factor * (self.clip_norm / norm).clamp(max=1.0)
        torch._foreach_mul_(list(grads.values()), factor)
        found_inf = 1 - finite.float()
        for optimizer in self.optimizers:
            optimizer.step(grads=grads, found_inf=found_inf)
        self.scale_state = verdict.state
        self.applied += finite.to(torch.int32)
        loss = torch.as_tensor(self._loss) / self._weights
        result = StepResult(loss, ~finite, used, norm, verdict.state.stuck)
        self._reset()
        return result

    def check(self, result: StepResult) -> None:
        """Stops a run that no scale can save. Reads from the device."""
        if bool(result.stuck):
            raise ScalingError(
                f"gradients are not finite although the loss scale is at its floor, {float(result.scale):g}",
                hint="the forward pass overflows: use bf16, or give the layers that do `compute=fp32` by a rule",
            )

    def _fold(self) -> None:
        """Moves gradients that are in another format than `accumulate` into sums that are in it."""
        for p in self.parameters:
            if p.grad is not None and p.grad.dtype != self._accumulate:
                wide = p.grad.to(self._accumulate)
                held = self._sums.get(p)
                self._sums[p] = wide if held is None else held.add_(wide)
                p.grad = None

    def _gradients(self) -> dict[Tensor, Tensor]:
        """The sum of each parameter that has one: autograd's own, or ours where that would be too narrow."""
        own: dict[Tensor, Tensor] = {p: p.grad for p in self.parameters if p.grad is not None}
        return {**own, **self._sums}

    def _reset(self) -> None:
        for p in self.parameters:
            p.grad = None
        self._sums = {}
        self._first_weight, self._weights, self._loss = None, 0.0, 0.0

    def _scalars(self, state: ScaleState) -> ScaleState:
        dtypes = (torch.float32, torch.int32, torch.int32, torch.bool)
        made = (torch.tensor(v, dtype=d, device=self.device) for v, d in zip(state, dtypes, strict=True))
        return ScaleState(*made)
