"""From policy to parameters: gives every leaf of a pytree its name, its storage format and its module's precision.

Parameters are any pytree. A leaf's name is its path, parts joined by dots: dictionary keys, attribute names and
indices alike, so a nested dictionary, a flat one keyed `blocks.0.attn.q.weight`, a Flax state and an Equinox
module read the same. The modules that rules match are the proper prefixes of those names, and a leaf's own name
where it is a single word.

    floating leaves          fp32, bf16 or fp16: trained; widened to fp32 for all arithmetic of the optimizer
    integers, booleans,
    keys of generators       pass through untouched
    all else                 refused: float64, complex and whatever is not an array

Nothing changes here: arrays are immutable, so `apply` checks a policy, says what it means for each leaf, and
refuses with the reason what the device cannot run. interpret.py makes a loss function compute so, step.py stores
the results so.

**What a function may do.** A function is opaque, and an island in it is code like any other. What its jaxpr shows
is compared with the policy at trace time, and refused with the primitive, dtype, shape and line:

    dot_general, conv_general_dilated    operands in another dtype than compute: an fp32 value promoted the stream
    exp, exp2                            narrower than `softmax`
    rsqrt, sqrt (of more than a scalar)  narrower than `norm`
    log                                  narrower than `loss`
    a primitive that cannot be opened    where it multiplies a parameter whose gradient, operands or rounding the
                                         policy determines

tanh, logistic, erf and the like are activations, and run in compute.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from halfstep.config.model import owner
from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import FP32, TF32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.core.refusal import EMULATE, check_formats, check_implemented, check_reach
from halfstep.core.roles import Accumulator, Operand, Param, Value, is_narrow
from halfstep.jax.dtypes import DType, as_device, dtype_of, format_of, supported
from halfstep.jax.functions.primitives import ISLANDS, PRODUCT, is_ours, line_of, multiplies
from halfstep.jax.lowering import NATIVE

_TRAINED = ("float32", "bfloat16", "float16")
# Holds a single array and is not a module: the leaf of a Flax nnx variable.
_BOX = jax.tree_util.GetAttrKey("value")


@dataclass(frozen=True)
class Applied:
    """What a policy means for a pytree: how parameters and moments are held, what their modules run in."""

    policy: Policy
    modules: int
    masters: dict[str, Param]
    moments: dict[str, Format]
    precisions: dict[str, Precision]

    def __str__(self) -> str:
        held: dict[str, int] = {}
        for param in self.masters.values():
            held[str(param.format)] = held.get(str(param.format), 0) + 1
        parameters = ", ".join(f"{count} parameters in {fmt}" for fmt, count in held.items())
        return f"{self.policy}: {self.modules} modules, {parameters}"


def apply(params: Any, policy: Policy, names: Sequence[str] = ()) -> Applied:
    """Returns what the policy says of each trained leaf. `names` are further modules that rules may match."""
    leaves = Leaves(params)
    modules = list(dict.fromkeys([*names, *modules_of(leaves.names)]))
    values = policy.resolve(modules)
    # Which modules multiply shows when the loss function is traced; narrow rules are checked against that then.
    check_reach(policy, modules, {owner(name) for name in leaves.trained})
    by_module = precisions(policy, modules)
    for form in (policy, policy.evaluation()):
        check_supported([base_precision(form), *precisions(form, modules).values()], leaves.device)
    check_implemented(policy, "jax", _not_implemented)
    return Applied(
        policy,
        len(modules),
        {name: cast(Param, values[owner(name)].values["param"]) for name in leaves.trained},
        {name: cast(Format, values[owner(name)].values["moments"]) for name in leaves.trained},
        {name: by_module[owner(name)] for name in leaves.trained},
    )


def check_supported(wanted: Sequence[Precision], device: jax.Device) -> None:
    """Refuses what the device cannot run, with the reason and the alternative that runs."""
    check_formats(wanted, str(device), lambda fmt: supported(fmt, device), NATIVE)
    for precision in dict.fromkeys(wanted):
        if precision.grad != precision.compute and not precision.emulate:
            raise PolicyError(
                f"grad={precision.grad} with compute={precision.compute}: JAX keeps the gradient of an "
                "activation in the activation's own dtype",
                hint=f"write `grad={precision.compute}`, or {EMULATE}",
            )


def _not_implemented(role: str, value: Value) -> str:
    if isinstance(value, Param) and value.split:
        return "`param=fp32` holds the same numbers in 4 bytes and a cast"
    if isinstance(value, Operand) and value.measured:
        return f"omit `measured`, `{role}={value.format}`, and name the matmuls by rules; or {EMULATE}"
    if isinstance(value, Operand) and value.amax == "delayed":
        return "`current` scales by this step's own amax"
    if isinstance(value, Accumulator) and value.fast:
        return "matmuls sum in fp32"
    if role in ("buffers", "router", "reduce") and value != FP32:
        return "these stay fp32: omit the role"
    return ""


_REMEDIES = {
    "softmax": "halfstep.jax.softmax or cross_entropy",
    "norm": "halfstep.jax.rms_norm or layer_norm",
    "loss": "halfstep.jax.cross_entropy",
}


def check_rules(policy: Policy) -> None:
    """Refuses rules for the islands of an opaque function, which have no names."""
    for rule in policy.rules:
        for role in ("norm", "softmax"):
            if role in dict(rule.changes):
                raise PolicyError(
                    f"rule `{rule}` changes `{role}` in a function whose islands have no names",
                    hint=f"set `{role}` for the whole policy; or build the function from halfstep.jax layers, "
                    "each with its own precision, and pass cast=False",
                )


def check_function(jaxpr: Any, applied: Applied) -> None:
    """Compares a function that casts by itself with the policy; halfstep's own layers need no check."""
    policy = applied.policy
    ruled = [value for rule in policy.rules for role, value in rule.changes if role == "compute"]
    wide = [v.format for v in ruled if isinstance(v, Operand) and not is_narrow(v.format)]
    wanted = {_seen_as(fmt) for fmt in (policy.compute.format, *wide)}
    for eqn in jaxpr.eqns:
        check_island(eqn, policy)
        name = eqn.primitive.name
        if name in PRODUCT:
            for aval in (atom.aval for atom in eqn.invars):
                if aval.dtype not in wanted:
                    check_operand(eqn, aval, _seen_as(policy.compute.format), ruled=False)
        elif not name.startswith("custom_vjp_call"):
            for inner in jaxprs_in_params(eqn.params):
                check_function(inner, applied)


def check_operand(eqn: Any, aval: Any, wanted: DType, *, ruled: bool, names: Sequence[str] = ()) -> None:
    """Refuses a matmul operand that is not in the compute dtype; `ruled`: a rule may have widened it."""
    if aval.dtype == wanted or not jnp.issubdtype(aval.dtype, jnp.floating):
        return
    if ruled and aval.dtype.itemsize > wanted.itemsize:
        return
    by = f" by `{names[0]}`" if names else ""
    layer = f"`{owner(names[0])}: compute=fp32`" if names else "`compute=fp32` for its layer"
    wider = aval.dtype.itemsize > wanted.itemsize
    cause = "an fp32 value promoted it: cast it, make scalars Python numbers" if wider else "drop the cast"
    raise PolicyError(
        f"`{eqn.primitive.name}` multiplies {aval.dtype}{list(aval.shape)}{by} at {line_of(eqn)}, but the policy "
        f"computes in {wanted}",
        hint=f"{cause}, or add the rule {layer}",
    )


def check_product(eqn: Any, names: Sequence[str], precision: Precision) -> None:
    """Refuses a product of two parameters: the one in the activation's place would lose its wide gradient."""
    lost = lost_by(precision)
    if lost:
        raise PolicyError(
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
        raise PolicyError(
            f"`{eqn.primitive.name}` at {line_of(eqn)} cannot run `{names[0]}` with {odd[0]} operands",
            hint=f"give `{owner(names[0])}` a rule with `compute={precision.compute}`",
        )


def check_opaque(eqn: Any, aval: Any, names: Sequence[str], precision: Precision) -> None:
    """Refuses a parameter in a primitive that cannot be opened, where the policy would not reach it."""
    name, lost = eqn.primitive.name, lost_by(precision)
    if not lost:
        return
    if name.startswith("custom_vjp_call") and aval.dtype != dtype_of(FP32):
        raise PolicyError(
            f"`{names[0]}` enters `{name}` at {line_of(eqn)} as {aval.dtype}, and its gradient "
            f"would be {aval.dtype} too: {lost} would not reach it",
            hint="pass it in fp32, with `.astype(jnp.float32)`: layers of halfstep.jax cast by themselves",
        )
    if multiplies(eqn) and not is_ours(eqn):
        raise PolicyError(
            f"`{names[0]}` enters `{name}` at {line_of(eqn)}, which multiplies and cannot be opened: {lost} "
            "would not reach it",
            hint="multiply outside of it, write the loop as lax.scan; or build the function from halfstep.jax "
            "layers and pass cast=False",
        )


def check_island(eqn: Any, policy: Policy) -> None:
    """Refuses an island narrower than the policy says, also inside what cannot be opened."""
    role = ISLANDS.get(eqn.primitive.name)
    if role is None:
        for inner in jaxprs_in_params(eqn.params):
            for each in inner.eqns:
                check_island(each, policy)
        return
    aval = eqn.invars[0].aval
    ruled = (value for rule in policy.rules for changed, value in rule.changes if changed == role)
    allowed = {_seen_as(fmt) for fmt in (FP32, getattr(policy, role), *ruled)}
    if aval.shape and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype not in allowed:
        raise PolicyError(
            f"`{eqn.primitive.name}` of {aval.dtype}{list(aval.shape)} at {line_of(eqn)}, but the policy says "
            f"{role}={getattr(policy, role)}",
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


def _seen_as(fmt: Format) -> DType:
    return dtype_of(FP32 if fmt == TF32 else fmt)


class Leaves:
    """A pytree by the names of its leaves: which are trained, and how to replace them."""

    def __init__(self, params: Any):
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(params)
        self.paths = [path for path, _ in flat]
        self.names = names_of(self.paths)
        self.values = dict(zip(self.names, (leaf for _, leaf in flat), strict=True))
        self.trained = {name: leaf for name, leaf in self.values.items() if _is_trained(name, leaf)}
        if not self.trained:
            raise HalfstepError(
                f"there is nothing to train: none of the {len(flat)} leaves is a floating array",
                hint="pass the parameters of the model",
            )

    def rebuilt(self, trained: Mapping[str, Any]) -> Any:
        """Returns the pytree with other trained leaves."""
        return jax.tree.unflatten(self.treedef, [trained.get(name, leaf) for name, leaf in self.values.items()])

    def bare(self, trained: Mapping[str, Any]) -> Any:
        """Returns the pytree of trained leaves alone, as an optimizer sees it, with None for all others."""
        return jax.tree.unflatten(self.treedef, [trained.get(name) for name in self.names])

    def read(self, bare: Any) -> dict[str, Any]:
        """Returns the trained leaves of a pytree of the structure of `bare`, by name."""
        return dict(zip(self.trained, jax.tree.leaves(bare), strict=True))

    @property
    def device(self) -> jax.Device:
        """The device of the parameters; JAX's default while they are traced."""
        for leaf in self.trained.values():
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                return min(leaf.devices(), key=lambda device: device.id)
        config: Any = jax.config
        return as_device(config.jax_default_device or jax.local_devices()[0])

    def moments_of(self, opt_state: Any) -> list[str | None]:
        """Returns, for each leaf of an optimizer's state, the parameter it is a moment of, if any.

        An optimizer keeps moments in trees like that of the parameters: the path of a moment ends in the path of
        its parameter, and it has the same shape.
        """
        names = dict(zip(self.paths, self.names, strict=True))
        owners: list[str | None] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
            ends = (names.get(path[start:], "") for start in range(len(path) + 1))
            alike = (
                name
                for name in ends
                if name in self.trained
                and jnp.shape(leaf) == jnp.shape(self.trained[name])
                and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            )
            owners.append(next(alike, None))
        return owners


def names_of(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Returns the name of each leaf; two leaves with one name are an error."""
    siblings = Counter(path[:-1] for path in paths)
    names = []
    for path in paths:
        boxed = len(path) > 1 and path[-1] == _BOX and siblings[path[:-1]] == 1
        names.append(jax.tree_util.keystr(path[:-1] if boxed else path, simple=True, separator=".") or "params")
    [(name, count)] = Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise HalfstepError(
            f"{count} leaves of the parameters are named `{name}`: a key with a dot reads like a nested one",
            hint="rename one of them",
        )
    return names


def modules_of(names: Iterable[str]) -> list[str]:
    """Returns what rules match: every proper prefix of a name, or the name itself if it is one word."""
    modules: dict[str, None] = {}
    for name in names:
        steps = name.split(".")
        modules |= dict.fromkeys(".".join(steps[:depth]) for depth in range(1, max(2, len(steps))))
    return list(modules)


def _is_trained(name: str, leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise HalfstepError(
            f"`{name}` is {type(leaf).__name__}, not an array",
            hint="pass arrays alone: `params, static = eqx.partition(model, eqx.is_array)`; numbers to train "
            "must be arrays: jnp.asarray(0.5)",
        )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
        return False
    if jnp.dtype(dtype).name not in _TRAINED:
        raise HalfstepError(
            f"`{name}` is {dtype}; parameters are trained in float32, bfloat16 or float16",
            hint=f"convert it with params[...].astype(jnp.float32): no policy has a format for {dtype}",
        )
    return True
