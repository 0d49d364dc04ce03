"""Finds the operation that made a step not finite: the first with finite inputs, forward or backward.

The value and gradient of each micro-batch are traced and evaluated again, equation by equation, on the device.
Every array carries its origin: the equation that made its first NaN or infinity of finite numbers. The loss, then
the gradients are asked for theirs, so what code makes and replaces is no failure. JAX computes some factors of a
derivative with the forward pass: what the loss does not show belongs to the backward pass. -inf is how masks are
written: an equation that was given -inf may return it, and what makes NaN of it, such as a softmax over nothing
else, is an origin. Loops (scan, while) are one operation.

A module is known by its weights: an operation belongs to the module whose weight it takes, or follows it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from halfstep.core.audit.cause import Cause
from halfstep.jax.jaxpr import CALLS, bind, functions_of, is_floating, line_of, walk

FINE, MASKED, BAD = range(3)  # how bad an array is: -inf alone may be a mask


def find_cause(
    loss_fn: Callable[[Any, Any], Any], params: Mapping[str, Array], micro_batches: Iterable[Any], scale: float
) -> Cause:
    """Returns the cause in `loss_fn(params, micro_batch)`, which returns a mean loss."""
    for name, array in params.items():
        if _badness(array):
            return Cause("forward", f"the weight `{name}` itself", _owner(name))
    sums: list[Any] = []
    for number, batch in enumerate(micro_batches):
        loss, gradients = _Walk().run(loss_fn, params, batch, scale)
        shown = [("forward", "the loss", loss)]
        shown += [("backward", f"gradient of `{name}`", value) for name, value in gradients.items()]
        for where, name, value in shown:
            if value.bad:
                alone = not any(gradient.bad for gradient in gradients.values())
                return replace(_cause(where, name, value.origin), micro_batch=number, loss_alone=alone)
        given = [value.array for value in gradients.values()]
        sums = [a + b for a, b in zip(sums, given, strict=True)] if sums else given
    for name, total in zip(params, sums, strict=True):
        if _badness(total):
            what = f"the sum of gradients of `{name}`; of each micro-batch they are finite"
            return Cause("reduction", what, _owner(name))
    return Cause("nowhere", "run again, the step is finite: dropout, another batch or a later update decides it")


@dataclass(frozen=True)
class _Origin:
    operation: str
    module: str
    line: str  # and after which weight, if it takes none


@dataclass(frozen=True)
class _Value:
    array: Any
    bad: int = FINE
    origin: _Origin | None = None
    weight: str = ""  # the name of the parameter that it is, cast or laid out


def _cause(where: Any, name: str, origin: _Origin | None) -> Cause:
    if origin is None:
        return Cause(where, f"{name}, by what the function was given")
    return Cause(where, f"{origin.module or origin.line}, which {name} shows", origin.module, origin.operation)


def _owner(weight: str) -> str:
    return weight.rpartition(".")[0]


class _Walk:
    """One evaluation."""

    def __init__(self) -> None:
        self._recent = ""  # the weight that was used last

    def run(
        self, loss_fn: Callable[[Any, Any], Any], params: Mapping[str, Array], batch: Any, scale: float
    ) -> tuple[_Value, dict[str, _Value]]:
        def loss(arrays: list[Array]) -> Any:
            return loss_fn(dict(zip(params, arrays, strict=True)), batch) * scale

        traced = jax.make_jaxpr(jax.value_and_grad(loss))([*params.values()])
        given = [_Value(array, weight=name) for name, array in params.items()]
        first, *rest = self._evaluate(traced.jaxpr, traced.consts, given)
        return first, dict(zip(params, rest, strict=True))

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[_Value]) -> list[_Value]:
        constants = (_Value(const, _badness(const)) for const in consts)
        return walk(
            jaxpr,
            dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True)),
            lambda atom: _Value(atom.val, _literal_badness(atom.val)),
            lambda eqn, values: self._equation(jaxpr, eqn, values),
        )

    def _equation(self, jaxpr: Any, eqn: Any, values: list[_Value]) -> list[_Value]:
        if eqn.primitive.name in CALLS:
            return self._evaluate(*functions_of(eqn)[0], values)
        weights = [value.weight for value in values if value.weight]
        alone = weights[0] if weights and len(values) == 1 else ""
        self._recent = weights[0] if weights and not alone else self._recent
        worst = max(values, key=lambda value: value.bad, default=_Value(None))
        made = []
        for array in bind(jaxpr, eqn, [value.array for value in values]):
            bad, origin = _badness(array), worst.origin
            if bad and (worst.bad == FINE or (worst.bad < bad and origin is None)):
                after = f" after `{self._recent}`" if self._recent and not weights else ""
                module = _owner(weights[0]) if weights else ""
                origin = _Origin(eqn.primitive.name, module, f"{line_of(eqn)}{after}")
            made.append(_Value(array, bad, origin if bad else None, alone))
        return made


def _literal_badness(number: Any) -> int:
    """How bad a number is that the code has in it: what infinity it makes, it makes itself."""
    return min(_badness(number), MASKED) if is_floating(number) and (np.asarray(number) == -np.inf).any() else FINE


def _badness(array: Any) -> int:
    if not is_floating(array):
        return FINE
    values = np.asarray(jnp.asarray(array).astype(jnp.float32))
    if np.isfinite(values).all():
        return FINE
    return MASKED if (np.isfinite(values) | (values == -np.inf)).all() else BAD
