"""One update: accumulate, is it finite?, unscale, clip, step, rescale.

    backward        accumulate: the sum over micro-batches, times the scale S, weighted by their tokens
    update          is the norm of the sum finite? -> unscale with the S that was used -> clip to `clip_norm` ->
                    step every optimizer -> move the scale

One norm of the sum serves the finite check and the clipping: it is finite exactly if every gradient is and none is
beyond 1.8e19, which no step survives. Nothing here reads a number from the device, except drivers of optimizers
that cannot skip there. A step that is not finite changes the scale alone: no parameter, state or running
statistic.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.audit.cause import Cause
from halfstep.core.audit.engine import check as check_rules
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.reached import Reached
from halfstep.core.choice import Choice
from halfstep.core.compare.shadow import Shadow
from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.core.formats import FP32
from halfstep.core.measure import TOKENS, settle
from halfstep.core.observed import SLICE
from halfstep.core.policy import Policy
from halfstep.core.precision import base_precision, precisions
from halfstep.core.refusal import step_error
from halfstep.core.scaling import DynamicScale, NoScale, way_out
from halfstep.torch import state
from halfstep.torch.apply import apply, names_of, restore, set_precision
from halfstep.torch.convert.plan import check_model
from halfstep.torch.dtypes import describe, home
from halfstep.torch.graph import StepGraph, check_graph, why_not_with
from halfstep.torch.observe.slots import unwatch
from halfstep.torch.optim.adamw import Grads, Optimizer
from halfstep.torch.parallel.ranks import agree, in_group, largest, leave_to_us, num_ranks
from halfstep.torch.run import nonfinite
from halfstep.torch.run.accumulation import checked_pair, checked_weight, divisor, mean_loss, times, with_last
from halfstep.torch.run.audit import record_of
from halfstep.torch.run.change import Kept, check_changed
from halfstep.torch.run.checks import (
    check_given,
    check_settings,
    device_of,
    measured_choice,
    policy_of,
)
from halfstep.torch.run.edit import edited
from halfstep.torch.run.from_amp import State, take_over
from halfstep.torch.run.monitor import Monitor
from halfstep.torch.run.own_steps import OwnSteps
from halfstep.torch.run.parts import RunParts
from halfstep.torch.run.reached import record
from halfstep.torch.run.shadow import shadow
from halfstep.torch.run.summary import summarize
from halfstep.torch.run.switches import check_fp32
from halfstep.torch.shards import local
from halfstep.torch.split.parameter import copying_run

# loss_fn(batch) -> the mean loss, or (the sum of losses, the number of tokens)
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFn = Callable[[Any], Loss]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# What the model holds inside a block.
_WHOLE, _AVERAGES = "whole masters, inside run.edit()", "its averages, inside run.averaged()"


@dataclass(frozen=True)
class StepResult:
    """What one update did, in device scalars: reading one waits for the device."""

    loss: Tensor  # mean over the tokens of all micro-batches
    skipped: Tensor  # bool: the gradients were not finite
    scale: Tensor  # the scale that was used
    grad_norm: Tensor  # after unscaling, before clipping
    stuck: Tensor  # bool: not finite, and the scale is at its floor
    bad_rank: Tensor | None = None  # of several processes, the first whose own loss is not finite; -1 if all are


def prepare(
    model: nn.Module,
    optimizer: Optimizers | Policy | str | None = None,
    policy: Policy | str | None = None,
    *,
    clip_norm: float = 0.0,
    seed: int = 0,
    ema: float = 0.0,
    tokens: int = TOKENS,
    memory: str = "fast",
    graph: bool = False,
) -> "Run":
    """Applies a policy to any model and any torch optimizers, in place; `Run.unprepare` undoes it.

    `prepare(model, policy)` takes the model alone: it can be evaluated, and `Run.attach` gives it optimizers when
    they exist. `prepare(model, optimizer, policy)` does both at once.

    Load weights and move the model to its device first, and create the optimizers that are given here; compile
    and wrap (DDP) after.
    Existing gradients are dropped: their scale is unknown. `seed` is for stochastic rounding; all replicas must
    use the same one. `ema` is the decay of an average of the masters, 0 for none. The policy `auto` is measured,
    as for a recipe; `run.choice` has the answer and its reason. `tokens` is the size of a micro-batch, for `auto`
    and for layers that are timed because rules say `measured`. With the memory `lean`, the backward pass computes
    norms and activation functions again instead of keeping their results, compiled or not. `graph` makes
    each `run.step` one CUDA graph: at small batches the host would be the limit. The bits are the same; what
    cannot be captured is refused.
    """
    check_settings(clip_norm, seed, ema, tokens)
    given, named = policy_of(optimizer, policy)
    check_model(model, empty=given is None)
    policy, choice, note = settle(named, lambda: measured_choice(model, tokens), describe(home(device_of(model))))
    optimizers = [] if given is None else check_given(given, model, policy)
    check_fp32([base_precision(policy), *precisions(policy, names_of(model, None)).values()])
    if graph and given is not None:  # else at the first step
        check_graph(why_not_with(device_of(model), optimizers))
    for p in model.parameters():
        p.grad = None
    later = given is None and (in_group() or device_of(model).type == "meta")  # to be sharded, or filled, first
    conversion = apply(model, policy, tokens=tokens, split=not later, memory=memory)
    leave_to_us(model, conversion.summed_here())
    options: dict[str, Any] = {"conversion": conversion, "seed": seed, "ema": ema}
    options |= {"choice": choice, "note": note, "warns": True, "graph": graph}
    return Run(model, optimizers, policy, clip_norm, **options)


class Run(RunParts):
    """A model, its optimizers and a policy: everything that a training step needs."""

    def __init__(self, *parts: Any, graph: bool = False, **options: Any):
        super().__init__(*parts, **options)
        self.graph = StepGraph(self, self._plain_step) if graph else None
        self._open = True
        self._holds = ""  # what the model holds for a while, if not its masters as the policy says
        self._last: tuple[LossFn, list[Any]] | None = None
        self.forget()

    def attach(self, optimizers: Optimizers) -> "Run":
        """Gives a run that was prepared without optimizers those that it trains with; returns the run.

        They are made from the prepared model's parameters, after it was moved to its device. The result is the
        same, bit for bit, as if `prepare` had taken them.
        """
        self._check_open()
        if self.optimizers:
            raise HalfstepError(
                "the run has its optimizers already", hint="run.unprepare(), then prepare the model with others"
            )
        self.take(check_given(optimizers, self.model, self.policy))
        self.forget()
        return self

    def step(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> StepResult:
        """Makes one update from micro-batches; `loss_fn` returns a mean loss, or (sum of losses, num tokens)."""
        self._check_trains()
        if isinstance(micro_batches, Tensor | dict) or not callable(loss_fn):
            raise step_error(loss_fn, micro_batches)
        if self.graph is None:
            return self._plain_step(loss_fn, micro_batches)
        batches = list(micro_batches)
        result, replayed = self.graph.step(loss_fn, batches)
        if replayed:  # what Python does in a step
            self.skipped = result.skipped
            self._last = (loss_fn, batches) if isinstance(self.policy.scale, DynamicScale) else None
            if self.scale_watch is not None:
                self.scale_watch.look(result.scale)
        return result

    def _plain_step(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> StepResult:
        """Makes the update by launching all of it, which a CUDA graph captures."""
        self.buffers.remember()
        self.shown.hide()
        # Only a dynamic scale has a floor, at which `check` runs the step again.
        kept: list[Any] = []
        self._last = (loss_fn, kept) if isinstance(self.policy.scale, DynamicScale) else None
        try:
            self.make_casts()
            for batch, last in with_last(micro_batches):
                if self._last is not None:
                    kept.append(batch)
                self.exchange(last)
                given = loss_fn(batch)
                if last:
                    self.weight_casts.drop()  # before the backward pass, which frees them one by one
                weight: Tensor | float | None = None
                if isinstance(given, tuple):
                    total, weight = checked_pair(given)
                    given = total / divisor(weight)
                with self._watched():
                    self.accumulation.add(given, weight, self.scale_state.scale, self.parameters, last=last)
            return self.update()
        except BaseException as error:
            self.forget()  # half a sum must not become part of the next
            if isinstance(error, Exception):
                self.masters.check_writes()  # a parameter that was resized is the reason, not where it failed
            raise
        finally:
            self.drop_casts()
            self.exchange(True)

    def backward(
        self, loss: Tensor, *, weight: Tensor | float | None = None, last: bool = True, normalized: bool = False
    ) -> None:
        """Adds the gradient of a micro-batch's mean loss; `weight` is its number of tokens, if it is not the same.

        `last` is False on all micro-batches of an update but the last: replicas exchange gradients once.
        `normalized` says that each loss is already its share of the update's loss, such as a sum over tokens
        divided by the tokens of all micro-batches: gradients are summed, and divided by nothing.
        """
        self._check_trains()
        if self.graph is not None:
            raise HalfstepError(
                "a run with graph=True makes whole steps, and backward() is part of one",
                hint="run.step(loss_fn, micro_batches), or prepare(..., graph=False)",
            )
        weight = None if weight is None else checked_weight(weight)
        self.shown.hide()
        scale = self.scale_state.scale
        if self.sharded is not None:  # DDP knows since the forward pass, by its no_sync()
            self.sharded.exchange(last)
        elif self.policy.reduce != FP32:
            self.wrappers()
        with self._watched():
            self.accumulation.add(loss, weight, scale, self.parameters, last=last, normalized=normalized)
        self.shown.show(self.parameters, last=last)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Counts a backward pass, if the run has a monitor."""
        if self.watching is not None:
            self.watching.before_backward()
        yield
        if self.watching is not None:
            self.watching.after_backward()

    def unscale(self) -> None:
        """Makes each `p.grad` the gradient of the mean loss, to clip, measure or change it before `update`.

        Call it after the last `backward`. Until then they are sums over micro-batches, times the loss scale.
        """
        self._check_trains()
        self.shown.unscale(self.parameters, self.scale_state.scale)

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Returns the norm of the gradient of the mean loss, after the last `backward` and before clipping.

        `update` takes it from here: asking for it costs no second pass over the gradients.
        """
        self._check_trains()
        grads, weights = self.shown.collect(self.parameters), self.accumulation.weights
        norm = self._norm_of(grads)
        self.shown.note_norm(norm, grads)
        if num_ranks() > 1:
            norm, weights, *_ = agree(norm, self.num_copies, weights, 0.0)
        return norm if self.shown.finite is not None else norm * (1.0 / self.scale_state.scale / weights)

    def _norm_of(self, grads: Grads) -> Tensor:
        """Returns the norm of gradients; of those that are sharded, of what this rank has."""
        values = [*grads.values()]
        return self._norm([*map(local, values)] if self.num_copies else values)

    @torch.no_grad()
    def update(self) -> StepResult:
        """Updates the parameters and uses up the gradients: finite? -> unscale -> clip -> step -> rescale."""
        self._check_trains()
        self.check_parameters()
        self.masters.check_writes()
        grads, weights = self.shown.collect(self.parameters), self.accumulation.weights
        for driver in self.drivers:
            driver.check(grads)  # before the first of them has moved anything
        known = self.shown.known_norm(grads)
        scaled_norm = self._norm_of(grads) if known is None else known
        losses: Tensor | float = self.accumulation.losses
        bad_rank: Tensor | None = None
        if num_ranks() > 1:
            scaled_norm, weights, losses, bad_rank = agree(scaled_norm, self.num_copies, weights, losses)
        # Weights that are on the device may all be zero.
        finite = (scaled_norm / weights if isinstance(weights, Tensor) else scaled_norm) < math.inf
        if self.shown.finite is not None:
            finite &= self.shown.finite
        skipped, used = ~finite, self.scale_state.scale
        inv_scale: Tensor | float = 1.0
        if not isinstance(self.policy.scale, NoScale):
            inv_scale, self.scale_state = self.policy.scale.judge(self.scale_state, finite, torch)
        factor = inv_scale / weights if self.shown.finite is None else 1.0
        norm = times(scaled_norm, factor)
        if self.watching is not None:
            self.watching.before_update(grads, factor)
        if self.clip_norm:
            factor = times((self.clip_norm / norm).clamp(max=1.0), factor)
        elif not isinstance(factor, Tensor):
            factor = torch.full((), factor, device=self.device)
        found_inf = skipped.float()
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

    def check(
        self, result: StepResult, loss_fn: LossFn | None = None, micro_batches: Iterable[Any] | None = None
    ) -> None:
        """Raises if no loss scale can save the run, naming the first bad tensor and its pass. Reads the device.

        The tensor is found by running the step again: the last one that `step` made, or the one that is given.
        """
        if not bool(result.stuck):
            return
        error = f"gradients are not finite although the loss scale is at its floor, {float(result.scale):g}"
        given = (loss_fn, micro_batches or []) if loss_fn is not None else self._last
        if given is None:
            raise ScalingError(
                error, hint="run.check(result, loss_fn, micro_batches) runs the step again and names the tensor"
            )
        cause = nonfinite.find(self.model, *given, result.scale)
        rule = f"`{cause.module}: compute=fp32`" if cause.module else "a rule with `compute=fp32`"
        raise ScalingError(f"{error}; {cause}", hint=way_out(cause.where, rule))

    def scheduler_step(self, scheduler: Any, *args: Any) -> bool:
        """Steps a torch scheduler if the last update was applied; returns whether it was. Reads the flag: a sync.

        Our optimizers count applied updates on the device and need none: `Optimizer.set_factor`.
        """
        if self.skipped is None:
            raise HalfstepError("no update was made yet", hint="call it after step() or update()")
        applied = not bool(self.skipped)
        if applied:
            scheduler.step(*args)
        return applied

    @property
    def ema(self) -> dict[str, Tensor]:
        """The averages of the masters in fp32, by parameter name; empty without `ema`."""
        if self._decay:
            self._check_trains()
        return {} if self.averages is None else self.averages.named()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model computes with the averages of its masters; after, the masters are back, exactly."""
        if not self._decay:
            raise HalfstepError("there are no averages", hint="prepare(..., ema=0.999) keeps them")
        self._check_trains()
        assert self.averages is not None
        self.masters.check_writes()
        with self._holding(_AVERAGES), self.averages.used(self.num_applied):
            yield

    @contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, each parameter is its whole fp32 master, to read and to write by any code.

        After, masters are held again as the policy says, split ones exactly. This is needed only if the policy
        splits or narrows masters: whole ones may be written to at any time.
        """
        self._check_open()
        with self._holding(_WHOLE), edited(self.masters, self.num_applied):
            yield

    @contextmanager
    def _holding(self, what: str) -> Iterator[None]:
        self._holds = what
        try:
            yield
        finally:
            self._holds = ""

    @contextmanager
    def evaluation(self, names: Sequence[str] | None = None) -> Iterator[None]:
        """Inside, the model computes as the policy's `eval` role says. It calls neither eval() nor no_grad().

        `names` are the modules that rules may match; all by default.
        """
        if self._holds != _AVERAGES:  # averages may be evaluated as well: formats and masters are two things
            self._check_open()
        if not self.optimizers:
            self.follow(device_of(self.model))
        evaluated = self.policy.evaluation()
        if evaluated == self.policy:
            yield
            return
        set_precision(self.model, evaluated, names)
        try:
            self._reshard()
            yield
        finally:
            measured = None if self.conversion is None else self.conversion.measured
            set_precision(self.model, self.policy, names, measured)
            self._reshard()

    def _reshard(self) -> None:
        if self.sharded is not None:
            self.sharded.reshard()

    def weights(self) -> dict[str, Tensor]:
        """Returns copies of the model's parameters by name, the fp32 master of those that have one."""
        named = list(self.model.named_parameters())
        if self._holds == _WHOLE:
            return {name: p.detach().clone() for name, p in named}
        self.masters.check_writes()
        wide = self.masters.wide([p for _, p in named])
        return {name: w.detach().clone() for (name, _), w in zip(named, wide, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything the next step depends on, and the policy. The tensors are live, as in torch."""
        self._check_trains()
        return state.to_dict(self)

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Restores a state bit for bit. One of another policy, model or optimizer is refused entirely."""
        self._check_trains()
        state.from_dict(self, given)
        if self.scale_watch is not None:
            self.scale_watch.forget()

    def load_torch_amp(
        self, optimizer_state: State | Sequence[State | None], scaler_state: State | None = None
    ) -> str:
        """Loads what training with autocast saved, state_dict() of torch's AdamW and GradScaler; describes it."""
        self._check_trains()
        return take_over(self, optimizer_state, scaler_state)

    def unprepare(self) -> nn.Module:
        """Returns the model in its own classes, with its masters in fp32, exactly. Ends the run."""
        self._check_open()
        if self.sharded is not None:
            raise HalfstepError(
                "the model is sharded, and FSDP has put a class of its own in front of the model's",
                hint="run.weights() has the masters: each is a DTensor, whose full_tensor() gathers it",
            )
        self.masters.check_writes()
        masters = dict(zip(self.masters.names, self.masters.wide([*self.masters.names]), strict=True))
        self.forget()
        if self.watching is not None:
            self.watching.stop()
        if self.conversion is not None:
            restore(self.conversion)
        for p, w in masters.items():
            if w is not p:
                p.data = w
        for hook in self.hooks:
            hook.remove()
        self.switches.restore()
        for driver in self.drivers:
            if isinstance(driver.optimizer, Optimizer):
                driver.optimizer.release()
            else:
                driver.cast_moments(widen=True)
        self.weight_casts.unmark()
        leave_to_us(self.model, [])
        self._open = False
        return self.model

    @torch.no_grad()
    def change_policy(self, policy: Policy | str, *, tokens: int = TOKENS) -> "Run":
        """Trains under another policy from the next step on; returns the run.

        Masters, moments, averages and the number of updates keep every bit, and so does the loss scale if both
        policies scale alike. A policy that would round any of them is refused, and nothing has changed then. The
        optimizers stay. A monitor ends, and compiled code is compiled again. `tokens` is as of `prepare`.
        """
        self._check_trains()
        now, choice, note = settle(policy, lambda: measured_choice(self.model, tokens), describe(self.device))
        check_changed(self, now)
        check_fp32([base_precision(now), *precisions(now, names_of(self.model, None)).values()])
        kept, before = Kept(self), (self.policy, self.choice, self.note)
        self.unprepare()
        try:
            self._begin(now, choice, note, tokens)
        except HalfstepError:  # the model or its device cannot run it
            self._begin(*before, tokens)
            raise
        finally:
            kept.put_back(self)
        return self

    def _begin(self, policy: Policy, choice: Choice | None, note: str, tokens: int) -> None:
        """Applies a policy to the model, which was given back, and begins with the same optimizers."""
        lean = self.conversion is not None and self.conversion.recomputed is not None
        conversion = apply(self.model, policy, tokens=tokens, memory="lean" if lean else "fast")
        leave_to_us(self.model, conversion.summed_here())
        options: dict[str, Any] = {"conversion": conversion, "seed": self._seed, "ema": self._decay}
        options |= {"choice": choice, "note": note, "warns": self._warns, "graph": self.graph is not None}
        Run.__init__(self, self.model, self.optimizers, policy, self.clip_norm, **options)

    def blame(self, loss_fn: LossFn, micro_batches: Iterable[Any], scale: float | None = None) -> Cause:
        """Finds the first operation of a step that made something not finite, even if the model hides it (T5).

        Runs the step again, eagerly, at a loss scale or the current one, and changes nothing.
        """
        self._check_open()
        return nonfinite.find(
            self.model, loss_fn, micro_batches, self.scale_state.scale if scale is None else scale
        )

    def monitor(self, every: int = 100, slice: int = SLICE) -> Monitor:
        """Watches every layer from the next step on: amax, overflow, underflow, norms of updates, lost updates.

        Call it before the first step: code that was compiled before is compiled again. Nothing that is trained
        depends on it, and no step waits. `slice` is how many elements of each tensor are counted, `every` how many
        updates lie between two copies to the host. `print(monitor)` shows the last; `monitor.sample` runs part of
        a batch again.
        """
        self._check_trains()
        if self.graph is not None:
            raise HalfstepError(
                "a run with graph=True has no monitor: it sends numbers to the host within a step",
                hint="prepare(..., graph=False)",
            )
        if self.watching is not None:
            raise HalfstepError("the run has a monitor already", hint="run.watching is it; its stop() ends it")
        self.watching = Monitor(self, every, slice)
        return self.watching

    def shadow(self, loss_fn: LossFn, batches: Iterable[Any]) -> Shadow:
        """Compares a step, which is not made, with the same step in fp32: the loss, and each layer's gradient.

        Beside them is what noise of half an ulp on every operand of a matmul does: `result.outside` names layers
        that it does not explain, `result.causes` the modules that alone lead there, and `print` shows all of them.
        Nothing that is trained depends on it. Runs the micro-batches ten times, eagerly, and waits for the device.
        """
        self._check_trains()
        return shadow(self, loss_fn, batches)

    def reach(self, loss_fn: LossFn, batch: Any) -> Reached:
        """Lists how each function in the model's own code runs, and why, by one forward pass without effects."""
        self._check_open()
        self.reached = record(self.model, loss_fn, batch)
        return self.reached

    def summary(self) -> str:
        """Describes what was converted and what was not, with reasons; masters; what each optimizer costs."""
        graph = [] if self.graph is None else ["  steps: one CUDA graph each, from the second of a kind on"]
        return "\n".join([*summarize(self), *graph])

    def audit(self, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Finding]:
        """Returns what is wrong with the run's formats, masters and moments, by the rules of `halfstep audit`.

        `select` and `ignore` are ids of rules, such as `HS101`, or their beginnings.
        """
        self._check_open()
        return check_rules(record_of(self), select, ignore)

    def watch_optimizers(self) -> None:
        """Hooks what users may do to optimizers themselves, steps included."""
        super().watch_optimizers()
        self.hooks += OwnSteps(self).hooks()

    def _check_trains(self) -> None:
        self._check_open()
        if not self.optimizers:
            raise HalfstepError(
                "the run has no optimizers: its model can be evaluated, and not trained",
                hint="run.attach(optimizers), made from model.parameters(); run.weights() returns its masters",
            )

    def _check_open(self) -> None:
        if not self._open:
            raise HalfstepError("the run has ended: its model was given back", hint="prepare the model again")
        if self._holds:
            raise HalfstepError(f"the model holds {self._holds}, now", hint="leave that block first")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Run":
        if self.sharded is not None:
            raise HalfstepError(
                "the model is sharded, and FSDP does not copy what it keeps for it",
                hint="run.state_dict() holds this rank's part: load it into a second model, prepared and sharded",
            )
        twin = memo[id(self)] = type(self).__new__(type(self))
        if self.watching is not None:
            memo[id(self.watching)] = None  # a copy is not watched
        with copying_run():
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for module in twin.model.modules():
            unwatch(module)
        if twin.conversion is not None and twin._open:
            twin.watch_optimizers()
        return twin
