import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.errors import FormatError
from halfstep.core.formats import ALIASES, FOREIGN, NAMED, Format, parse
from tests.core.oracles import ORACLES


@pytest.mark.parametrize("name", ORACLES)
def test_limits_and_specials_equal_those_of_the_oracle(name):
    info, ours = ml_dtypes.finfo(ORACLES[name]), parse(name)
    assert ours.bits == info.bits
    assert ours.max == float(info.max)
    assert ours.smallest_normal == float(info.smallest_normal)
    assert ours.smallest_subnormal == float(info.smallest_subnormal)
    assert ours.epsilon == float(info.eps)
    codes = np.array([0x7F800000, 0x7FC00000, 0x80000000], np.uint32)
    if ours.bits <= 16:
        codes = np.arange(2**ours.bits, dtype=np.uint8 if ours.bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):
        values = codes.view(ORACLES[name]).astype(np.float32)
    assert ours.has_inf == bool(np.isinf(values).any())
    assert ours.has_nan == bool(np.isnan(values).any())
    assert ours.has_negative_zero == bool((np.signbit(values) & (values == 0)).any())


def test_known_facts():
    assert (NAMED["e4m3"].max, NAMED["e5m2"].max, NAMED["fp16"].max) == (448, 57344, 65504)
    assert (parse("e4m3ieee").max, NAMED["tf32"].bits) == (240, 19)
    assert (NAMED["fp16"].native_overflow, NAMED["e4m3"].native_overflow) == ("inf", "nan")
    assert NAMED["e2m1"].native_overflow == "saturate"


@given(
    st.integers(2, 8),
    st.integers(1, 23),
    st.sampled_from(["ieee", "fn", "f", "fnuz"]),
    st.one_of(st.just(-1), st.integers(0, 140)),
)
def test_every_format_reads_back(exponent_bits, mantissa_bits, specials, bias):
    try:
        fmt = Format(exponent_bits, mantissa_bits, specials, bias)
    except FormatError:
        return  # some biases leave fp32
    assert parse(str(fmt)) == fmt
    assert math.isfinite(fmt.max)
    assert np.float32(fmt.max) == fmt.max
    assert np.float32(fmt.smallest_subnormal) == fmt.smallest_subnormal > 0


@pytest.mark.parametrize(("short", "full"), ALIASES.items())
def test_two_names_of_one_format_are_equal_and_print_the_short_one(short, full):
    assert parse(short) == parse(full)
    assert str(parse(full)) == short


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_other_libraries_are_understood(name):
    assert str(parse(name)) in ALIASES


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("bf61", "unknown number format `bf61`", "bf16"),
        ("e3m4", "does not say whether it has infinities and NaN", "e3m4ieee"),
        ("e9m3ieee", "2 to 8 exponent bits", None),
        ("e4m0fn", "1 to 23 mantissa bits", None),
        ("e8m23fnuz", "has values that fp32 lacks", None),
        ("", "unknown number format", "halfstep formats"),
    ],
)
def test_what_is_not_a_format_is_refused_with_the_remedy(text, said, hint):
    with pytest.raises(FormatError) as caught:
        parse(text)
    assert said in caught.value.message
    assert hint is None or hint in caught.value.hint


@pytest.mark.parametrize("name", ["fp8", "float8", "FP8"])
def test_a_name_of_several_formats_says_which_they_are(name):
    with pytest.raises(FormatError) as caught:
        parse(name)
    assert "`e4m3` forward" in caught.value.hint
    assert "`fp8-mixed`" in caught.value.hint
