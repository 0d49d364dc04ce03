"""The casted matmul and the islands: formats in and out, forward and backward, within what a format allows.

Backends may add in another order, so that sums are held to bounds that follow from the format:

    u(p) = 2^-p                      the relative error of one rounding to p significant bits (nearest)
    |computed - exact| <= k u(24) sum |terms|          a sum of k terms in fp32, in any order
    |stored - computed| <= u(p) |computed|             the rounding of a result that is stored in p bits
"""

import numpy as np
import pytest

from halfstep.config.model import ModelConfig
from halfstep.core import rounding
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision
from halfstep.core.roles import Operand

U32 = 2.0**-24


def unit(fmt: Format) -> float:
    return 2.0 ** -(fmt.mantissa_bits + 1)


def half(fmt: Format, emulate: bool = False) -> Precision:
    operand = Operand(fmt)
    return Precision(compute=fmt, operand=operand, grad=fmt, grad_operand=operand, emulate=emulate)


def samples(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(x, fmt):
    return rounding.cast(np.asarray(x, np.float32), fmt, overflow="inf")


NAMES = {BF16: "bfloat16", FP16: "float16", FP32: "float32"}
HALVES = [(BF16, False), (BF16, True), (FP16, False), (FP16, True)]


def matmul_bound(a, b, fmt):
    """What the product of exactly known operands may be off by, summed in fp32 and stored in `fmt`."""
    a, b = np.float64(a), np.float64(b)
    summed = a.shape[-1] * U32 * (np.abs(a) @ np.abs(b))
    return summed + unit(fmt) * (np.abs(a @ b) + summed) + fmt.smallest_subnormal


LONG = [(3, 500, 5), (3, 5, 500), (500, 5, 3)]  # each result in turn is a sum of 500 products


@pytest.mark.parametrize(
    ("fmt", "emulate", "shape"),
    [*((*half, (5, 48, 16)) for half in HALVES), *((fmt, False, shape) for fmt in (BF16, FP16) for shape in LONG)],
)
def test_the_three_matmuls_of_a_linear_layer(backend, fmt, emulate, shape):
    """Operands in the format, sums in fp32, results in the format; a weight's gradient is fp32 throughout.

    Summed in the format, 500 products would be off by percents.
    """
    tokens, inputs, outputs = shape
    x, w, g = samples(tokens, inputs), samples(outputs, inputs, seed=1), samples(tokens, outputs, seed=2)
    x, lw, lg = stored(x, fmt), stored(w, fmt), stored(g, fmt)
    given = backend.array(x) if emulate else backend.as_dtype(x, fmt)
    (kind, y), ((_, grad_x), (grad_kind, grad_w)) = _linear(backend, given, w, half(fmt, emulate), lg)
    assert kind == ("float32" if emulate else NAMES[fmt])
    assert grad_kind == "float32"
    assert (np.abs(y - np.float64(x) @ np.float64(lw).T) <= matmul_bound(x, lw.T, fmt)).all()
    assert (np.abs(grad_x - np.float64(lg) @ np.float64(lw)) <= matmul_bound(lg, lw, fmt)).all()
    exact = np.float64(lg).T @ np.float64(x)
    assert (np.abs(grad_w - exact) <= lg.shape[0] * U32 * (np.abs(lg).T @ np.abs(x))).all()
    assert not (grad_w == stored(grad_w, fmt)).all()


def _linear(backend, x, w, precision, cotangent):
    casts = backend.casts(precision)
    return backend.vjp(lambda a, b: backend.layers.linear(a, b, None, casts), [x, w], cotangent)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_emulated_fp8_matmuls_multiply_the_reference_operands(backend, granularity):
    operand, grad = Operand(E4M3, granularity=granularity), Operand(E5M2, granularity=granularity)
    precision = Precision(BF16, operand, BF16, grad, emulate=True)
    # Without a scale, the smallest of these would vanish in e4m3.
    size = np.float32([[1e-6], [1], [1e3], [1e-4], [1], [1e6]]) if granularity == "row" else np.float32(1e-4)
    x, w = stored(samples(6, 32) * size, BF16), samples(8, 32, seed=1)
    g = stored(samples(6, 8, seed=2) * 1e-3, BF16)

    def lowered(a, fmt):
        amax = np.abs(a).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(a).max()
        scale = np.float32(2.0) ** np.floor(np.log2(fmt.max / amax)).astype(np.float32)
        return np.float64(rounding.cast(a * scale, fmt, overflow="saturate")) / scale

    (_, y), ((_, grad_x), (_, grad_w)) = _linear(backend, x, w, precision, g)
    lw = stored(w, BF16)
    for found, a, b, fmt in [
        (y, lowered(x, E4M3), lowered(lw, E4M3).T, BF16),
        (grad_x, lowered(g, E5M2), lowered(lw.T.copy(), E4M3).T, BF16),
        (grad_w, lowered(g.T.copy(), E5M2), lowered(x.T.copy(), E4M3).T, FP32),
    ]:
        assert (np.abs(found - a @ b) <= matmul_bound(a, b, fmt)).all()


def island(name, x, rest):
    x, rest = np.float64(x), [np.float64(r) for r in rest]
    if name == "rms_norm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * rest[0]
    if name == "layer_norm":
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * rest[0] + rest[1]
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(("fmt", "emulate"), [(FP32, False), *HALVES])
@pytest.mark.parametrize(("name", "count"), [("rms_norm", 1), ("layer_norm", 2), ("softmax", 0)])
def test_an_island_is_fp32_inside_and_compute_outside(backend, name, count, fmt, emulate):
    """Large, offset inputs: inside bf16 a mean or a sum of squares would be off by far more than one rounding."""
    x = stored(samples(4, 64) * 4 + 30, fmt)
    rest = [1 + samples(64, seed=3 + i) / 8 for i in range(count)]
    given = backend.array(x) if emulate else backend.as_dtype(x, fmt)
    casts = backend.casts(half(fmt, emulate))
    call = getattr(backend.layers, name)
    cotangent = stored(samples(4, 64, seed=9), fmt)
    (kind, y), grads = backend.vjp(lambda *a: call(*a, casts), [given, *rest], cotangent)
    assert kind == ("float32" if emulate else NAMES[fmt])
    assert grads[0][0] == kind
    assert [dtype for dtype, _ in grads[1:]] == ["float32"] * count
    exact = island(name, x, rest)
    # some 64 roundings in fp32, of numbers up to 30 times the centered ones, then one to the format
    slack = 64 * 32 * U32 * np.abs(exact).max()
    assert (np.abs(y - exact) <= unit(fmt) * np.abs(exact) + slack + fmt.smallest_subnormal).all()
    # backward: against central differences of the exact function in fp64
    step = 1e-4
    for index in ((0, 0), (2, 33), (3, 63)):
        moved = np.zeros(x.shape)
        moved[index] = step
        slope = ((island(name, x + moved, rest) - island(name, x - moved, rest)) * cotangent).sum() / (2 * step)
        size = np.abs(cotangent[index[0]]).max() * np.abs(exact).max()
        assert abs(grads[0][1][index] - slope) <= unit(fmt) * abs(slope) + 64 * 32 * U32 * size + 1e-6
    normalized = island(name, x, [np.ones(64), np.zeros(64)])
    largest = np.abs(cotangent).sum(0).max() * np.abs(normalized).max()
    for (_, found), slope in zip(grads[1:], (cotangent * normalized, cotangent), strict=False):
        assert (np.abs(found - slope.sum(0)) <= 64 * 32 * U32 * largest).all()


@pytest.mark.parametrize(("fmt", "emulate"), HALVES)
def test_the_loss_is_fp32_inside_and_out(backend, fmt, emulate):
    logits, targets = stored(samples(2, 7, 33) * 3, fmt), np.random.default_rng(1).integers(0, 33, (2, 7))
    given = backend.array(logits) if emulate else backend.as_dtype(logits, fmt)
    casts = backend.casts(half(fmt, emulate))
    for softcap in (0.0, 15.0):
        (kind, loss), ((grad_kind, grad),) = backend.vjp(
            lambda x, cap=softcap: backend.layers.cross_entropy(x, backend.array(targets), casts, cap),
            [given],
            None,
        )
        assert kind == "float32"
        assert grad_kind == ("float32" if emulate else NAMES[fmt])
        x = np.float64(logits)
        x = softcap * np.tanh(x / softcap) if softcap else x
        picked = np.take_along_axis(x, targets[..., None], -1)[..., 0]
        exact = (np.log(np.exp(x).sum(-1)) - picked).sum()
        assert abs(loss - exact) <= (33 + 14) * U32 * (abs(exact) + np.abs(x).sum() / 33)
        chances = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        slope = chances - np.eye(33)[targets]
        slope = slope * (1 - (x / softcap) ** 2) if softcap else slope
        assert (np.abs(grad - slope) <= unit(fmt) * np.abs(slope) + 64 * U32 + fmt.smallest_subnormal).all()


@pytest.mark.parametrize(("fmt", "emulate"), [(FP32, False), *HALVES])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention(backend, fmt, emulate, kv_heads):
    q, k, v = (stored(samples(2, h, 9, 8, seed=i), fmt) for i, h in enumerate((4, kv_heads, kv_heads)))
    wide = emulate or fmt == FP32
    given = [backend.array(a) if wide else backend.as_dtype(a, fmt) for a in (q, k, v)]
    casts = backend.casts(half(fmt, emulate))
    (kind, y), grads = backend.vjp(lambda *a: backend.layers.attention(*a, casts), given, None)
    assert {kind, *(dtype for dtype, _ in grads)} == {"float32" if wide else NAMES[fmt]}
    k, v = (np.repeat(np.float64(a), 4 // kv_heads, axis=1) for a in (k, v))
    scores = np.float64(q) @ k.swapaxes(-1, -2) / np.sqrt(8)
    scores[..., np.triu(np.ones((9, 9), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    # A fused kernel may store the probabilities in the format (one rounding each) and rounds its result once.
    exact = weights @ v
    bound = unit(fmt) * (np.abs(exact) + 2 * weights @ np.abs(v)) + 64 * U32 * (weights @ np.abs(v))
    assert (np.abs(y - exact) <= bound).all()


def test_attention_sees_no_future_and_its_gradients_are_those_of_fp32(backend):
    q, k, v, g = (stored(samples(1, h, 6, 8, seed=i), BF16) for i, h in enumerate((4, 2, 2, 4)))
    exact = backend.vjp(lambda *a: backend.layers.attention(*a, backend.casts(Precision())), [q, k, v], g)[1]
    for emulate in (False, True):
        casts = backend.casts(half(BF16, emulate))
        given = [backend.array(a) if emulate else backend.as_dtype(a, BF16) for a in (q, k, v)]
        (_, y), grads = backend.vjp(lambda *a, c=casts: backend.layers.attention(*a, c), given, g)
        for (_, found), (_, expected) in zip(grads, exact, strict=True):
            # Weights, their gradient and the result are each rounded once; norms of 1e-2 would be a fault.
            assert np.linalg.norm(found - expected) <= 4 * unit(BF16) * np.linalg.norm(expected)
        later = v.copy()
        later[:, :, -1] += 100
        given[2] = backend.array(later) if emulate else backend.as_dtype(later, BF16)
        changed = backend.numpy(backend.layers.attention(*given, casts))
        assert np.array_equal(changed[:, :, :-1], y[:, :, :-1])
        assert not np.array_equal(changed, y)


@pytest.mark.parametrize(("fmt", "emulate"), HALVES)
def test_a_bias_is_added_in_compute_and_its_gradient_is_fp32_from_the_sum_on(backend, fmt, emulate):
    x, w, b = (stored(samples(*shape, seed=i), fmt) for i, shape in enumerate([(2, 3, 8), (4, 8), (4,)]))
    g, casts = stored(samples(2, 3, 4, seed=3), fmt), backend.casts(half(fmt, emulate))
    (_, without), _ = backend.vjp(lambda a, m: backend.layers.linear(a, m, None, casts), [x, w], g)
    b += np.float32(2.0**-20)  # which the compute format does not hold
    (_, y), grads = backend.vjp(lambda *a: backend.layers.linear(*a, casts), [x, w, b], g)
    # A fused kernel adds the bias to the fp32 sum and rounds once; the others round the sum first.
    slack = unit(fmt) * (np.abs(without) + np.abs(y))
    assert (np.abs(y - (without + stored(b, fmt))) <= slack).all()
    assert np.array_equal(y, stored(y, fmt))
    kind, grad = grads[2]
    assert kind == "float32"
    assert (np.abs(grad - np.float64(g).sum((0, 1))) <= 6 * U32 * np.abs(g).sum((0, 1))).all()
    assert not np.array_equal(grad, stored(grad, fmt))


def test_weight_gradients_in_bf16_are_rounded(backend):
    x, w, b, g = samples(5, 8), samples(4, 8, seed=1), samples(4, seed=2), samples(5, 4, seed=3)
    for policy in ("bf16-true", "bf16-true,emulate=true"):
        casts = backend.casts(base_precision(Policy.parse(policy)))
        given = x if casts.emulate else backend.as_dtype(x, BF16)
        _, grads = backend.vjp(lambda *a, c=casts: backend.layers.linear(*a, c), [given, w, b], g)
        _, (owned,) = backend.vjp(
            lambda p, c=casts: backend.layers.with_weight_grad_format(p, c), [b], samples(4, seed=4)
        )
        for _, grad in (*grads[1:], owned):
            assert np.array_equal(grad, stored(grad, BF16))
    plain = backend.casts(half(BF16))
    _, [(_, grad)] = backend.vjp(
        lambda p: backend.layers.with_weight_grad_format(p, plain) * 1, [b], samples(4, seed=4)
    )
    assert np.array_equal(grad, samples(4, seed=4))


@pytest.mark.parametrize("x_format", [FP32, BF16], ids=str)
@pytest.mark.parametrize("w_format", [FP32, BF16], ids=str)
def test_the_format_is_the_layers_own_whatever_the_operands_are(backend, x_format, w_format):
    x, w = backend.as_dtype(samples(3, 8), x_format), backend.as_dtype(samples(4, 8, seed=1), w_format)
    for precision, kind in ((half(BF16), "bfloat16"), (Precision(), "float32"), (half(BF16, True), "float32")):
        y = backend.layers.linear(x, w, None, backend.casts(precision))
        assert backend.named(y)[0] == kind


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_native_and_emulated_are_the_same_numbers_where_sums_are_exact(backend, fmt):
    """Small integers: every sum is exact in fp32, whatever the order, so that all that is left is the rounding."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(-40, 40, shape).astype(np.float32) for shape in ((9, 33), (7, 33), (9, 7)))
    native = _linear(backend, backend.as_dtype(x, fmt), w, half(fmt), g)
    emulated = _linear(backend, x, w, half(fmt, emulate=True), g)
    assert native[0][0] != emulated[0][0]
    for (_, one), (_, other) in zip((native[0], *native[1]), (emulated[0], *emulated[1]), strict=True):
        assert np.array_equal(one, other)


def test_an_island_in_bf16_is_another_number_native_and_emulated_alike(slow_backend):
    x, gain = stored(samples(4, 64) * 100, BF16), samples(64, seed=1)
    q, k, v = (stored(samples(1, 2, 6, 8, seed=i), BF16) for i in range(3))
    asked = "bf16-mixed,norm=bf16,softmax=bf16,loss=bf16"

    def islands(policy):
        casts = slow_backend.casts(base_precision(Policy.parse(policy)))
        a = slow_backend.array if casts.emulate else lambda t: slow_backend.as_dtype(t, BF16)
        layers, targets = slow_backend.layers, slow_backend.array(np.arange(4))
        return [
            slow_backend.named(y)
            for y in (
                layers.layer_norm(a(x), slow_backend.array(gain), None, casts),
                layers.rms_norm(a(x), slow_backend.array(gain), casts),
                layers.softmax(a(x), casts),
                layers.cross_entropy(a(x), targets, casts),
                layers.attention(a(q), a(k), a(v), casts),
            )
        ]

    native, emulated, wide = (islands(p) for p in (asked, f"{asked},emulate=true", "bf16-mixed,emulate=true"))
    assert {kind for kind, _ in native} == {"bfloat16"}
    for place, ((_, one), (_, other), (_, fp32)) in enumerate(zip(native, emulated, wide, strict=True)):
        assert np.array_equal(one, stored(one, BF16))
        # In attention sums of products come in between; torch sums a bf16 loss in bf16.
        if place < 3 or (place == 3 and slow_backend.name != "torch"):
            assert np.array_equal(one, other)
        assert np.array_equal(one, fp32) == (place == 2)  # a softmax alone has bf16 in and out either way
        # inputs, statistics or weights, and the result are each within half an ulp
        assert np.abs(one - fp32).max() <= 16 * unit(BF16) * np.abs(fp32).max()


def test_a_softmax_may_run_along_another_axis_and_a_softcap_bounds_the_logits(backend):
    x, casts = samples(40, 3), backend.casts(Precision())
    found = backend.numpy(backend.layers.softmax(backend.array(x), casts, axis=0))
    np.testing.assert_allclose(found, island("softmax", x.T, []).T, rtol=80 * U32)
    logits, targets = backend.array(np.float32([[1e4, 0.0]])), backend.array(np.array([1]))
    loss = backend.layers.cross_entropy(logits, targets, casts, 30.0)
    assert float(loss) == pytest.approx(30.0, rel=1e-6)


def test_rotation_keeps_the_norm_and_turns_by_relative_position(backend):
    tables = backend.model.rope_tables(ModelConfig(width=16, heads=1, context=64))
    cos, sin = (backend.array(table) for table in tables)
    x = np.array(np.broadcast_to(samples(1, 1, 1, 16), (1, 1, 64, 16)))
    turned = backend.numpy(backend.layers.rotate(backend.array(x), cos, sin, backend.casts(Precision())))[0, 0]
    length = np.square(np.float64(x[0, 0, 0])).sum()
    assert (np.abs(np.square(np.float64(turned)).sum(-1) - length) <= 2.0**-19 * length).all()
    dots = (np.float64(turned)[:-3] * turned[3:]).sum(-1)
    assert (np.abs(dots - dots[0]) <= 2.0**-18 * length).all()
    narrow = backend.layers.rotate(backend.as_dtype(x, BF16), cos, sin, backend.casts(half(BF16)))
    assert backend.named(narrow)[0] == "bfloat16"


def test_emulated_rounding_reaches_gradients_and_overflows_as_hardware_does(backend):
    x, g = samples(64), samples(64, seed=1)
    casts = backend.casts(half(BF16, emulate=True))
    (_, y), [(_, grad)] = backend.vjp(lambda x: backend.layers.to_compute(x, casts), [x], g)
    assert np.array_equal(y, stored(x, BF16))
    assert np.array_equal(grad, stored(g, BF16))
    far = backend.array(np.float32([7e4, -7e4, 65504.0]))
    found = backend.numpy(backend.layers.to_compute(far, backend.casts(half(FP16, emulate=True))))
    assert found.tolist() == [np.inf, -np.inf, 65504.0]
