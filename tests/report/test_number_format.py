import math

import pytest

from halfstep.report import number_format


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, math.nan),
        (True, math.nan),
        ("inf", math.inf),
        ("nonsense", math.nan),
        ([], math.nan),
        (3, 3.0),
        (0.5, 0.5),
    ],
)
def test_number(value, expected):
    assert number_format.number(value) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("written", "value", "expected"),
    [
        (number_format.plain, 1.39812, "1.398"),
        (number_format.plain, 12345.6, "12,346"),
        (number_format.plain, 65536.0, "65,536"),
        (number_format.plain, 3e-5, "3e-05"),
        (number_format.plain, 0.0, "0"),
        (number_format.plain, -2.5, "-2.5"),
        (number_format.plain, math.nan, "not a number"),
        (number_format.plain, math.inf, "infinite"),
        (number_format.plain, -math.inf, "minus infinite"),
        (number_format.plain, 1e300, "1e+300"),
        (number_format.count, 999, "999"),
        (number_format.count, 999.7, "1k"),
        (number_format.count, 820_352, "820k"),
        (number_format.count, 999_950, "1M"),
        (number_format.count, 124_475_904, "124M"),
        (number_format.count, 1_500_000_000, "1.5B"),
        (number_format.count, math.nan, "not a number"),
        (number_format.size, 0, "0 B"),
        (number_format.size, 1023, "1023 B"),
        (number_format.size, 1024, "1 KiB"),
        (number_format.size, 1.5 * 2**30, "1.5 GiB"),
        (number_format.size, 1023 * 2**20, "1023 MiB"),
        (number_format.duration, 0.0421, "0.042 s"),
        (number_format.duration, 9.96, "10 s"),
        (number_format.duration, 59.6, "1 min 00 s"),
        (number_format.duration, 134, "2 min 14 s"),
        (number_format.duration, 3599.7, "1 h 00 min"),
        (number_format.duration, 11_100, "3 h 05 min"),
        (number_format.duration, 187_200, "2 d 4 h"),
        (number_format.duration, math.nan, "not a number"),
        (number_format.power_of_two, 65536.0, "65,536 (2^16)"),
        (number_format.power_of_two, 1.0, "1"),
        (number_format.power_of_two, 1000.0, "1,000"),
        (number_format.power_of_two, 2.0**-20, "9.537e-07 (2^-20)"),
        (number_format.moment, 0, "1970-01-01 00:00 UTC"),
        (number_format.moment, math.nan, "an unknown time"),
    ],
)
def test_numbers_are_written(written, value, expected):
    assert written(value) == expected


def test_plural():
    assert [number_format.plural(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
