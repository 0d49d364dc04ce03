"""What an optimizer intends and what of it arrives: its own update, run again in fp64 beside the real one.

Any optax transform is a pure function, so the intended update needs no formula: gradients, state and parameters
are widened to fp64 and given to the same transform. **Weight decay** is what of the update depends on the
parameter itself: the difference to the update of parameters that are zero, where it is -c times the parameter.

A transform that refuses fp64 (optax.MultiSteps) runs in fp32 instead; one that refuses that too, in its own
formats, and the counts are then not `exact`.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax import Array

from halfstep.core.audit.record import UpdateCounts
from halfstep.core.errors import UnsupportedModelError
from halfstep.jax.instruments.collect.operations import format_name
from halfstep.jax.jaxpr import COMPILER_OPTIONS, is_floating
from halfstep.jax.pytree import NamedTree

_TINY = 1e-37  # no divisor is zero
_STEPPING = ("ScaleBy", "Trace", "Muon")
_SUMS = "acc_grads"


class Parameters(NamedTree):
    """The parameters of an audit: floating arrays are trained, and anything else may lie beside them."""

    def __init__(self, tree: Any):
        super().__init__(tree)
        arrays = {n: x for n, x in self.values.items() if hasattr(x, "dtype") and hasattr(x, "shape")}
        self.trained: dict[str, Array] = {n: jnp.asarray(x) for n, x in arrays.items() if is_floating(x)}
        if not self.trained:
            raise UnsupportedModelError(
                f"there is nothing to audit: none of the {len(self.names)} leaves of the parameters is a floating "
                "array",
                hint="pass the parameters of the model, as the loss function takes them",
            )


class Stepper:
    """Steps an optimizer, and counts what of its intended updates arrives."""

    def __init__(self, optimizer: Any, params: Parameters, scale: float = 1.0):
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.params, self.scale = params, scale
        self.state = self.optimizer.init(params.bare(params.trained))
        self.values = self.first = dict(params.trained)
        self.counts = {name: UpdateCounts() for name in params.trained}
        self.master = _master(params, self.state)
        self._step = jax.jit(self._try_step, compiler_options=COMPILER_OPTIONS)
        # What the transform may run in while its intended update is computed; None: its own formats.
        self.formats: list[Any] = [jnp.float64, jnp.float32, None]
        self._compiled_compare = jax.jit(self._compare, static_argnums=0, compiler_options=COMPILER_OPTIONS)

    def step(self, grads: Mapping[str, Array], loss: Array) -> None:
        """Applies one update, unless gradients are not finite: then no update means anything."""
        moved, state, finite = self._step(grads, self.state, self.values, loss)
        if not finite:
            return
        counted = jax.device_get(self._count(grads, self.state, self.values, loss, moved))
        for name, row in counted.items():
            found = UpdateCounts(*(1, *(x.item() for x in row), self.formats[0] is not None))
            self.counts[name] = self.counts[name].merge(found)
        self.values, self.state = moved, state

    def moments(self, name: str) -> dict[str, str]:
        """Returns the formats of a parameter's moments, by their name in the optimizer's state."""
        return {
            label: format_name(leaf.dtype)
            for label, group in self.params.groups_of(self.state).items()
            if label != self.master and not label.endswith(_SUMS) and (leaf := group.get(name)) is not None
        }

    def sums(self) -> list[str]:
        """Returns the formats in which the optimizer sums gradients of several calls, as optax.MultiSteps does."""
        groups = self.params.groups_of(self.state).items()
        return sorted(
            {format_name(x.dtype) for label, group in groups if label.endswith(_SUMS) for x in group.values()}
        )

    @property
    def name(self) -> str:
        """What the optimizer is called, by its states: optax has no names."""
        kinds = re.findall(r"namedtuple\[(\w+)\]", str(jax.tree.structure(self.state)))
        known = sorted(kind.removesuffix("State") for kind in kinds if kind.startswith(_STEPPING))
        return f"optax {re.sub(r'(?<!^)(?=[A-Z])', '_', known[0]).lower()}" if known else "optax"

    def _updates(self, grads: Any, state: Any, values: Any, loss: Any) -> tuple[dict[str, Array], Any]:
        bare = self.params.bare
        grads = {name: g / self.scale if self.scale != 1 else g for name, g in grads.items()}
        updates, state = self.optimizer.update(bare(grads), state, bare(values), value=loss)
        return self.params.read(updates), state

    def _try_step(self, grads: Any, state: Any, values: Any, loss: Any) -> tuple[dict[str, Array], Any, Array]:
        updates, state = self._updates(grads, state, values, loss)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in grads.values()]))
        return dict(optax.apply_updates(values, updates)), state, finite

    def _count(self, *given: Any) -> dict[str, list[Array]]:
        """Counts what arrived of an update, in the widest format that the transform runs in."""
        while True:
            try:
                with jax.enable_x64(self.formats[0] == jnp.float64):
                    counted: dict[str, list[Array]] = self._compiled_compare(self.formats[0], *given)
                    return counted
            except TypeError:  # branches or loops of a transform that fixes its dtypes
                if self.formats == [None]:
                    raise
                del self.formats[0]

    def _compare(
        self, wide: Any, grads: Any, state: Any, values: Any, loss: Any, moved: Mapping[str, Array]
    ) -> dict[str, list[Array]]:
        def widened(x: Any) -> Any:
            return jnp.asarray(x, wide) if wide is not None and is_floating(x) else x

        grads, state, masters, loss = jax.tree.map(widened, (grads, state, values, loss))
        intended, _ = self._updates(grads, state, masters, loss)
        without, _ = self._updates(grads, state, jax.tree.map(jnp.zeros_like, masters), loss)
        return {
            name: self._row(name, grads[name], masters[name], u, u - without[name], values[name], moved[name])
            for name, u in intended.items()
        }

    def _row(
        self, name: str, grad: Array, value: Array, update: Array, decay: Array, old: Array, new: Array
    ) -> list[Array]:
        """Returns the fields of UpdateCounts from `elements` to `moved`."""
        actual = new.astype(value.dtype) - value
        rate = -jnp.sum(decay * value) / jnp.maximum(jnp.sum(value * value), _TINY)
        # A share of each weight, and nothing else: what norms of weights do to an update is not decay.
        decays = (rate > 0) & jnp.all(jnp.abs(decay + rate * value) <= 1e-6 * jnp.abs(rate * value) + _TINY)
        decayed = decays & (decay != 0)
        return [
            jnp.asarray(value.size),
            jnp.sum(update != 0),
            jnp.sum((update != 0) & (new == old)),
            jnp.sum(decayed),
            jnp.sum(decayed & ((value + decay).astype(old.dtype) == old)),
            jnp.sum(actual * update),
            jnp.sum(update * update),
            jnp.sum(grad != 0),
            jnp.any(new != self.first[name]),
        ]


def _master(params: Parameters, state: Any) -> str | None:
    """Returns the part of an optimizer's state that is an fp32 copy of all parameters, if there is one."""
    for label, group in params.groups_of(state).items():
        same = [
            leaf.dtype == jnp.float32 and bool(jnp.all(leaf == params.trained[name].astype(jnp.float32)))
            for name, leaf in group.items()
        ]
        varied = any(np.ptp(np.asarray(leaf, np.float32)) > 0 for leaf in group.values() if leaf.size)
        if all(same) and varied and len(group) == len(params.trained):
            return label
    return None
