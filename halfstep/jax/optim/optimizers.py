"""AdamW and Muon (config.groups) as optax transforms, and what a session updates the reference decoder with.

AdamW consists of optax's own pieces. An optimizer here sees fp32 parameters, gradients and moments, which
update/step.py stores as the policy says. Muon's iteration has a format, that of the policy, which the step passes
to transforms that take it. None knows of skipped steps: the step restores its whole state, so a schedule counts
applied updates.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array, lax

from halfstep.config.groups import NEWTON_SCHULZ, moments, parameter_groups
from halfstep.config.model import ModelConfig
from halfstep.config.run import OptimizerConfig
from halfstep.config.session import Schedule
from halfstep.core.errors import OptimizerParametersError
from halfstep.core.formats import FP32, TF32, Format, parse
from halfstep.core.policy import Policy
from halfstep.jax.numerics.cast import carried
from halfstep.jax.numerics.lowering import carrier_of
from halfstep.jax.pytree import NamedTree


class MuonState(NamedTuple):
    """The momentum of each matrix, and the updates applied so far."""

    momentum: Any
    applied: Array


def adamw(
    rate: float | Mapping[str, float] = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    schedule: Schedule | None = None,
) -> optax.GradientTransformation:
    """Returns AdamW at one rate for all, or one per name; only matrices named `.weight` decay."""
    return optax.chain(
        optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        _scale_by_rate(rate, schedule),
    )


def muon(
    rate: float = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    iteration: Format | str | None = None,
    *,
    emulate: bool = False,
    schedule: Schedule | None = None,
    momentum_schedule: Schedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns Muon with Nesterov momentum, for matrices; those of one shape are updated in one batch.

    Its iteration runs in the compute format of the state's policy unless it is given its own; `emulate` is for one
    outside of `make_step`. A `schedule(applied, jnp)` returns what the rate is multiplied by after `applied`
    updates; a `momentum_schedule` returns the momentum itself. The other parameters need another optimizer:

        optax.multi_transform({"muon": muon(0.02), "adamw": optax.adamw(1e-3)}, lambda params: jax.tree.map(
            lambda leaf: "muon" if leaf.ndim == 2 else "adamw", params))
    """
    own = parse(iteration) if isinstance(iteration, str) else iteration
    return optax.chain(
        _orthogonalized_momentum(momentum_schedule or (lambda applied, xp: momentum), own, emulate),
        optax.add_decayed_weights(weight_decay),
        _scale_by_rate(rate, schedule),
    )


def build_optimizers(
    model: ModelConfig, config: OptimizerConfig, schedule: Schedule | None = None, momentum: Schedule | None = None
) -> optax.GradientTransformation:
    """Returns Muon for the matrices in blocks if the recipe says so, and AdamW for the rest, by group."""
    groups = parameter_groups(model, config)
    rates = {name: group.rate for group in groups if not group.muon for name in group.names}
    rate: float | Mapping[str, float] = rates if len({*rates.values()}) > 1 else next(iter(rates.values()))
    adam = adamw(rate, config.betas, config.epsilon, config.weight_decay, schedule)
    if config.name == "adamw":
        return adam
    group = next(group for group in groups if group.muon)
    given: dict[str, Any] = {"schedule": schedule, "momentum_schedule": momentum}
    ours = muon(group.rate, config.muon_momentum, group.weight_decay, **given)
    return optax.multi_transform(
        {"muon": ours, "adamw": adam},
        lambda params: {name: "muon" if name in group.names else "adamw" for name in params},
    )


def names_in_state(model: ModelConfig, config: OptimizerConfig) -> dict[str, str]:
    """Maps names of moments in the state of `build_optimizers` to their names in a checkpoint."""
    optax_names = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum": "momentum"}
    named = {}
    for name, (_, parameter, kind) in moments(model, config).items():
        place = f"inner_states.{'muon' if kind == 'momentum' else 'adamw'}.inner_state.0"
        place = place if config.name == "muon" else "0"
        named[f"optimizer.{place}.{parameter}.{optax_names[kind]}"] = name
    return named


def decay_mask(params: Any) -> Any:
    """Returns which leaves are matrices that decay."""
    named = NamedTree(params)
    return named.rebuild({n: n.endswith(".weight") and leaf.ndim == 2 for n, leaf in named.values.items()})


def orthogonalize(matrices: Array, iteration: Format, *, emulate: bool = False) -> Array:
    """Pushes the singular values of each matrix of a batch to about one, by Newton-Schulz."""
    a, b, c = NEWTON_SCHULZ
    tf32 = iteration == TF32 and not emulate
    precision: Any = lax.DotAlgorithmPreset.TF32_TF32_F32 if tf32 else lax.Precision.HIGHEST
    matmul = partial(jnp.matmul, precision=precision)

    def held(x: Array) -> Array:
        return carried(x, iteration) if emulate else x.astype(carrier_of(iteration))

    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = held(x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + 1e-7))
    for _ in range(5):
        product = held(matmul(x, x.mT))
        x = held(a * x + matmul(held(b * product + c * held(matmul(product, product))), x))
    return x.mT if tall else x


def _orthogonalized_momentum(
    momentum_at: Schedule, own: Format | None, emulate: bool
) -> optax.GradientTransformationExtraArgs:
    def init(params: Any) -> MuonState:
        for name, leaf in NamedTree(params).values.items():
            if leaf.ndim != 2:
                raise OptimizerParametersError(
                    f"Muon updates matrices; `{name}` has {leaf.ndim} dimensions",
                    hint="give it to AdamW: "
                    'optax.multi_transform({"muon": muon(0.02), "adamw": optax.adamw(1e-3)}, labels)',
                )
        return MuonState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(
        grads: Any, state: MuonState, params: Any = None, *, policy: Policy | None = None, **_: Any
    ) -> tuple[Any, MuonState]:
        compute, emulated = (FP32, emulate) if policy is None else (policy.compute.format, policy.emulate)
        momentum = momentum_at(state.applied, jnp)
        moved = jax.tree.map(lambda old, g: momentum * old + g, state.momentum, grads)
        ahead = jax.tree.map(lambda g, m: g + momentum * m, grads, moved)
        leaves, treedef = jax.tree.flatten(ahead)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for place, leaf in enumerate(leaves):
            by_shape.setdefault(leaf.shape, []).append(place)
        for (rows, columns), places in by_shape.items():
            batch = jnp.stack([leaves[place] for place in places])
            update = orthogonalize(batch, own or compute, emulate=emulated).astype(jnp.float32)
            update = update * max(1.0, rows / columns) ** 0.5
            for index, place in enumerate(places):
                leaves[place] = update[index]
        return jax.tree.unflatten(treedef, leaves), MuonState(moved, state.applied + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_rate(rate: float | Mapping[str, float], schedule: Schedule | None) -> optax.GradientTransformation:
    if not isinstance(rate, Mapping):
        if schedule is None:
            return optax.scale(-rate)
        return optax.scale_by_schedule(lambda applied: -rate * schedule(applied, jnp))

    def scale_each(updates: Any, _: Any) -> Any:
        named = NamedTree(updates)
        return named.rebuild({name: -rate[name] * update for name, update in named.values.items()})

    scheduled = optax.identity() if schedule is None else optax.scale_by_schedule(lambda n: schedule(n, jnp))
    return optax.chain(scheduled, optax.stateless(scale_each))
