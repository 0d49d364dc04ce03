"""One update: accumulate, is it finite?, unscale, clip, step, rescale.

    backward        accumulate: the sum over micro-batches, times the scale S, weighted by their tokens
    update          is the norm of the sum finite? -> unscale with the S that was used -> clip to `clip_norm` ->
                    step every optimizer -> move the scale

One norm of the sum serves the finite check and the clipping (core/scaling.py). Nothing here reads a number from
the device, except drivers of optimizers that cannot skip there. A step that is not finite changes the scale alone:
no parameter, state or running statistic. One with a loss that is not finite, and gradients that are, does not even
change the scale.

The engine knows no instrument. What watches a run is its `watching` and is called around each backward
pass and each update.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.core.errors import BatchError, HalfstepError, RunStateError
from halfstep.core.formats import FP32
from halfstep.core.refusal import call_error, no_batches_error, step_error
from halfstep.core.scaling import DynamicScale, NoScale
from halfstep.torch.convert.apply import set_precision
from halfstep.torch.convert.resolve import resolve
from halfstep.torch.numerics.shards import local_parts
from halfstep.torch.optim.adamw import Grads
from halfstep.torch.optim.drivers import check_given
from halfstep.torch.parallel.ranks import agree, largest, num_ranks
from halfstep.torch.update.accumulation import check_pair, check_weight, divisor, mark_last, mean_loss, times
from halfstep.torch.update.graph import StepGraph
from halfstep.torch.update.own_steps import OwnSteps
from halfstep.torch.update.parts import RunParts, device_of

# loss_fn(batch) -> the mean loss, or (the sum of losses, the number of tokens)
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFn = Callable[[Any], Loss]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# What the model holds inside a block.
WHOLE, AVERAGES = "whole masters, inside run.edit()", "its averages, inside run.averaged()"


@dataclass(frozen=True)
class StepResult:
    """What one update did, in device scalars: reading one waits for the device."""

    loss: Tensor  # mean over the tokens of all micro-batches
    skipped: Tensor  # bool: a gradient or a loss was not finite
    scale: Tensor  # the scale that was used
    grad_norm: Tensor  # after unscaling, before clipping
    stuck: Tensor  # bool: not finite, and the scale is at its floor
    bad_rank: Tensor | None = None  # of several processes, the first whose own loss is not finite; -1 if all are


class Engine(RunParts):
    """What makes updates: a model, its optimizers and a policy."""

    def __init__(self, *parts: Any, graph: bool = False, **options: Any):
        super().__init__(*parts, **options)
        self.graph = StepGraph(self, self._plain_step) if graph else None
        self._open = True
        self._holds = ""  # what the model holds for a while, if not its masters as the policy says
        self._last: tuple[LossFn, list[Any]] | None = None
        self.forget()

    def attach(self, optimizers: Optimizers) -> Self:
        """Gives a run that was prepared without optimizers those that it trains with; returns the run.

        They are made from the prepared model's parameters, after it was moved to its device. The result is the
        same, bit for bit, as if `prepare` had taken them.
        """
        self._check_open()
        if self.optimizers:
            raise RunStateError(
                "the run has its optimizers already", hint="run.unprepare(), then prepare the model with others"
            )
        self.attach_optimizers(check_given(optimizers, self.model, resolve(self.model, self.policy)))
        self.forget()
        return self

    def step(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> StepResult:
        """Makes one update from micro-batches; `loss_fn` returns a mean loss, or (sum of losses, num tokens)."""
        self._check_trains()
        if isinstance(micro_batches, Tensor | dict | np.ndarray) or not callable(loss_fn):
            cast = "torch.from_numpy" if isinstance(micro_batches, np.ndarray) else ""
            raise step_error(loss_fn, micro_batches, cast)
        if self.graph is None:
            return self._plain_step(loss_fn, micro_batches)
        batches = list(micro_batches)
        result, replayed = self.graph.step(loss_fn, batches)
        if replayed:  # a replay runs none of the Python of a step
            self.skipped = result.skipped
            self._last = (loss_fn, batches) if isinstance(self.policy.scale, DynamicScale) else None
            if self.scale_watch is not None:
                self.scale_watch.look(result.scale)
        return result

    def _plain_step(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> StepResult:
        """Makes the update by launching all of it, which a CUDA graph captures."""
        self.buffers.remember()
        self.user_gradients.detach()
        # Only a dynamic scale has a floor, at which `check` runs the step again.
        kept: list[Any] = []
        self._last = (loss_fn, kept) if isinstance(self.policy.scale, DynamicScale) else None
        has_peers, batch, last = self.sharded is not None or num_ranks() > 1, None, False
        try:
            self.make_casts()
            for batch, last in mark_last(micro_batches):
                if self._last is not None:
                    kept.append(batch)
                if has_peers:
                    self.set_grad_sync(last)
                sums = self.sharded or self.accumulation
                with sums.without_strays():
                    given = loss_fn(batch)
                if last:
                    self.weight_casts.drop()  # before the backward pass, which frees them one by one
                weight: Tensor | float | None = None
                if isinstance(given, tuple):
                    total, weight = check_pair(given)
                    given = total / divisor(weight)
                self._accumulate(given, weight, last=last)
            if not last:
                raise no_batches_error()
            return self.update()
        except BaseException as error:
            begun = self.accumulation.begun
            self.forget()  # half a sum must not become part of the next
            if isinstance(error, Exception):
                self.masters.check_writes()  # a parameter that was written, moved or resized is the reason
                self.check_parameters()
                explained: HalfstepError | None = _device_error(error, batch, self.device)
                if not begun and not isinstance(error, torch.OutOfMemoryError):
                    explained = explained or call_error(error, loss_fn, micro_batches, Tensor)
                if explained is not None:
                    raise explained from error
            raise
        finally:
            self.drop_casts()
            if has_peers:
                self.set_grad_sync(True)

    def backward(
        self,
        loss: Tensor,
        *,
        weight: Tensor | float | None = None,
        last: bool = True,
        normalized: bool = False,
        retain_graph: bool = False,
    ) -> None:
        """Adds the gradient of a micro-batch's mean loss; `weight` is its number of tokens, if it is not the same.

        `last` is False on all micro-batches of an update but the last: replicas exchange gradients once.
        `normalized` says that each loss is already its share of the update's loss, such as a sum over tokens
        divided by the tokens of all micro-batches: gradients are summed, and divided by nothing. `retain_graph` is
        that of `Tensor.backward`.
        """
        self._check_trains()
        if self.graph is not None:
            raise RunStateError(
                "a run with graph=True makes whole steps, and backward() is part of one",
                hint="run.step(loss_fn, micro_batches), or prepare(..., graph=False)",
            )
        weight = None if weight is None else check_weight(weight)
        self.user_gradients.detach()
        if self.sharded is not None:  # DDP knows since the forward pass, by its no_sync()
            self.sharded.set_grad_sync(last)
        elif self.policy.reduce != FP32:
            self.wrappers()
        self._accumulate(loss, weight, last=last, normalized=normalized, retain_graph=retain_graph)
        self.user_gradients.publish(self.parameters, last=last)

    def _accumulate(self, loss: Tensor, weight: Tensor | float | None, *, last: bool, **options: bool) -> None:
        """Runs the backward pass of a micro-batch, whose weight was checked."""
        if self.watching is not None:
            self.watching.before_backward()
        scale = self.scale_state.scale
        self.accumulation.add(loss, weight, scale, self.parameters, last=last, **options)
        if self.watching is not None:
            self.watching.after_backward()

    def unscale(self) -> None:
        """Makes each `p.grad` the gradient of the mean loss, to clip, measure or change it before `update`.

        Call it after the last `backward`. Until then they are sums over micro-batches, times the loss scale.
        """
        self._check_trains()
        self.user_gradients.unscale(self.parameters, self._inv_scale(), self._norm_of)

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Returns the norm of the gradient of the mean loss, after the last `backward` and before clipping.

        `update` takes it from here: asking for it costs no second pass over the gradients.
        """
        self._check_trains()
        grads, weights = self.user_gradients.collect(self.parameters), self.accumulation.weights
        norm = self._norm_of(grads)
        self.user_gradients.note_norm(norm, grads)
        if num_ranks() > 1:
            norm, weights, *_ = agree(norm, self.num_copies, weights, 0.0)
        return norm if self.user_gradients.finite is not None else times(norm, self._inv_scale() / weights)

    def _inv_scale(self) -> Tensor | float:
        """Returns what undoes the loss scale: the number 1 without one, which costs no launch."""
        return 1.0 if isinstance(self.policy.scale, NoScale) else 1.0 / self.scale_state.scale

    def _norm_of(self, grads: Grads) -> Tensor:
        """Returns the norm of gradients; of those that are sharded, of what this rank has."""
        values = [*grads.values()]
        return self._norm(local_parts(values) if self.num_copies else values)

    @torch.no_grad()
    def update(self) -> StepResult:
        """Updates the parameters and uses up the gradients: finite? -> unscale -> clip -> step -> rescale."""
        self._check_trains()
        self.host_watch.mark()
        self.check_parameters()
        self.masters.check_writes()
        grads, weights = self.user_gradients.collect(self.parameters), self.accumulation.weights
        for driver in self.drivers:
            driver.check(grads)  # before the first of them has moved anything
        known = self.user_gradients.known_norm(grads)
        scaled_norm = self._norm_of(grads) if known is None else known
        losses: Tensor | float = self.accumulation.losses
        bad_rank: Tensor | None = None
        if num_ranks() > 1:
            scaled_norm, weights, losses, bad_rank = agree(scaled_norm, self.num_copies, weights, losses)
        # Weights that are on the device may all be zero.
        judged = scaled_norm / weights if isinstance(weights, Tensor) else scaled_norm
        if self.user_gradients.finite is not None:
            judged = torch.where(self.user_gradients.finite, judged, math.inf)
        used, inv_scale = self.scale_state.scale, 1.0
        if not isinstance(self.policy.scale, NoScale):
            inv_scale, self.scale_state = self.policy.scale.judge(self.scale_state, judged < math.inf, torch)
        finite = torch.add(judged, losses, alpha=0) < math.inf  # zero times a loss that is not finite is NaN
        skipped = ~finite
        factor = inv_scale / weights if self.user_gradients.finite is None else 1.0
        norm = times(scaled_norm, factor)
        if self.watching is not None:
            self.watching.before_update(grads, factor)
        if self.clip_norm:
            factor = times((self.clip_norm / norm).clamp(max=1.0), factor)
        elif not isinstance(factor, Tensor):
            factor = torch.full((), factor, device=self.device)
        found_inf = skipped.float()
        self.host_watch.look()
        for driver in self.drivers:
            driver.step(grads, factor, found_inf, self.num_applied)
        if self.watching is not None:
            self.watching.after_update(finite)
        self.num_applied += finite
        self.buffers.restore_unless(finite)
        if self.amaxes is not None:
            if num_ranks() > 1:
                largest(self.amaxes.pending)
            self.amaxes.update(finite)
        if self.averages is not None:
            self.averages.update(finite.float())
        loss = mean_loss(losses, weights)
        result = StepResult(loss, skipped, used, norm, self.scale_state.stuck, bad_rank)
        self.skipped = result.skipped
        self.forget()
        if self.scale_watch is not None:
            self.scale_watch.look(used)
        return result

    @contextmanager
    def evaluation(self, names: Sequence[str] | None = None) -> Iterator[None]:
        """Inside, the model computes as the policy's `eval` role says. It calls neither eval() nor no_grad().

        `names` are the modules that rules may match; all by default.
        """
        if self._holds != AVERAGES:  # averages may be evaluated as well: formats and masters are two things
            self._check_open()
        if not self.optimizers:
            self.move_to(device_of(self.model))
        evaluated = self.policy.evaluation()
        if evaluated == self.policy:
            yield
            return
        set_precision(self.model, evaluated, names)
        try:
            self._reshard()
            yield
        finally:
            set_precision(self.model, self.policy, names, self.conversion.measured)
            self._reshard()

    def _reshard(self) -> None:
        if self.sharded is not None:
            self.sharded.reshard()

    def watch_optimizers(self) -> None:
        """Hooks what users may do to optimizers themselves, steps included."""
        super().watch_optimizers()
        self.hooks += OwnSteps(self).hooks()

    def _check_trains(self) -> None:
        self._check_open()
        if not self.optimizers:
            raise RunStateError(
                "the run has no optimizers: its model can be evaluated, and not trained",
                hint="run.attach(optimizers), made from model.parameters(); run.weights() returns its masters",
            )

    def _check_open(self) -> None:
        if not self._open:
            raise RunStateError("the run has ended: its model was given back", hint="prepare the model again")
        if self._holds:
            raise RunStateError(f"the model holds {self._holds}, now", hint="leave that block first")


def _device_error(error: Exception, batch: Any, device: torch.device) -> BatchError | None:
    """Returns the error behind one of torch's about devices, if the batch is elsewhere than the model."""
    others = {str(x.device) for x in tree_leaves(batch) if isinstance(x, Tensor)} - {str(device)}
    if not others or not isinstance(error, RuntimeError) or "device" not in str(error):
        return None
    return BatchError(
        f"a micro-batch has tensors on {', '.join(sorted(others))}, and the model is on {device}",
        hint=f'move them first: x, y = x.to("{device}"), y.to("{device}")',
    )
