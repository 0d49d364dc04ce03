"""What a loss function may do: its jaxpr is compared with the policy, and refused where the two contradict.

What the function computes in a narrow format where the policy says fp32 is computed in fp32 (islands.py), and
tables do not promote its stream (patterns.py). Refused when it is traced, with the place:

    dot_general, conv_general_dilated    operands that the function itself converted to another dtype than compute
    exp, exp2, rsqrt, sqrt, log          narrower than `softmax`, `norm` or `loss`, in what cannot be opened
    a primitive that cannot be opened    where it multiplies a parameter that the policy says more about

tanh, logistic, erf and the like are activations, and run in compute.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import jaxprs_in_params

from halfstep.config.model import owner
from halfstep.core.errors import DelayedScaleError, PolicyReachError, UnmatchedRuleError, UnsupportedRoleError
from halfstep.core.formats import FP32, TF32
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision
from halfstep.core.roles import Operand, is_narrow
from halfstep.jax.convert.apply import Applied
from halfstep.jax.fp8 import PREFIX
from halfstep.jax.jaxpr import ISLANDS, PRODUCT, equations_inside, is_ours, line_of, multiplies
from halfstep.jax.numerics.dtypes import DType, dtype_of, format_of
from halfstep.jax.numerics.lowering import carrier_of

_REMEDIES = {
    "softmax": "halfstep.jax.softmax or cross_entropy",
    "norm": "halfstep.jax.rms_norm or layer_norm",
    "loss": "halfstep.jax.cross_entropy",
}


def call_checked(
    fn: Callable[..., Any], applied: Applied, masters: Mapping[str, Array], rest: Sequence[Any]
) -> tuple[Any, Any]:
    """Calls a function that casts inside, on the masters themselves; returns its result, also as shapes."""
    params = with_amaxes(applied.leaves.rebuild(masters), masters)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(params, *rest)
    if not applied.policy.emulate:  # emulated, every array is fp32, and the layers know what they hold
        check_function(closed.jaxpr, applied)
    out = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves((params, rest)))
    return jax.tree.unflatten(jax.tree.structure(shape), out), shape


def check_rules(policy: Policy) -> None:
    """Refuses rules for the islands of an opaque function, which have no names."""
    changes = ((rule, role) for rule in policy.rules for role, _ in rule.changes)
    for named, role in changes:
        if role in ("norm", "softmax"):
            raise UnmatchedRuleError(
                f"rule `{named}` changes `{role}` in a function whose islands have no names",
                hint=f"set `{role}` for the whole policy; or build the function from halfstep.jax layers, each "
                "with its own precision, and pass cast=False",
            )


def check_function(jaxpr: Any, applied: Applied) -> None:
    """Compares a function that casts by itself with the policy; halfstep's own layers need no check."""
    policy = applied.policy
    ruled = [value for rule in policy.rules for role, value in rule.changes if role == "compute"]
    wide = [v.format for v in ruled if isinstance(v, Operand) and not is_narrow(v.format)]
    compute, *others = (carrier_of(fmt) for fmt in (policy.compute.format, *wide))
    for eqn in jaxpr.eqns:
        check_island(eqn, policy)
        name = eqn.primitive.name
        if name in PRODUCT:
            for aval in (atom.aval for atom in eqn.invars if atom.aval.dtype not in others):
                check_operand(eqn, aval, compute, ruled=False)
        elif not name.startswith("custom_vjp_call"):
            for inner in jaxprs_in_params(eqn.params):
                check_function(inner, applied)


def check_operand(
    eqn: Any, aval: Any, wanted: DType, *, ruled: bool, names: Sequence[str] = (), conversion: Any = None
) -> None:
    """Refuses a matmul operand that is not in the compute dtype.

    `ruled`: a rule may have widened it. `names` are the parameters it is multiplied by, and `conversion` is the
    equation of the function's own that widened it, if one is known.
    """
    wider = aval.dtype.itemsize > wanted.itemsize
    if aval.dtype == wanted or not jnp.issubdtype(aval.dtype, jnp.floating) or (ruled and wider):
        return
    by = f" by `{names[0]}`" if names else ""
    layer = f"`{owner(names[0])}: compute=fp32`" if names else "`compute=fp32` for its layer"
    cause = "an fp32 value promoted it: cast it, make scalars Python numbers" if wider else "drop the cast"
    if conversion is not None:
        cause = f"it was converted to {aval.dtype} at {line_of(conversion)}: drop that"
    raise PolicyReachError(
        f"`{eqn.primitive.name}` multiplies {aval.dtype}{list(aval.shape)}{by} at {line_of(eqn)}, but the policy "
        f"computes in {wanted}",
        hint=f"{cause}, or add the rule {layer}",
    )


def check_product(eqn: Any, names: Sequence[str], precision: Precision) -> None:
    """Refuses a product of two parameters: the one in the activation's place would lose its wide gradient."""
    lost = lost_by(precision)
    if lost:
        raise PolicyReachError(
            f"`{eqn.primitive.name}` at {line_of(eqn)} multiplies `{names[0]}` by another parameter, but {lost} "
            "reach only one of the two",
            hint="multiply the activations by one, then by the other: (x @ a) @ b; if one is the activation, like "
            "learned queries, mark it: jax.ad_checkpoint.checkpoint_name(queries, 'activation')",
        )


def check_convolution(eqn: Any, names: Sequence[str], precision: Precision) -> None:
    """Refuses operand formats that no convolution takes."""
    formats = {precision.operand.format, precision.grad_operand.format}
    odd = [fmt for fmt in formats if is_narrow(fmt) or (fmt == TF32 and not precision.emulate)]
    if odd:
        raise UnsupportedRoleError(
            f"`{eqn.primitive.name}` at {line_of(eqn)} cannot run `{names[0]}` with {odd[0]} operands",
            hint=f"give `{owner(names[0])}` a rule with `compute={precision.compute}`",
        )


def check_opaque(eqn: Any, aval: Any, names: Sequence[str], precision: Precision) -> None:
    """Refuses a parameter in a primitive that cannot be opened, where the policy would not reach it."""
    name, lost = eqn.primitive.name, lost_by(precision)
    if not lost:
        return
    if name.startswith("custom_vjp_call") and aval.dtype != dtype_of(FP32):
        raise PolicyReachError(
            f"`{names[0]}` enters `{name}` at {line_of(eqn)} as {aval.dtype}, and its gradient "
            f"would be {aval.dtype} too: {lost} would not reach it",
            hint="pass it in fp32, with `.astype(jnp.float32)`: layers of halfstep.jax cast by themselves",
        )
    if multiplies(eqn) and not is_ours(eqn):
        remedy = "multiply outside of it, write the loop as lax.scan"
        if name == "shard_map":
            remedy = (
                "pass the mesh to `init` and `make_step`, which share the batch, and write the loss for one device"
            )
        raise PolicyReachError(
            f"`{names[0]}` enters `{name}` at {line_of(eqn)}, which multiplies and cannot be opened: {lost} "
            "would not reach it",
            hint=f"{remedy}; or build the function from halfstep.jax layers and pass cast=False",
        )


def find_narrow_island(eqn: Any, policy: Policy) -> Any:
    """Returns an equation of an island narrower than the policy says, also inside what cannot be opened."""
    for each in (eqn, *equations_inside(eqn)):
        if (role := ISLANDS.get(each.primitive.name)) is not None:
            aval = each.invars[0].aval
            ruled = (value for rule in policy.rules for changed, value in rule.changes if changed == role)
            allowed = {carrier_of(fmt) for fmt in (FP32, getattr(policy, role), *ruled)}
            if aval.shape and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype not in allowed:
                return each
    return None


def check_island(eqn: Any, policy: Policy) -> None:
    """Refuses an island narrower than the policy says."""
    if (found := find_narrow_island(eqn, policy)) is not None:
        aval, role = found.invars[0].aval, ISLANDS[found.primitive.name]
        raise PolicyReachError(
            f"`{found.primitive.name}` of {aval.dtype}{list(aval.shape)} at {line_of(found)}, but the policy "
            f"says {role}={getattr(policy, role)}",
            hint=f"use {_REMEDIES[role]}, convert before it with `.astype(jnp.float32)`, or accept it with "
            f"`{role}={format_of(aval.dtype)}`",
        )


def lost_by(precision: Precision) -> str:
    """Returns what a parameter would lose if layers.dot_general did not multiply it; empty if nothing."""
    if precision.emulate:
        return "emulated casts"
    if is_narrow(precision.operand.format):
        return f"{precision.operand.format} operands"
    if precision.grad_weight.bits > precision.compute.bits:
        return f"{precision.grad_weight} weight gradients"
    return ""


def with_amaxes(params: Any, masters: Mapping[str, Any]) -> Any:
    """Returns the parameters for a function that casts by itself, with the amaxes of delayed operands."""
    amaxes = {name: x for name, x in masters.items() if name.startswith(PREFIX)}
    if amaxes and not isinstance(params, dict):
        raise DelayedScaleError(
            f"delayed operands in a function that casts by itself: its parameters are a {type(params).__name__}, "
            "which has no place for their amaxes",
            hint="pass parameters by name, in a dict, and `linear(..., amaxes=params.get('amax.<module>'))`; or "
            "omit cast=False",
        )
    return params | amaxes if amaxes else params


def check_stacked(values: Sequence[Any]) -> None:
    """Refuses weights of several layers in one array, which a scan takes apart, with delayed operands."""
    for value in values:
        if value.owner is not None and value.owner.amaxes is not None:
            raise DelayedScaleError(
                f"`{value.owner.names[0]}` holds the weights of several layers, one for each turn of lax.scan, "
                "and a delayed amax belongs to one matmul",
                hint="omit `delayed`: `current` scales each layer by its own amax",
            )
