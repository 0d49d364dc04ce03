"""Which operation made a step on JAX not finite: the first with finite inputs, forward or backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep.jax.instruments.nonfinite import find_cause


def model(fail):
    """A loss of three matrices, between which something fails."""

    def loss(params, x):
        for name in ("blocks.0.up.weight", "blocks.1.up.weight", "blocks.2.up.weight"):
            x = jnp.tanh(x @ params[name])
            x = fail(x) if name.startswith("blocks.1") else x
        return jnp.mean(x * x)

    return loss


PARAMS = {f"blocks.{i}.up.weight": 0.5 * jnp.eye(4) for i in range(3)}
X = jnp.linspace(-1, 1, 8).reshape(2, 4)


def replaced(x):
    """Divides by zero and replaces the result, as code with a guard does: nothing happened."""
    return jnp.where(x == x, x, jax.lax.stop_gradient(x / (x * 0)))


def softmax(x, masked):
    return x + jax.nn.softmax(jnp.where(masked, -jnp.inf, x))


FAILURES = {
    "an exponential": (lambda x: jnp.exp(x * 0 + 1e4), "forward", "exp"),
    "a product": (lambda x: (x * 1e30) @ (x.T * 1e30) @ x, "forward", "dot_general"),
    "a softmax of masks": (lambda x: softmax(x, x == x), "forward", "sub"),
    "a root at zero": (lambda x: x + jnp.sqrt(x * 0), "backward", "div"),
    "inside of a jit": (jax.jit(lambda x: jnp.log(x * 0)), "forward", "log"),
    "inside of a recomputed block": (jax.checkpoint(lambda x: jnp.exp(x * 0 + 1e4)), "forward", "exp"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_operation_is_the_first_with_finite_inputs_forward_or_backward(failure):
    fail, where, operation = FAILURES[failure]
    cause = find_cause(model(fail), PARAMS, [X], 1.0)
    assert (cause.where, cause.operation, cause.micro_batch) == (where, operation, 0), str(cause)
    if where == "forward":
        assert "blocks.1.up" in str(cause)


def test_what_is_replaced_and_masks_are_no_failure_and_weights_and_micro_batches_are_named():
    assert find_cause(model(replaced), PARAMS, [X], 1.0).where == "nowhere"
    assert find_cause(model(lambda x: softmax(x, jnp.arange(4) > 1)), PARAMS, [X], 1.0).where == "nowhere"
    cause = find_cause(model(lambda x: jnp.exp(x * 1e4)), PARAMS, [X * 0, -abs(X), X], 1.0)
    assert (cause.where, cause.operation, cause.micro_batch) == ("forward", "exp", 2)
    bad = PARAMS | {"blocks.1.up.weight": PARAMS["blocks.1.up.weight"].at[0, 0].set(np.nan)}
    cause = find_cause(model(lambda x: x), bad, [X], 1.0)
    assert (str(cause), cause.module) == ("forward: the weight `blocks.1.up.weight` itself", "blocks.1.up")


def test_a_sum_that_overflows_is_a_reduction():
    cause = find_cause(lambda p, x: jnp.sum(p["w"] * x), {"w": jnp.ones(1)}, [jnp.full(1, 3e38)] * 2, 1.0)
    assert str(cause) == "reduction: the sum of gradients of `w`; of each micro-batch they are finite"


def test_a_loss_that_alone_is_not_finite_is_named_as_such():
    alone = "; the loss was not finite, its gradients were"
    plain = model(lambda x: x)
    cause = find_cause(lambda params, x: plain(params, x) - jnp.sum(1 / (x * 0)), PARAMS, [X], 1.0)
    assert (cause.where, cause.micro_batch) == ("forward", 0)
    assert str(cause).endswith(alone)
    assert alone not in str(find_cause(model(lambda x: jnp.exp(x * 0 + 1e4)), PARAMS, [X], 1.0))
