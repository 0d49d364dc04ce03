"""`halfstep.jax.audit`: what is wrong with a training in JAX, from its loss, parameters, batch and optimizer.

for finding in halfstep.jax.audit(loss_fn, params, batch, optax.adamw(1e-5)):
    print(finding)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array

from halfstep.core.audit import engine
from halfstep.core.audit.finding import Finding
from halfstep.core.policy import Policy, as_policy
from halfstep.jax.convert.apply import apply
from halfstep.jax.convert.checks import call_checked
from halfstep.jax.convert.interpret import cast_inside
from halfstep.jax.instruments.collect.record import STEPS, Prepared, record_of


def audit(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: Any,
    *,
    rng: Any = None,
    policy: Policy | str | None = None,
    cast: bool = True,
    loss_scale: float = 1.0,
    steps: int = STEPS,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Finding]:
    """Returns what is wrong with a training, worst first; an empty list if nothing is.

    `loss_fn(params, batch[, rng])` returns a loss, or a tuple that begins with one; `params` is any pytree, and
    `optimizer` any optax transform. `steps` updates are made with this batch, on copies: the arrays that were
    passed do not change. `loss_scale` is what your step multiplies the loss by before it differentiates.
    `policy` and `cast` are those that `init` and `make_step` get; without a policy the function runs unchanged.

    `select` and `ignore` are ids of rules, or their beginnings: `ignore=["HS4"]`.
    """
    prepared = None if policy is None else _prepare(as_policy(policy), cast, params)
    given: dict[str, Any] = {"rng": rng, "loss_scale": loss_scale, "steps": steps}
    return engine.check(record_of(loss_fn, params, batch, optimizer, prepared=prepared, **given), select, ignore)


def _prepare(policy: Policy, cast: bool, params: Any) -> Prepared:
    """Returns how halfstep runs a training under a policy, with fp32 masters."""
    applied = apply(params, policy)
    call = partial(cast_inside, cast_batch=True) if cast else call_checked

    def run(loss_fn: Callable[..., Any], masters: Mapping[str, Array], rest: Sequence[Any]) -> Any:
        # As a step does it: fp32 is fp32.
        with jax.default_matmul_precision("highest"):
            return call(loss_fn, applied, masters, rest)[0]

    compute = {name: str(precision.compute) for name, precision in applied.precisions.items()}
    masters = {name: str(param.format) for name, param in applied.masters.items()}
    return Prepared(str(policy), compute, masters, run)
