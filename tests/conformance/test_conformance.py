"""One policy, one meaning: the same tests on torch, JAX, MLX and, where it has one, the numpy reference.

Bits are held to bits wherever nothing is summed. Where sums are involved, backends may add in another order and
results are held to bounds that follow from the format:

    u(p) = 2^-p                      the relative error of one rounding to p significant bits (nearest)
    |computed - exact| <= k u(24) sum |terms|          a sum of k terms in fp32, in any order
    |stored - computed| <= u(p) |computed|             the rounding of a result that is stored in p bits

What differs on purpose is listed in docs/backends.md, each row with its reason and the test that shows it.
"""

from dataclasses import replace

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.config.model import ModelConfig
from halfstep.config.weights import initial_weights
from halfstep.core import philox, rounding
from halfstep.core import split as split_reference
from halfstep.core.errors import HalfstepError, PolicyError, ScalingError
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision
from halfstep.core.roles import Operand
from halfstep.core.scaling import DynamicScale, NoScale, StaticScale
from halfstep.training.session import open_session

FORMATS = ["bf16", "fp16", "tf32", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1", "e3m4ieee"]
ROUNDINGS = ["nearest-even", "nearest-away", "truncate", "stochastic"]
U32 = 2.0**-24


def unit(fmt: Format) -> float:
    return 2.0 ** -(fmt.mantissa_bits + 1)


# --- casts ---------------------------------------------------------------------------------------------------


def boundaries(fmt: Format):
    """Every number of the format and every midpoint of two, with the fp32 patterns before and after each.

    A cast is monotone, so a cast that is right at both sides of every point where its result changes, and at the
    points themselves, is right on every bit pattern.
    """
    values = rounding.decode(np.arange(2 ** min(fmt.bits - 1, 18)), fmt)
    if fmt.bits - 1 > 18:  # no format here but fp32 itself
        raise AssertionError(fmt)
    numbers = np.unique(values[np.isfinite(values)]).astype(np.float64)
    numbers = np.append(numbers, numbers[-1] + (numbers[-1] - numbers[-2]))  # where overflow begins
    with np.errstate(over="ignore"):
        exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2]).astype(np.float32)
    near = exact.view(np.uint32).astype(np.int64)[:, None] + [-1, 0, 1]
    patterns = np.unique(near[(near >= 0) & (near <= 0x7F800000)]).astype(np.uint32)
    special = np.uint32([1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    patterns = np.concatenate([patterns, special if fmt.has_nan else special[:5]])
    return np.concatenate([patterns, patterns | np.uint32(0x80000000)]).view(np.float32)


def assert_bits(found, expected, x):
    found, expected = (np.ascontiguousarray(a, np.float32).view(np.uint32) for a in (found, expected))
    wrong = np.flatnonzero(found != expected)
    at = wrong[:3]
    assert len(wrong) == 0, (
        f"{len(wrong)} differ: {x.ravel()[at]} -> {found.ravel()[at]} not {expected.ravel()[at]}"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_cast_has_the_bits_of_the_reference(backend, name):
    fmt = Format.parse(name)
    x = boundaries(fmt)
    words = np.random.default_rng(7).integers(0, 2**32, x.shape, dtype=np.uint32)
    rules = ["saturate"] + ["inf"] * fmt.has_inf + ["nan"] * fmt.has_nan
    for mode in ROUNDINGS:
        for overflow in rules if mode == "nearest-even" else rules[-1:]:
            bits = words if mode == "stochastic" else None
            found = backend.quantize(x, fmt, overflow=overflow, rounding=mode, bits=bits)
            assert_bits(found, rounding.cast(x, fmt, overflow=overflow, rounding=mode, bits=bits), x)


ORACLE = {"bf16": "bfloat16", "fp16": "float16", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz"}


@pytest.mark.parametrize("name", ORACLE)
def test_every_implementation_agrees_with_an_independent_one(implementation, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fmt = Format.parse(name)
    dtype = np.float16 if name == "fp16" else getattr(ml_dtypes, ORACLE[name])
    x = boundaries(fmt)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    found = implementation.quantize(x, fmt, overflow="inf" if fmt.has_inf else "nan")
    nan = np.isnan(expected)
    assert np.isnan(found[nan]).all()
    assert_bits(found[~nan], expected[~nan], x[~nan])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_emulated_cast_is_the_native_one(backend, name):
    """`carried` is what emulation rounds by; the native dtype is what runs without it."""
    fmt = Format.parse(name)
    x = boundaries(fmt)
    x = x[~np.isnan(x)]
    expected = rounding.cast(x, fmt, overflow="inf")
    assert_bits(backend.carried(x, fmt), expected, x)
    assert_bits(backend.native(x, fmt, overflow="inf"), expected, x)
    assert np.isnan(backend.carried(np.float32([np.nan, -np.nan]), fmt)).all()


def test_native_fp8_follows_the_stated_rule_or_is_not_there(backend):
    x = np.float32([448, 464, 465, 1000, np.inf, -np.inf, 0, -3.3])
    if backend.name == "mlx":
        with pytest.raises(HalfstepError, match=r"(?i)fp8|e4m3"):
            backend.native(x, E4M3, overflow="saturate")
        return
    far = np.float32([57344, 61439, 61440, 1e9, -np.inf])
    for fmt, given, overflow in [
        (E4M3, x, "saturate"),
        (E4M3, x, "nan"),
        (E5M2, far, "saturate"),
        (E5M2, far, "inf"),
    ]:
        found = backend.native(given, fmt, overflow=overflow)
        # equal as numbers: which of its NaN codes a framework takes is its own choice
        assert np.array_equal(found, rounding.cast(given, fmt, overflow=overflow), equal_nan=True), (fmt, overflow)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 4, 8), ()])
def test_random_words_depend_on_the_key_alone(implementation, shape):
    key = {"seed": 2**40 + 17, "step": 3, "tensor": philox.tensor_id("blocks.0.mlp.up.weight")}
    found = implementation.random_bits(shape, **key)
    assert (found == philox.random_bits(shape, **key)).all()
    assert found.shape == shape


def test_scales_of_narrow_operands(backend):
    amax = np.float32([0, 1, 448, 449, 447.9, 1e-30, 3e38, 2.0**-149, np.inf, np.nan])
    for fmt in (E4M3, E5M2, Format.parse("e2m1")):
        scale = backend.scale_for(amax, fmt)
        # a device may flush subnormals, so the power of two is looked for among normal numbers
        for a, s in zip(amax.tolist(), scale.tolist(), strict=True):
            if not np.isfinite(a):
                assert np.isnan(s)
            elif a == 0:
                assert s == 1
            else:
                assert np.frexp(s)[0] == 0.5
                assert a * s <= fmt.max
                assert a * s * 2 > fmt.max or s == 2.0**126


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_narrow_operands_and_what_undoes_their_scale(backend, granularity):
    x = np.random.default_rng(3).standard_normal((6, 32)).astype(np.float32) * np.float32(2.0) ** np.arange(-3, 3)[
        :, None
    ].astype(np.float32)
    x[4] = 0
    operand = Operand(E4M3, granularity=granularity)
    values, inv_scale = backend.quantize_scaled(x, operand)
    amax = np.abs(x).max(axis=-1, keepdims=True) if granularity == "row" else np.abs(x).max()
    scale = np.where(amax == 0, 1, 2.0 ** np.floor(np.log2(448 / np.where(amax == 0, 1, amax)))).astype(np.float32)
    assert (inv_scale.reshape(scale.shape) == 1 / scale).all()
    assert_bits(values, rounding.cast(x * scale, E4M3, overflow="saturate"), x)


def test_split_masters_are_exact_and_differ_from_the_native_cast_on_ties_alone(implementation):
    codes = np.arange(2**16, dtype=np.uint32) << 16
    rng = np.random.default_rng(5).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    patterns = np.concatenate([codes, codes | 0x7FFF, codes | 0x8000, codes | 0x8001, rng])
    x = patterns.view(np.float32)
    hi, lo = implementation.split(x)
    expected_hi, expected_lo = split_reference.split(x)
    assert (np.asarray(hi).view(np.uint16) == expected_hi).all()
    assert (lo == expected_lo).all()
    back = implementation.join(np.asarray(hi).view(np.uint16), np.asarray(lo))
    nan = np.isnan(x)
    assert np.isnan(back[nan]).all()
    assert (back[~nan].view(np.uint32) == patterns[~nan]).all()
    native = rounding.cast(x[~nan], BF16, overflow="inf").view(np.uint32) >> 16
    ties = (patterns[~nan] & 0xFFFF) == 0x8000
    assert (native == hi[~nan])[~ties].all()
    assert (native != hi[~nan])[ties].sum() > 1000  # half of the ties: those whose lower neighbor is even


# --- the law of scaling --------------------------------------------------------------------------------------

LAW = DynamicScale(init_scale=1024.0, interval=3, hysteresis=2, floor=256.0, ceiling=2048.0)
# (finite?, scale that was used, then: scale, good steps, tolerance, stuck)
SCRIPT = [
    (True, 1024, (1024, 1, 2, False)),
    (True, 1024, (1024, 2, 2, False)),
    (True, 1024, (2048, 0, 2, False)),  # an interval of finite steps
    (False, 2048, (2048, 0, 1, False)),  # borne, by hysteresis
    (True, 2048, (2048, 1, 1, False)),
    (False, 2048, (1024, 0, 1, False)),
    (False, 1024, (512, 0, 1, False)),
    (True, 512, (512, 1, 1, False)),
    (True, 512, (512, 2, 1, False)),
    (True, 512, (1024, 0, 2, False)),  # a whole interval restores the tolerance
    (True, 1024, (1024, 1, 2, False)),
    (True, 1024, (1024, 2, 2, False)),
    (True, 1024, (2048, 0, 2, False)),
    (True, 2048, (2048, 1, 2, False)),
    (True, 2048, (2048, 2, 2, False)),
    (True, 2048, (2048, 0, 2, False)),  # at the ceiling
    (False, 2048, (2048, 0, 1, False)),
    (False, 2048, (1024, 0, 1, False)),
    (False, 1024, (512, 0, 1, False)),
    (False, 512, (256, 0, 1, False)),
    (False, 256, (256, 0, 1, True)),  # not finite at the floor: no scale will help
    (True, 256, (256, 1, 1, False)),
]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_law_step_by_step(implementation, compiled):
    judge = LAW.judge
    if compiled:
        if implementation.name == "jax":
            judge = implementation.jax.jit(LAW.judge, static_argnums=2)
        elif implementation.name == "mlx":

            def law(scale, good, tolerance, stuck, finite):
                inv_scale, state = LAW.judge(
                    type(LAW.init())(scale, good, tolerance, stuck), finite, implementation.mx
                )
                return inv_scale, *state

            traced = implementation.mx.compile(law)
            judge = lambda state, finite, xp: _verdict(traced(*state, finite))  # noqa: E731
        elif implementation.name == "torch":
            judge = implementation.torch.compile(LAW.judge, backend="eager")
        else:
            pytest.skip("numpy compiles nothing")
    state = implementation.scalars(LAW.init())
    for step, (finite, used, following) in enumerate(SCRIPT):
        assert float(state.scale) == used, step
        verdict = judge(state, implementation.scalars((0.0, 0, 0, finite)).stuck, implementation.xp)
        assert float(verdict.inv_scale) == 1 / used, step
        state = verdict.state
        found = (float(state.scale), int(state.good_steps), int(state.tolerance), bool(state.stuck))
        assert found == following, step


def _verdict(flat):
    from halfstep.core.scaling import ScaleState, Verdict

    return Verdict(flat[0], ScaleState(*flat[1:]))


@pytest.mark.parametrize("law", [NoScale(), StaticScale(512.0)])
def test_a_scale_that_never_moves(implementation, law):
    state = implementation.scalars(law.init())
    for finite in (True, False, False, True):
        verdict = law.judge(state, implementation.scalars((0.0, 0, 0, finite)).stuck, implementation.xp)
        assert float(verdict.inv_scale) == 1 / float(state.scale)
        assert float(verdict.state.scale) == float(state.scale)
        state = verdict.state


# --- a step --------------------------------------------------------------------------------------------------
# y = x W^T and loss = sum(y t) / w: the gradient is t^T x / w, whatever W is. All numbers are small integers or
# powers of two, so nothing is rounded and every backend must give the same bits.

WEIGHT = np.float32([[1, -2, 3, 0.5], [0, 1, -1, 2]])
X = np.float32([[1, 0, 2, -1], [2, 1, 0, 1], [0, -1, 1, 4]])
T = np.float32([[1, -1], [2, 0], [0.5, 1]])
RATE = 2.0**-4
FP16_LAW = "fp16-mixed,scale=dynamic:init=1024:interval=3:floor=256"


def gradient(*micro_batches):
    return sum(t.T @ x for x, t, _ in micro_batches) / sum(w for _, _, w in micro_batches)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", FP16_LAW, "bf16-mixed,emulate=true"])
def test_a_step_is_exact_where_nothing_rounds(backend, policy):
    toy = backend.toy(policy, WEIGHT, rate=RATE)
    result = toy.step([(X, T, 4.0)])
    assert result.loss == float(((X @ WEIGHT.T) * T).sum() / 4)
    expected = gradient((X, T, 4.0))
    assert result.grad_norm == pytest.approx(float(np.linalg.norm(expected)), rel=16 * U32)
    dtype, weight = toy.weight()
    assert dtype == "float32"
    assert (weight == WEIGHT - np.float32(RATE) * expected).all()
    assert not result.skipped
    assert toy.applied() == 1


def test_the_script_of_overflows_through_real_steps(backend):
    """t of 128 times a scale of 512 and more is beyond fp16; the step is skipped and the scale follows the law."""
    toy = backend.toy(FP16_LAW, WEIGHT, rate=RATE)
    weight, applied = WEIGHT, 0
    law = Policy.parse(FP16_LAW).scale
    state = law.init()
    for step, big in enumerate([0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0]):
        t = T * np.float32(128) if big else T
        result = toy.step([(X, t, 1.0)])
        finite = float(state.scale) * np.abs(t).max() < 65520
        assert result.scale == float(state.scale), step
        assert result.skipped == (not finite), step
        if finite:
            weight, applied = weight - np.float32(RATE) * gradient((X, t, 1.0)), applied + 1
        state = law.judge(state, finite, np).state
        assert (toy.weight()[1] == weight).all(), step
        assert toy.applied() == applied
    assert applied < 11


def test_a_run_that_no_scale_saves_stops(backend):
    toy = backend.toy("fp16-mixed,scale=dynamic:init=512:floor=256", WEIGHT, rate=RATE)
    for _ in range(2):
        toy.step([(X, T * np.float32(512), 1.0)])
        if not toy.last.stuck:
            toy.check()
    assert bool(toy.last.stuck)
    with pytest.raises(ScalingError, match="floor"):
        toy.check()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", FP16_LAW])
def test_a_step_that_is_not_finite_changes_nothing(backend, policy, bad):
    toy = backend.toy(policy, WEIGHT, rate=RATE, clip_norm=1.0)
    x = X.copy()
    x[1, 2] = bad
    result = toy.step([(X, T, 1.0), (x, T, 1.0)])
    assert result.skipped
    assert (toy.weight()[1] == WEIGHT).all()
    assert toy.applied() == 0
    assert not toy.step([(X, T, 1.0)]).skipped
    assert toy.applied() == 1


def test_micro_batches_are_weighted_by_their_tokens(backend):
    toy = backend.toy("bf16-mixed", WEIGHT, rate=RATE)
    batches = [(X, T, 2.0), (X[::-1].copy(), T * 2, 4.0), (X * 2, T, 2.0)]
    result = toy.step(batches)
    assert (toy.weight()[1] == WEIGHT - np.float32(RATE) * gradient(*batches)).all()
    totals = [float(((x @ WEIGHT.T) * t).sum()) for x, t, _ in batches]
    assert result.loss == pytest.approx(sum(totals) / 8, rel=8 * U32)


def test_gradients_are_summed_in_fp32(backend):
    """256 and then ones: a sum in bf16 stays at 256."""
    toy = backend.toy("bf16-mixed", np.zeros((1, 1), np.float32), rate=1.0)
    one = np.float32([[1]])
    toy.step([(one * 256, one, 1.0)] + [(one, one, 1.0)] * 7)
    assert toy.weight()[1] == -(256 + 7) / 8


@pytest.mark.parametrize("policy", ["fp32", FP16_LAW])
def test_clipping_comes_after_unscaling(backend, policy):
    x, t = np.float32([[3, 4]]), np.float32([[1]])
    toy = backend.toy(policy, np.zeros((1, 2), np.float32), rate=1.0, clip_norm=2.5)
    result = toy.step([(x, t, 1.0)])
    assert result.grad_norm == 5
    assert (toy.weight()[1] == [[-1.5, -2]]).all()
    loose = backend.toy(policy, np.zeros((1, 2), np.float32), rate=1.0, clip_norm=8.0)
    loose.step([(x, t, 1.0)])
    assert (loose.weight()[1] == [[-3, -4]]).all()  # clipping the scaled gradient would have shortened it


def test_the_scale_used_is_the_scale_undone(backend):
    """On the step where the scale grows, dividing by the new one would halve the gradient."""
    toy = backend.toy("fp16-mixed,scale=dynamic:init=1024:interval=1", WEIGHT, rate=RATE)
    weight = WEIGHT
    for scale in (1024, 2048, 4096):
        result = toy.step([(X, T, 1.0)])
        weight = weight - np.float32(RATE) * gradient((X, T, 1.0))
        assert result.scale == scale
        assert (toy.weight()[1] == weight).all()


def test_fp32_masters_move_where_bf16_ones_stay(backend):
    ones, small = np.ones((1, 1), np.float32), np.float32([[2.0**-10]])
    mixed = backend.toy("bf16-mixed", ones, rate=1.0)
    true = backend.toy("bf16-true", ones, rate=1.0)
    for _ in range(8):
        mixed.step([(small, ones, 1.0)])
        true.step([(small, ones, 1.0)])
    assert mixed.weight() == ("float32", 1 - 8 * 2.0**-10)
    assert true.weight() == ("bfloat16", 1)


# --- layers --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("fmt", "emulate"), HALVES)
def test_the_three_matmuls_of_a_linear_layer(backend, fmt, emulate):
    """Operands in the format, sums in fp32, results in the format; a weight's gradient is fp32 throughout."""
    x, w, g = samples(5, 48), samples(16, 48, seed=1), samples(5, 16, seed=2)
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
    casts = backend.layers.casts_of(precision)
    return backend._vjp(lambda a, b: backend.layers.linear(a, b, None, casts), [x, w], cotangent)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_emulated_fp8_matmuls_multiply_the_reference_operands(backend, granularity):
    operand, grad = Operand(E4M3, granularity=granularity), Operand(E5M2, granularity=granularity)
    precision = Precision(BF16, operand, BF16, grad, emulate=True)
    x, w, g = stored(samples(6, 32), BF16), samples(8, 32, seed=1), stored(samples(6, 8, seed=2) * 1e-3, BF16)

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


@pytest.mark.parametrize(("fmt", "emulate"), HALVES)
@pytest.mark.parametrize(("name", "count"), [("rms_norm", 1), ("layer_norm", 2), ("softmax", 0)])
def test_an_island_is_fp32_inside_and_compute_outside(backend, name, count, fmt, emulate):
    """Large, offset inputs: inside bf16 a mean or a sum of squares would be off by far more than one rounding."""
    x = stored(samples(4, 64) * 4 + 30, fmt)
    rest = [1 + samples(64, seed=3 + i) / 8 for i in range(count)]
    given = backend.array(x) if emulate else backend.as_dtype(x, fmt)
    casts = backend.layers.casts_of(half(fmt, emulate))
    call = getattr(backend.layers, name)
    cotangent = stored(samples(4, 64, seed=9), fmt)
    (kind, y), grads = backend._vjp(lambda *a: call(*a, casts), [given, *rest], cotangent)
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


@pytest.mark.parametrize(("fmt", "emulate"), HALVES)
def test_the_loss_is_fp32_inside_and_out(backend, fmt, emulate):
    logits, targets = stored(samples(2, 7, 33) * 3, fmt), np.random.default_rng(1).integers(0, 33, (2, 7))
    given = backend.array(logits) if emulate else backend.as_dtype(logits, fmt)
    casts = backend.layers.casts_of(half(fmt, emulate))
    for softcap in (0.0, 15.0):
        (kind, loss), ((grad_kind, grad),) = backend._vjp(
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
    casts = backend.layers.casts_of(half(fmt, emulate))
    (kind, y), grads = backend._vjp(lambda *a: backend.layers.attention(*a, casts), given, None)
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


# --- the decoder ---------------------------------------------------------------------------------------------

SMALL = ModelConfig(vocabulary=64, context=16, layers=2, width=32, heads=4, zero_init=False)
GOLF = ModelConfig(
    vocabulary=64,
    context=16,
    layers=3,
    width=32,
    heads=4,
    kv_heads=2,
    mlp="relu2",
    mlp_width=64,
    norm_gain=False,
    embedding_norm=True,
    qk_norm="plain",
    q_gain=True,
    softcap=30.0,
    unet_skips=True,
    value_residual=True,
    embedding_shortcut="channel",
    branch_scale=True,
    zero_init=False,
)
GPT2 = ModelConfig(
    vocabulary=64,
    context=16,
    layers=2,
    width=32,
    heads=2,
    bias=True,
    norm="layer",
    positions="learned",
    zero_init=False,
)
QWEN = ModelConfig(
    vocabulary=64,
    context=16,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_width=16,
    mlp="swiglu",
    qk_norm="gain",
    tied=False,
    zero_init=False,
)
EXACT = replace(GPT2, layers=1, mlp="gelu_exact", qk_norm="gain", norm_epsilon=1e-2)
MODELS = {"small": SMALL, "golf": GOLF, "gpt2": GPT2, "qwen": QWEN, "exact": EXACT}
TOKENS = np.random.default_rng(11).integers(0, 64, (2, 17))


def decoded(backend, config, policy):
    weights = dict(initial_weights(config, seed=1))
    return backend.decoder(config, policy, weights)(TOKENS[:, :-1].copy(), TOKENS[:, 1:].copy())


def series(config: ModelConfig) -> int:
    """Stored results one after another, from the tokens to a gradient: some 16 a block, there and back."""
    return 2 * (16 * config.layers + 4)


def distance(found, expected, at_least=0.0):
    off = np.linalg.norm(np.float64(found) - np.float64(expected))
    return off / max(np.linalg.norm(np.float64(expected)), at_least) if off else 0.0


def assert_gradients(found, expected, bound):
    """Each within `bound` of the expected one, in norm.

    Some gradients are zero in exact arithmetic, as that of a key's bias, which softmax does not see. What is left
    is the error of what was cancelled, so it is held against a share of all gradients together.
    """
    assert found.keys() == expected.keys()
    whole = np.sqrt(sum(np.square(np.float64(grad)).sum() for grad in expected.values()))
    for parameter in found:
        assert distance(found[parameter], expected[parameter], whole / 1024) <= bound, parameter


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_in_fp32_is_one_function_on_every_backend(backend, torch_backend, name):
    """Each of `series` results carries the error of sums of at most 128 terms, whose signs are random."""
    config = MODELS[name]
    bound = series(config) * np.sqrt(128) * U32
    logits, loss, grads = decoded(backend, config, "fp32")
    expected_logits, expected_loss, expected_grads = decoded(torch_backend, config, "fp32")
    assert distance(logits, expected_logits) <= bound
    assert abs(loss - expected_loss) <= bound * expected_loss
    assert_gradients(grads, expected_grads, 4 * bound)


@pytest.mark.parametrize(
    "policy", ["bf16-mixed", "bf16-mixed,emulate=true", "fp16-mixed", "fp8-mixed,emulate=true"]
)
@pytest.mark.parametrize("name", ["small", pytest.param("golf", marks=pytest.mark.prove)])
def test_the_decoder_in_half_precision(backend, torch_backend, name, policy):
    """Against torch's emulation. Both round each of `series` results once; where an fp32 sum came out on the other
    side of a tie they differ by one unit. Errors of random sign add up as the root of their number."""
    config = MODELS[name]
    emulated = policy if "emulate" in policy else f"{policy},emulate=true"
    fmt = Policy.parse(policy).compute.format
    bound = 2 * unit(fmt) * np.sqrt(series(config))
    if policy.startswith("fp8"):
        bound = 2 * unit(E5M2) * np.sqrt(series(config))
    logits, loss, grads = decoded(backend, config, policy)
    expected_logits, expected_loss, expected_grads = decoded(torch_backend, config, emulated)
    exact_logits, exact_loss, _ = decoded(torch_backend, config, "fp32")
    assert distance(logits, expected_logits) <= bound
    assert distance(logits, exact_logits) > unit(FP32) * 64  # it did run in another precision
    assert abs(loss - expected_loss) <= bound * expected_loss
    assert_gradients(grads, expected_grads, 4 * bound)
    assert abs(loss - exact_loss) <= 2 * bound * exact_loss


def test_rules_change_what_they_name(backend):
    config = SMALL
    head = decoded(backend, config, "bf16-mixed; lm_head: compute=fp32")[0]
    plain = decoded(backend, config, "bf16-mixed")[0]
    assert (plain == stored(plain, BF16)).all()
    assert not (head == stored(head, BF16)).all()
    narrow = decoded(backend, config, "bf16-mixed,emulate=true; blocks.*.mlp.*: compute=e4m3")[0]
    assert distance(narrow, plain) > 4 * unit(BF16)


# --- sessions ------------------------------------------------------------------------------------------------

RECIPE = [
    "model.context=16",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.vocabulary=64",
    "training.batch=2",
    "training.micro_batches=2",
    "training.compile=false",
    "optimizer.rate=0.003",
]


def batches(config, steps):
    rng = np.random.default_rng(4)
    shape = (config.training.micro_batches, config.training.batch, config.model.context + 1)
    return [(rng.integers(0, 8, shape) * 8).astype(np.int32) for _ in range(steps)]


def trained(backend, policy, optimizer, steps=20):
    config = load("tiny", [*RECIPE, f"optimizer.name={optimizer}"])
    session = backend.open(config, policy, lambda applied, xp: 1.0 / (1.0 + 0.1 * applied))
    first = {name: record for name, record in session.state().items() if name.startswith("model.")}
    losses = [session.read(session.step(batch))["loss"] for batch in batches(config, steps)]
    return first, np.array(losses), session


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("fp32", "adamw"),
        ("fp32", "muon"),
        ("bf16-mixed", "adamw"),
        pytest.param("bf16-mixed", "muon", marks=pytest.mark.prove),
        ("fp16-mixed", "adamw"),
        pytest.param("fp16-mixed", "muon", marks=pytest.mark.prove),
    ],
)
def test_twenty_steps_of_training(backend, torch_backend, policy, optimizer):
    """The same weights to begin with, bit for bit, and then the same losses at every step.

    In half precision to one rounding of the format: the logits that a loss is made of are known no better. In fp32
    to one rounding for each of `series` results, though the weights are those of twenty steps.
    """
    first, losses, session = trained(backend, policy, optimizer)
    expected_first, expected, _ = trained(torch_backend, policy, optimizer)
    assert first == expected_first
    fmt = Policy.parse(policy).compute.format
    bound = series(SMALL) * U32 if fmt == FP32 else unit(fmt)
    assert (np.abs(losses - expected) <= bound * expected).all(), (losses - expected) / expected
    assert losses[-1] < losses[0] - 0.5
    assert session.applied() == 20


SHRUNK = {
    "speedrun": ["model.heads=2", "model.zero_init=false", "model.zero_head=false"],
    "golf": ["model.layers=3", "model.heads=4", "model.kv_heads=2", "model.mlp_width=64", "model.zero_init=false"],
}


@pytest.mark.parametrize("recipe", SHRUNK)
def test_ten_steps_of_a_recipe_with_rates_of_its_own(backend, torch_backend, recipe):
    """Each group at its rate, Muon's momentum on its way up: the same losses, bounded as above.

    Rates are for a model as small as this: at those of the recipe its loss is chaos after a few steps. And nothing
    starts at zero: the first gradients behind it are of the size of Adam's epsilon, where rounding decides.
    """
    rates = [f"optimizer.{kind}_rate={rate}" for kind, rate in RECIPE_RATES[recipe].items()]
    given = [*RECIPE[:-1], *SHRUNK[recipe], *rates, "optimizer.muon_momentum_warmup=8", "training.steps=10"]

    def losses(name):
        config = load(recipe, [*given, f"backend={name}"])
        session = open_session(config, Policy.parse("fp32"), "cpu")
        return np.array([session.read(session.step(batch))["loss"] for batch in batches(config, 10)])

    found, expected = losses(backend.name), losses(torch_backend.name)
    assert (np.abs(found - expected) <= series(SMALL) * U32 * expected).all(), (found - expected) / expected
    assert found[-1] < found[0] - 0.1


RECIPE_RATES = {
    "speedrun": {"embedding": 0.03, "head": 0.01, "scalar": 0.002, "muon": 0.002},
    "golf": {"embedding": 0.005, "scalar": 0.004, "muon": 0.004},
}


def test_stochastic_rounding_takes_the_same_words_everywhere(backend, torch_backend):
    """After one step most weights are rounded from the same number by the same word: other words would make half
    of them differ."""
    policy = "bf16-true,param=bf16:stochastic"
    _, _, ours = trained(backend, policy, "adamw", steps=1)
    _, _, theirs = trained(torch_backend, policy, "adamw", steps=1)
    left, right = (np.frombuffer(s.state()["model.blocks.0.mlp.up.weight"][2], np.uint16) for s in (ours, theirs))
    assert (left == right).mean() > 0.95


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("bf16-mixed,compute=e3m2", "emulate=true"),
        ("bf16-mixed; nowhere.*: compute=fp32", "nowhere"),
        ("bf16-mixed,compute=e4m3:row:delayed,emulate=true", "delayed"),
        ("bf16-mixed,matmul=fp32:fast", "fast"),
        ("bf16-mixed,buffers=bf16", "buffers"),
        ("bf16-mixed; blocks.0.attn_norm: compute=e4m3", "names no matmul|emulate=true"),
    ],
)
def test_what_a_backend_does_not_run_is_refused_with_the_reason(backend, policy, said):
    config = load("tiny", RECIPE)
    with pytest.raises(PolicyError, match=said):
        backend.open(config, policy)


def test_the_same_names_everywhere(backend, torch_backend):
    config = load("tiny", [*RECIPE, "optimizer.name=adamw"])
    ours, theirs = (b.open(config, "fp32").state() for b in (backend, torch_backend))
    names = [
        {name for name in state if name.startswith(("model.", "scale.", "applied"))} for state in (ours, theirs)
    ]
    assert names[0] == names[1]


def test_the_base_precision_of_a_policy_is_what_layers_read(backend):
    casts = backend.layers.casts_of(base_precision(Policy.parse("bf16-mixed,norm=bf16")))
    assert casts.compute == casts.norm == backend.dtypes.dtype_of(BF16)
    assert casts.softmax == casts.loss == backend.dtypes.dtype_of(FP32)
