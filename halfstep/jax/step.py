"""One update (core.scaling): accumulate, finite?, unscale, clip, step, rescale; a pure function of the state.

    state = init(params, optimizer, "fp16-mixed")    any pytree, any optax transform
    step = make_step(loss_fn, optimizer)             loss_fn(params, batch[, rng]) -> loss | Weighted | (..., aux)
    state, result = step(state, batch)               jitted, and the state is donated: the old one is used up

**Masters are outside the loss, casts inside.** The state holds parameters and moments in the formats the policy
gives them; the loss function sees parameters in their compute format (interpret.py), and any optimizer sees fp32
parameters, gradients and moments. A narrower master is widened, updated and rounded back, to nearest or
stochastically. The state carries the policy: as a pytree it keeps every field under jit, scan and checkpoints.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfstep.core.audit.reached import Reached
from halfstep.core.averages import averaged, check_decay
from halfstep.core.choice.layers import Measured, Timer
from halfstep.core.errors import HalfstepError, warn_caller
from halfstep.core.measure import TOKENS, settle
from halfstep.core.observed import Sample
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_numbers
from halfstep.core.scaling import DynamicScale, ScaleAlarm, ScaleState, stuck_error
from halfstep.jax.apply import Applied, Leaves, apply, modules_of
from halfstep.jax.cast import carried
from halfstep.jax.dtypes import dtype_of
from halfstep.jax.fp8 import PREFIX, empty, in_use, moved
from halfstep.jax.functions.interpret import cast_inside, checked
from halfstep.jax.layers import COMPILER_OPTIONS
from halfstep.jax.measure import Product, time_product_once
from halfstep.jax.observe.gradient import describer, watched_gradient
from halfstep.jax.observe.monitor import SAMPLE, Monitor, first_rows, update_sums
from halfstep.jax.observe.taps import merged
from halfstep.jax.optim.masters import held_moments, hold, wide_moments, widened
from halfstep.jax.parallel import check_mesh, check_placed, everywhere, on_each, place_rows, summed
from halfstep.jax.run.checks import (
    Begun,
    check_alone,
    check_leading,
    check_loss,
    check_micro_batches,
    check_optimizer,
    check_transform,
    measured_choice,
    unpacked,
)
from halfstep.jax.run.fp8_choice import Products, find_products, first_choice, measure_products
from halfstep.jax.run.reached import record
from halfstep.jax.state import Origin, State, check_measured, check_state

LossFn = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResult:
    """What one update did, as device scalars: reading one waits for the device."""

    loss: Array  # mean over the tokens of all micro-batches
    skipped: Array  # bool: the gradients were not finite
    scale: Array  # the scale that was used
    grad_norm: Array  # after unscaling, before clipping
    stuck: Array  # bool: not finite, and the scale is at its floor
    aux: Any = None  # what the loss function returned besides; stacked by device of a mesh, and by micro-batch
    layers: Any = None  # with a monitor: the numbers of its layers
    updates: Any = None  # with a monitor: sums over a slice of each parameter


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A sum of losses and how many there are (tokens), where micro-batches differ in size."""

    total: Any
    weight: Any


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

    A `TrainState` of Flax is taken as it is, in place of the parameters: its moments and its count of steps come
    along. Pass its own `tx` as the optimizer. Back: `train.replace(step=state.num_applied, params=state.masters(),
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
    params, begun = unpacked(params, optimizer)
    policy, choice, note = settle(policy, lambda: measured_choice(params, tokens))
    if mesh is not None:
        check_mesh(mesh)
    origin = Origin(choice, (), note)
    given: dict[str, Any] = {"origin": origin, "mesh": mesh, "begun": begun, "ema": ema}
    return first_state(params, optimizer, policy, seed=seed, names=names, **given)


def first_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    policy: Policy,
    *,
    seed: int = 0,
    names: Sequence[str] = (),
    origin: Origin | None = None,
    mesh: Mesh | None = None,
    begun: Begun | None = None,
    ema: float = 0.0,
    measured: Measured | None = None,
) -> State:
    """Returns the first state of a policy that was named or chosen; `begun` has moments to continue from.

    `measured` are the layers of rules that say so, if they were timed.
    """
    applied = apply(params, policy, names)
    leaves = Leaves(params)

    @jax.jit
    def make(trained: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array], Any]:
        wide = widened(trained, {})
        moments = optimizer.init(leaves.bare(wide)) if begun is None else begun.opt_state
        opt_state = held_moments(leaves, moments, applied)
        return *hold(wide, applied), opt_state

    held, remainders, opt_state = make(leaves.trained)
    sizes = {name: 4 if name in remainders else leaf.dtype.itemsize for name, leaf in held.items()}
    narrower = tuple(name for name, leaf in leaves.trained.items() if leaf.dtype.itemsize < sizes[name])
    state = State(
        params=leaves.rebuilt(held),
        opt_state=opt_state,
        scale=_scalars(policy.scale.init()),
        num_applied=jnp.asarray(0 if begun is None else begun.steps, jnp.int32),
        policy=policy,
        seed=seed,
        names=tuple(names),
        origin=replace(origin or Origin(None, (), ""), widened=narrower),
        ema=widened(held, remainders) if ema else {},
        decay=ema,
        remainders=remainders,
        amaxes={name: empty() for name in applied.delayed},
        measured=measured or first_choice(policy),
    )
    traced = any(isinstance(x, jax.core.Tracer) for x in held.values())
    return state if traced else _placed(state, leaves, held, mesh)


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
    The loss function gets the rows of one device, and an `rng` folded with its index.

    A `monitor` sees what enters each layer, the gradient of what leaves it, and what happens to updates. It
    changes no bit of them, and the step is still one program; `step.sample(state, batch)` looks closely at a part
    of a batch.

    The function below the jit is `step.__wrapped__`: pure, for use inside another jit or scan. Give the outermost
    jit `layers.COMPILER_OPTIONS` then, or XLA may keep more precision than the policy says.
    """
    check_transform(optimizer)
    check_numbers(clip_norm=clip_norm)
    check_micro_batches(micro_batches)
    call = partial(cast_inside, loss_fn, cast_batch=cast_batch) if cast else partial(checked, loss_fn)
    stepper = optax.with_extra_args_support(optimizer)

    def update(state: State, batch: Any, rng: Any) -> tuple[tuple[State, StepResult], Any]:
        # fp32 is fp32: JAX's default means TF32 on some GPUs and bf16 on a TPU.
        with jax.default_matmul_precision("highest"):
            check_measured(state)
            leaves, applied = Leaves(state.params), state.applied()
            check_optimizer(optimizer, leaves, state.opt_state)
            scale = state.scale.scale
            gradient = _gradient(call, leaves, applied, scale, monitor, state.names)
            masters = widened(leaves.trained, state.remainders, applied.halves) | in_use(state.amaxes)
            sums, first, own = _accumulated(gradient, masters, applied, batch, rng, micro_batches)
            if mesh is not None:
                amaxes = lax.pmax(sums.amaxes, mesh.axis_names)
                sums = summed(sums, first, mesh)._replace(amaxes=amaxes)
            return _updated(state, leaves, applied, stepper, sums, clip_norm, monitor), own

    run = update if mesh is None else on_each(update, mesh, micro_batches)

    def step(state: State, batch: Any, rng: Any = None) -> tuple[State, StepResult]:
        check_alone()
        (following, result), (aux, numbers) = run(state, batch, rng)
        if monitor is not None and mesh is not None:
            numbers = merged(numbers)
        return following, replace(result, aux=aux, layers=numbers)

    replay = None if monitor is None else partial(replayed, call, monitor)
    reach = partial(record, loss_fn, cast_batch=cast_batch) if cast else None
    products = partial(find_products, loss_fn, cast_batch=cast_batch) if cast else None
    return Step(compiled(step, mesh), mesh, micro_batches, monitor, replay, reach, products)


def compiled(step: Callable[..., Any], mesh: Mesh | None = None) -> Any:
    """Compiles a pure step for use outside of any jit: it donates the state, and XLA keeps no excess precision."""
    # A state that comes back as it was placed, to the letter, does not compile the step anew.
    place: dict[str, Any] = {} if mesh is None else {"out_shardings": (everywhere(mesh), None)}
    return jax.jit(step, donate_argnums=0, compiler_options=COMPILER_OPTIONS, **place)


class Step:
    """A compiled step that warns once when the loss scale is low and falling. It reads results that are done."""

    _step: Any = None  # before __init__ there is nothing to delegate to

    def __init__(
        self,
        step: Any,
        mesh: Mesh | None = None,
        micro_batches: int | None = None,
        monitor: Monitor | None = None,
        replay: Callable[..., list[Array]] | None = None,
        reach: Callable[..., Reached] | None = None,
        products: Callable[..., Products] | None = None,
    ):
        self._step, self._warned, self._reach, self._products = step, False, reach, products
        self._mesh, self._micro_batches = mesh, micro_batches
        self._monitor, self._replay = monitor, replay and jax.jit(replay, compiler_options=COMPILER_OPTIONS)
        self._unread: deque[tuple[Array, Array]] = deque(maxlen=64)  # scale, and whether the update was skipped

    def __call__(self, state: State, batch: Any, rng: Any = None) -> tuple[State, StepResult]:
        """Returns the state after one update, and what the update did; uses up the state it is given."""
        check_state(state)
        state = self.measure(state, batch, rng)
        if self._mesh is not None:
            check_placed(state, self._mesh)
            batch = place_rows(batch, self._mesh, self._micro_batches)
        law, origin = state.policy.scale, state.origin
        following, result = self._step(state, batch, rng)
        if self._monitor is not None:
            self._monitor.add(result.layers, result.updates)
        if not self._warned and isinstance(law, DynamicScale):
            self._unread.append((result.scale, result.skipped))
            self._watch(ScaleAlarm(law))
        return replace(following, origin=origin, measured=state.measured), result

    def sample(
        self, state: State, batch: Any, rng: Any = None, share: float = 1 / 16
    ) -> dict[str, dict[str, Sample]]:
        """Runs at most a `share` of a batch again, at least one row, and describes {layer: {role: what it met}}.

        A halfstep.core.observed.Sample has exponents, signal to noise, headroom, kurtosis, and what other formats
        would lose; roles are activation, gradient and weight. It waits for the device, and keeps the state.
        """
        if self._monitor is None or self._replay is None:
            raise HalfstepError(
                "the step has no monitor", hint="make_step(loss_fn, optimizer, monitor=halfstep.jax.Monitor())"
            )
        check_state(state)
        if self._mesh is not None:
            state = jax.tree.map(lambda leaf: leaf.addressable_data(0), state)
        if self._micro_batches is not None:
            batch = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:]) if jnp.ndim(leaf) > 1 else leaf, batch
            )
        reported = self._replay(state, first_rows(batch, share), rng)
        return self._monitor.describe(reported, widened(Leaves(state.params).trained, state.remainders))

    def reach(self, state: State, batch: Any, rng: Any = None) -> Reached:
        """Lists how each product, island and look-up of the loss function runs under the policy, and why.

        It traces the function on one micro-batch: nothing is computed, and the state is kept.
        """
        if self._reach is None:
            raise HalfstepError(
                "the step was made with cast=False: the loss function casts by itself",
                hint="summary(state) says what the policy means for each module",
            )
        check_state(state)
        return self._look(self._reach, state, batch, rng)

    def measure(
        self, state: State, batch: Any, rng: Any = None, *, timer: Timer[Product] = time_product_once
    ) -> State:
        """Times the matmuls that rules call `measured` (`compute=e4m3:measured`), unless the state has the answer.

        The first step does this by itself. A step inside another jit or scan cannot: call it before. The returned
        state has the same arrays, and `summary(state)` says which layers are narrow, and why.
        """
        if state.measured is not None:
            return state
        if self._products is None:
            raise HalfstepError(
                "the step was made with cast=False, so what `measured` layers multiply is not known",
                hint="omit `measured` from the rules; or let make_step cast: leave out cast=False",
            )
        share = 1 if self._mesh is None else self._mesh.size
        found = self._look(self._products, state, batch, rng, share)
        return replace(state, measured=measure_products(found, timer=timer))

    def _look(self, look: Callable[..., Any], state: State, batch: Any, rng: Any, share: int = 1) -> Any:
        """Interprets the loss function on one micro-batch, or one of so many shares of its rows."""
        if self._micro_batches is not None:
            batch = jax.tree.map(lambda leaf: leaf[0], batch)
        if share > 1:
            batch = jax.tree.map(lambda leaf: leaf[: len(leaf) // share] if jnp.ndim(leaf) else leaf, batch)
        leaves, rest = Leaves(state.params), (batch,) if rng is None else (batch, rng)
        masters = widened(leaves.trained, state.remainders) | in_use(state.amaxes)
        return look(leaves, state.applied(), masters, rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)  # lower, eval_shape, __wrapped__

    def _watch(self, alarm: ScaleAlarm) -> None:
        while self._unread and self._unread[0][0].is_ready():  # type: ignore[attr-defined]
            scale, skipped = self._unread.popleft()
            if message := alarm.observe(float(scale), falling=bool(skipped)):
                self._warned = True
                self._unread.clear()
                warn_caller(message)


def check(result: StepResult, cause: str = "") -> None:
    """Stops a run that no scale can save, and names the cause if it is known. Reads from the device."""
    if bool(result.stuck):
        raise stuck_error(float(result.scale), cause)


class _Sum(NamedTuple):
    """The sums over micro-batches, each weighted against the first."""

    grads: dict[str, Array]  # scaled, in the accumulate format
    loss: Array
    weight: Array
    amaxes: dict[str, Array]  # of delayed operands: the largest, not a sum


Gradient = Callable[[dict[str, Array], Any, Any], tuple[Any, tuple[Any, Any, Any], Any]]
"""(masters, batch, rng) -> gradients; loss, weight, and what the function returned besides; a monitor's numbers"""


def _gradient(
    call: LossFn, leaves: Leaves, applied: Applied, scale: Array, monitor: Monitor | None, names: Sequence[str]
) -> Gradient:
    """Returns a function that differentiates the scaled loss of one micro-batch."""

    def objective(masters: dict[str, Array], part: Any, key: Any) -> tuple[Array, Any]:
        loss, weight, aux = _loss(call, leaves, applied, masters, part, key)
        return loss * scale, (loss, weight, aux)

    def gradient(masters: dict[str, Array], part: Any, key: Any) -> tuple[Any, Any, Any]:
        if monitor is None:
            return *jax.grad(objective, has_aux=True)(masters, part, key), None
        describe = describer(applied, [*names, *modules_of(leaves.names)])
        grads, besides, watched, reported = watched_gradient(
            objective, masters, (part, key), describe, monitor.slice
        )
        monitor.watched, monitor.parameters = watched, tuple(leaves.trained)
        return grads, besides, watched.numbers(reported)

    return gradient


def replayed(call: LossFn, monitor: Monitor, state: State, batch: Any, rng: Any) -> list[Array]:
    """Returns what each layer meets of a batch, whole: for each site of the monitor, and each role."""
    with jax.default_matmul_precision("highest"):
        check_measured(state)
        leaves, applied = Leaves(state.params), state.applied()
        masters = widened(leaves.trained, state.remainders, applied.halves) | in_use(state.amaxes)

        def objective(masters: dict[str, Array], part: Any, key: Any) -> tuple[Array, None]:
            return _loss(call, leaves, applied, masters, part, key)[0] * state.scale.scale, None

        describe = describer(applied, [*state.names, *modules_of(leaves.names)])
        *_, watched, reported = watched_gradient(objective, masters, (batch, rng), describe, SAMPLE, whole=True)
        monitor.watched, monitor.parameters = watched, tuple(leaves.trained)
        return reported


def _accumulated(
    gradient: Gradient, masters: dict[str, Array], applied: Applied, batch: Any, rng: Any, count: int | None
) -> tuple[_Sum, Array, Any]:
    """Returns the sums, the weight of the first micro-batch that has any, and what is each micro-batch's own."""
    fmt = applied.policy.accumulate

    def micro_batch(first: Array, part: Any, key: Any) -> tuple[_Sum, Array, Any]:
        """Returns the gradient of one; `first` is the weight of the first, 0 if this is it."""
        grads, (loss, weight, aux), numbers = gradient(masters, part, key)
        reference = jnp.where(first == 0, weight, first)
        share = weight / _divisor(reference)  # not inside the loss: times fp16's scale it could overflow
        # `carried` first: XLA may drop a conversion to bf16 and back, and the sum would be another.
        amaxes = {name: grads.pop(name) for name in [*grads] if name.startswith(PREFIX)}
        narrow = {name: carried(share * g, fmt).astype(dtype_of(fmt)) for name, g in grads.items()}
        return _Sum(narrow, share * loss, share, amaxes), reference, (aux, numbers)

    if count is None:
        return micro_batch(jnp.float32(0), batch, rng)
    check_leading(batch, count)

    def body(carry: tuple[_Sum, Array], inputs: tuple[Array, Any]) -> tuple[tuple[_Sum, Array], Any]:
        sums, first = carry
        index, part = inputs
        key = None if rng is None else jax.random.fold_in(rng, index)
        more, first, own = micro_batch(first, part, key)
        added = jax.tree.map(jnp.add, sums, more)
        return (added._replace(amaxes=jax.tree.map(jnp.maximum, sums.amaxes, more.amaxes)), first), own

    zero = jnp.float32(0)
    zeros = {name: jnp.zeros(x.shape, dtype_of(fmt)) for name, x in masters.items()}
    amaxes = {name: jnp.zeros(x.shape) for name, x in masters.items() if name.startswith(PREFIX)}
    nothing = _Sum({name: x for name, x in zeros.items() if name not in amaxes}, zero, zero, amaxes)
    (sums, first), (aux, numbers) = lax.scan(body, (nothing, zero), (jnp.arange(count), batch))
    return sums, first, (aux, None if numbers is None else merged(numbers))


def _loss(
    call: LossFn, leaves: Leaves, applied: Applied, masters: Mapping[str, Array], batch: Any, rng: Any
) -> tuple[Array, Array, Any]:
    """Returns the mean loss of a micro-batch in fp32, its weight, and what the function returned besides."""
    returned, shape = call(leaves, applied, masters, (batch,) if rng is None else (batch, rng))
    check_loss(shape, applied.policy)
    loss, aux = returned if isinstance(returned, tuple) else (returned, None)
    if isinstance(loss, Weighted):
        weight = lax.stop_gradient(jnp.asarray(loss.weight, jnp.float32))
        return jnp.asarray(loss.total, jnp.float32) / _divisor(weight), weight, aux
    return jnp.asarray(loss, jnp.float32), jnp.float32(1), aux


def _divisor(weight: Array) -> Array:
    """Returns a weight to divide by: a micro-batch without tokens has no mean, and its sum is zero."""
    return jnp.where(weight == 0, 1.0, weight)


def _updated(
    state: State,
    leaves: Leaves,
    applied: Applied,
    optimizer: optax.GradientTransformationExtraArgs,
    sums: _Sum,
    clip_norm: float,
    monitor: Monitor | None,
) -> tuple[State, StepResult]:
    """Finite? -> unscale -> clip -> step -> rescale."""
    wide = {name: g.astype(jnp.float32) for name, g in sums.grads.items()}
    scaled_norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in wide.values()))
    finite = jnp.isfinite(scaled_norm) & (sums.weight > 0)  # without any token there is no mean either
    used = state.scale
    verdict = state.policy.scale.judge(used, finite, jnp)
    factor = verdict.inv_scale / sums.weight
    norm, unscaled = scaled_norm * factor, factor
    if clip_norm:
        factor = factor * jnp.minimum(clip_norm / norm, 1.0)
    grads = {name: g * factor for name, g in wide.items()}
    loss = sums.loss / sums.weight
    masters = widened(leaves.trained, state.remainders)
    (held, remainders), opt_state, intended = _stepped(state, masters, leaves, applied, optimizer, grads, loss)
    updates = None
    if monitor is not None:
        after = widened(held, remainders)
        updates = update_sums(masters, after, intended, wide, unscaled, finite, monitor.slice)

    def kept(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    held, remainders = kept(held, leaves.trained), kept(remainders, state.remainders)
    share = jnp.where(finite, 1.0 - state.decay, 0.0)
    following = replace(
        state,
        params=leaves.rebuilt(held),
        remainders=remainders,
        ema=averaged(state.ema, widened(held, remainders), share),
        amaxes=moved(state.amaxes, sums.amaxes, finite),
        opt_state=kept(opt_state, state.opt_state),
        scale=verdict.state,
        num_applied=state.num_applied + finite.astype(jnp.int32),
    )
    return following, StepResult(loss, ~finite, used.scale, norm, verdict.state.stuck, updates=updates)


def _stepped(
    state: State,
    masters: dict[str, Array],
    leaves: Leaves,
    applied: Applied,
    optimizer: optax.GradientTransformationExtraArgs,
    grads: dict[str, Array],
    loss: Array,
) -> tuple[tuple[dict[str, Array], dict[str, Array]], Any, dict[str, Array]]:
    """Steps the optimizer, which sees fp32; returns parameters and moments as they are held, and its updates."""
    moments = wide_moments(leaves, state.opt_state, applied)
    besides = {"value": loss, "policy": state.policy}  # for transforms that ask: optax leaves them out for others
    updates, moments = optimizer.update(leaves.bare(grads), moments, leaves.bare(masters), **besides)
    intended = leaves.read(updates)
    wide = {name: masters[name] + u.astype(jnp.float32) for name, u in intended.items()}
    held = hold(wide, applied, seed=state.seed, step=state.num_applied + 1)
    return held, held_moments(leaves, moments, applied), intended


def _placed(state: State, leaves: Leaves, held: Mapping[str, Array], mesh: Mesh | None) -> State:
    """Copies a state, moments to where their parameters are, and what belongs to none of them to every device.

    With a mesh, all goes to each of its devices. Copies, since a donated state must not take the caller's arrays
    with it, nor one array twice.
    """

    def copied(leaf: Any, sharding: Any = None) -> Array:
        leaf = jnp.asarray(leaf)
        return jax.device_put(leaf, sharding or leaf.sharding, may_alias=False)

    if mesh is not None:  # from one device to all, `may_alias` does not keep the first from sharing
        return jax.tree.map(lambda leaf: jax.device_put(jnp.copy(leaf), everywhere(mesh)), state)
    whole = next(iter(held.values())).sharding
    if isinstance(whole, NamedSharding):
        whole = NamedSharding(whole.mesh, PartitionSpec())
    flat, treedef = jax.tree.flatten(state.opt_state)
    owners = zip(flat, leaves.moments_of(state.opt_state), strict=True)
    moments = [copied(x, whole if name is None else held[name].sharding) for x, name in owners]
    return replace(
        state,
        params=jax.tree.map(copied, state.params),
        opt_state=jax.tree.unflatten(treedef, moments),
        scale=ScaleState(*(copied(x, whole) for x in state.scale)),
        num_applied=copied(state.num_applied, whole),
        ema={name: copied(x, held[name].sharding) for name, x in state.ema.items()},
        remainders={name: copied(x, held[name].sharding) for name, x in state.remainders.items()},
        amaxes={name: copied(x, whole) for name, x in state.amaxes.items()},
    )


def _scalars(state: ScaleState) -> ScaleState:
    dtypes = (jnp.float32, jnp.int32, jnp.int32, jnp.bool_)
    return ScaleState(*(jnp.asarray(value, dtype) for value, dtype in zip(state, dtypes, strict=True)))
