"""One update (core.scaling): accumulate, is it finite?, unscale, clip, step, rescale.

Every optimizer gets fp32 masters (masters.py) and fp32 gradients; state that has its parameter's shape is stored
in the moments format and widened for the update. MLX differentiates functions, so the caller passes gradients on:
`value_and_grad` returns them with the scale they carry, `update` takes them. mx.async_eval launches each update
and each micro-batch: arrays are lazy, and the graph would otherwise grow from step to step.

**Compiled**, each of the two parts, gradients and update, is a function of the arrays of model, optimizer and
scale, so a new rate or scale compiles nothing again. On a CPU MLX compiles every fused kernel by a call of g++:
the first step of the `tiny` recipe takes 33 s, and the others as long as before. So `compile=None` compiles on a
GPU only, unmeasured.

**In several processes** (parallel.py) each has its share of the micro-batches. Their gradients are summed once per
update, between the two parts; everything after that is the same in all of them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_unflatten

from halfstep.core.audit import engine
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.reached import Reached
from halfstep.core.averages import check_decay
from halfstep.core.choice import Choice
from halfstep.core.errors import HalfstepError, warn_caller
from halfstep.core.formats import FP32
from halfstep.core.measure import TOKENS, settle
from halfstep.core.observed import SLICE
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_numbers, step_error
from halfstep.core.scaling import DynamicScale, ScaleAlarm, ScaleState, stuck_error
from halfstep.mlx.apply import Applied, Place, apply, arrays, public, restore, set_precision, trainable, walk
from halfstep.mlx.collect.audit import STEPS
from halfstep.mlx.collect.prepared import prepared_record
from halfstep.mlx.dtypes import describe, dtype_of
from halfstep.mlx.functions.scope import scope
from halfstep.mlx.layers import Held
from halfstep.mlx.lowering import casts_for
from halfstep.mlx.observe.monitor import Monitor
from halfstep.mlx.observe.recording import Recorder, forward_ends, recording
from halfstep.mlx.observe.updates import UpdateNumbers
from halfstep.mlx.optim.ema import Averages
from halfstep.mlx.optim.masters import Masters
from halfstep.mlx.optim.optimizers import Muon, leaves_of
from halfstep.mlx.parallel.ranks import TIMEOUT, Ranks, ranks_of
from halfstep.mlx.parallel.start import start_as_rank_0
from halfstep.mlx.run.audit import audit_updates
from halfstep.mlx.run.checks import (
    check_loss,
    check_parts,
    check_untraced,
    check_weight,
    measured_choice,
    refuse_update,
    resolve_compile,
)
from halfstep.mlx.run.gradients import Gradients, norm, summed
from halfstep.mlx.run.reached import record
from halfstep.mlx.run.summary import summarize
from halfstep.mlx.state import Live, load_state, set_random_key, state_of

# loss_fn(model, batch) -> the mean loss, or (the sum of losses, the number of tokens)
LossFn = Callable[[Module, Any], Any]
BEHIND = 4  # updates; a scale takes ten to fall from where the alarm begins to its floor
_SCALARS = {"scale": mx.float32, "good_steps": mx.int32, "tolerance": mx.int32, "stuck": mx.bool_}


@dataclass(frozen=True)
class StepResult:
    """What one update did, as unread arrays: reading one waits for the device."""

    loss: mx.array  # mean over the tokens of all micro-batches
    skipped: mx.array  # bool: the gradients were not finite
    scale: mx.array  # the scale that was used
    grad_norm: mx.array  # after unscaling, before clipping
    stuck: mx.array  # bool: not finite, and the scale is at its floor
    bad_rank: mx.array | None = None  # of several processes, the first whose own loss is not finite; -1 if all are


def prepare(
    model: Module,
    optimizer: Optimizer,
    policy: Policy | str,
    *,
    clip_norm: float = 0.0,
    seed: int = 0,
    ema: float = 0.0,
    compile: bool | None = None,
    cast_inputs: bool = True,
    tokens: int = TOKENS,
    group: mx.distributed.Group | None = None,
    timeout: float = TIMEOUT,
) -> "Run":
    """Gives any MLX model and optimizer a policy, in place; `Run.unprepare` restores the model.

    `cast_inputs` casts the floating inputs of the model to compute, but not targets, which only the loss sees.
    Without it inputs arrive unchanged, and a layer that computes in a narrower format refuses fp32 ones. `ema` is
    the decay of an average of the masters, 0 for none.

    `compile=True` compiles the step, or says why it cannot; None does so on a GPU. Pass `step` the same `loss_fn`
    each time then: another one is compiled again.

    The policy `auto` is measured, as for a recipe, with micro-batches of `tokens`; `run.choice` has the answer and
    its reason.

    With `group=mx.distributed.init()` the processes of the group train one model: all start from the weights of
    rank 0, each gives `step` its own micro-batches, and gradients are summed in fp32 once per update, weighted by
    their tokens. A process that has waited `timeout` seconds for the others ends with an error.
    """
    check_numbers(clip_norm=clip_norm, seed=seed, tokens=tokens)
    if ema:
        check_decay(ema)
    ranks = ranks_of(group, timeout)
    check_parts(model, optimizer)
    compiled = resolve_compile(compile)
    device = describe(mx.default_device())
    policy, choice, note = settle(policy, lambda: measured_choice(model, tokens, alone=ranks is None), device)
    conversion = apply(model, policy, cast_inputs=cast_inputs)
    parts = (model, optimizer, conversion, clip_norm)
    options: dict[str, Any] = {"seed": seed, "ema": ema, "compile": compiled, "choice": choice, "note": note}
    return Run(*parts, **options, warns=True, ranks=ranks)


class Run:
    """A model, its optimizer and a policy: everything that one step needs."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        conversion: Applied,
        clip_norm: float = 0.0,
        *,
        seed: int = 0,
        compile: bool = False,
        choice: Choice | None = None,
        note: str = "",
        warns: bool = False,
        ranks: Ranks | None = None,
        ema: float = 0.0,
    ):
        self.model, self.optimizer, self.conversion, self.ranks = model, optimizer, conversion, ranks
        self.optimizers = leaves_of(optimizer)
        self.policy = conversion.policy
        self.clip_norm, self.choice = clip_norm, choice  # what `auto` chose and why; None if a policy was named
        self.note = note  # what the name of the policy was read as
        self.compile = compile
        self.masters = Masters(conversion, seed)
        for _, module in walk(model):
            if isinstance(module, Held):
                module.halfstep_masters = self.masters
        init = self.policy.scale.init()._asdict()
        self.scalars = {name: mx.array(init[name], dtype) for name, dtype in _SCALARS.items()}
        self.scalars["applied"] = mx.array(0, mx.int32)
        self._accumulate, self._base = dtype_of(self.policy.accumulate), casts_for(self.policy)
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._sum: Gradients | None = None
        # Arrays that are not trained: their places, their values before the step, and the names of those that the
        # forward pass replaces, such as running statistics.
        self._others = {n: place for n, place in arrays(model).items() if n not in conversion.places}
        self._before: dict[str, mx.array] = {}
        self._replaced: set[str] = set()
        self._known = {name: (id(p.container), p.array.dtype) for name, p in conversion.places.items()}
        self._open, self._holds = True, ""  # what the model holds for now, if not what it trains
        watched = warns and isinstance(self.policy.scale, DynamicScale)
        self._alarm = ScaleAlarm(self.policy.scale) if watched else None
        self._unread: deque[StepResult] = deque()  # updates whose scale was not looked at
        self._monitor: Monitor | None = None
        self._measured: list[UpdateNumbers] = []  # what wants to see the next update
        if ranks is not None:
            start_as_rank_0(self, ranks)
        for each in self.optimizers:
            if isinstance(each, Muon):
                each.bind(self.policy.compute.format, emulate=self.policy.emulate)
        optimizer.update = refuse_update  # type: ignore[method-assign]
        optimizer.init(tree_unflatten(list(self.masters.wide().items())))
        self._cast_moments()
        self.averages = Averages(self.masters, ema) if ema else None
        mx.eval(self._live())

    @property
    def scale_state(self) -> ScaleState:
        """The state of the loss scale."""
        return ScaleState(*(self.scalars[name] for name in ScaleState._fields))

    @property
    def num_applied(self) -> mx.array:
        """The number of updates that were not skipped."""
        return self.scalars["applied"]

    @property
    def ema(self) -> dict[str, mx.array]:
        """The averages of the masters in fp32, by parameter name; empty without `ema`."""
        return {} if self.averages is None else dict(self.averages.arrays)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model computes with the averages of its masters; after, the masters are back, exactly."""
        self._check_open()
        if self.averages is None:
            raise HalfstepError("there are no averages", hint="prepare(..., ema=0.999) keeps them")
        self.masters.check_writes()
        with self.averages.used(), self._holding("its averages, inside run.averaged()"):
            yield

    @contextmanager
    def evaluation(self, names: Sequence[str] | None = None) -> Iterator[None]:
        """Inside, the model computes as the policy's `eval` role says. It does not call model.eval().

        `names` are the modules that rules may match; all by default.
        """
        if not self._holds:  # averages may be evaluated as well: formats and masters are two things
            self._check_open()
        evaluated = self.policy.evaluation()
        if evaluated == self.policy:
            yield
            return
        set_precision(self.model, evaluated, names)
        try:
            with self._holding("the formats of `eval`, inside run.evaluation()"):
                yield
        finally:
            set_precision(self.model, self.policy, names)

    @contextmanager
    def _holding(self, what: str) -> Iterator[None]:
        before, self._holds = self._holds, what
        try:
            yield
        finally:
            self._holds = before

    def weights(self) -> dict[str, mx.array]:
        """Returns the model's parameters by name, the fp32 master of those that have one."""
        self._check_open()
        self.masters.check_writes()
        held: dict[str, mx.array] = dict(tree_flatten(self.model.parameters()))
        return held | {name: array for name, array in self.masters.wide().items() if name in held}

    def step(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> StepResult:
        """Updates once from micro-batches; `loss_fn` returns a mean loss, or (sum of losses, number of tokens)."""
        if isinstance(micro_batches, mx.array | dict) or not callable(loss_fn):
            raise step_error(loss_fn, micro_batches)
        differentiate = self.value_and_grad(loss_fn)
        for batch in micro_batches:
            self.accumulate(differentiate(batch)[1])
        return self.update()

    def value_and_grad(self, loss_fn: LossFn) -> Callable[[Any], tuple[mx.array, Gradients]]:
        """Returns a function of a batch that returns its mean loss and the gradients, which `update` takes."""

        def differentiate(batch: Any) -> tuple[mx.array, Gradients]:
            self._check_open()
            check_untraced(batch, self._live())
            self._check_model()
            if not self._before:
                self._before = {name: place.array for name, place in self._others.items()}
            loss, weight, grads, counted = self._call(loss_fn, self._differentiator(loss_fn), batch)
            if self._monitor is not None:
                self._monitor.merge(counted)
            share = (weight != 0).astype(mx.float32)
            return loss, Gradients(grads, self.scalars["scale"], weight, share, share * loss)

        return differentiate

    def accumulate(self, grads: Gradients) -> None:
        """Adds the gradients of a micro-batch to those of the next update."""
        if not isinstance(grads, Gradients):
            raise HalfstepError(
                f"the gradients are a {type(grads).__name__}, which does not say which scale they carry",
                hint="pass what run.value_and_grad(loss_fn)(batch) returns, unchanged",
            )
        held = self._sum
        if held is None:
            self._sum = grads
        elif held.finite is not None or grads.finite is not None:
            raise HalfstepError(
                "some of the gradients have been unscaled, and others have not",
                hint="pass all of them to run.unscale() and its result to run.update()",
            )
        else:
            weight = grads.weight / mx.where(held.weight == 0, 1.0, held.weight)
            share = weight * (held.scale / grads.scale)  # powers of two, and equal unless an update came between
            sums = {n: held.arrays[n] + (share * g).astype(self._accumulate) for n, g in grads.arrays.items()}
            weights, loss = held.weights + weight, held.loss + weight * grads.loss
            self._sum = replace(held, arrays=sums, weights=weights, loss=loss)
        check_untraced(self._sum.arrays, self._sum.weights, self._sum.loss, self._watched())

    def unscale(self, grads: "Gradients | Sequence[Gradients] | None" = None) -> Gradients:
        """Returns the gradient of the mean loss, in fp32, from gradients given here or to `accumulate`.

        Clip, measure or change `arrays` (dataclasses.replace), and pass the result to `update`, which knows.
        """
        total = self._taken(grads)
        if total.finite is not None:
            return total
        finite = mx.isfinite(norm(total.arrays) / total.weights)
        factor = 1.0 / (total.scale * total.weights)
        return replace(
            total, arrays={n: g.astype(mx.float32) * factor for n, g in total.arrays.items()}, finite=finite
        )

    def update(self, grads: "Gradients | Sequence[Gradients] | None" = None) -> StepResult:
        """Finite? -> unscale -> clip -> step -> rescale, with the gradients given here or to `accumulate`."""
        total = self._taken(grads)
        function = self._update if total.finite is None else self._update_unscaled
        given = {name: value for name, value in vars(replace(total, bad_rank=None)).items() if value is not None}
        measured = list(self._measured)
        self._measured.clear()
        for numbers in measured:
            numbers.start(self.masters.part, self.optimizers)
        loss, finite, norm = self._call(function.__name__, function, given)
        for numbers in measured:
            factor = mx.array(1.0) if total.finite is not None else 1.0 / (total.scale * total.weights)
            clip = mx.minimum(self.clip_norm / norm, 1.0) if self.clip_norm else mx.array(1.0)
            numbers.end(self.masters.part, total.arrays, factor, clip, finite)
        replaced = {n: self._others[n].array for n in sorted(self._replaced & self._before.keys())}
        if self.ranks is not None and replaced:
            replaced = self.ranks.from_rank_0("running statistics", replaced)
        for name, array in replaced.items():
            self._others[name].put(mx.where(finite, array, self._before[name]))
        self._before = {}
        skipped, stuck = mx.logical_not(finite), self.scalars["stuck"]
        result = StepResult(loss, skipped, total.scale, norm, stuck, total.bad_rank)
        check_untraced(self._live(), [value for value in vars(result).values() if value is not None])
        self._watch_scale(result)
        return result

    def _taken(self, grads: "Gradients | Sequence[Gradients] | None") -> Gradients:
        """Returns the sum of all gradients so far and of those that are given, on all ranks; it is used up."""
        self._check_open()
        for each in () if grads is None else (grads,) if not isinstance(grads, list | tuple) else grads:
            self.accumulate(each)
        if self._sum is None:
            raise HalfstepError(
                "there are no gradients to update with",
                hint="call step(), or value_and_grad(loss_fn)(batch) and pass its gradients to update()",
            )
        total, self._sum = self._sum, None
        if self.ranks is None or total.finite is not None:
            return total
        return summed(total, self.ranks, int(self.num_applied.item()) + 1)  # type: ignore[arg-type]

    def check(self, result: StepResult, cause: str = "") -> None:
        """Stops a run that no scale can save, and names the cause if it is known. Reads from the device."""
        if result.stuck.item():
            rank = -1 if result.bad_rank is None else int(result.bad_rank)
            known = f"forward: the loss of rank {rank}" if rank >= 0 else ""
            raise stuck_error(float(result.scale), cause or known)

    def state_dict(self) -> dict[str, mx.array]:
        """Returns every array that the next step depends on, by name: mx.save_safetensors takes them."""
        self._check_held()
        return state_of(self._state())

    def load_state_dict(self, state: Mapping[str, mx.array]) -> None:
        """Restores a state, bit for bit. One of another model, optimizer or precision is refused whole."""
        self._check_open()
        load_state(self._state(), state, self.policy.scale)
        self.masters.note_writes()
        self.forget()

    def forget(self) -> None:
        """Drops gradients that were accumulated and not used."""
        self._sum, self._before = None, {}

    def monitor(self, slice: int = SLICE) -> Monitor:
        """Watches every layer from now on: `slice` elements of what enters it and of the gradient of what leaves.

        `layer_numbers()` returns what steps have counted, `weight_numbers()` measures the next update, and
        `sample(loss_fn, batch)` looks closely at a part of a batch. No bit of a step changes.
        """
        self._check_open()
        check_numbers(slice=slice)
        if self._monitor is None:
            hands = (self._replay, self.measure_next)
            self._monitor = Monitor(self.model, self.conversion, self.masters, slice, *hands)
        elif self._monitor.slice != slice:
            raise HalfstepError(
                f"the run is monitored already, with slices of {self._monitor.slice}",
                hint="call run.monitor once, before the first step",
            )
        return self._monitor

    def reach(self, loss_fn: LossFn, batch: Any) -> Reached:
        """Runs a batch once, without lasting effects, and lists how each function of the model's own code ran."""
        return record(lambda watched: self._replay(watched, batch, 0), loss_fn)

    def measure_next(self, numbers: UpdateNumbers) -> None:
        """Lets somebody see the next update."""
        self._measured.append(numbers)

    def audit(self, loss_fn: LossFn | None = None, batch: Any = None, *, steps: int = STEPS) -> list[Finding]:
        """Returns what is wrong, worst first; an empty list if nothing is.

        With a loss function and a batch, `steps` updates are made and taken back, and lost ones are counted.
        """
        self._check_open()
        record = prepared_record(self.model, self.masters, self.optimizers)
        if loss_fn is not None:
            audit_updates(self, record, loss_fn, batch, steps)
        return engine.check(record)

    def unprepare(self) -> Module:
        """Returns the model in its own classes again, with its exact masters in fp32. This ends the run."""
        self._check_open()
        wide = self.masters.wide()
        restore(self.conversion)
        self.masters.put(wide)
        self.forget()
        vars(self.optimizer).pop("update", None)
        self._open = False
        return self.model

    def summary(self) -> str:
        """Describes what was converted and what was not, with reasons."""
        return "\n".join(summarize(self))

    def _watch_scale(self, result: StepResult) -> None:
        """Warns once when the loss scale is low and falling, by an update so old that reading it does not wait."""
        if self._alarm is None:
            return
        self._unread.append(result)
        if len(self._unread) > BEHIND:
            old = self._unread.popleft()
            scale, skipped = float(old.scale), bool(old.skipped)
            if message := self._alarm.observe(scale, falling=skipped):
                self._alarm = None
                warn_caller(message)

    def _live(self) -> list[Any]:
        return [
            self.model,
            self.masters.remainders,
            self.scalars,
            *(o.state for o in self.optimizers),
            *([] if self.averages is None else [self.averages.arrays]),
            mx.random.state,
        ]

    def _state(self) -> Live:
        averages = {} if self.averages is None else self.averages.arrays
        return Live(self._places(), self.masters.remainders, self.scalars, averages)

    def _places(self) -> dict[str, Place]:
        places = {f"model.{name}": place for name, place in arrays(self.model).items() if public(name)}
        for index, optimizer in enumerate(self.optimizers):
            places |= {f"optimizer.{index}.{name}": place for name, place in arrays(optimizer.state).items()}
        return places

    def _check_open(self) -> None:
        if not self._open:
            raise HalfstepError("the run is over: unprepare() restored the model", hint="prepare it again")
        self._check_held()

    def _check_held(self) -> None:
        if self._holds:
            raise HalfstepError(f"the model holds {self._holds}", hint="leave the `with` block first")

    def _check_model(self) -> None:
        """Refuses a model whose parameters are no longer those that were prepared."""
        self.masters.check_writes()
        now = {name: (id(p.container), p.array.dtype) for name, p in trainable(self.model).items()}
        if now != self._known:
            odd = sorted(dict(now.items() ^ self._known.items()))[0]
            raise HalfstepError(
                f"the model changed since it was prepared: `{odd}` was added, replaced, frozen, unfrozen or cast",
                hint="change the model before you prepare it; model.load_weights takes weights of any format",
            )

    def _call(self, key: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the live arrays, compiled if the run is."""
        if not self.compile:
            return function(*args)
        # Compiled code keeps containers, not arrays: replacing one makes it stale.
        live = self._live()
        key = (key, *map(id, live[:-1]))
        if key not in self._compiled:
            self._compiled[key] = mx.compile(function, inputs=live, outputs=live)
        results = self._compiled[key](*args)
        self.masters.note_writes()  # compiled code replaces the arrays of its outputs
        return results

    def _differentiator(self, loss_fn: LossFn) -> Callable[[Any], tuple[Any, ...]]:
        monitor = self._monitor

        def differentiate(batch: Any) -> tuple[Any, ...]:
            *results, seen = self._pass(loss_fn, batch, 0 if monitor is None else monitor.slice)
            return *results, () if monitor is None else monitor.count(seen)

        return differentiate

    def _pass(
        self, loss_fn: LossFn, batch: Any, size: int
    ) -> tuple[mx.array, mx.array, dict[str, mx.array], Recorder]:
        """Returns loss, weight, scaled gradients, and the first `size` elements of what watched layers met."""

        def scaled(used: dict[str, mx.array], batch: Any, scale: mx.array) -> tuple[mx.array, ...]:
            self.masters.put(used)
            with scope(self._base):
                returned = loss_fn(self.model, batch)
            is_pair = isinstance(returned, tuple) and len(returned) == 2
            total, weight = returned if is_pair else (returned, 1.0)
            weight = check_weight(weight)
            # No tokens, no gradient; 0 / 0 would spoil the other micro-batches.
            loss = check_loss(total, self.policy).astype(mx.float32) / mx.where(weight == 0, 1.0, weight)
            forward_ends()
            return mx.where(weight == 0, 0.0, loss * scale), loss, weight

        before = {name: place.array for name, place in self._others.items()}
        used = self.masters.used()
        with self.masters.in_use(), recording(size) as seen:
            (_, loss, weight), grads = mx.value_and_grad(scaled)(used, batch, self.scalars["scale"])
        self._replaced |= {name for name, place in self._others.items() if place.array is not before[name]}
        return loss, weight, {name: g.astype(self._accumulate) for name, g in grads.items()}, seen

    def _replay(self, loss_fn: LossFn, batch: Any, size: int) -> Recorder:
        """Runs a batch again, not compiled; leaves random state and running statistics as they were."""
        self._check_open()
        others = {name: place.array for name, place in self._others.items()}
        replaced, key = set(self._replaced), mx.random.state[0]  # type: ignore[index]
        try:
            seen = self._pass(loss_fn, batch, size)[-1]
            mx.eval([each.array for each in seen.seen])
        finally:
            for name, array in others.items():
                self._others[name].put(array)
            self._replaced = replaced
            set_random_key(key)
        return seen

    def _watched(self) -> list[mx.array]:
        return [] if self._monitor is None else self._monitor.arrays

    def _update(self, total: dict[str, Any]) -> tuple[mx.array, mx.array, mx.array]:
        """Replaces the live arrays; returns the loss, whether the step was finite, and the norm."""
        scaled_norm = norm(total["arrays"])
        finite = mx.isfinite(scaled_norm / total["weights"])  # all weights may be zero
        return self._updated(total, scaled_norm, finite, 1.0 / (total["scale"] * total["weights"]))

    def _update_unscaled(self, total: dict[str, Any]) -> tuple[mx.array, mx.array, mx.array]:
        """Does the same with gradients that `unscale` returned."""
        true_norm = norm(total["arrays"])
        return self._updated(total, true_norm, mx.isfinite(true_norm) & total["finite"], mx.array(1.0))

    def _updated(
        self, total: dict[str, Any], scaled_norm: mx.array, finite: mx.array, factor: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        verdict = self.policy.scale.judge(self.scale_state, finite, mx)
        norm = scaled_norm * factor
        if self.clip_norm:
            factor = factor * mx.minimum(self.clip_norm / norm, 1.0)
        self._step_optimizer({n: g.astype(mx.float32) * factor for n, g in total["arrays"].items()}, finite)
        following = verdict.state._asdict()
        self.scalars.update({name: mx.array(following[name]).astype(d) for name, d in _SCALARS.items()})
        self.scalars["applied"] = self.num_applied + finite.astype(mx.int32)
        if self.averages is not None:
            self.averages.update(finite)
        return total["loss"] / total["weights"], finite, norm

    def _step_optimizer(self, grads: dict[str, mx.array], finite: mx.array) -> None:
        """Steps the optimizer on fp32 masters and moments; if not finite, everything stays unchanged."""
        states = [place for o in self.optimizers for place in arrays(o.state).values()]
        before = [place.array for place in states]
        self._cast_moments(widen=True)
        trees = (tree_unflatten(list(flat.items())) for flat in (grads, self.masters.wide()))
        updated: dict[str, mx.array] = dict(tree_flatten(self.optimizer.apply_gradients(*trees)))
        self._cast_moments()
        for place, old in zip(states, before, strict=True):
            if place.array is not old:
                place.put(mx.where(finite, place.array, old))
        self.masters.update(updated, finite, (self.num_applied + 1).astype(mx.uint32))

    def _cast_moments(self, *, widen: bool = False) -> None:
        """Casts optimizer state of its parameter's shape to the moments format, or to fp32 for the update."""
        for optimizer in self.optimizers:
            for name, place in arrays(optimizer.state).items():
                parameter = self.conversion.places.get(name.rpartition(".")[0])
                if parameter is not None and place.array.shape == parameter.array.shape:
                    fmt = FP32 if widen else self.conversion.moments[name.rpartition(".")[0]]
                    place.put(place.array.astype(dtype_of(fmt)))
