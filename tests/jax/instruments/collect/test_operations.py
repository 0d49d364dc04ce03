"""What an audit reads in a jaxpr, without running it."""

import jax
import jax.numpy as jnp
import pytest

from halfstep.jax.instruments.collect.graph import Names, graph_of
from halfstep.jax.instruments.collect.operations import fp32_matmul, operations_of

BF16, FP32 = jnp.bfloat16, jnp.float32


def seen(loss, **params):
    """The operations of loss(**params) and its gradient, as (kind, module, format)."""
    names = [*params]
    every = tuple(range(len(names)))
    traced = jax.make_jaxpr(
        jax.value_and_grad(lambda *leaves: loss(**dict(zip(names, leaves, strict=True))), argnums=every)
    )
    graph = graph_of(traced(*params.values()), [f"layer.{name}" for name in names])
    return [*operations_of(graph, Names(f"layer.{name}" for name in names))]


def formats(operations, kind):
    return {(op.module, op.inside) for op in operations if op.kind == kind and not op.backward}


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def standardized(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def unit(x):
    return x / jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True))


X, GAIN, SQUARE = jnp.ones((2, 4), BF16), jnp.ones(4, BF16), jnp.ones((4, 4), BF16)


@pytest.mark.parametrize("norm", [rms, standardized, unit])
@pytest.mark.parametrize("wide", [False, True])
def test_a_norm_has_the_narrowest_format_on_its_way(norm, wide):
    def loss(gain):
        x = X.astype(FP32) if wide else X
        return jnp.sum((norm(x) * gain.astype(x.dtype)).astype(FP32))

    assert formats(seen(loss, gain=GAIN), "norm") == {("layer", "fp32" if wide else "bf16")}


def test_a_norm_without_a_gain_is_named_by_the_matmul_after_it():
    assert formats(seen(lambda up: jnp.sum((rms(X) @ up).astype(FP32)), up=SQUARE), "norm") == {
        ("norm before layer", "bf16")
    }


@pytest.mark.parametrize("wide", [False, True])
def test_softmax_and_loss_are_distinguished(wide):
    def loss(up):
        x = X @ up
        x = x.astype(FP32) if wide else x
        return jnp.sum((jax.nn.softmax(x) + jax.nn.log_softmax(x)).astype(FP32))

    found, fmt = seen(loss, up=SQUARE), "fp32" if wide else "bf16"
    assert formats(found, "softmax") == {("layer", fmt)}
    assert ("layer", fmt) in formats(found, "loss")


@pytest.mark.parametrize("wide", [False, True])
def test_a_router_is_what_top_k_chooses_from(wide):
    def loss(router):
        dtype = FP32 if wide else BF16
        logits = X.astype(dtype) @ router.astype(dtype)
        return jnp.sum(jax.lax.top_k(jax.nn.softmax(logits.astype(FP32)), 2)[0])

    assert ("layer", "fp32" if wide else "bf16") in formats(seen(loss, router=SQUARE), "router")
    assert not formats(seen(loss, router=SQUARE), "softmax")


@pytest.mark.parametrize(("last", "fmt"), [(lambda x: x, "bf16"), (lambda x: x.astype(FP32), "bf16")])
def test_a_scalar_that_was_narrow_once_is_a_narrow_loss(last, fmt):
    found = seen(lambda up: last(jnp.mean(jnp.square(X @ up))), up=SQUARE)
    assert formats(found, "loss") == {("", fmt)}
    wide = seen(lambda up: jnp.mean(jnp.square((X @ up).astype(FP32))), up=SQUARE)
    assert formats(wide, "loss") == {("", "fp32")}


def test_operands_of_two_formats_are_a_promotion_and_a_cast_is_none():
    wide = X.astype(FP32)
    assert [op.promoted for op in seen(lambda up: jnp.sum(wide @ up), up=SQUARE) if op.kind == "matmul"] == [True]
    asked = seen(lambda up: jnp.sum(wide @ up.astype(FP32)), up=SQUARE)
    assert [op.promoted for op in asked if op.kind == "matmul"] == [False]


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_gradient_of_a_weight_in_a_loop_is_summed_there(dtype):
    def loss(other, up):
        _, rows = jax.lax.scan(lambda _, x: (None, x @ up), None, jnp.ones((3, 2, 4), dtype))
        return jnp.sum(rows.astype(FP32))

    found = seen(loss, other=GAIN, up=SQUARE.astype(dtype))
    sums = [(op.module, op.inside, op.count) for op in found if op.kind == "accumulation"]
    assert sums == [("layer", "bf16" if dtype == BF16 else "fp32", 3)]


def test_a_residual_stream_in_a_loop_is_no_sum():
    def loss(up):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), X, up)
        return jnp.sum(x.astype(FP32))

    found = seen(loss, up=jnp.ones((3, 4, 4), BF16))
    assert [op for op in found if op.kind == "accumulation"] == []


def test_a_sum_over_devices_has_the_format_that_travels():
    mesh = jax.make_mesh((1,), ("data",))
    spec = jax.sharding.PartitionSpec()

    def loss(up):
        total = jax.shard_map(
            lambda up: jax.lax.psum(jnp.sum(X @ up), "data"), mesh=mesh, in_specs=spec, out_specs=spec
        )
        return total(up).astype(FP32)

    assert "bf16" in {fmt for _, fmt in formats(seen(loss, up=SQUARE), "reduction")}


def test_places_are_in_the_code_of_the_user():
    found = seen(lambda gain: jnp.sum((rms(X) * gain).astype(FP32)), gain=GAIN)
    [norm] = [op for op in found if op.kind == "norm"]
    line = rms.__code__.co_firstlineno + 1
    assert norm.place == f"{__file__}:{line}"


def test_what_fp32_means_on_the_device():
    assert fp32_matmul() is None  # a CPU
    with jax.default_matmul_precision("tensorfloat32"):
        assert fp32_matmul() == "tf32"
    with jax.default_matmul_precision("highest"):
        assert fp32_matmul() is None
