"""From policy to parameters: gives every leaf of a pytree its name, its storage format and its module's precision.

The modules that rules match are the proper prefixes of the names of leaves (pytree.py), and a leaf's own name
where it is a single word. Leaves of fp32, bf16 and fp16 are trained; integers, booleans and keys of generators
pass through untouched; anything else is refused.

Nothing changes here, since arrays are immutable: interpret.py makes a loss function compute in these
formats, and optim/masters.py stores the results in them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from halfstep.config.model import owner
from halfstep.core.choice.layers import NO_LAYERS, Measured
from halfstep.core.errors import UnsupportedModelError, type_name
from halfstep.core.formats import BF16, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.core.refusal import check_formats, check_implemented, check_reach
from halfstep.core.roles import Operand, Param
from halfstep.jax.numerics.dtypes import default_device, supported
from halfstep.jax.numerics.lowering import NATIVE
from halfstep.jax.pytree import NamedTree

_TRAINED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Applied:
    """What a policy means for a pytree: how parameters and moments are held, what their modules run in."""

    policy: Policy
    leaves: "Leaves"
    modules: tuple[str, ...]  # that rules may match
    masters: dict[str, Param]
    moments: dict[str, Format]
    precisions: dict[str, Precision]
    halves: frozenset[str] = frozenset()  # split masters of which the loss function uses the bf16 half alone
    delayed: tuple[str, ...] = ()  # modules with operands that are scaled by earlier amaxes
    measured: Measured = NO_LAYERS  # modules that stay wide because that is faster, and why

    def by_module(self, modules: Sequence[str]) -> dict[str, Precision]:
        """Returns what modules run in."""
        return self.measured.widen(precisions(self.policy, modules))


def apply(params: Any, policy: Policy, names: Sequence[str] = (), measured: Measured | None = None) -> Applied:
    """Returns what the policy says of each trained leaf. `names` are further modules that rules may match.

    What rules call `measured` is narrow unless it was measured to be slower.
    """
    measured = measured or NO_LAYERS
    leaves = Leaves(params)
    modules = list(dict.fromkeys([*names, *modules_of(leaves.names)]))
    values = policy.resolve(modules)
    # Which modules multiply shows when the loss function is traced; narrow rules are checked against that then.
    owners = {owner(name) for name in leaves.trained}
    computing = owners | set(names)
    reach = {"param": owners, "moments": owners, "compute": computing, "grad": computing, "grad_weight": computing}
    check_reach(policy, reach)
    by_module = precisions(policy, modules)
    chosen = measured.widen(by_module)
    device = leaves.device
    for form in (policy, policy.evaluation()):
        wanted = [base_precision(form), *precisions(form, modules).values()]
        check_formats(wanted, "JAX", str(device), lambda fmt: supported(fmt, device), NATIVE)
    check_implemented(policy, "jax", _without_delayed)
    masters = {}
    for name, leaf in leaves.trained.items():
        param = cast(Param, values[owner(name)].values["param"])
        masters[name] = replace(param, split=param.split and jnp.ndim(leaf) > 1)  # no gain or bias is split
    return Applied(
        policy,
        leaves,
        tuple(modules),
        masters,
        {name: cast(Format, values[owner(name)].values["moments"]) for name in leaves.trained},
        {name: chosen[owner(name)] for name in leaves.trained},
        find_halves(policy, masters, modules),
        _find_delayed(by_module, leaves, names),
        measured,
    )


def _find_delayed(by_module: Mapping[str, Precision], leaves: "Leaves", names: Sequence[str]) -> tuple[str, ...]:
    """Returns the modules that may multiply with delayed operands: those with a matrix, or without parameters.

    One that stays wide is among them: a checkpoint may make it narrow.
    """
    owners = {owner(name) for name in leaves.trained}
    matrices = {owner(name) for name, leaf in leaves.trained.items() if jnp.ndim(leaf) > 1}
    wanted = [name for name, precision in by_module.items() if precision.delayed]
    return tuple(name for name in wanted if name in matrices or (name in names and name not in owners))


def find_halves(policy: Policy, masters: Mapping[str, Param], modules: Sequence[str]) -> frozenset[str]:
    """Returns the split masters whose bf16 half is all that is used: by modules that compute in bf16.

    A module without parameters, such as a tied head, may use any of them.
    """
    by_module, owners = precisions(policy, modules), {owner(name) for name in masters}
    inside = [name for name in modules if not any(other.startswith(f"{name}.") for other in modules)]
    if any(by_module[name].compute != BF16 for name in inside if name not in owners):
        return frozenset()
    return frozenset(n for n, param in masters.items() if param.split and by_module[owner(n)].compute == BF16)


def _without_delayed(operand: Operand) -> str:
    if operand.granularity != "row":
        return ""
    return f"a row of activations is a token: `{operand.format}:row`, or `{operand.format}:delayed`"


class Leaves(NamedTree):
    """The parameters of a model: a leaf is trained if it is floating, and must be an array in any case."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.trained = {name: leaf for name, leaf in self.values.items() if _is_trained(name, leaf)}
        if not self.trained:
            raise UnsupportedModelError(
                f"there is nothing to train: none of the {len(self.names)} leaves is a floating array",
                hint="pass the parameters of the model",
            )

    @property
    def device(self) -> jax.Device:
        """The device of the parameters; JAX's default while they are traced."""
        for leaf in self.trained.values():
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                return min(leaf.devices(), key=lambda device: device.id)
        return default_device()


def modules_of(names: Iterable[str]) -> list[str]:
    """Returns what rules match: every proper prefix of a name, or the name itself if it is one word."""
    paths = (name.split(".") for name in names)
    prefixes = (".".join(path[:depth]) for path in paths for depth in range(1, max(2, len(path))))
    return [*dict.fromkeys(prefixes)]


def _is_trained(name: str, leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise UnsupportedModelError(
            f"`{name}` is {type_name(leaf)}, not an array",
            hint="pass arrays alone: Flax's `model.init(key, x)`, `params, static = eqx.partition(model, "
            "eqx.is_array)`; numbers to train must be arrays: jnp.asarray(0.5)",
        )
    if any(jnp.issubdtype(dtype, kind) for kind in (jax.dtypes.prng_key, jnp.integer, jnp.bool_)):
        return False
    if jnp.dtype(dtype).name not in _TRAINED:
        raise UnsupportedModelError(
            f"`{name}` is {dtype}; parameters are trained in float32, bfloat16 or float16",
            hint=f"convert it with params[...].astype(jnp.float32): no policy has a format for {dtype}",
        )
    return True
