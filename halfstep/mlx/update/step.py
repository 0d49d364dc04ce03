"""One update (core.scaling): accumulate, is it finite?, unscale, clip, step, rescale.

Every optimizer gets fp32 masters (masters.py) and fp32 gradients; state that has its parameter's shape is stored
in the moments format and widened for the update. MLX differentiates functions, so the caller passes gradients on:
`value_and_grad` returns them with the scale they carry, `update` takes them. mx.async_eval launches each update
and each micro-batch: arrays are lazy, and the graph would otherwise grow from step to step.

**Compiled**, each of the two parts, gradients and update, is a function of the arrays of model, optimizer and
scale, so a new rate or scale compiles nothing again. On a CPU MLX compiles every fused kernel by a call of g++:
the first step of the `tiny` recipe takes 33 s, and the others as long as before. So `compile=None` compiles on a
GPU only, unmeasured.

**In several processes** (parallel/ranks.py) each has its share of the micro-batches. Their gradients are summed
once per update, between the two parts; everything after that is the same in all of them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_unflatten

from halfstep.core.choice import Choice
from halfstep.core.errors import GradientsError, ModelChangedError, RunStateError, warn_caller
from halfstep.core.formats import FP32
from halfstep.core.refusal import call_error, no_batches_error, step_error
from halfstep.core.scaling import DynamicScale, ScaleAlarm, ScaleState
from halfstep.mlx.convert.apply import Applied
from halfstep.mlx.convert.places import arrays, trainable, walk
from halfstep.mlx.convert.scope import scope
from halfstep.mlx.layers import Held
from halfstep.mlx.numerics.dtypes import dtype_of
from halfstep.mlx.numerics.lowering import casts_for
from halfstep.mlx.optim.masters import Averages, Masters
from halfstep.mlx.optim.optimizers import Muon, leaf_optimizers
from halfstep.mlx.parallel.ranks import Ranks, start_as_rank_0
from halfstep.mlx.state import set_random_key
from halfstep.mlx.update.checks import check_loss, check_untraced, check_weight, refuse_update

# loss_fn(model, batch) -> the mean loss, or (the sum of losses, the number of tokens)
LossFn = Callable[[Module, Any], Any]
_CALL = (
    ("the model", "a micro-batch"),
    "run.step(lambda model, batch: loss_fn(model, *batch), [batch])",
    "mx.array(array)",
)
BEHIND = 4  # updates; a scale takes ten to fall from where the alarm begins to its floor
_SCALARS = {"scale": mx.float32, "good_steps": mx.int32, "tolerance": mx.int32, "stuck": mx.bool_}


@dataclass(frozen=True)
class StepResult:
    """What one update did, as unread arrays: reading one waits for the device."""

    loss: mx.array  # mean over the tokens of all micro-batches
    skipped: mx.array  # bool: a gradient or a loss was not finite
    scale: mx.array  # the scale that was used
    grad_norm: mx.array  # after unscaling, before clipping
    stuck: mx.array  # bool: not finite, and the scale is at its floor
    bad_rank: mx.array | None = None  # of several processes, the first whose own loss is not finite; -1 if all are


@dataclass(frozen=True)
class Gradients:
    """The gradients of a micro-batch, times the scale, by the name of the parameter; or a sum of several."""

    arrays: dict[str, mx.array]
    scale: mx.array  # the one they carry
    weight: mx.array  # tokens of the first micro-batch, against which the others are weighted
    weights: mx.array  # sum of the weights, over the first
    loss: mx.array  # sum of the mean losses, with the same weights
    finite: mx.array | None = None  # whether they were before `unscale`; None if that was not called
    bad_rank: mx.array | None = None  # of several processes, the first whose own loss is not finite; -1 if all are


def sum_over_ranks(total: Gradients, ranks: Ranks, update: int) -> Gradients:
    """Returns the sum over ranks, whose weights are against the first micro-batch of rank 0."""
    mx.eval(vars(total))  # before the exchange, so that its time-out counts only the wait for others
    weight = mx.where(total.weight == 0, 1.0, total.weight)
    what = f"the sums of update {update}"
    given = [float(number) for number in (weight, total.scale, total.weights, total.loss)]
    weight, scale, weights, loss = np.array(ranks.exchange(what, given), np.float32).T
    shares, bad = weight / weight[0], next((r for r, own in enumerate(loss) if not np.isfinite(own)), -1)
    share = mx.array((shares * (scale[0] / scale))[ranks.rank])
    sums = ranks.sum(what, {name: g.astype(mx.float32) * share for name, g in total.arrays.items()})
    first, both = (weight[0], scale[0]), ((shares * weights).sum(), (shares * loss).sum())
    weight, scale, weights, loss = map(mx.array, (*first, *both))
    return Gradients(sums, scale, weight, weights, loss, bad_rank=mx.array(bad))


def norm_of(arrays: Mapping[str, mx.array]) -> mx.array:
    """Returns the norm of all gradients together."""
    return mx.sqrt(mx.stack([mx.square(g.astype(mx.float32)).sum() for g in arrays.values()]).sum())


class Engine:
    """What makes updates: a model, its optimizers and a policy. It calls instruments, and imports none."""

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
        self.optimizers = leaf_optimizers(optimizer)
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
        self._open, self._holds = True, ""  # what the model holds instead of its masters, if anything
        watched = warns and isinstance(self.policy.scale, DynamicScale)
        self._alarm = ScaleAlarm(self.policy.scale) if watched else None
        self._unread: deque[StepResult] = deque()  # updates whose scale was not looked at
        self.watching: Any = None  # a Monitor, once there is one
        self._update_watchers: list[Any] = []  # UpdateNumbers of the next update
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

    def step(self, loss_fn: LossFn, micro_batches: Iterable[Any]) -> StepResult:
        """Updates once from micro-batches; `loss_fn` returns a mean loss, or (sum of losses, number of tokens)."""
        if isinstance(micro_batches, mx.array | dict | np.ndarray) or not callable(loss_fn):
            raise step_error(loss_fn, micro_batches)
        differentiate = self.value_and_grad(loss_fn)
        try:
            for batch in micro_batches:
                self.accumulate(differentiate(batch)[1])
            if self._sum is None:
                raise no_batches_error()
            return self.update()
        except BaseException as error:
            begun = self._sum is not None
            self.forget()  # half a sum must not become part of the next
            explained = None if begun else call_error(error, loss_fn, micro_batches, mx.array, *_CALL)
            if explained is not None:
                raise explained from error
            raise

    def value_and_grad(self, loss_fn: LossFn) -> Callable[[Any], tuple[mx.array, Gradients]]:
        """Returns a function of a batch that returns its mean loss and the gradients, which `update` takes."""

        def differentiate(batch: Any) -> tuple[mx.array, Gradients]:
            self._check_open()
            check_untraced(batch, self._live())
            self._check_model()
            if not self._before:
                self._before = {name: place.array for name, place in self._others.items()}
            loss, weight, grads, counted = self._call(loss_fn, self._differentiator(loss_fn), batch)
            if self.watching is not None:
                self.watching.merge(counted)
            share, counted = (weight != 0).astype(mx.float32), mx.where(weight == 0, 0.0, loss)
            return loss, Gradients(grads, self.scalars["scale"], weight, share, counted)

        return differentiate

    def accumulate(self, grads: Gradients) -> None:
        """Adds the gradients of a micro-batch to those of the next update."""
        if not isinstance(grads, Gradients):
            raise GradientsError(
                f"the gradients are a `{type(grads).__name__}`, which does not say which scale they carry",
                hint="pass what run.value_and_grad(loss_fn)(batch) returns, unchanged",
            )
        held = self._sum
        if held is None:
            self._sum = grads
        elif held.finite is not None or grads.finite is not None:
            raise GradientsError(
                "some of the gradients have been unscaled, and others have not",
                hint="pass all of them to run.unscale() and its result to run.update()",
            )
        else:
            weight = grads.weight / mx.where(held.weight == 0, 1.0, held.weight)
            share = weight * (held.scale / grads.scale)  # powers of two, and equal unless an update came between
            sums = {n: held.arrays[n] + (share * g).astype(self._accumulate) for n, g in grads.arrays.items()}
            weights, loss = held.weights + weight, held.loss + weight * grads.loss
            self._sum = replace(held, arrays=sums, weights=weights, loss=loss)
        watched = () if self.watching is None else self.watching.counted
        check_untraced(self._sum.arrays, self._sum.weights, self._sum.loss, watched)

    def unscale(self, grads: "Gradients | Sequence[Gradients] | None" = None) -> Gradients:
        """Returns the gradient of the mean loss, in fp32, from gradients given here or to `accumulate`.

        Clip, measure or change `arrays` (dataclasses.replace), and pass the result to `update`, which knows.
        """
        total = self._take_sum(grads)
        if total.finite is not None:
            return total
        finite = mx.isfinite(norm_of(total.arrays) / total.weights)
        factor = 1.0 / (total.scale * total.weights)
        unscaled = {name: g.astype(mx.float32) * factor for name, g in total.arrays.items()}
        return replace(total, arrays=unscaled, finite=finite)

    def update(self, grads: "Gradients | Sequence[Gradients] | None" = None) -> StepResult:
        """Finite? -> unscale -> clip -> step -> rescale, with the gradients given here or to `accumulate`."""
        total = self._take_sum(grads)
        given = {name: value for name, value in vars(total).items() if value is not None and name != "bad_rank"}
        if self.watching is not None:
            self.watching.before_update()
        watchers, self._update_watchers = self._update_watchers, []
        for watcher in watchers:
            watcher.start(self)
        loss, finite, norm = self._call(("update", total.finite is None), self._update, given)
        for watcher in watchers:
            watcher.end(self, total, norm, finite)
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
        if self.watching is not None:
            self.watching.after_update()
        return result

    def _take_sum(self, grads: "Gradients | Sequence[Gradients] | None") -> Gradients:
        """Returns the sum of all gradients so far and of those that are given, on all ranks; it is used up."""
        self._check_open()
        for each in () if grads is None else (grads,) if not isinstance(grads, list | tuple) else grads:
            self.accumulate(each)
        if self._sum is None:
            raise GradientsError(
                "there are no gradients to update with",
                hint="call step(), or value_and_grad(loss_fn)(batch) and pass its gradients to update()",
            )
        total, self._sum = self._sum, None
        if self.ranks is None or total.finite is not None:
            return total
        return sum_over_ranks(total, self.ranks, int(self.num_applied.item()) + 1)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Drops gradients that were accumulated and not used."""
        self._sum, self._before = None, {}

    def watch_update(self, watcher: Any) -> None:
        """Calls `start` and `end` of a watcher before and after the next update."""
        self._update_watchers.append(watcher)

    def _watch_scale(self, result: StepResult) -> None:
        """Warns once when the loss scale is low and falling, by an update so old that reading it does not wait."""
        if self._alarm is None:
            return
        self._unread.append(result)
        if len(self._unread) > BEHIND:
            old = self._unread.popleft()
            scale, norm = float(old.scale), float(old.grad_norm)
            if message := self._alarm.observe(scale, falling=not math.isfinite(norm)):
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

    def _check_open(self) -> None:
        if not self._open:
            raise RunStateError("the run is over: unprepare() restored the model", hint="prepare it again")
        self._check_held()

    def _check_held(self) -> None:
        if self._holds:
            raise RunStateError(f"the model holds {self._holds}", hint="leave the `with` block first")

    def _check_model(self) -> None:
        """Refuses a model whose parameters are no longer those that were prepared."""
        self.masters.check_writes()
        now = {name: (id(p.container), p.array.dtype) for name, p in trainable(self.model).items()}
        if now != self._known:
            odd = sorted(dict(now.items() ^ self._known.items()))[0]
            raise ModelChangedError(
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
        watching = self.watching

        def differentiate(batch: Any) -> tuple[Any, ...]:
            recorder = None if watching is None else watching.recorder()
            return *self._pass(loss_fn, batch, recorder), () if watching is None else watching.count(recorder)

        return differentiate

    def _pass(
        self, loss_fn: LossFn, batch: Any, recorder: Any = None
    ) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        """Returns loss, weight and scaled gradients; shows a recorder what watched layers meet."""

        def scaled(used: dict[str, mx.array], batch: Any, scale: mx.array) -> tuple[mx.array, ...]:
            self.masters.put(used)
            with scope(self._base):
                returned = loss_fn(self.model, batch)
            is_pair = isinstance(returned, tuple) and len(returned) == 2
            total, weight = returned if is_pair else (returned, 1.0)
            weight = check_weight(weight)
            # No tokens, no gradient; 0 / 0 would spoil the other micro-batches.
            loss = check_loss(total, self.policy).astype(mx.float32) / mx.where(weight == 0, 1.0, weight)
            if recorder is not None:
                recorder.forward_ends()
            return mx.where(weight == 0, 0.0, loss * scale), loss, weight

        before = {name: place.array for name, place in self._others.items()}
        used = self.masters.forward_arrays()
        with self.masters.swap_in(), nullcontext() if recorder is None else recorder.watch():
            (_, loss, weight), grads = mx.value_and_grad(scaled)(used, batch, self.scalars["scale"])
        self._replaced |= {name for name, place in self._others.items() if place.array is not before[name]}
        return loss, weight, {name: g.astype(self._accumulate) for name, g in grads.items()}

    def replay(self, loss_fn: LossFn, batch: Any, recorder: Any = None) -> dict[str, mx.array]:
        """Runs a batch again, not compiled, and returns its scaled gradients; no state has changed after it."""
        self._check_open()
        others = {name: place.array for name, place in self._others.items()}
        replaced, key = set(self._replaced), mx.random.state[0]  # type: ignore[index]
        try:
            results = self._pass(loss_fn, batch, recorder)
            mx.eval(results)
            return results[2]
        finally:
            for name, array in others.items():
                self._others[name].put(array)
            self._replaced = replaced
            set_random_key(key)

    def _update(self, total: dict[str, Any]) -> tuple[mx.array, mx.array, mx.array]:
        """Replaces the live arrays; returns the loss, whether the step was finite, and the unclipped norm."""
        norm = norm_of(total["arrays"])
        if "finite" in total:  # `unscale` returned these gradients
            finite, factor = mx.isfinite(norm) & total["finite"], mx.array(1.0)
        else:
            finite = mx.isfinite(norm / total["weights"])  # all weights may be zero
            factor = 1.0 / (total["scale"] * total["weights"])
        verdict = self.policy.scale.judge(self.scale_state, finite, mx)
        finite &= mx.isfinite(total["loss"])  # which no scale is to blame for
        norm = norm * factor
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
