"""Training with a loss function of one's own: `init` makes a state, `make_step` a compiled step of it.

    state = init(params, optimizer, "fp16-mixed")    any pytree, any optax transform
    step = make_step(loss_fn, optimizer)             loss_fn(params, batch[, rng]) -> loss | Weighted | (..., aux)
    state, result = step(state, batch)               jitted, and the state is donated: the old one is used up

**Masters are outside the loss, casts inside.** The state holds parameters and moments in the formats the policy
gives them; the loss function sees parameters in their compute format (interpret.py), and any optimizer sees fp32
parameters, gradients and moments. A narrower master is widened, updated and rounded back, to nearest or
stochastically. The state carries the policy: as a pytree it keeps every field under jit, scan and checkpoints.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfstep.core.arrays.measure import TOKENS, resolve_policy
from halfstep.core.audit.coverage import Coverage
from halfstep.core.averages import check_decay
from halfstep.core.choice.layers import Measured, Timer
from halfstep.core.errors import RunStateError, warn_caller, warn_renamed
from halfstep.core.observed import Sample, first_rows
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_numbers
from halfstep.core.scaling import DynamicScale, ScaleAlarm, ScaleState, stuck_error
from halfstep.jax import parallel
from halfstep.jax.convert.apply import Applied, Leaves, apply
from halfstep.jax.convert.checks import call_checked, with_amaxes
from halfstep.jax.convert.fp8_choice import ProductFinder, first_choice, measure_products
from halfstep.jax.convert.interpret import Interpreter, cast_inside, shown_inside
from halfstep.jax.fp8 import empty_history, scaling_amaxes
from halfstep.jax.instruments.coverage import Recorder
from halfstep.jax.instruments.gradient import merge_rows, watched_gradient
from halfstep.jax.instruments.monitor import SAMPLE, Monitor, update_sums
from halfstep.jax.layers import COMPILER_OPTIONS
from halfstep.jax.measure import Product, time_product_once
from halfstep.jax.optim.masters import hold, narrow_moments, widen_masters
from halfstep.jax.pytree import check_transform
from halfstep.jax.state import Origin, State, check_measured, check_state, map_state
from halfstep.jax.update.checks import (
    Progress,
    check_micro_batches,
    check_not_in_shard_map,
    check_optimizer,
    measured_choice,
    trace_error,
    unpack_train_state,
)
from halfstep.jax.update.rows import find_mixing
from halfstep.jax.update.step import Gradient, LossFn, accumulate, apply_sums, scalar_loss
from halfstep.jax.update.step import StepResult as StepResult
from halfstep.jax.update.step import Weighted as Weighted

_Interpreter = TypeVar("_Interpreter", bound=Interpreter)
_SCALE_DTYPES = (jnp.float32, jnp.int32, jnp.int32, jnp.bool_)


def init(
    params: Any,
    optimizer: optax.GradientTransformation,
    policy: Policy | str,
    *,
    seed: int = 0,
    names: Sequence[str] = (),
    tokens: int = TOKENS,
    mesh: Mesh | None = None,
    ema: float = 0.0,
) -> State:
    """Returns the first state. It copies the parameters and may be donated; `names` are modules without any.

    Instead of parameters, `params` may be a `TrainState` of Flax: its moments and its count of steps come along.
    Pass its own `tx` as the optimizer. Back: `train.replace(step=state.num_applied, params=state.masters(),
    opt_state=state.opt_state)`.

    With a `mesh` every device of it gets the whole state, for a step over the same mesh.

    `ema` is the decay of an fp32 average of the masters, 0 for none: every step moves it, and `state.averaged()`
    returns the parameters to evaluate.

    The policy `auto` is measured, as for a recipe, with micro-batches of `tokens`; `state.choice` has the answer
    and its reason.
    """
    check_transform(optimizer)
    check_numbers(seed=seed, tokens=tokens)
    if ema:
        check_decay(ema)
    params, begun = unpack_train_state(params, optimizer)
    policy, choice, note = resolve_policy(policy, lambda: measured_choice(params, tokens))
    if mesh is not None:
        parallel.check_mesh(mesh)
    given: dict[str, Any] = {"mesh": mesh, "begun": begun, "ema": ema}
    return first_state(params, optimizer, policy, seed=seed, names=names, origin=Origin(choice, (), note), **given)


def first_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    policy: Policy,
    *,
    seed: int = 0,
    names: Sequence[str] = (),
    origin: Origin | None = None,
    mesh: Mesh | None = None,
    begun: Progress | None = None,
    ema: float = 0.0,
    measured: Measured | None = None,
) -> State:
    """Returns the first state of a policy that was named or chosen; `begun` has moments to continue from.

    `measured` are the layers of rules that say so, if they were timed.
    """
    applied = apply(params, policy, names)
    leaves = applied.leaves

    @jax.jit
    def make(trained: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array], Any]:
        wide = widen_masters(trained, {})
        moments = optimizer.init(leaves.bare(wide)) if begun is None else begun.opt_state
        return *hold(wide, applied), narrow_moments(moments, applied)

    held, remainders, opt_state = make(leaves.trained)
    sizes = {name: 4 if name in remainders else leaf.dtype.itemsize for name, leaf in held.items()}
    narrower = tuple(name for name, leaf in leaves.trained.items() if leaf.dtype.itemsize < sizes[name])
    state = State(
        params=leaves.rebuild(held),
        opt_state=opt_state,
        scale=ScaleState(*map(jnp.asarray, policy.scale.init(), _SCALE_DTYPES)),
        num_applied=jnp.asarray(0 if begun is None else begun.steps, jnp.int32),
        policy=policy,
        seed=seed,
        names=tuple(names),
        origin=replace(origin or Origin(), widened=narrower),
        ema=widen_masters(held, remainders) if ema else {},
        decay=ema,
        remainders=remainders,
        amaxes={name: empty_history() for name in applied.delayed},
        measured=measured or first_choice(policy),
    )
    traced = any(isinstance(x, jax.core.Tracer) for x in held.values())
    return state if traced else _place_copies(state, held, mesh)


def make_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float = 0.0,
    micro_batches: int | None = None,
    cast: bool = True,
    cast_batch: bool = True,
    mesh: Mesh | None = None,
    monitor: Monitor | None = None,
) -> "Step":
    """Returns a jitted `step(state, batch, rng=None) -> (state, result)` that donates the state.

    `loss_fn(params, batch)` returns a mean loss, or `Weighted(sum, count)`, or either in a tuple with a second
    value, which becomes the result's `aux`; `rng`, if given, is the third argument. With `micro_batches=n` every
    leaf of the batch has a leading axis of n, and `rng` is folded with the index of the micro-batch.

    With `cast` any function will do: its parameters, and with `cast_batch` the floating leaves of its batch,
    appear in their compute format, and its matmuls run as the policy says (interpret.py). Without, it gets the
    masters in fp32 and casts inside, as functions built from halfstep.jax layers do.

    The optimizer, and every transform that `optax.chain` puts in front of it, gets the gradient of the mean loss:
    unscaled, clipped to `clip_norm`, in fp32.

    With a `mesh` its devices share the rows of every batch, which are along its first axis, or along the second if
    the first counts micro-batches. The update is that of the whole batch: losses are weighted by tokens, gradients
    are summed over devices once, in fp32, and a gradient that is not finite on one device skips the update on all.
    The loss function gets the rows of one device, and an `rng` folded with its index. A loss that is neither
    `Weighted` nor a mean over rows gets the whole batch and `rng`, and a warning names the line that mixes rows.

    A `monitor` sees what enters each layer, the gradient of what leaves it, and what happens to updates. It
    changes no bit of them, and the step is still one program; `step.sample(state, batch)` looks closely at a part
    of a batch.

    The function below the jit is `step.__wrapped__`: pure, for use inside another jit or scan. Give the outermost
    jit `layers.COMPILER_OPTIONS` then, or XLA may keep more precision than the policy says.
    """
    check_transform(optimizer)
    check_numbers(clip_norm=clip_norm)
    check_micro_batches(micro_batches)
    inside = partial(cast_inside, loss_fn, cast_batch=cast_batch, trains=True)
    call = inside if cast else partial(call_checked, loss_fn)
    gradient = partial(_gradient, call, monitor)
    stepper = optax.with_extra_args_support(optimizer)
    report = None if monitor is None else partial(update_sums, size=monitor.slice)

    def update(
        state: State, batch: Any, rng: Any, mesh: Mesh | None = None
    ) -> tuple[tuple[State, StepResult], Any]:
        # fp32 is fp32: JAX's default means TF32 on some GPUs and bf16 on a TPU.
        with jax.default_matmul_precision("highest"):
            applied, masters = _inputs(state)
            check_optimizer(optimizer, applied.leaves, state.opt_state)
            differentiate = gradient(state, applied)
            sums, first, (aux, numbers) = accumulate(differentiate, masters, applied, batch, rng, micro_batches)
            if numbers is not None and micro_batches is not None:
                numbers = merge_rows(numbers)
            if mesh is not None:
                amaxes = lax.pmax(sums.amaxes, mesh.axis_names)
                sums = parallel.sum_over_devices(sums, first, mesh)._replace(amaxes=amaxes)
            return apply_sums(state, applied, stepper, sums, clip_norm, report), (aux, numbers)

    def shown(state: State, rest: Sequence[Any]) -> Sequence[Any]:
        applied, masters = _inputs(state)
        if cast:
            return shown_inside(applied, masters, rest, cast_batch=cast_batch)
        return with_amaxes(applied.leaves.rebuild(masters), masters), *rest

    run = update if mesh is None else _over_devices(update, loss_fn, shown, mesh, micro_batches)

    def step(state: State, batch: Any, rng: Any = None) -> tuple[State, StepResult]:
        check_not_in_shard_map()
        (following, result), (aux, numbers) = run(state, batch, rng)
        if monitor is not None and mesh is not None:
            numbers = merge_rows(numbers)
        return following, replace(result, aux=aux, layers=numbers)

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def replay(state: State, batch: Any, rng: Any) -> Any:
        """Returns whole tensors of a batch, as each layer gets them: for each site and role of the monitor."""
        with jax.default_matmul_precision("highest"):
            applied, masters = _inputs(state)
            return gradient(state, applied, whole=True)(masters, batch, rng)[2]

    return Step(loss_fn, replay, call if cast else None, mesh, micro_batches, monitor, compile_step(step, mesh))


def compile_step(step: Callable[..., Any], mesh: Mesh | None = None) -> Any:
    """Compiles a pure step for use outside of any jit: it donates the state, and XLA keeps no excess precision."""
    # A state that comes back exactly as it was placed does not compile the step again.
    place: dict[str, Any] = {} if mesh is None else {"out_shardings": (parallel.replicated(mesh), None)}
    return jax.jit(step, donate_argnums=0, compiler_options=COMPILER_OPTIONS, **place)


@dataclass(eq=False, repr=False)
class Step:
    """A compiled step that warns once when the loss scale is low and falling. It reads results that are done."""

    _loss_fn: LossFn
    _replay: Any
    _call: Callable[..., Any] | None
    _mesh: Mesh | None
    _micro_batches: int | None
    _monitor: Monitor | None
    _step: Any = None  # before __init__ there is nothing to delegate to
    _warned: bool = False
    _unread: deque[tuple[Array, Array]] = field(default_factory=partial(deque, maxlen=64))  # scales and norms

    def __call__(self, state: State, batch: Any, rng: Any = None) -> tuple[State, StepResult]:
        """Returns the state after one update, and what the update did; uses up the state it is given."""
        check_state(state)
        state = self.measure(state, batch, rng)
        if self._mesh is not None:
            parallel.check_placed(state, self._mesh)
            batch = parallel.place_rows(batch, self._mesh, self._micro_batches)
        law, origin = state.policy.scale, state.origin
        try:
            following, result = self._step(state, batch, rng)
        except Exception as error:
            if (explained := trace_error(error, self._loss_fn, batch, rng)) is not None:
                raise explained from error
            raise
        if self._monitor is not None:
            self._monitor.add(result.layers, result.updates)
        if not self._warned and isinstance(law, DynamicScale):
            self._unread.append((result.scale, result.grad_norm))
            self._warn_if_low(ScaleAlarm(law))
        return replace(following, origin=origin, measured=state.measured), result

    def sample(
        self, state: State, batch: Any, rng: Any = None, share: float = 1 / 16
    ) -> dict[str, dict[str, Sample]]:
        """Runs at most a `share` of a batch again, at least one row, and returns {layer: {role: sample}}.

        A halfstep.core.observed.Sample has exponents, signal to noise, headroom, kurtosis, and what other formats
        would lose; roles are activation, gradient and weight. It waits for the device, and keeps the state.
        """
        if self._monitor is None:
            raise RunStateError(
                "the step has no monitor", hint="make_step(loss_fn, optimizer, monitor=halfstep.jax.Monitor())"
            )
        check_state(state)
        if self._mesh is not None:
            state = jax.tree.map(lambda leaf: leaf.addressable_data(0), state)
        if self._micro_batches is not None:
            batch = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:]) if jnp.ndim(leaf) > 1 else leaf, batch
            )
        reported = self._replay(state, first_rows(batch, share, jax.tree.leaves(batch), jax.tree.map)[0], rng)
        return self._monitor.describe(reported, widen_masters(Leaves(state.params).trained, state.remainders))

    def coverage(self, state: State, batch: Any, rng: Any = None) -> Coverage:
        """Lists how each product, island and look-up of the loss function runs under the policy, and why.

        It traces the function on one micro-batch: nothing is computed, and the state is kept.
        """
        if self._call is None:
            raise RunStateError(
                "the step was made with cast=False: the loss function casts by itself",
                hint="summary(state) says what the policy means for each module",
            )
        check_state(state)
        return self._interpret(Recorder, state, batch, rng).coverage()

    def reach(self, state: State, batch: Any, rng: Any = None) -> Coverage:
        """The older name of `coverage`."""
        warn_renamed("reach", "coverage")
        return self.coverage(state, batch, rng)

    def measure(
        self, state: State, batch: Any, rng: Any = None, *, timer: Timer[Product] = time_product_once
    ) -> State:
        """Times the matmuls that rules call `measured` (`compute=e4m3:measured`), unless the state has the answer.

        The first step does this by itself. A step inside another jit or scan cannot: call it before. The returned
        state has the same arrays, and `summary(state)` says which layers are narrow, and why.
        """
        if state.measured is not None:
            return state
        if self._call is None:
            raise RunStateError(
                "the step was made with cast=False, so what `measured` layers multiply is not known",
                hint="omit `measured` from the rules; or let make_step cast: leave out cast=False",
            )
        finder = self._interpret(ProductFinder, state, batch, rng, 1 if self._mesh is None else self._mesh.size)
        return replace(state, measured=measure_products(finder.found, timer=timer))

    def _interpret(
        self, kind: Callable[[Applied], _Interpreter], state: State, batch: Any, rng: Any, share: int = 1
    ) -> _Interpreter:
        """Interprets the loss function on the shapes of one micro-batch, or of a part of `share` equal ones."""
        batch = parallel.shapes_of_part(batch, self._micro_batches, lambda rows: rows // share)
        applied, rest = state.applied(), (batch,) if rng is None else (batch, rng)
        masters = widen_masters(applied.leaves.trained, state.remainders) | scaling_amaxes(state.amaxes)
        call, interpreter = self._call, kind(applied)
        assert call is not None
        jax.eval_shape(lambda *given: call(applied, *given, interpreter=interpreter)[0], masters, rest)
        return interpreter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)  # lower, eval_shape, __wrapped__

    def _warn_if_low(self, alarm: ScaleAlarm) -> None:
        while self._unread and self._unread[0][0].is_ready():  # type: ignore[attr-defined]
            scale, norm = self._unread.popleft()
            if message := alarm.observe(float(scale), falling=not math.isfinite(float(norm))):
                self._warned = True
                self._unread.clear()
                warn_caller(message)


def check(result: StepResult, cause: str = "") -> None:
    """Stops a run that no scale can save, and names the cause if it is known. Reads from the device."""
    if bool(result.stuck):
        raise stuck_error(float(result.scale), cause)


def _gradient(
    call: LossFn, monitor: Monitor | None, state: State, applied: Applied, *, whole: bool = False
) -> Gradient:
    """Returns a function that differentiates the scaled loss of one micro-batch.

    With a monitor, the numbers of its layers come out beside the gradients; or the tensors themselves, if `whole`.
    """

    def objective(masters: dict[str, Array], part: Any, key: Any) -> tuple[Array, Any]:
        loss, weight, aux = scalar_loss(call, applied, masters, part, key)
        return loss * state.scale.scale, (loss, weight, aux)

    def gradient(masters: dict[str, Array], part: Any, key: Any) -> tuple[Any, Any, Any]:
        if monitor is None:
            return *jax.grad(objective, has_aux=True)(masters, part, key), None
        size = SAMPLE if whole else monitor.slice
        grads, others, monitor.watched, reported = watched_gradient(
            objective, masters, (part, key), applied, size, whole=whole
        )
        return grads, others, reported if whole else monitor.watched.numbers(reported)

    return gradient


def _over_devices(
    update: Callable[..., Any], loss_fn: LossFn, shown: Callable[..., Any], mesh: Mesh, micro_batches: int | None
) -> Callable[..., Any]:
    """Returns an update over a mesh: devices share the rows if the loss is a mean over them."""
    by_rows = parallel.map_devices(partial(update, mesh=mesh), mesh, micro_batches)

    def run(state: State, batch: Any, rng: Any) -> Any:
        def arguments(times: int) -> Sequence[Any]:
            part = parallel.shapes_of_part(batch, micro_batches, lambda rows: times * max(rows // mesh.size, 2))
            return shown(state, (part,) if rng is None else (part, rng))

        if not (mixing := find_mixing(loss_fn, arguments)):
            return by_rows(state, batch, rng)
        warn_caller(
            f"the loss is not a mean over rows ({mixing}): it is computed over the whole batch, as on one device, "
            "and devices exchange more; if it is a sum over a count, return Weighted(sum, count)"
        )
        return parallel.run_whole(update, mesh)(state, batch, rng)

    return run


def _inputs(state: State) -> tuple[Applied, dict[str, Array]]:
    """Returns what the policy means for the parameters, and what the loss function is called on."""
    check_measured(state)
    applied = state.applied()
    masters = widen_masters(applied.leaves.trained, state.remainders, applied.halves)
    return applied, masters | scaling_amaxes(state.amaxes)


def _place_copies(state: State, held: Mapping[str, Array], mesh: Mesh | None) -> State:
    """Copies a state, moments to where their parameters are, and what belongs to none of them to every device.

    With a mesh, all goes to each of its devices. Copies, since a donated state must not take the caller's arrays
    with it, nor one array twice.
    """
    if mesh is not None:  # from one device to all, `may_alias` does not keep the first from sharing
        return jax.tree.map(lambda leaf: jax.device_put(jnp.copy(leaf), parallel.replicated(mesh)), state)
    whole = next(iter(held.values())).sharding
    if isinstance(whole, NamedSharding):
        whole = NamedSharding(whole.mesh, PartitionSpec())

    def copied(_: str, parameter: str | None, leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        place = whole if parameter is None else held.get(parameter, leaf).sharding
        return jax.device_put(leaf, place, may_alias=False)

    return map_state(state, copied)
