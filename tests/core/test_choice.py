import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.choice import FP16_MARGIN, MIN_GAIN, ROUNDS, Support, Timing, choose, gain
from halfstep.core.choice.layers import Measured, resumed, with_outcome
from halfstep.core.formats import BF16, FP16, FP32
from halfstep.core.policy import PRESETS

SHAPE = (512, 512, 512)
YES, EMULATED = Support(True, "native"), Support(False, "emulated by the driver")
OLD = Support(False, "compute capability 7.5; bf16 needs 8.0")
BOTH = {BF16: YES, FP16: YES}
SLOWER = "measured: 2 ms in e4m3 and e5m2, 1 ms in bf16"  # of a layer that stays wide


def timed(**milliseconds):
    formats = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
    return [Timing(formats[name], SHAPE, (ms / 1e3,) * ROUNDS) for name, ms in milliseconds.items()]


def test_bf16_that_is_hundreds_of_times_slower_is_not_chosen_and_the_reason_holds_the_ratio():
    choice = choose(timed(fp32=3.8, bf16=1089.0, fp16=1000.0), BOTH)
    assert choice.preset == "fp32"
    assert "bf16 matmuls are 287x slower than fp32 (1.09 s against 3.8 ms at 512x512x512)" in choice.reason


@pytest.mark.parametrize(
    ("timings", "support", "preset", "said"),
    [
        (timed(fp32=20.0, bf16=2.0, fp16=2.0), BOTH, "bf16-mixed", ("10x faster", "no loss scale")),
        (timed(fp32=1.05, bf16=1.0), {BF16: YES}, "fp32", ("short of the 1.1x",)),
        (timed(fp32=20.0, fp16=3.0), {BF16: OLD, FP16: YES}, "fp16-mixed", (OLD.reason,)),
        (timed(fp32=20.0, bf16=2.0), {BF16: EMULATED}, "fp32", (EMULATED.reason,)),
        (timed(fp32=20.0, bf16=10.0, fp16=9.0), BOTH, "bf16-mixed", ()),  # fp16 must be well ahead
        (timed(fp32=20.0, bf16=10.0, fp16=5.0), BOTH, "fp16-mixed", ()),
    ],
    ids=[
        "pays",
        "too small a gain",
        "bf16 not supported",
        "fast but not supported",
        "fp16 ahead",
        "fp16 far ahead",
    ],
)
def test_what_pays_and_is_supported_is_chosen_with_the_reason(timings, support, preset, said):
    choice = choose(timings, support)
    assert choice.preset == preset
    assert all(text in choice.reason for text in said)


def test_the_largest_shape_counts_a_block_before_a_matmul_and_no_slow_repeat():
    timings = [
        Timing(FP32, (64, 64, 64), (1.0,)),
        Timing(BF16, (64, 64, 64), (2.0,)),
        Timing(FP32, (256, 256, 256), (8.0,)),
        Timing(BF16, (256, 256, 256), (4.0,)),
        Timing(FP32, (1024, 1024, 1024), (64.0,)),  # bf16 could not be afforded here
    ]
    assert (gain(timings, BF16).shape, gain(timings, BF16).ratio) == ((256, 256, 256), 2)
    assert gain(timings, FP16) is None
    timings = [Timing(FP32, SHAPE, (1.0, 1.0, 50.0)), Timing(BF16, SHAPE, (0.5, 0.5, 0.5))]
    assert gain(timings, BF16).ratio == 2
    assert choose([], BOTH).reason == "bf16 was not timed; fp16 was not timed"
    block = "training steps of a block"
    timings = [
        *timed(fp32=10.0, bf16=2.0),
        Timing(FP32, (8, 8, 8), (1.0,), block),
        Timing(BF16, (8, 8, 8), (1.5,), block),
    ]
    choice = choose(timings, {BF16: YES})
    assert choice.preset == "fp32"
    assert "bf16 training steps of a block are 1.5x slower than fp32" in choice.reason
    assert gain(timings[:2], BF16).ratio == 5


def test_what_a_busy_machine_disturbed_does_not_pay():
    few = [Timing(FP32, SHAPE, (2.0,)), Timing(BF16, SHAPE, (1.0,))]
    choice = choose(few, {BF16: YES})
    assert choice.preset == "fp32"
    assert "2x faster than fp32" in choice.reason
    assert f"time for 1 of the {ROUNDS} turns" in choice.reason
    stalled = [Timing(FP32, SHAPE, (2.0,) * ROUNDS), Timing(BF16, SHAPE, (1.0, *[2.0] * ROUNDS))]
    choice = choose(stalled, {BF16: YES})
    assert choice.preset == "fp32"
    assert "only in its fastest turns" in choice.reason
    fp16 = Timing(FP16, SHAPE, (0.5, *[0.9] * ROUNDS))
    quiet = [Timing(FP32, SHAPE, (2.0,) * ROUNDS), Timing(BF16, SHAPE, (1.0,) * ROUNDS), fp16]
    assert choose(quiet, BOTH).preset == "bf16-mixed"


times = st.floats(1e-6, 1e3)


@given(times, times, times, st.booleans(), st.booleans())
def test_the_choice_is_always_one_that_pays(fp32, bf16, fp16, bf16_ok, fp16_ok):
    timings = timed(fp32=fp32, bf16=bf16, fp16=fp16)
    choice = choose(timings, {BF16: Support(bf16_ok, "x"), FP16: Support(fp16_ok, "x")})
    assert choice.preset in PRESETS
    assert choice.reason
    ratios = {"bf16-mixed": (fp32 / bf16, bf16_ok), "fp16-mixed": (fp32 / fp16, fp16_ok)}
    if choice.preset == "fp32":
        assert all(not ok or ratio < MIN_GAIN * 1.0001 for ratio, ok in ratios.values())
    else:
        assert ratios[choice.preset][1]
        assert ratios[choice.preset][0] >= MIN_GAIN * 0.9999
    if choice.preset == "fp16-mixed" and bf16_ok and fp32 / bf16 >= MIN_GAIN * 1.0001:
        assert bf16 / fp16 >= FP16_MARGIN * 0.9999


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ({}, ""),
        ({"a": "", "b": ""}, ""),
        ({"a": SLOWER, "b": SLOWER}, "0 of 2 matmuls in fp8: bf16 is faster here"),
        ({"a": "", "b": f"{SLOWER}, with its loss"}, "1 of 2 matmuls in fp8: bf16 is faster here"),
        ({"a": "not timed within 90 s, so it stays bf16"}, "0 of 1 matmuls in fp8: not timed within 90 s"),
    ],
)
def test_what_measuring_made_of_a_policy_is_said_with_its_reason(notes, said):
    measured = Measured({name: not note for name, note in notes.items()}, notes)
    assert measured.outcome == said
    assert with_outcome("fp8-mixed", said) == (f"fp8-mixed ({said})" if said else "fp8-mixed")


def test_layers_as_a_resumed_run_had_them_say_so():
    said = "0 of 1 matmuls in fp8: as in the run that is resumed"
    assert resumed({"a": False}).outcome == said
    assert Measured({"a": True}, {"a": "measured: 1 ms in e4m3, 2 ms in bf16"}).adopt({"a": False}).outcome == said
