"""A policy for any function: its jaxpr, run again with the casts that the policy asks for.

A loss function is opaque: it may multiply anything. So

1. it is traced once, with parameters in the dtype of their compute format;
2. what its jaxpr shows as a whole is found: a promoted stream, activations to compute again (patterns.py);
3. the jaxpr is evaluated one equation at a time, at trace time only.

In it a parameter stays its fp32 master, *not yet cast*, for as long as possible (values.py):

    layout, and arithmetic of parameters and constants alone
                      runs on the master, in fp32, and is cast where it meets activations; so the sums of its
                      transpose (a bias over tokens, the rows of an embedding) are sums in fp32
    dot_general       layers.dot_general with the precision that rules give the parameter: narrow operands,
                      fp32 layers and fp32 weight gradients reach any function
    conv_general_dilated      the same three products; the weight gradient comes from widened operands
    exp, rsqrt, log, ...      begin an island: softmax, norm, loss, all in fp32 (islands.py)
    gelu, silu, softmax       keep only their input for the backward pass (patterns.py)
    jit, scan, cond, remat    rebuilt around the interpreted body (calls.py)
    custom_jvp_call   of parameters and constants alone, it and its rule run on the master
    anything else     masters are cast, and the operation runs as it stands; where a table promoted the stream to
                      fp32, its result is rounded to compute (patterns.py)

Arrays are carried as calls.py says. What cannot be opened (custom_jvp_call, while, ...) runs in the dtypes of
the jaxpr, also emulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

from halfstep.config.model import owner as module_of
from halfstep.core.errors import LossError
from halfstep.core.formats import BF16, FP16, FP32, TF32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import base_precision
from halfstep.core.refusal import check_reach
from halfstep.jax import jaxpr as jaxprs
from halfstep.jax import layers
from halfstep.jax.convert import checks, patterns
from halfstep.jax.convert.apply import Applied
from halfstep.jax.convert.calls import FLOAT32, Calls, shape_of, shown_dtype
from halfstep.jax.convert.islands import history_of
from halfstep.jax.convert.values import (
    Owner,
    Value,
    check_early_cast,
    find_early_cast,
    floats_of,
    is_number_within,
    owner_in_fp32,
    owner_on_masters,
)
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.numerics.dtypes import format_of
from halfstep.jax.numerics.lowering import Casts, casts_of
from halfstep.jax.numerics.matmul import as_dimensions, as_matmul, convolve, product

_ALGORITHMS: dict[Any, Format] = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: BF16,
    lax.DotAlgorithmPreset.F16_F16_F32: FP16,
}
"""The operands of algorithms that sum in fp32, as matmuls here do: not every device knows them by name."""


# --- calling a loss function under a policy


def cast_inside(
    fn: Callable[..., Any],
    applied: Applied,
    masters: Mapping[str, Array],
    rest: Sequence[Any],
    *,
    cast_batch: bool,
    trains: bool = False,
    interpreter: "Interpreter | None" = None,
) -> tuple[Any, Any]:
    """Calls fn(params, batch, ...) as the policy says; returns its result, also as shapes and dtypes.

    A function that `trains` returns a loss, which depends on parameters.
    """
    policy, leaves = applied.policy, applied.leaves
    checks.check_rules(policy)
    interpreter = interpreter or Interpreter(policy)
    owners = {
        name: Owner(
            (name,), casts_of(each), jnp.ndim(masters[name]) > 1, amaxes=masters.get(PREFIX + module_of(name))
        )
        for name, each in applied.precisions.items()
    }
    # 1. Trace it, with everything in the dtype that the policy computes in.
    shown = shown_inside(applied, masters, rest, cast_batch=cast_batch)
    entering, *others = rest
    if cast_batch:
        casts = interpreter.base_casts
        entering = jax.tree.map(
            lambda leaf: layers.batch_to_compute(jnp.asarray(leaf), casts) if jaxprs.is_floating(leaf) else leaf,
            entering,
        )
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*shown)
    parameters = [v for name, v in zip(leaves.names, closed.jaxpr.invars, strict=False) if name in masters]
    if trains and closed.jaxpr.outvars and not patterns.depends(closed.jaxpr, parameters):
        raise LossError(
            "the loss does not depend on the parameters that the function is given",
            hint="compute it from the first argument, loss_fn(params, batch), without jax.lax.stop_gradient",
        )
    # 2. Find what shows in the jaxpr as a whole.
    interpreter.promoted = patterns.find_promoted(closed.jaxpr, shown_dtype(interpreter.base), len(leaves.values))
    # 3. Evaluate it on masters and on the batch as it enters.
    given = [
        Value(layers.with_weight_grad_format(masters[name], owners[name].casts), owners[name])
        if name in masters
        else Value(leaf, free=True)
        for name, leaf in leaves.values.items()
    ]
    others = jax.tree.leaves((entering, others))
    given += [Value(interpreter.carry(leaf), free=not jaxprs.is_floating(leaf)) for leaf in others]
    out, wide_loss = interpreter.run(closed.jaxpr, closed.consts, given)
    check_reach(policy, {"operand": {module_of(name) for name in interpreter.multiplied}})
    structure = jax.tree.structure(shape)
    if wide_loss:
        shape = jax.tree.unflatten(structure, [shape_of(out[0], FLOAT32), *jax.tree.leaves(shape)[1:]])
    return jax.tree.unflatten(structure, out), shape


def shown_inside(
    applied: Applied, masters: Mapping[str, Any], rest: Sequence[Any], *, cast_batch: bool
) -> tuple[Any, ...]:
    """Returns what a loss function is traced with: parameters and batch in the dtypes that they compute in."""
    shown = {name: shape_of(masters[name], shown_dtype(own)) for name, own in applied.precisions.items()}
    batch, *others = rest
    if cast_batch:
        dtype = shown_dtype(base_precision(applied.policy))
        batch = jax.tree.map(lambda leaf: shape_of(leaf, dtype) if jaxprs.is_floating(leaf) else leaf, batch)
    return applied.leaves.rebuild(shown), batch, *others


class Interpreter(Calls):
    """Evaluates a jaxpr under a policy. `multiplied` are the parameters that a matmul has taken."""

    def __init__(self, policy: Policy):
        super().__init__(policy)
        self.multiplied: set[str] = set()
        # "fp32" is fp32; tf32 runs only if asked for.
        tf32 = self.base.compute == TF32
        self.fp32_dot = lax.DotAlgorithmPreset.TF32_TF32_F32 if tf32 else (lax.Precision.HIGHEST,) * 2

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> tuple[list[Any], bool]:
        """Returns the results of a jaxpr as arrays, with masters cast; and whether a narrow loss came out wide."""
        values = self._evaluate(jaxpr, consts, args)
        out = self._arrays(jaxpr.outvars, values)
        out[1:] = [
            v.array if v.narrow and v.owner is None else x for v, x in zip(values[1:], out[1:], strict=True)
        ]
        losses = [v for v in jaxpr.outvars[:1] if v.aval.shape == () and jaxprs.is_float(v)]
        narrow = self.policy.loss == FP32 and any(loss.aval.dtype != FLOAT32 for loss in losses)
        if narrow:
            out[0] = self.island.recompute("loss", values[0])
        return out, narrow

    # --- equations: functions are opened, then masters, islands and plain arrays are tried in this order

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        # A traced constant was closed over, and may depend on the batch.
        constants = (
            Value(self.carry(const), fixed=not isinstance(const, jax.core.Tracer), free=True) for const in consts
        )
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))
        recomputed = patterns.find_recomputed(jaxpr)

        def equation(eqn: Any, values: list[Value]) -> list[Value]:
            out = self._equation(jaxpr, eqn, values)
            functions = ((recomputed.get(var), value) for var, value in zip(eqn.outvars, out, strict=True))
            return [y if f is None else self._recompute(f, env[f.root], y) for f, y in functions]

        return jaxprs.walk(jaxpr, env, lambda atom: Value(self.carry(atom.val), fixed=True, free=True), equation)

    def _recompute(self, function: patterns.Activation | patterns.Softmax, x: Value, y: Value) -> Value:
        """Returns the result of a function that keeps only its input; what else led to `y` is then unused."""
        aval: Any = function.root.aval
        in_stream = x.narrow or aval.dtype == shown_dtype(self.base)
        other = x.owner is not None or x.kind or x.free or x.fixed or self._is_ruled(x)
        if other or not in_stream:
            return y
        if isinstance(function, patterns.Softmax):
            return replace(y, array=patterns.recomputed_softmax(x.array, function.axes)) if y.kind == "out" else y
        if y.kind or y.owner is not None or y.explicit_cast is not None:
            return y
        return replace(y, array=layers.pointwise(function, x.array, self.base_casts))

    def _equation(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in jaxprs.INLINED:
            return self._evaluate(*jaxprs.functions_of(eqn)[0], values)
        if name == "scan" and (jaxprs.multiplies(eqn) or owner_in_fp32(eqn, values) is None):
            return self._scan(eqn, values)
        if name == "cond":
            return self._cond(eqn, values)
        if name in jaxprs.REMAT:
            return self._remat(eqn, values)
        if name in jaxprs.PASSED:
            out = jaxprs.results(eqn, [value.array for value in values])
            return [replace(value, array=array) for value, array in zip(values, out, strict=True)]
        return (
            self._on_masters(jaxpr, eqn, values)
            or self._in_island(jaxpr, eqn, values)
            or self._on_arrays(jaxpr, eqn, values)
        )

    def _on_masters(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        """Runs the equation in fp32 on the masters, if it takes only masters and constants."""
        name, arrays = eqn.primitive.name, [value.array for value in values]
        owner = owner_on_masters(eqn, values)
        if owner is not None:
            out = jaxprs.bind_wide(eqn, arrays)
        elif name.startswith("custom_jvp_call") and (opened := self._custom_jvp_on_masters(jaxpr, eqn, values)):
            return opened
        elif name not in jaxprs.PRODUCT | jaxprs.NAMED and (owner := owner_in_fp32(eqn, values)) is not None:
            self._check_opaque(eqn, values)
            out = jaxprs.bind(jaxpr, eqn, arrays)
        else:
            return None
        fixed = not owner.looked_up and all(value.fixed or value.owner is not None for value in values)
        return [
            Value(array, owner, narrow=owner.looked_up and var in self.promoted)
            if jaxprs.is_float(var)
            else Value(array, fixed=fixed)
            for array, var in zip(out, eqn.outvars, strict=True)
        ]

    def _in_island(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value] | None:
        """Runs the equation in fp32, and leaves the result uncast, if it is part of an island."""
        name = eqn.primitive.name
        if name.startswith("custom_jvp_call") and checks.find_narrow_island(eqn, self.policy) is not None:
            return self._custom_jvp_in_island(jaxpr, eqn, values)
        if name in jaxprs.ISLANDS and self._begins(eqn, values[0]):
            operand, kind = self.island.begin(name, values[0])
            inputs = [operand]
        elif (found := self.island.extend(eqn, values)) is not None:
            inputs, kind = found
        else:
            return None
        array = inputs[0] if jaxprs.is_conversion(eqn) else jaxprs.bind_wide(eqn, inputs)[0]
        return [replace(self._derive(values), array=array, kind=kind)]

    def _begins(self, eqn: Any, value: Value) -> bool:
        (operand,), (out,) = eqn.invars, eqn.outvars
        if not operand.aval.shape or not jaxprs.is_float(operand):
            return False
        if getattr(self.policy, jaxprs.ISLANDS[eqn.primitive.name]) != FP32:
            return False
        promoted = out in self.promoted and not value.free
        return promoted or value.narrow or bool(value.kind) or operand.aval.dtype.itemsize < 4

    def _on_arrays(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Value]:
        name, early = eqn.primitive.name, None
        known = self._derive(values)
        if name in jaxprs.PRODUCT or name == "gather":
            for value in values:
                check_early_cast(eqn, value.early_cast)
        if name in jaxprs.PRODUCT:
            array, narrow = self._run_product(eqn, values)
            return [replace(known, array=array, narrow=narrow)]
        if laid_out := self._lay_out_in_compute(eqn, values):
            return laid_out
        if name not in jaxprs.NAMED:
            # What an index of the batch moves stays what it was.
            early = find_early_cast(floats_of(eqn, values) if name in jaxprs.LAYOUT else values, eqn)
        history, conversion = history_of(eqn, values), self._explicit_cast(eqn, values)
        stays = known.free or known.ruled or conversion is not None
        floats = floats_of(eqn, values)  # a layer's result, and its bias
        layered = any(value.narrow and value.owner is None for value in floats)
        biased = layered and all(value.narrow or value.owner is not None for value in floats)
        becomes = [
            ((biased and name in jaxprs.BROADCASTING) or var in self.promoted) and not stays for var in eqn.outvars
        ]
        out = self._compute_narrowly(eqn, values) if becomes == [True] else None
        if out is None:
            pairs = zip(self._bind_cast(jaxpr, eqn, values), becomes, strict=True)
            out = [self._in_compute(array, eqn, values) if narrow else array for array, narrow in pairs]
        known = replace(known, early_cast=early, explicit_cast=conversion, history=history)
        return [replace(known, array=array, narrow=narrow) for array, narrow in zip(out, becomes, strict=True)]

    # --- a promoted stream, held in compute

    def _compute_narrowly(self, eqn: Any, values: list[Value]) -> list[Any] | None:
        """Runs arithmetic in compute itself, if all operands are in compute or can be.

        fp32 would give the same, rounded, but hides from XLA what it can make part of a matmul, and keeps fp32
        arrays for the backward pass.
        """
        if self.emulate or eqn.primitive.name not in jaxprs.EXACT:
            return None
        shape, casts, arrays = eqn.outvars[0].aval.shape, self.base_casts, []
        for atom, value in zip(eqn.invars, values, strict=True):
            if not jaxprs.is_float(atom) or (value.owner is None and value.narrow and not value.kind):
                arrays.append(value.array)
            elif self._is_small_master(value):
                arrays.append(layers.cast_bias(value.array, shape, value.owner.casts))  # type: ignore[union-attr]
            elif isinstance(atom, Literal) and jaxprs.fits_exactly(atom.val, casts.compute):
                arrays.append(jnp.asarray(atom.val, casts.compute))
            elif eqn.primitive.name == "select_n" and value.owner is None and value.free and not value.kind:
                bounded = is_number_within(value, self.base.compute.max)
                cast = layers.to_compute if bounded else layers.batch_to_compute
                arrays.append(cast(jnp.asarray(value.array), casts))  # what is selected is rounded either way
            else:
                return None
        return jaxprs.results(eqn, arrays)

    def _is_small_master(self, value: Value) -> bool:
        """Returns whether a value is a parameter that computes as the stream does: a bias or a gain."""
        owner = value.owner
        return owner is not None and not owner.looked_up and owner.casts.compute == self.base_casts.compute

    def _lay_out_in_compute(self, eqn: Any, values: list[Value]) -> list[Value] | None:
        """Moves arrays in the compute format unchanged, though their variables are fp32."""
        floats = floats_of(eqn, values)
        moves = eqn.primitive.name in jaxprs.LAYOUT and all(
            value.narrow and value.owner is None for value in floats
        )
        if not moves or not floats:
            return None
        if patterns.is_pick(eqn) and eqn.outvars[0] not in self.promoted:
            x, indices = values  # read in fp32, as all of its row: gradients of both meet there
            picked = patterns.pick_numbers(eqn, self.island.widen(x), x.array, indices.array)
            return [replace(x, array=picked, narrow=False)]
        out, history = jaxprs.results(eqn, [value.array for value in values]), history_of(eqn, values)
        return [replace(floats[0], array=array, history=history) for array in out]

    def _explicit_cast(self, eqn: Any, values: list[Value]) -> Any:
        """Returns the conversion that made a result fp32, if the function wrote it down."""
        if jaxprs.is_widening(eqn):
            return eqn if patterns.is_explicit(eqn) else None
        if any(value.narrow or value.kind for value in values):
            return None
        return next((value.explicit_cast for value in values if value.explicit_cast is not None), None)

    def _in_compute(self, array: Any, eqn: Any, values: Sequence[Value]) -> Any:
        """Casts a promoted result to compute. What a mask selects or adds stays finite, as in a batch."""
        masks = (v for v in floats_of(eqn, values) if v.free and not is_number_within(v, self.base.compute.max))
        masked = eqn.primitive.name in ("select_n", "add") and any(masks)
        return (layers.batch_to_compute if masked else layers.to_compute)(array, self.base_casts)

    # --- products

    def _run_product(self, eqn: Any, values: list[Value]) -> tuple[Array, bool]:
        """Multiplies; returns the product, and whether it is in compute though its variable is fp32."""
        is_dot, out = eqn.primitive.name == "dot_general", eqn.outvars[0].aval
        side = _side_of_weight(values) if is_dot else 1
        if side is None:
            return self._product(eqn, values)
        x, master, seen = values[1 - side], values[side], eqn.invars[1 - side].aval
        if x.owner is not None and not x.is_looked_up:
            checks.check_product(eqn, x.owner.names, x.owner.casts.precision)
        if (owner := master.owner) is None:
            return self._product(eqn, values)
        precision = owner.casts.precision
        if seen.dtype != shown_dtype(self.base) and not x.follows_compute:
            ruled, wanted = self._is_ruled(x), shown_dtype(precision)
            checks.check_operand(eqn, seen, wanted, ruled=ruled, names=owner.names, conversion=x.explicit_cast)
        self.multiplied.update(owner.names)
        if is_dot:
            if out.dtype.itemsize > max(atom.aval.dtype.itemsize for atom in eqn.invars):
                # preferred_element_type wants the sum unrounded: the same operands, a wider result.
                precision = replace(precision, compute=format_of(out.dtype), grad=format_of(out.dtype))
            rows, matrix, dims = as_matmul(
                self._array(x, seen), master.array, eqn.params["dimension_numbers"], side
            )
            y = self._multiply(rows, matrix, dims, casts_of(precision), owner)
            y = (jnp.swapaxes(y, -1, -2) if side == 0 else y).reshape(out.shape)
        else:
            if precision.measured:  # narrow only if that is faster, and no convolution takes narrow operands
                precision = precision.widened()
            checks.check_convolution(eqn, owner.names, precision)
            casts = casts_of(precision)
            y = convolve(eqn, layers.to_compute(self._array(x, seen), casts), master.array, casts)
        # In the dtype of its variable, or in its own if that was promoted.
        narrow = shown_dtype(precision).itemsize < out.dtype.itemsize and not any(map(self._is_ruled, values))
        return (y if self.emulate or narrow else y.astype(out.dtype)), narrow

    def _multiply(self, rows: Array, matrix: Array, dims: Any, casts: Casts, owner: Owner) -> Array:
        return layers.dot_general(rows, matrix, dims, casts, amaxes=owner.amaxes)

    def _product(self, eqn: Any, values: list[Value]) -> tuple[Array, bool]:
        """Multiplies activations in compute, and tables and positions by each other in their own dtype."""
        base, wide = shown_dtype(self.base), False
        if not all(value.free or value.fixed for value in values):
            for value, aval in zip(values, (atom.aval for atom in eqn.invars), strict=True):
                if not value.follows_compute:
                    ruled, conversion = self._is_ruled(value), value.explicit_cast
                    checks.check_operand(eqn, aval, base, ruled=ruled, conversion=conversion)
                wide = wide or (aval.dtype.itemsize > base.itemsize and value.follows_compute)
        arrays = self._arrays(eqn.invars, values)
        params = eqn.params
        if _ALGORITHMS.get(params["precision"]) == self.base.compute and not self.emulate:
            dims, out = as_dimensions(params["dimension_numbers"]), format_of(eqn.outvars[0].aval.dtype)
            return product(
                *(layers.to_compute(x, self.base_casts) for x in arrays), dims, out, self.base_casts
            ), wide
        if wide and not any(self._is_ruled(value) for value in values):
            arrays = [layers.to_compute(array, self.base_casts) for array in arrays]
            params = {**params, "preferred_element_type": base}
        if all(array.dtype == jnp.float32 for array in arrays):
            params = {**params, "precision": self.fp32_dot}
        eqn = eqn.replace(params=params)
        if not self.emulate:
            return eqn.primitive.bind(*arrays, **params), wide
        if wide:
            return layers.round_result(jaxprs.bind_wide(eqn, arrays)[0], self.base_casts), wide
        return self._on_grid(jaxprs.bind_wide(eqn, arrays)[0], eqn.outvars[0].aval), wide

    def _bind_cast(self, jaxpr: Any, eqn: Any, values: list[Value]) -> list[Any]:
        """Runs the operation as it stands, with masters cast; emulated, rounds its results."""
        self._check_opaque(eqn, values)
        checks.check_island(eqn, self.policy)
        name = eqn.primitive.name
        if name in jaxprs.BROADCASTING:
            # Broadcast while it is a master: the transpose of a broadcast is a sum over tokens, here in fp32.
            shape = eqn.outvars[0].aval.shape
            values = [
                v if v.owner is None else replace(v, array=self._broadcast_master(atom, v, shape))
                for atom, v in zip(eqn.invars, values, strict=True)
            ]
        arrays = self._arrays(eqn.invars, values)
        carried = any(self._is_carried(atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars))
        if carried and name in jaxprs.LAYOUT | jaxprs.ARITHMETIC | jaxprs.COMPARISON | {"convert_element_type"}:
            out = jaxprs.bind_wide(eqn, arrays)
            rounds = name not in jaxprs.LAYOUT
            return [self._on_grid(a, v.aval) if rounds else a for a, v in zip(out, eqn.outvars, strict=True)]
        if carried:
            pairs = zip(arrays, eqn.invars, strict=True)  # in its own dtype, which holds a carried array exactly
            arrays = [x.astype(atom.aval.dtype) if jaxprs.is_float(atom) else x for x, atom in pairs]
        out = [self.carry(array) for array in jaxprs.bind(jaxpr, eqn, arrays)]
        return [self._on_grid(a, v.aval) for a, v in zip(out, eqn.outvars, strict=True)]

    def _broadcast_master(self, atom: Any, master: Value, shape: tuple[int, ...]) -> Array:
        """Broadcasts a master. A bias is cast before: XLA can make what it reads part of a matmul."""
        wide = self.emulate or atom.aval.dtype == FLOAT32 or not self._is_small_master(master)
        if wide or master.owner is None:
            return jnp.broadcast_to(master.array, shape)
        return layers.cast_bias(master.array, shape, master.owner.casts)

    def _check_opaque(self, eqn: Any, values: list[Value]) -> None:
        for atom, owner in ((a, v.owner) for a, v in zip(eqn.invars, values, strict=True) if v.owner is not None):
            checks.check_opaque(eqn, atom.aval, owner.names, owner.casts.precision)


def _side_of_weight(values: Sequence[Value]) -> int | None:
    """Returns which operand of a matmul is the weight, if any; of two parameters, the one not looked up."""
    parameters = [side for side in (1, 0) if values[side].owner is not None]
    if len(parameters) == 2:
        parameters = [side for side in parameters if not values[side].is_looked_up]
    return parameters[0] if parameters else None
