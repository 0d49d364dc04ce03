"""A function under a policy, as a step runs it."""

from halfstep.core.policy import Policy
from halfstep.jax.convert.apply import apply
from halfstep.jax.convert.interpret import cast_inside


def interpreted(fn, params, batch, policy="bf16-mixed", *, cast_batch=True):
    """fn(params, batch) under a policy."""
    applied = apply(params, Policy.parse(policy))
    return cast_inside(fn, applied, applied.leaves.trained, (batch,), cast_batch=cast_batch)[0]
