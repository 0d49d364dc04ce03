"""A policy for any function: its jaxpr, run again with the casts that the policy asks for.

A loss function is opaque: it multiplies what it likes. So it is traced once, with parameters in the dtype of their
compute format, and the jaxpr is evaluated one equation at a time, at trace time only. In it a parameter stays its
fp32 master, *not yet cast*, for as long as possible (lazy.py):

    layout, and arithmetic of parameters and constants alone
                      runs on the master, in fp32, and is cast where it meets activations; so the sums of its
                      transpose (a bias over tokens, the rows of an embedding) are sums in fp32
    dot_general       layers.dot_general with the precision that rules give the parameter: narrow operands,
                      fp32 layers and fp32 weight gradients reach any function
    conv_general_dilated      the same three products; the weight gradient comes from widened operands
    exp, rsqrt, log, ...      begin an island: softmax, norm, loss, all in fp32 (islands.py)
    gelu, silu, softmax       keep only their input for the backward pass (recomputed.py)
    jit, scan, cond, remat    rebuilt around the interpreted body
    custom_jvp_call   of parameters and constants alone, it and its rule run on the master
    all else          masters are cast, and the operation runs as it stands; where a table promoted the stream to
                      fp32, its result is rounded to compute (promoted.py)

**Emulated**, dtypes in the jaxpr say where numbers would be narrow, but none is: fp32 carries an array of a narrow
dtype, and the result of every operation on such arrays is rounded to it, value and gradient. What cannot be opened
(custom_jvp_call, while, ...) runs in the narrow dtype itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal, Var

from halfstep.config.model import owner as module_of
from halfstep.core.errors import FormatError, PolicyError
from halfstep.core.formats import FP32, TF32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision
from halfstep.core.refusal import check_reach
from halfstep.jax.apply import Applied, Leaves
from halfstep.jax.dtypes import DType, dtype_of, format_of
from halfstep.jax.functions import checks
from halfstep.jax.functions.islands import Island, remember
from halfstep.jax.functions.lazy import (
    Owner,
    Value,
    amaxes_of,
    check_narrowed,
    custom_jvp,
    find_narrowed,
    fits,
    is_biased,
    merged,
    moved,
    place_of,
    shared_owner,
    wide_jvp,
    wide_owner,
)
from halfstep.jax.functions.primitives import (
    ALGORITHMS,
    ARITHMETIC,
    BROADCASTING,
    COMPARISON,
    EXACT,
    INLINED,
    ISLANDS,
    LAYOUT,
    NAMED,
    PASSED,
    PRODUCT,
    REMAT,
    as_matmul,
    bind,
    bind_wide,
    convolve,
    fits_exactly,
    is_conversion,
    is_float,
    is_floating,
    multiplies,
    parts_of_scan,
)
from halfstep.jax.functions.promoted import find_promoted, is_asked
from halfstep.jax.functions.recomputed import Activation, Pick, Softmax, find_recomputed, kept_softmax, picked
from halfstep.jax.layers import admit, cast_bias, dot_general, enter, owned, pointwise, rounded
from halfstep.jax.lowering import Casts, casts_of
from halfstep.jax.matmul import as_dimensions, product

_FLOAT32 = jnp.dtype(jnp.float32)


def cast_inside(
    fn: Callable[..., Any],
    leaves: Leaves,
    applied: Applied,
    masters: Mapping[str, Array],
    rest: Sequence[Any],
    *,
    cast_batch: bool,
    interpreter: "Interpreter | None" = None,
) -> tuple[Any, Any]:
    """Calls fn(params, batch, ...) as the policy says; returns its result, also as shapes and dtypes."""
    policy = applied.policy
    checks.check_rules(policy)
    interpreter = interpreter or Interpreter(policy)
    owners = {
        name: Owner((name,), casts_of(each), jnp.ndim(masters[name]) > 1, amaxes=amaxes_of(name, masters))
        for name, each in applied.precisions.items()
    }
    seen = {name: _like(masters[name], appears(own.casts.precision)) for name, own in owners.items()}
    batch, *others = rest
    traced = jax.tree.map(interpreter.seen, batch) if cast_batch else batch
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(leaves.rebuilt(seen), traced, *others)
    interpreter.promoted = find_promoted(closed.jaxpr, appears(interpreter.base), len(leaves.values))
    given = [
        Value(owned(masters[name], owners[name].casts), owners[name])
        if name in masters
        else Value(leaf, free=True)
        for name, leaf in leaves.values.items()
    ]
    batch = jax.tree.map(interpreter.entering, batch) if cast_batch else batch
    given += [
        Value(interpreter.carrier(leaf), free=not is_floating(leaf)) for leaf in jax.tree.leaves((batch, others))
    ]
    out, wide_loss = interpreter.run(closed.jaxpr, closed.consts, given)
    check_reach(policy, {"operand": {module_of(name) for name in interpreter.multiplied}})
    structure = jax.tree.structure(shape)
    if wide_loss:
        shape = jax.tree.unflatten(structure, [_like(out[0], _FLOAT32), *jax.tree.leaves(shape)[1:]])
    return jax.tree.unflatten(structure, out), shape


def checked(
    fn: Callable[..., Any], leaves: Leaves, applied: Applied, masters: Mapping[str, Array], rest: Sequence[Any]
) -> tuple[Any, Any]:
    """Calls a function that casts inside, on the masters themselves; returns its result, also as shapes."""
    params = checks.with_amaxes(leaves.rebuilt(masters), masters)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(params, *rest)
    if not applied.policy.emulate:  # emulated, every array is fp32, and the layers know what they hold
        checks.check_function(closed.jaxpr, applied)
    out = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves((params, rest)))
    return jax.tree.unflatten(jax.tree.structure(shape), out), shape


class Interpreter:
    """Evaluates a jaxpr under a policy. `multiplied` are the parameters that were seen in a matmul."""

    def __init__(self, policy: Policy):
        self.emulate = policy.emulate
        self.policy = policy
        self.base = base_precision(policy)
        self.multiplied: set[str] = set()
        self.promoted: frozenset[Var] = frozenset()
        self.island = Island(self._widened)
        # "fp32" is fp32; tf32 runs only if asked for.
        tf32 = self.base.compute == TF32
        self.pinned = lax.DotAlgorithmPreset.TF32_TF32_F32 if tf32 else (lax.Precision.HIGHEST,) * 2

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> tuple[list[Any], bool]:
        """Returns the results of a jaxpr as arrays, with masters cast; and whether a narrow loss came out wide."""
        values = self._evaluate(jaxpr, consts, args)
        out = self._arrays(jaxpr.outvars, values)
        out[1:] = [
            v.array if v.narrow and v.owner is None else x for v, x in zip(values[1:], out[1:], strict=True)
        ]
        first = jaxpr.outvars[0].aval if jaxpr.outvars else None
        narrow = first is not None and first.shape == () and is_float(jaxpr.outvars[0]) and first.dtype != _FLOAT32
        if narrow and self.policy.loss == FP32:
            out[0] = self.island.loss(values[0])
            return out, True
        return out, False

    def seen(self, leaf: Any) -> Any:
        """Returns a leaf of a batch as the function sees it: in the compute dtype if floating, else unchanged."""
        return _like(leaf, appears(self.base)) if is_floating(leaf) else leaf

    def entering(self, leaf: Any) -> Any:
        """Returns the same leaf as it enters: cast, or rounded if emulated."""
        if not is_floating(leaf):
            return leaf
        return admit(jnp.asarray(leaf), casts_of(self.base))

    def carrier(self, x: Any) -> Any:
        """Returns an array as it is carried: emulated, in fp32 if its dtype is narrow."""
        return x.astype(jnp.float32) if self._is_carried(jnp.result_type(x)) else x

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        env: dict[Var, Value] = {}

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return Value(self.carrier(atom.val), fixed=True, free=True)
            return env[atom]

        # A traced constant was closed over, and may depend on the batch.
        held = [
            Value(self.carrier(const), fixed=not isinstance(const, jax.core.Tracer), free=True) for const in consts
        ]
        env.update(zip(jaxpr.constvars, held, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        recomputed = find_recomputed(jaxpr)
        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(jaxpr, eqn, values), strict=True))
            if (function := recomputed.get(eqn.outvars[0])) is not None:
                env[eqn.outvars[0]] = self._with_input_kept(function, read(function.root), env[eqn.outvars[0]])
        return [read(atom) for atom in jaxpr.outvars]

    def _with_input_kept(self, function: Activation | Softmax, x: Value, y: Value) -> Value:
        """Returns the result of a function that keeps its input alone: then what else led to it is unused."""
        aval: Any = function.root.aval
        in_stream = x.narrow or aval.dtype == appears(self.base)
        other = x.owner is not None or x.kind or x.free or x.fixed or self._is_ruled(x)
        if other or not in_stream:
            return y
        if isinstance(function, Softmax):
            return replace(y, array=kept_softmax(x.array, function.axes)) if y.kind == "out" else y
        if y.kind or y.owner is not None or y.asked is not None:
            return y
        return replace(y, array=pointwise(function, x.array, casts_of(self.base)))

    def _equation(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in INLINED:
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self._evaluate(closed.jaxpr, closed.consts, values)
        if name == "scan" and (multiplies(eqn) or wide_owner(eqn, values) is None):
            return self._scan(eqn, values)
        if name == "cond":
            return self._cond(eqn, values)
        if name in REMAT:
            return self._remat(eqn, values)
        if name in PASSED:
            out = eqn.primitive.bind(*(value.array for value in values), **eqn.params)
            return [replace(value, array=array) for value, array in zip(values, out, strict=True)]
        return (
            self._on_masters(jaxpr, eqn, values)
            or self._in_island(jaxpr, eqn, values)
            or self._on_arrays(jaxpr, eqn, values)
        )

    def _on_masters(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        """Runs the equation in fp32 on the masters, if it takes only masters and constants."""
        name, arrays = eqn.primitive.name, [value.array for value in values]
        shared = shared_owner(eqn, values)
        if shared is not None:
            out = bind_wide(eqn, arrays)
        elif name.startswith("custom_jvp_call") and (opened := custom_jvp(self._evaluate, jaxpr, eqn, values)):
            return opened
        elif name not in PRODUCT | NAMED and (shared := wide_owner(eqn, values)) is not None:
            self._check_opaque(eqn, values)
            out = bind(jaxpr, eqn, arrays)
        else:
            return None
        fixed = not shared.looked_up and all(value.fixed or value.owner is not None for value in values)
        return [
            Value(array, shared, narrow=shared.looked_up and var in self.promoted)
            if is_float(var)
            else Value(array, fixed=fixed)
            for array, var in zip(out, eqn.outvars, strict=True)
        ]

    def _in_island(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        """Runs the equation in fp32, and leaves the result uncast, if it is part of an island."""
        name = eqn.primitive.name
        if name.startswith("custom_jvp_call") and self._is_island(eqn):
            return wide_jvp(self._evaluate, jaxpr, eqn, [self.island.widened(value) for value in values])
        if name in ISLANDS and self._begins(eqn, values[0]):
            operand, kind = self.island.begun(name, values[0])
            inputs = [operand]
        elif (found := self.island.continued(eqn, values)) is not None:
            inputs, kind = found
        else:
            return None
        array = inputs[0] if is_conversion(eqn) else bind_wide(eqn, inputs)[0]
        ruled, fixed, free = self._properties(values)
        return [Value(array, ruled=ruled, fixed=fixed, free=free, kind=kind)]

    def _begins(self, eqn: Any, value: Value) -> bool:
        (operand,), (out,) = eqn.invars, eqn.outvars
        if not operand.aval.shape or not is_float(operand):
            return False
        if getattr(self.policy, ISLANDS[eqn.primitive.name]) != FP32:
            return False
        promoted = out in self.promoted and not value.free
        return promoted or value.narrow or bool(value.kind) or operand.aval.dtype.itemsize < 4

    def _is_island(self, eqn: Any) -> bool:
        try:
            checks.check_island(eqn, self.policy)
        except PolicyError:
            return True
        return False

    def _properties(self, values: Sequence[Value]) -> tuple[bool, bool, bool]:
        ruled, fixed = any(self._is_ruled(value) for value in values), all(value.fixed for value in values)
        return ruled, fixed, all(value.free or value.fixed for value in values)

    def _on_arrays(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value]:
        name, narrowed = eqn.primitive.name, None
        ruled, fixed, free = self._properties(values)
        if name in PRODUCT or name == "gather":
            for value in values:
                check_narrowed(eqn, value.narrowed)
        if name in PRODUCT:
            array, narrow = self._dot(eqn, values) if name == "dot_general" else self._conv(eqn, values)
            return [Value(array, ruled=ruled, fixed=fixed, free=free, narrow=narrow)]
        if carried := self._carried_over(eqn, values):
            return carried
        if name not in NAMED:
            # What an index of the batch moves stays what it was.
            of = [v for a, v in zip(eqn.invars, values, strict=True) if is_float(a) or name not in LAYOUT]
            narrowed = find_narrowed(of, place_of(eqn))
        made, asked = remember(eqn, values), self._asked(eqn, values)
        stays = free or ruled or asked is not None
        biased = name in BROADCASTING and is_biased(eqn, values)
        becomes = [(biased or var in self.promoted) and not stays for var in eqn.outvars]
        out = self._narrowly(eqn, values) if becomes == [True] else None
        if out is None:
            pairs = zip(self._bound(jaxpr, eqn, values), becomes, strict=True)
            out = [self._in_compute(array, eqn, values) if narrow else array for array, narrow in pairs]
        return [
            Value(array, None, ruled, fixed, narrowed, free, "", narrow, asked, made)
            for array, narrow in zip(out, becomes, strict=True)
        ]

    def _narrowly(self, eqn: Any, values: list[Value]) -> list[Any] | None:
        """Runs arithmetic in compute itself, if its operands are so: fp32 would give the same, rounded, but
        hides from XLA what it can make part of a matmul, and keeps fp32 arrays for the backward pass."""
        if self.emulate or eqn.primitive.name not in EXACT:
            return None
        shape, casts, arrays = eqn.outvars[0].aval.shape, casts_of(self.base), []
        for atom, value in zip(eqn.invars, values, strict=True):
            if not is_float(atom) or (value.owner is None and value.narrow and not value.kind):
                arrays.append(value.array)
            elif self._is_small_master(value):
                arrays.append(cast_bias(value.array, shape, value.owner.casts))  # type: ignore[union-attr]
            elif isinstance(atom, Literal) and fits_exactly(atom.val, casts.compute):
                arrays.append(jnp.asarray(atom.val, casts.compute))
            elif eqn.primitive.name == "select_n" and value.owner is None and value.free and not value.kind:
                cast = enter if fits(value, self.base.compute.max) else admit
                arrays.append(cast(jnp.asarray(value.array), casts))  # what is selected is rounded either way
            else:
                return None
        return [eqn.primitive.bind(*arrays, **eqn.params)]

    def _is_small_master(self, value: Value) -> bool:
        """Returns whether a value is a parameter that computes as the stream does: a bias or a gain."""
        owner = value.owner
        return owner is not None and not owner.looked_up and owner.casts.compute == casts_of(self.base).compute

    def _carried_over(self, eqn: Any, values: list[Value]) -> list[Value] | None:
        """Moves arrays in the compute format as they are, though their variables are fp32."""
        floats = [value for atom, value in zip(eqn.invars, values, strict=True) if is_float(atom)]
        plain = eqn.primitive.name in LAYOUT and all(value.narrow and value.owner is None for value in floats)
        if not plain or not floats:
            return None
        if (pick := Pick.of(eqn)) is not None and eqn.outvars[0] not in self.promoted:
            x, indices = values  # read in fp32, as all of its row: gradients of both meet there
            return [replace(x, array=picked(self.island.widened(x), x.array, indices.array, pick), narrow=False)]
        out = eqn.primitive.bind(*(value.array for value in values), **eqn.params)
        out, made = (out if eqn.primitive.multiple_results else [out]), remember(eqn, values)
        return [replace(floats[0], array=array, made=made) for array in out]

    def _asked(self, eqn: Any, values: list[Value]) -> Any:
        """Returns the conversion that made a result fp32, if the function asked for it."""
        if is_conversion(eqn) and eqn.invars[0].aval.dtype.itemsize < eqn.outvars[0].aval.dtype.itemsize:
            return eqn if is_asked(eqn) else None
        if any(value.narrow or value.kind for value in values):
            return None
        return next((value.asked for value in values if value.asked is not None), None)

    def _in_compute(self, array: Any, eqn: Any, values: Sequence[Value]) -> Any:
        """Casts a promoted result to compute. What a mask selects or adds stays finite, as in a batch."""
        casts = casts_of(self.base)
        pairs = zip(eqn.invars, values, strict=True)
        masks = (v for atom, v in pairs if is_float(atom) and v.free and not fits(v, self.base.compute.max))
        return (admit if eqn.primitive.name in ("select_n", "add") and any(masks) else enter)(array, casts)

    def _dot(self, eqn: Any, values: list[Value]) -> tuple[Array, bool]:
        """Multiplies; returns the product, and whether it is in compute though its variable is fp32."""
        avals = [atom.aval for atom in eqn.invars]
        side = _side_of_weight(values)
        if side is None:
            return self._product(eqn, values)
        owner, x, seen = values[side].owner, values[1 - side], avals[1 - side]
        assert owner is not None
        precision, out = owner.casts.precision, eqn.outvars[0].aval.dtype
        if x.owner is not None and not _looked_up(x):
            checks.check_product(eqn, x.owner.names, x.owner.casts.precision)
        self._check_entering(eqn, x, seen, owner)
        if out.itemsize > max(aval.dtype.itemsize for aval in avals):
            # preferred_element_type asks for the sum as it is: the same operands, a wider result.
            precision = replace(precision, compute=format_of(out), grad=format_of(out))
        self.multiplied.update(owner.names)
        dims = eqn.params["dimension_numbers"]
        rows, matrix, dims = as_matmul(self._array(x, seen), values[side].array, dims, side)
        y = self._multiply(rows, matrix, dims, casts_of(precision), side == 0, owner)
        return self._leaving(eqn, y.reshape(eqn.outvars[0].aval.shape), values, appears(precision))

    def _multiply(
        self, rows: Array, matrix: Array, dims: Any, casts: Casts, weight_first: bool, owner: Owner
    ) -> Array:
        return dot_general(rows, matrix, dims, casts, weight_first=weight_first, amaxes=owner.amaxes)

    def _conv(self, eqn: Any, values: list[Value]) -> tuple[Array, bool]:
        (x, weight), (seen, _) = values, [atom.aval for atom in eqn.invars]
        if x.owner is not None and not _looked_up(x):
            checks.check_product(eqn, x.owner.names, x.owner.casts.precision)
        if weight.owner is None:
            return self._product(eqn, values)
        casts = weight.owner.casts
        if casts.precision.measured:  # narrow only if that is faster, and no convolution takes narrow operands
            casts = casts_of(casts.precision.widened())
        self._check_entering(eqn, x, seen, weight.owner)
        checks.check_convolution(eqn, weight.owner.names, casts.precision)
        self.multiplied.update(weight.owner.names)
        y = convolve(eqn, enter(self._array(x, seen), casts), weight.array, casts)
        return self._leaving(eqn, y, values, appears(casts.precision))

    def _leaving(self, eqn: Any, y: Array, values: Sequence[Value], held: DType) -> tuple[Array, bool]:
        """Returns the result of a layer in the dtype of its variable, or in its own if that was promoted."""
        out = eqn.outvars[0].aval.dtype
        narrow = held.itemsize < out.itemsize and not any(self._is_ruled(value) for value in values)
        return (y if self.emulate or narrow else y.astype(out)), narrow

    def _check_entering(self, eqn: Any, x: Value, seen: Any, layer: Owner) -> None:
        """Refuses an activation that enters a layer neither in the layer's own dtype nor in that of the stream."""
        if seen.dtype != appears(self.base) and not _follows(x):
            ruled, wanted = self._is_ruled(x), appears(layer.casts.precision)
            checks.check_operand(eqn, seen, wanted, ruled=ruled, names=layer.names, asked=x.asked)

    def _product(self, eqn: Any, values: list[Value]) -> tuple[Array, bool]:
        """Multiplies activations, in compute; tables and positions by each other, as they are."""
        base, wide = appears(self.base), False
        if not all(value.free or value.fixed for value in values):
            for value, aval in zip(values, (atom.aval for atom in eqn.invars), strict=True):
                if not _follows(value):
                    checks.check_operand(eqn, aval, base, ruled=self._is_ruled(value), asked=value.asked)
                wide = wide or (aval.dtype.itemsize > base.itemsize and _follows(value))
        arrays = self._arrays(eqn.invars, values)
        params = eqn.params
        if ALGORITHMS.get(params["precision"]) == self.base.compute and not self.emulate:
            dims, out = as_dimensions(params["dimension_numbers"]), format_of(eqn.outvars[0].aval.dtype)
            casts = casts_of(self.base)
            return product(*(enter(array, casts) for array in arrays), dims, out, casts), wide
        if wide and not any(self._is_ruled(value) for value in values):
            arrays = [enter(array, casts_of(self.base)) for array in arrays]
            params = {**params, "preferred_element_type": base}
        if all(array.dtype == jnp.float32 for array in arrays):
            params = {**params, "precision": self.pinned}
        eqn = eqn.replace(params=params)
        if not self.emulate:
            return eqn.primitive.bind(*arrays, **params), wide
        if wide:
            return rounded(bind_wide(eqn, arrays)[0], casts_of(self.base)), wide
        return self._on_grid(bind_wide(eqn, arrays)[0], eqn.outvars[0].aval), wide

    def _bound(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Any]:
        """Runs the operation as it stands, with masters cast; emulated, rounds its results."""
        self._check_opaque(eqn, values)
        checks.check_island(eqn, self.policy)
        name = eqn.primitive.name
        if name in BROADCASTING:
            # Broadcast while it is a master: the transpose of a broadcast is a sum over tokens, here in fp32.
            shape = eqn.outvars[0].aval.shape
            values = [
                v if v.owner is None else replace(v, array=self._spread(atom, v, shape))
                for atom, v in zip(eqn.invars, values, strict=True)
            ]
        arrays = self._arrays(eqn.invars, values)
        carried = any(self._is_carried(atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars))
        if carried and (name in LAYOUT | ARITHMETIC | COMPARISON or name == "convert_element_type"):
            out = bind_wide(eqn, arrays)
            rounds = name not in LAYOUT
            return [self._on_grid(a, v.aval) if rounds else a for a, v in zip(out, eqn.outvars, strict=True)]
        if carried:
            pairs = zip(arrays, eqn.invars, strict=True)  # in its own dtype, which holds a carried array exactly
            arrays = [x.astype(atom.aval.dtype) if is_float(atom) else x for x, atom in pairs]
        out = [self.carrier(array) for array in bind(jaxpr, eqn, arrays)]
        return [self._on_grid(a, v.aval) for a, v in zip(out, eqn.outvars, strict=True)]

    def _spread(self, atom: Any, master: Value, shape: tuple[int, ...]) -> Array:
        """Broadcasts a master. A bias is cast before: XLA can make what it reads part of a matmul."""
        wide = self.emulate or atom.aval.dtype == _FLOAT32 or not self._is_small_master(master)
        if wide or master.owner is None:
            return jnp.broadcast_to(master.array, shape)
        return cast_bias(master.array, shape, master.owner.casts)

    def _check_opaque(self, eqn: Any, values: list[Value]) -> None:
        for atom, owner in ((a, v.owner) for a, v in zip(eqn.invars, values, strict=True) if v.owner is not None):
            checks.check_opaque(eqn, atom.aval, owner.names, owner.casts.precision)

    def _scan(self, eqn: Any, values: list[Value]) -> list[Value]:
        params, closed = eqn.params, eqn.params["jaxpr"]
        first, count = parts_of_scan(eqn)
        last = first + count
        fixed, by = all(value.fixed for value in values), place_of(eqn)
        # In a loop over parameters and constants alone no state is an activation, unless a matmul returns it.
        alone, opens = find_narrowed(values, by), multiplies(eqn)
        narrowed = [find_narrowed([value], by) if alone and opens else alone for value in values[first:last]]
        ruled = any(self._is_ruled(value) for value in values)
        values = [replace(value, ruled=ruled) for value in values]
        consts, xs = values[:first], checks.stacked(values[last:])
        held = [not fixed and not ruled and var in self.promoted for var in closed.jaxpr.invars[first:last]]
        carry = self._carried(eqn.invars[first:last], values[first:last], held)
        kept: list[Value] = []

        def body(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            states = [
                Value(array, ruled=ruled, fixed=fixed, narrowed=each, narrow=narrow)
                for array, each, narrow in zip(carry, narrowed, held, strict=True)
            ]
            given = [*(moved(value, value.array) for value in consts), *states]
            given += [moved(value, part) for value, part in zip(xs, parts, strict=True)]
            out = self._evaluate(closed.jaxpr, closed.consts, given)
            kept[:] = [moved(value, None) for value in out]
            ends = self._carried(closed.jaxpr.outvars[:count], out[:count], held)
            return ends, [value.array for value in out[count:]]

        ends, ys = lax.scan(
            body,
            carry,
            [value.array for value in xs],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        states = [
            Value(array, ruled=ruled, fixed=fixed, narrowed=find_narrowed([value], by), narrow=narrow)
            for value, array, narrow in zip(kept[:count], ends, held, strict=True)
        ]
        return states + [replace(value, array=y, ruled=ruled) for value, y in zip(kept[count:], ys, strict=True)]

    def _cond(self, eqn: Any, values: list[Value]) -> list[Value]:
        """Runs branches, traced twice: a result is a master if all of them return masters or constants."""
        index, *operands = values
        arrays = [value.array for value in operands]
        branches = [self._enclosed(branch.jaxpr, branch.consts, operands) for branch in eqn.params["branches"]]
        for fn, _ in branches:
            jax.eval_shape(fn, *arrays)
        each = zip(*(kept for _, kept in branches), strict=True)
        joined = [self._joined(eqn, index, var, of) for var, of in zip(eqn.outvars, each, strict=True)]

        def as_joined(fn: Callable[..., list[Any]], kept: list[Value]) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                out = [replace(value, array=array) for array, value in zip(fn(*arrays), kept, strict=True)]
                return [
                    jnp.asarray(own.array, jnp.float32)
                    if value.owner is not None
                    else self._carried([var], [own], [value.narrow])[0]
                    for own, value, var in zip(out, joined, eqn.outvars, strict=True)
                ]

            return run

        out = lax.switch(index.array, [as_joined(fn, kept) for fn, kept in branches], *arrays)
        return [replace(value, array=array) for value, array in zip(joined, out, strict=True)]

    def _joined(self, eqn: Any, index: Value, var: Any, branches: Sequence[Value]) -> Value:
        ruled, fixed, free = self._properties(branches)
        return Value(
            None,
            owner := merged(branches),
            ruled=ruled,
            fixed=index.fixed and fixed,
            narrowed=None if owner is not None else find_narrowed(branches, place_of(eqn)),
            free=free and index.free,
            narrow=owner is None and var in self.promoted and not ruled and not free,
        )

    def _remat(self, eqn: Any, values: list[Value]) -> list[Value]:
        fn, kept = self._enclosed(eqn.params["jaxpr"], (), values)
        again = jax.checkpoint(fn, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        out = again(*(value.array for value in values))
        return [replace(value, array=array) for array, value in zip(out, kept, strict=True)]

    def _enclosed(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Value]
    ) -> tuple[Callable[..., list[Any]], list[Value]]:
        """Returns a function of arrays that runs a jaxpr on values like these, and what it then knows of them."""
        kept: list[Value] = []

        def fn(*arrays: Any) -> list[Any]:
            args = [moved(value, array) for value, array in zip(values, arrays, strict=True)]
            out = self._evaluate(jaxpr, consts, args)
            kept[:] = [moved(value, None) for value in out]
            return [value.array for value in out]

        return fn, kept

    def _is_ruled(self, value: Value) -> bool:
        owner = value.owner
        return value.ruled or (owner is not None and owner.casts.precision.compute != self.base.compute)

    def _is_carried(self, dtype: Any) -> bool:
        return self.emulate and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4

    def _arrays(self, atoms: Sequence[Any], values: Sequence[Value]) -> list[Any]:
        return [self._array(value, atom.aval) for value, atom in zip(values, atoms, strict=True)]

    def _array(self, value: Value, aval: Any) -> Any:
        """Returns what the operation gets: a master, or what an island returns, in the dtype it appears in."""
        array = value.array
        if value.owner is not None and value.narrow:
            array = enter(array, value.owner.casts)
        if value.owner is None and not value.kind:
            if not value.narrow:
                return array
            if aval.dtype == _FLOAT32:
                return self.island.widened(value)  # once, so that gradients of what reads it are summed in fp32
        return self._on_grid(array, aval) if self.emulate else array.astype(aval.dtype)

    def _carried(self, atoms: Sequence[Any], values: Sequence[Value], narrow: Sequence[bool]) -> list[Any]:
        """Returns what crosses into a loop or out of a branch: in compute where the variable was promoted."""
        arrays = zip(self._arrays(atoms, values), narrow, strict=True)
        return [enter(array, casts_of(self.base)) if each else array for array, each in arrays]

    def _widened(self, value: Value) -> Any:
        """Returns a value in fp32: masters and what islands hold are so already."""
        array = value.array
        if value.owner is not None and value.narrow:
            array = enter(array, value.owner.casts)
        return jnp.asarray(array, jnp.float32)

    def _on_grid(self, x: Array, aval: Any) -> Array:
        """Rounds a carried array to the dtype it stands for, value and gradient; returns any other unchanged."""
        if not self._is_carried(aval.dtype):
            return x
        fmt = format_of(aval.dtype)
        grad = self.base.grad if fmt == self.base.compute else fmt
        return rounded(x, casts_of(replace(self.base, compute=fmt, grad=grad)))


def appears(precision: Precision) -> DType:
    """Returns the dtype in which a function sees the compute format of a precision."""
    if precision.compute == TF32 and not precision.emulate:
        return _FLOAT32  # a way to multiply fp32 arrays
    try:
        return dtype_of(precision.compute)
    except FormatError:
        raise PolicyError(
            f"compute={precision.compute} has no dtype that a function could see",
            hint="build the function from halfstep.jax layers, which round by themselves, and pass cast=False",
        ) from None


def _side_of_weight(values: Sequence[Value]) -> int | None:
    """Returns which operand of a matmul is the weight, if any; of two parameters, the one not looked up."""
    parameters = [side for side in (1, 0) if values[side].owner is not None]
    if len(parameters) == 2:
        parameters = [side for side in parameters if not _looked_up(values[side])]
    return parameters[0] if parameters else None


def _follows(value: Value) -> bool:
    """Returns whether a value that appears in fp32 is cast to compute where it is multiplied."""
    return value.narrow or bool(value.kind) or value.free or value.fixed


def _looked_up(value: Value) -> bool:
    return value.owner is not None and value.owner.looked_up


def _like(x: Any, dtype: DType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype)
