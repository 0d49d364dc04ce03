"""The JAX backend: how a policy runs on JAX arrays. Each public name is loaded when it is used, and JAX with it.

    state = init(params, optimizer, "fp16-mixed")      params: any pytree; optimizer: any optax transform
    step = make_step(loss_fn, optimizer)               loss_fn(params, batch[, rng]) -> loss | (loss, aux)
    state, result = step(state, batch)

The islands and matmuls here take a `Casts` last: `cross_entropy(logits, targets, casts_for("bf16-mixed"))`.
"""

import lazy_loader

from halfstep.core.errors import explain_missing

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = explain_missing(_load, __name__, "jax", "optax")
