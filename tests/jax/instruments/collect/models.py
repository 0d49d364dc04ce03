"""A third-party decoder: plain functions on a nested dictionary, with faults that tests plant in its layers."""

import jax
import jax.numpy as jnp

VOCABULARY, WIDTH = 32, 16
HALF = {"fp16": jnp.float16, "bf16": jnp.bfloat16}


def parameters(layers, *, bf16_layers=(), adapter=None, router=None, seed=0):
    """fp32 masters; the layers named in `bf16_layers` are held in bf16."""
    keys = iter(jax.random.split(jax.random.key(seed), 8 * layers + 2))

    def matrix(rows, columns, scale=0.2, dtype=jnp.float32):
        return (scale * jax.random.normal(next(keys), (rows, columns))).astype(dtype)

    params = {"embed": {"weight": matrix(VOCABULARY, WIDTH, 0.5)}, "head": {"kernel": matrix(WIDTH, VOCABULARY)}}
    for layer in range(layers):
        dtype = jnp.bfloat16 if layer in bf16_layers else jnp.float32
        block = {"norm": {"gain": jnp.ones(WIDTH)}}
        block["up"] = {"kernel": matrix(WIDTH, WIDTH, dtype=dtype)}
        block["down"] = {"kernel": matrix(WIDTH, WIDTH, dtype=dtype)}
        if layer == adapter:
            block["lora_a"] = matrix(WIDTH, 2, 1.0, jnp.bfloat16)
            block["lora_b"] = matrix(2, WIDTH, 1.0, jnp.bfloat16)
        if layer == router:
            block["router"] = {"kernel": matrix(WIDTH, 4)}
        params[f"block_{layer}"] = block
    return params


def loss_of(*, compute="bf16", narrow_norm=(), narrow_router=False, overflow=None, underflow=None):
    """A mean loss over tokens; `overflow` and `underflow` are layers whose numbers leave fp16."""
    dtype = HALF[compute]

    def norm(x, gain, wide):
        x = x.astype(jnp.float32) if wide else x
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain.astype(x.dtype)

    def block(layer, p, x):
        h = norm(x, p["norm"]["gain"], layer not in narrow_norm).astype(dtype)
        hidden = jax.nn.relu(h @ p["up"]["kernel"].astype(dtype))
        if layer == overflow:
            hidden = hidden * 60000
        out = hidden @ p["down"]["kernel"].astype(dtype)
        if layer == underflow:
            out = out * jnp.asarray(6e-6, dtype)
        if "lora_a" in p:
            out = out + (h @ p["lora_a"].astype(dtype)) @ p["lora_b"].astype(dtype)
        if "router" in p:
            inside = dtype if narrow_router else jnp.float32
            shares = jax.nn.softmax(h.astype(inside) @ p["router"]["kernel"].astype(inside))
            out = out * jax.lax.top_k(shares, 1)[0].astype(dtype)
        return x + out

    def loss(params, tokens):
        x = params["embed"]["weight"].astype(dtype)[tokens[:, :-1]]
        for layer in range(sum(name.startswith("block") for name in params)):
            x = block(layer, params[f"block_{layer}"], x)
        logits = (x @ params["head"]["kernel"].astype(dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -jnp.mean(picked)

    return loss


def tokens(rows=2, length=9):
    return jax.random.randint(jax.random.key(1), (rows, length), 0, VOCABULARY)
