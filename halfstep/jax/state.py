"""The state of training, as flat {name: array} too, and back, bit for bit, by the names of core.state_format.

What belongs to no parameter (counts) is named after its path in the optimizer's state. There is no random state: a
step's random numbers come from the state's seed, its count and its `rng`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from halfstep.config.model import owner
from halfstep.core import state_format
from halfstep.core.arrays.cast import HISTORY
from halfstep.core.audit.coverage import some
from halfstep.core.averages import PREFIX as AVERAGE
from halfstep.core.averages import pop_from_state, to_state
from halfstep.core.choice import Choice
from halfstep.core.choice.layers import NO_LAYERS, Measured, resumed, with_outcome
from halfstep.core.errors import ArgumentError, RunStateError, StateError, UnsupportedTransformError, type_name
from halfstep.core.policy import Policy
from halfstep.core.roles import print_value
from halfstep.core.scaling import ScaleState, saved_scale
from halfstep.core.state_format import Description, Stored, check_same, find_dtype
from halfstep.jax.convert.apply import Applied, Leaves, apply
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.optim.masters import widen_masters

NARROW = "narrow."  # before a module's name: 1 if it was measured and is narrow, 0 if it stayed wide
SPLIT = "bf16 and a 16-bit remainder, together fp32: state.masters() joins them"
DTYPE_NAMES = {jnp.dtype(kind): name for kind, name in state_format.DTYPE_NAMES.items()}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Origin:
    """How a state came about. Any two are equal: a step is compiled once for all of them."""

    choice: Choice | None = field(default=None, compare=False)
    widened: tuple[str, ...] = field(default=(), compare=False)
    note: str = field(default="", compare=False)  # what the name of the policy was read as


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "scale", "num_applied", "ema", "remainders", "amaxes"],
    meta_fields=["policy", "seed", "names", "origin", "decay", "measured"],
)
@dataclass(frozen=True)
class State:
    """Everything the next step depends on."""

    params: Any  # the masters, each in the format it is held in; of a split one the bf16 half
    opt_state: Any
    scale: ScaleState
    num_applied: Array  # int32: updates that were not skipped
    policy: Policy
    seed: int  # of stochastic rounding
    names: tuple[str, ...] = ()  # modules without parameters that rules may match
    origin: Origin = Origin()  # what `choice` and `widened` say
    ema: Mapping[str, Array] = field(default_factory=dict)  # the averages of the masters in fp32, by name
    decay: float = 0.0  # of the averages; 0 if there are none
    remainders: Mapping[str, Array] = field(default_factory=dict)  # what the bf16 of split masters leaves out
    amaxes: Mapping[str, Array] = field(default_factory=dict)  # histories of delayed operands, by module (fp8.py)
    measured: Measured | None = NO_LAYERS  # which `measured` layers are narrow; None until a step times them

    @property
    def choice(self) -> Choice | None:
        """What `auto` chose and why; None if a policy was named."""
        return self.origin.choice

    @property
    def widened(self) -> tuple[str, ...]:
        """The parameters that came narrower than their masters are held."""
        return self.origin.widened

    def applied(self) -> Applied:
        """Returns what the policy means for the parameters."""
        return apply(self.params, self.policy, self.names, self.measured)

    def masters(self) -> Any:
        """Returns the parameters in fp32, however the state holds them; split masters joined, exactly."""
        leaves = Leaves(self.params)
        return leaves.rebuild(widen_masters(leaves.trained, self.remainders))

    def averaged(self) -> Any:
        """Returns the parameters with the averages of the masters, in fp32. Copy what the next step may use up."""
        if not self.decay:
            raise RunStateError("there are no averages", hint="init(..., ema=0.999) keeps them")
        return Leaves(self.params).rebuild(self.ema)

    def __str__(self) -> str:
        is_state = all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(self.params))  # not one of shapes, say
        return summary(self) if is_state else repr(self)


def summary(state: State) -> str:
    """Describes what the state holds, and what its policy means for each module."""
    applied, policy, note = state.applied(), state.policy, state.origin.note
    name = with_outcome(policy, "" if state.measured is None else state.measured.outcome)
    lines = [name, *([f"  {note}"] if note else []), *_modules(applied), *_masters(applied)]
    waits = "the first step times the matmuls that rules name; step.measure(state, batch) does so before it"
    if measured := waits if state.measured is None else state.measured.description:
        lines.append(f"  measured: {measured}")
    if count := len(state.widened):
        lines.append(f"  widened to their masters: {count} parameters that were narrower ({some(state.widened)})")
    if count := sum(applied.measured.narrow.get(name, True) for name in applied.delayed):
        lines.append(f"  delayed: {count} matmuls are scaled by the largest amax of their last {HISTORY} updates")
    if state.decay:
        lines.append(f"  averages of the masters in fp32, decay {state.decay:g}")
    scale = print_value(policy.scale)
    lines.append(f"  gradients: summed in {policy.accumulate}; loss scale: {scale}; not finite: skipped")
    lines.append("  functions of the loss function: step.coverage(state, batch) lists how each runs")
    return "\n".join(lines)


def _modules(applied: Applied) -> Iterator[str]:
    groups: dict[str, dict[str, None]] = {}
    for name, precision in applied.precisions.items():
        form = f"computes in {precision.compute}"
        timed = applied.measured.notes.get(owner(name), "")
        if precision.narrow:
            x, g = (print_value(replace(o, measured=o.measured and not timed)) for o in precision.operands)
            form += f", multiplies in {x}, with gradients in {g}"
        form += f", weight gradients in {precision.grad_weight}{timed and f' ({timed})'}"
        groups.setdefault(form, {})[owner(name)] = None
    for form, names in groups.items():
        word = "module" if len(names) == 1 else "modules"
        yield f"  {len(names)} {word} ({some([*names])}): {form}"


def _masters(applied: Applied) -> Iterator[str]:
    held: dict[str, list[int]] = {}
    emulated = " (emulated)" if applied.policy.emulate else ""
    for name, param in applied.masters.items():
        form = SPLIT if param.split else f"{print_value(param)}{emulated}"
        sizes = held.setdefault(f"{form}, moments in {applied.moments[name]}", [])
        sizes.append(applied.leaves.trained[name].size)
    for form, sizes in held.items():
        yield f"  masters: {len(sizes)} parameters, {sum(sizes):,} numbers, in {form}"


def check_state(state: Any) -> None:
    """Refuses what is no state, and a state that is used up or traced: a compiled step takes neither."""
    if not isinstance(state, State):
        raise ArgumentError(
            f"the first argument of the step is {type_name(state)}, not a state",
            hint="state = init(params, optimizer, policy); state, result = step(state, batch)",
        )
    if isinstance(state.num_applied, jax.core.Tracer):
        raise UnsupportedTransformError(
            "the step is compiled, and was called inside another jit, scan, vmap or eval_shape",
            hint="use step.__wrapped__ there, and compile the outermost with layers.COMPILER_OPTIONS; "
            "step.eval_shape(state, batch) gives shapes",
        )
    if isinstance(state.num_applied, jax.Array) and state.num_applied.is_deleted():
        raise RunStateError(
            "an earlier step used up this state: its arrays are in the state that the step returned",
            hint="state, result = step(state, batch) continues with that; to keep arrays, such as averages, copy "
            "them: jax.tree.map(jnp.copy, state.params)",
        )


def check_measured(state: State) -> None:
    """Refuses a state whose `measured` layers were not timed yet: a traced function cannot do so."""
    if state.measured is None:
        raise RunStateError(
            "the layers that rules call `measured` are not timed yet, and a traced function cannot time them",
            hint="state = step.measure(state, batch) does so before; or call the step itself, outside of any jit",
        )


def map_state(state: State, convert: Callable[[str, str | None, Any], Any]) -> State:
    """Returns the state with `convert(name, parameter, array)` for each array, by its name in a saved state.

    The parameter is that of masters, remainders, averages and moments; None for what belongs to no parameter.
    """
    leaves = Leaves(state.params)

    def by_parameter(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: convert(f"{prefix}{name}", name, x) for name, x in arrays.items()}

    moments, treedef = _named_moments(leaves, state.opt_state), jax.tree.structure(state.opt_state)
    return replace(
        state,
        params=jax.tree.unflatten(leaves.treedef, by_parameter("model.", leaves.values).values()),
        remainders=by_parameter("remainder.", state.remainders),
        amaxes={name: convert(f"{PREFIX}{name}", None, x) for name, x in state.amaxes.items()},
        opt_state=jax.tree.unflatten(treedef, [convert(*each) for each in moments]),
        scale=ScaleState(**{part: convert(f"scale.{part}", None, x) for part, x in state.scale._asdict().items()}),
        ema=by_parameter(AVERAGE, state.ema),
        num_applied=convert("applied", None, state.num_applied),
    )


def state_dict(state: State) -> dict[str, Array]:
    """Returns every array that the next step depends on: the live ones, not copies."""
    arrays: dict[str, Array] = {}
    map_state(state, lambda name, _, leaf: arrays.setdefault(name, _as_numbers(leaf)))
    narrow = {} if state.measured is None else state.measured.narrow  # a resumed run must not measure again
    return arrays | {f"{NARROW}{name}": jnp.asarray(flag, jnp.uint8) for name, flag in narrow.items()}


def load_state_dict(state: State, given: Mapping[str, Any]) -> State:
    """Returns the state with given arrays. Those of another model, optimizer or precision are refused whole."""
    if not isinstance(given, Mapping):
        raise StateError(
            f"a state is restored from arrays by name, not a {type(given).__name__}",
            hint="load_state_dict(state, np.load(file)) reads what np.savez(file, **state_dict(state)) wrote",
        )
    # Files of numpy hold bf16 as two bytes without a name.
    given = {name: x.view(jnp.bfloat16) if x.dtype == np.dtype("V2") else x for name, x in given.items()}
    averages = pop_from_state(given, state.ema)
    measured = _adopt_measured(state, given)
    check_same(_describe(state_dict(replace(state, ema={}, measured=measured))), _describe(given))
    scale = saved_scale(state.policy.scale, given) or state.scale
    given |= to_state(averages) | {f"scale.{part}": value for part, value in scale._asdict().items()}
    following = map_state(state, lambda name, _, old: _place_like(given[name], old))
    return replace(following, measured=measured)


def stored(array: Any) -> Stored:
    """Returns an array's dtype, shape and bytes, little-endian: a copy of them."""
    record = bytes_of(np.asarray(array))
    return record._replace(data=bytes(record.data))


def bytes_of(host: NDArray[Any]) -> Stored:
    """Returns the dtype, shape and bytes of an array on the host, without a copy."""
    flat = np.ascontiguousarray(host).astype(host.dtype.newbyteorder("<"), copy=False).reshape(-1)
    return Stored(DTYPE_NAMES[host.dtype], host.shape, flat.view(np.uint8).data)


def restored(record: Stored) -> NDArray[Any]:
    """Returns the array that `stored` wrote, on the host."""
    name, shape, data = record
    return np.frombuffer(data, find_dtype(name, _DTYPES)).reshape(shape)


def _named_moments(leaves: Leaves, opt_state: Any) -> Iterator[tuple[str, str | None, Any]]:
    """Yields leaves of an optimizer's state: a name, the parameter it is a moment of, if any, and the array."""
    depths = {name: len(path) for path, name in zip(leaves.paths, leaves.names, strict=True)}
    owners = leaves.moments_of(opt_state)
    for (path, leaf), name in zip(jax.tree_util.tree_leaves_with_path(opt_state), owners, strict=True):
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        if name is not None:
            *where, moment = parts[: len(parts) - depths[name]] or [""]
            parts = [*where, name, moment]
        yield ".".join(["optimizer", *parts]), name, leaf


def _adopt_measured(state: State, given: Mapping[str, Any]) -> Measured | None:
    """Returns the choice of measured layers that a loaded state was saved with."""
    narrow = {name.removeprefix(NARROW): bool(x) for name, x in given.items() if name.startswith(NARROW)}
    if state.measured is None:
        return resumed(narrow) if narrow else None
    return state.measured.adopt(narrow) if narrow.keys() == state.measured.narrow.keys() else state.measured


def _as_numbers(leaf: Any) -> Any:
    """Returns an array of numbers: the array itself, or the words of a generator's key."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _place_like(given: Any, old: Array) -> Array:
    """Returns a given array with the type and on the devices of an old one."""
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        given = jax.random.wrap_key_data(jnp.array(given), impl=jax.random.key_impl(old))
        return jax.device_put(given, old.sharding)
    # A copy: a state that is donated must not take the given arrays with it.
    return jax.device_put(np.array(given), old.sharding)


def _describe(state: Mapping[str, Any]) -> dict[str, Description]:
    return {name: (DTYPE_NAMES[jnp.dtype(x.dtype)], tuple(x.shape)) for name, x in state.items()}
