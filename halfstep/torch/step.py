"""One update: accumulate, is it finite?, unscale, clip, step, rescale.

    gradients.py    accumulate: the sum over micro-batches, times the scale S, weighted by their tokens
    update          is the norm of the sum finite? -> unscale with the S that was used -> clip to `clip_norm` ->
                    one step of every optimizer -> one move of the scale

One norm of the sum serves the finite check and the clipping: it is finite exactly if every gradient is and none is
beyond 1.8e19, which no step survives.

Nothing here reads a number from the device: losses, norms, scales and flags are device scalars until someone
asks. A step that is not finite changes nothing but the scale, under every policy: not the parameters, not the
optimizer's state, not running statistics. Where an optimizer cannot be told so on the device, drivers.py reads the
flag, and `summary` says so.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.core.formats import FP32
from halfstep.core.policy import Policy, as_policy
from halfstep.core.precision import base_precision, precisions
from halfstep.core.roles import Param
from halfstep.core.scaling import DynamicScale, NoScale, ScaleState, way_out
from halfstep.torch import state
from halfstep.torch.apply import Applied, apply, names_of, restore, set_precision
from halfstep.torch.convert.fp8_choice import TOKENS
from halfstep.torch.convert.plan import check_model
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.optim.drivers import Stock, check_optimizers, driver_of
from halfstep.torch.run.accumulation import CAST, Gradients, checked_pair, divisor, values_of
from halfstep.torch.optim.masters import Averages, Masters, Statistics
from halfstep.torch.run import nonfinite
from halfstep.torch.run.switches import Sums, check_fp32
from halfstep.torch.run.checks import check_moments, check_replicas, check_settings
from halfstep.torch.run.from_amp import State, take_over
from halfstep.torch.run.reached import Reached, record
from halfstep.torch.run.summary import summarize

# loss_fn(batch) -> the mean loss, or (the sum of losses, the number of tokens)
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFn = Callable[[Any], Loss]


@dataclass(frozen=True)
class StepResult:
    """What one update did, as device scalars: reading one waits for the device."""

    loss: Tensor  # mean over the tokens of all micro-batches
    skipped: Tensor  # bool: the gradients were not finite
    scale: Tensor  # the scale that was used
    grad_norm: Tensor  # after unscaling, before clipping
    stuck: Tensor  # bool: not finite, and the scale is at its floor


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    policy: Policy | str,
    *,
    clip_norm: float = 0.0,
    seed: int = 0,
    ema: float = 0.0,
    tokens: int = TOKENS,
) -> "Run":
    """Gives any model and any optimizers of torch a policy, in place; `Run.unprepare` gives the model back.

    Load weights, move the model to its device and make the optimizers first; compile and wrap (DDP) after.
    Gradients that are left from before are dropped: nobody knows their scale. `seed` is for stochastic rounding;
    all replicas must agree on it. `ema` is the decay of an average of the masters, 0 for none. `tokens` of a
    micro-batch are what layers are timed with where rules say `measured`.
    """
    policy = as_policy(policy)
    check_model(model)
    check_settings(clip_norm, seed, ema)
    if not tokens >= 1:
        raise HalfstepError(f"tokens={tokens!r}: a micro-batch has some", hint="batch times sequence length")
    params = [value for rule in policy.rules for _, value in rule.changes if isinstance(value, Param)]
    narrow = any(param.split or param.format != FP32 for param in (policy.param, *params))
    optimizers = check_optimizers(optimizer, model, narrow=narrow)
    check_replicas(split=any(param.split for param in (policy.param, *params)))
    check_moments(optimizers, model, policy)
    check_fp32([base_precision(policy), *precisions(policy, names_of(model, None)).values()])
    for p in model.parameters():
        p.grad = None
    conversion = apply(model, policy, tokens=tokens)
    return Run(model, optimizers, policy, clip_norm, conversion=conversion, seed=seed, ema=ema)


class Run:
    """A model, its optimizers and a policy: what training one step needs."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        policy: Policy,
        clip_norm: float = 0.0,
        *,
        conversion: Applied | None = None,
        seed: int = 0,
        ema: float = 0.0,
    ):
        self.model, self.optimizers, self.policy = model, list(optimizers), policy
        self.clip_norm = clip_norm
        self.conversion = conversion
        self.masters = self._masters(seed)
        moments = {} if conversion is None else conversion.moments
        self.drivers = [driver_of(optimizer, self.masters, moments) for optimizer in self.optimizers]
        self.parameters = self._held()
        self.device = self.parameters[0].device
        self.scale_state = self.scalars(policy.scale.init())
        self.num_applied = torch.zeros((), dtype=torch.int32, device=self.device)  # updates that were not skipped
        trained = [p for p in self.parameters if p.requires_grad]
        self.averages = Averages(self.masters, trained, ema) if ema else None
        self.statistics = Statistics(model)
        self.amaxes = None if conversion is None else conversion.amaxes
        self.sums = Sums(self.device)
        self._gradients = Gradients(policy)
        self.reached: Reached | None = None  # what `reach` found last
        self._open = True
        self._in_use = False  # by evaluation with averages
        self._skipped: Tensor | None = None
        self._last: tuple[LossFn, list[Any]] | None = None
        self._handles = [] if conversion is None else self._settle(conversion)
        self.forget()

    def step(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> StepResult:
        """One update from micro-batches; `loss_fn` gives a mean loss, or (sum of losses, number of tokens)."""
        self._check_open()
        self.statistics.remember()
        self.masters.settle()
        # Only a dynamic scale has a floor, at which `check` runs the step again.
        kept: list[Any] = []
        self._last = (loss_fn, kept) if isinstance(self.policy.scale, DynamicScale) else None
        try:
            for batch in micro_batches:
                if self._last is not None:
                    kept.append(batch)
                given = loss_fn(batch)
                if isinstance(given, tuple):
                    total, weight = checked_pair(given)
                    self.backward(total / divisor(weight), weight=weight)
                else:
                    self.backward(given)
            return self.update()
        except BaseException:
            self.forget()  # half a sum must not become part of the next
            raise

    def backward(self, loss: Tensor, *, weight: Tensor | float = 1.0, last: bool = True) -> None:
        """Adds the gradient of a micro-batch's mean loss; `weight` is its number of tokens.

        `last` is False on all micro-batches of an update but the last: replicas exchange gradients once.
        """
        self._check_open()
        self._gradients.add(loss, weight, self.scale_state.scale, self.parameters, last=last)

    @torch.no_grad()
    def update(self) -> StepResult:
        """Finite? -> unscale -> clip -> step -> rescale. The accumulated gradients are used up."""
        self._check_open()
        self._check_unchanged()
        self.masters.settle()
        grads, weights = self._gradients.of(self.parameters, self.model), self._gradients.weights
        for driver in self.drivers:
            driver.check(grads)  # before the first of them has moved anything
        values = [values_of(g) for g in grads.values()]
        norms = [norm.float() for norm in torch._foreach_norm(values)]
        scaled_norm = torch.linalg.vector_norm(torch.stack(norms))
        # Weights that are on the device may all be zero.
        finite = torch.isfinite(scaled_norm / weights)
        used = self.scale_state.scale
        verdict = self.policy.scale.judge(self.scale_state, finite, torch)
        factor = verdict.inv_scale / weights
        norm = scaled_norm * factor
        if self.clip_norm:
            factor = factor * (self.clip_norm / norm).clamp(max=1.0)
        found_inf = 1 - finite.float()
        for driver in self.drivers:
            driver.step(grads, factor, found_inf, self.num_applied + 1)
        self.scale_state = verdict.state
        self.num_applied += finite.to(torch.int32)
        self.statistics.settle(finite)
        if self.amaxes is not None:
            self.amaxes.update(finite)
        if self.averages is not None:
            self.averages.update(finite.float())
        loss = torch.as_tensor(self._gradients.losses) / weights
        result = StepResult(loss, ~finite, used, norm, verdict.state.stuck)
        self._skipped = result.skipped
        self.forget()
        return result

    def check(
        self, result: StepResult, loss_fn: LossFn | None = None, micro_batches: Iterable[Any] | None = None
    ) -> None:
        """Stops a run that no scale can save, naming the first bad tensor and its pass. Reads from the device.

        The tensor is found by running the step again: the last one that `step` made, or the one that is given.
        """
        if not bool(result.stuck):
            return
        told = f"gradients are not finite although the loss scale is at its floor, {float(result.scale):g}"
        if loss_fn is None and self._last is None:
            raise ScalingError(
                told, hint="run.check(result, loss_fn, micro_batches) runs the step again and names the tensor"
            )
        given = (loss_fn, micro_batches) if loss_fn is not None else self._last
        cause = nonfinite.find(self.model, given[0], given[1] or [], result.scale)  # type: ignore[index, arg-type]
        rule = f"`{cause.module}: compute=fp32`" if cause.module else "a rule with `compute=fp32`"
        raise ScalingError(f"{told}; {cause}", hint=way_out(cause.where, rule))

    def scheduler_step(self, scheduler: Any, *args: Any) -> bool:
        """Steps a scheduler of torch's if the last update was applied; whether it was. Reads the flag: a sync.

        Ours count applied updates on the device and need none: `Optimizer.set_factor`.
        """
        if self._skipped is None:
            raise HalfstepError("no update was made yet", hint="call it after step() or update()")
        applied = not bool(self._skipped)
        if applied:
            scheduler.step(*args)
        return applied

    @property
    def ema(self) -> dict[str, Tensor]:
        """The averages of the masters, fp32, by the name of the parameter; none unless `ema` was asked for."""
        return {} if self.averages is None else self.averages.named()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model computes with the averages of its masters; after, the masters are back, exactly."""
        if self.averages is None:
            raise HalfstepError("there are no averages", hint="prepare(..., ema=0.999) keeps them")
        self._check_open()
        self._in_use = True
        try:
            with self.averages.used(self.num_applied):
                yield
        finally:
            self._in_use = False

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, the model computes as the policy's `eval` role says. It neither calls eval() nor no_grad()."""
        self._check_open()
        evaluated = self.policy.evaluation()
        if evaluated != self.policy:
            set_precision(self.model, evaluated)
        try:
            yield
        finally:
            if evaluated != self.policy:
                measured = None if self.conversion is None else self.conversion.measured
                set_precision(self.model, self.policy, measured=measured)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter of the model by its name, its master in fp32 where it has one; copies."""
        named = list(self.model.named_parameters())
        wide = self.masters.wide([p for _, p in named])
        return {name: w.detach().clone() for (name, _), w in zip(named, wide, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, and the policy. The tensors are the live ones, as torch has it."""
        self._check_open()
        return state.to_dict(self)

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Puts a state back, bit for bit. One of another policy, model or optimizer is refused whole."""
        self._check_open()
        state.from_dict(self, given)

    def load_torch_amp(
        self, optimizer_state: State | Sequence[State | None], scaler_state: State | None = None
    ) -> str:
        """Takes over what training with autocast saved: state_dict() of torch's AdamW and GradScaler; in words."""
        self._check_open()
        return take_over(self, optimizer_state, scaler_state)

    def unprepare(self) -> nn.Module:
        """The model in its own classes again, with its masters in fp32, exactly. The run is over."""
        self._check_open()
        masters = dict(zip(self.masters.names, self.masters.wide([*self.masters.names]), strict=True))
        self.forget()
        if self.conversion is not None:
            restore(self.conversion)
        for p, w in masters.items():
            if w is not p:
                p.data = w
        for handle in self._handles:
            handle.remove()
        self.sums.restore()
        for driver in self.drivers:
            if isinstance(driver.optimizer, Optimizer):
                driver.optimizer.release()
            else:
                driver.cast_moments(widen=True)
        self._open = False
        return self.model

    def blame(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> nonfinite.Cause:
        """The first tensor of a step that is not finite, and in which pass, also where the model hides it (T5).

        Runs the step again, eagerly, and changes nothing.
        """
        self._check_open()
        return nonfinite.find(self.model, loss_fn, micro_batches, self.scale_state.scale)

    def reach(self, loss_fn: LossFn, batch: Any) -> Reached:
        """How each function of the model's own code runs, and why: one forward pass, which changes nothing."""
        self._check_open()
        self.reached = record(self.model, loss_fn, batch)
        return self.reached

    def summary(self) -> str:
        """What was converted and what was not, with reasons; masters; what each optimizer costs."""
        return "\n".join(summarize(self))

    def forget(self) -> None:
        """Drops gradients that were accumulated and not used."""
        self._gradients.clear([*self.model.parameters()])
        if self.amaxes is not None:
            self.amaxes.forget()

    def _masters(self, seed: int) -> Masters:
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        if self.conversion is not None:
            return Masters(names, self.conversion.masters, self.conversion.remainders, seed=seed, complete=True)
        held: dict[str, Param] = {}
        for optimizer in self.optimizers:
            held |= optimizer.masters.held if isinstance(optimizer, Optimizer) else {}
        return Masters(names, held, seed=seed)

    def _settle(self, conversion: Applied) -> list[Any]:
        """Hands the formats to the optimizers; the hooks that keep them as they are."""
        self._bind(conversion)
        handles = self.masters.watch(self.model)
        stock = [driver for driver in self.drivers if isinstance(driver, Stock)]
        narrow = any(not self.masters.is_whole(p) for p in self.parameters)
        if narrow:
            handles += [d.optimizer.register_load_state_dict_pre_hook(_refuse_load) for d in stock]
        if narrow or not isinstance(self.policy.scale, NoScale):
            handles += [driver.optimizer.register_step_pre_hook(driver.refuse_alone) for driver in stock]
        return handles

    def _bind(self, conversion: Applied) -> None:
        for driver in self.drivers:
            if isinstance(driver.optimizer, Optimizer):
                compute = self.policy.compute.format
                driver.optimizer.bind(self.masters, conversion.moments, compute, emulate=self.policy.emulate)
            driver.cast_moments()

    def _held(self) -> list[Tensor]:
        """What the optimizers hold, in the order of the model."""
        taken = {p for driver in self.drivers for p in driver.parameters}
        held = [p for p in self.masters.names if p in taken]
        self._dtypes = [p.dtype for p in held]
        return held

    def _check_unchanged(self) -> None:
        """Refuses parameters that came or were cast after the policy was given."""
        count = sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)
        if count != len(self.parameters):
            check_optimizers(self.optimizers, self.model, narrow=False)
            self.parameters = self._held()
            if self.conversion is not None:
                self._bind(self.conversion)
        for p, dtype in zip(self.parameters, self._dtypes, strict=True):
            if p.requires_grad and (p.dtype != dtype or self._has_no_master(p)):
                raise HalfstepError(
                    f"`{self.masters.names[p]}` is {p.dtype}, and no master of it is kept",
                    hint="a policy casts by itself: cast, unfreeze or add it before prepare()",
                )

    def _has_no_master(self, parameter: Tensor) -> bool:
        """Whether a policy was given, and not for this parameter, which is narrower than a master may be."""
        narrow = parameter.dtype in CAST and parameter.dtype != torch.float32
        return narrow and self.conversion is not None and self.masters.names[parameter] not in self.masters.held

    def _check_open(self) -> None:
        check_replicas(split=bool(self.masters.remainders))
        if not self._open:
            raise HalfstepError("the run is over: its model was given back", hint="prepare the model again")
        if self._in_use:
            raise HalfstepError("the model holds its averages now", hint="train outside of run.averaged()")

    def scalars(self, given: ScaleState) -> ScaleState:
        """A state of the law of scaling on the device of the run."""
        dtypes = (torch.float32, torch.int32, torch.int32, torch.bool)
        made = (torch.tensor(v, dtype=d, device=self.device) for v, d in zip(given, dtypes, strict=True))
        return ScaleState(*made)


def _refuse_load(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Before `optimizer.load_state_dict`, which would cast moments to the dtype of parameters that are bf16."""
    raise HalfstepError(
        f"{type(optimizer).__name__}.load_state_dict casts moments to the dtype of the parameters, which is bf16",
        hint="run.load_state_dict(run's own state), or run.load_torch_amp(the optimizer's state)",
    )
