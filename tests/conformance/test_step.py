"""The scaling law and one update: the same numbers on torch, JAX, MLX and, for the law, the numpy reference."""

import warnings

import numpy as np
import pytest

from halfstep.core.errors import ScalingError
from halfstep.core.policy import Policy
from halfstep.core.scaling import DynamicScale, NoScale, StaticScale

U32 = 2.0**-24  # the relative error of one rounding to fp32

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


def test_the_law_step_by_step(implementation):
    follow_script(implementation, LAW.judge)


def test_the_law_step_by_step_compiled(backend):
    follow_script(backend, backend.compiled(LAW.judge))


def follow_script(implementation, judge):
    state = implementation.scalars(LAW.init())
    for step, (finite, used, following) in enumerate(SCRIPT):
        assert float(state.scale) == used, step
        verdict = judge(state, implementation.scalars((0.0, 0, 0, finite)).stuck, implementation.xp)
        assert float(verdict.inv_scale) == 1 / used, step
        state = verdict.state
        found = (float(state.scale), int(state.good_steps), int(state.tolerance), bool(state.stuck))
        assert found == following, step


@pytest.mark.parametrize("law", [NoScale(), StaticScale(512.0)])
def test_a_scale_that_never_moves(implementation, law):
    state = implementation.scalars(law.init())
    for finite in (True, False, False, True):
        verdict = law.judge(state, implementation.scalars((0.0, 0, 0, finite)).stuck, implementation.xp)
        assert float(verdict.inv_scale) == 1 / float(state.scale)
        assert float(verdict.state.scale) == float(state.scale)
        state = verdict.state


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
    assert toy.num_applied() == 1


@pytest.mark.filterwarnings("ignore:the loss scale is")
def test_the_script_of_overflows_through_real_steps(backend):
    """t of 128 times a scale of 512 and more is beyond fp16; the step is skipped and the scale follows the law."""
    toy = backend.toy(FP16_LAW, WEIGHT, rate=RATE)
    weight, num_applied = WEIGHT, 0
    law = Policy.parse(FP16_LAW).scale
    state = law.init()
    for step, big in enumerate([0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0]):
        t = T * np.float32(128) if big else T
        result = toy.step([(X, t, 1.0)])
        finite = float(state.scale) * np.abs(t).max() < 65520
        assert result.scale == float(state.scale), step
        assert result.skipped == (not finite), step
        if finite:
            weight, num_applied = weight - np.float32(RATE) * gradient((X, t, 1.0)), num_applied + 1
        state = law.judge(state, finite, np).state
        assert (toy.weight()[1] == weight).all(), step
        assert toy.num_applied() == num_applied
    assert num_applied < 11


@pytest.mark.filterwarnings("ignore:the loss scale is")
def test_a_run_that_no_scale_saves_stops(backend):
    toy = backend.toy("fp16-mixed,scale=dynamic:init=512:floor=256", WEIGHT, rate=RATE)
    for _ in range(2):
        toy.step([(X, T * np.float32(512), 1.0)])
        if not toy.last.stuck:
            toy.check()
    assert bool(toy.last.stuck)
    with pytest.raises(ScalingError, match="floor, 256"):
        toy.check()
    toy.step([(X, T, 1.0)])
    toy.check()


@pytest.mark.filterwarnings("ignore:the loss scale is")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", FP16_LAW])
def test_a_step_that_is_not_finite_changes_nothing(backend, policy, bad):
    toy = backend.toy(policy, WEIGHT, rate=RATE, clip_norm=1.0)
    x = X.copy()
    x[1, 2] = bad
    result = toy.step([(X, T, 1.0), (x, T, 1.0)])
    assert result.skipped
    assert (toy.weight()[1] == WEIGHT).all()
    assert toy.num_applied() == 0
    assert not toy.step([(X, T, 1.0)]).skipped
    assert toy.num_applied() == 1


AT_THE_FLOOR = "fp16-mixed,scale=dynamic:init=256:floor=256"


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", AT_THE_FLOOR])
def test_a_loss_that_is_not_finite_skips_the_step_and_moves_no_scale(backend, policy, bad):
    """A constant added to the loss: gradients never see it. The scale, at its floor, did not cause it."""
    toy = backend.toy(policy, WEIGHT, rate=RATE, clip_norm=1.0)
    for batches in ([(X, T, 1.0, bad), (X, T, 1.0)], [(X, T, 1.0), (X, T, 3.0, bad)]):
        result = toy.step(batches)
        assert result.skipped
        assert not np.isfinite(result.loss)
        assert np.isfinite(result.grad_norm)
        assert not result.stuck
        toy.check()
        assert (toy.weight()[1] == WEIGHT).all()
        assert toy.num_applied() == 0
    fine = toy.step([(X, T, 1.0), (X, T, 1.0)])
    assert (fine.skipped, fine.scale, toy.num_applied()) == (False, result.scale, 1)


def test_a_loss_that_is_not_finite_is_no_alarm_about_the_loss_scale(backend):
    toy = backend.toy(AT_THE_FLOOR, WEIGHT, rate=RATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            assert toy.step([(X, T, 1.0, np.inf)]).skipped


def test_a_loss_scale_that_is_low_and_falling_is_a_warning_once_before_its_floor(backend):
    """t of 2^16 is beyond fp16 at every scale: it falls from 8192 to its floor, 1, in thirteen steps."""
    toy, seen = backend.toy("fp16-mixed,scale=dynamic:init=8192", WEIGHT, rate=2.0**-5), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            result = toy.step([(X, T * np.float32(2**16), 1.0)])
            seen.append((result.scale, len(caught)))
            assert not result.stuck
    assert len(caught) == 1
    assert "and falling: gradients overflow fp16 again and again; at its floor, 1," in str(caught[0].message)
    assert caught[0].filename.endswith("conftest.py")  # the line that called step
    assert [count for scale, count in seen if scale > 1024] == [0, 0, 0]
    assert dict(seen)[32.0] == 1


def test_micro_batches_are_weighted_by_their_tokens(backend):
    toy = backend.toy("bf16-mixed", WEIGHT, rate=RATE)
    batches = [(X, T, 2.0), (X[::-1].copy(), T * 2, 4.0), (X * 2, T, 2.0)]
    result = toy.step(batches)
    assert (toy.weight()[1] == WEIGHT - np.float32(RATE) * gradient(*batches)).all()
    totals = [float(((x @ WEIGHT.T) * t).sum()) for x, t, _ in batches]
    assert result.loss == pytest.approx(sum(totals) / 8, rel=8 * U32)


@pytest.mark.parametrize("order", [1, -1])
def test_the_loss_scale_does_not_depend_on_the_size_of_the_first_micro_batch(backend, order):
    """A mean over 512 tokens beside one over a single token: times 512, its gradients would be beyond fp16."""
    toy = backend.toy("fp16-mixed,scale=dynamic:init=8192", WEIGHT, rate=RATE)
    batches = [(X, T, 1.0), (X, T * 512, 512.0), (X, T * 256, 256.0)][::order]
    result = toy.step(batches)
    assert not result.skipped
    assert toy.weight()[1] == pytest.approx(WEIGHT - RATE * gradient(*batches), rel=8 * U32)
    totals = [float(((x @ WEIGHT.T) * t).sum()) for x, t, _ in batches]
    assert result.loss == pytest.approx(sum(totals) / 769, rel=8 * U32)


@pytest.mark.parametrize(
    ("policy", "expected"), [("bf16-mixed", 256 + 7), ("bf16-true", 256 + 8), ("bf16-mixed,accumulate=bf16", 256)]
)
def test_gradients_are_summed_in_the_accumulate_format(backend, policy, expected):
    """256 and then ones: a sum in bf16 stays at 256. A bf16 master rounds 263 / 8 in the end."""
    toy = backend.toy(policy, np.zeros((1, 1), np.float32), rate=1.0)
    one = np.float32([[1]])
    toy.step([(one * 256, one, 1.0)] + [(one, one, 1.0)] * 7)
    assert toy.weight()[1] == -expected / 8


@pytest.mark.parametrize("bad", [0.0, np.nan])
@pytest.mark.parametrize("weights", [(0.0, 4.0), (4.0, 0.0)])
def test_a_micro_batch_without_tokens_counts_for_nothing(backend, weights, bad):
    """Not even with a loss of NaN, as the mean over nothing has."""
    toy = backend.toy("fp32", WEIGHT, rate=RATE)
    result = toy.step([(X, T, weight) if weight else (X, T * 0, weight, bad) for weight in weights])
    assert (toy.weight()[1] == WEIGHT - np.float32(RATE) * gradient((X, T, 4.0))).all()
    assert result.loss == float(((X @ WEIGHT.T) * T).sum() / 4)


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
