import math

import pytest

from halfstep.report import figures


@pytest.mark.parametrize(
    ("value", "told"),
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
def test_number(value, told):
    assert figures.number(value) == pytest.approx(told, nan_ok=True)


@pytest.mark.parametrize(
    ("written", "value", "told"),
    [
        (figures.plain, 1.39812, "1.398"),
        (figures.plain, 12345.6, "12,346"),
        (figures.plain, 65536.0, "65,536"),
        (figures.plain, 3e-5, "3e-05"),
        (figures.plain, 0.0, "0"),
        (figures.plain, -2.5, "-2.5"),
        (figures.plain, math.nan, "not a number"),
        (figures.plain, math.inf, "infinite"),
        (figures.plain, -math.inf, "minus infinite"),
        (figures.plain, 1e300, "1e+300"),
        (figures.count, 999, "999"),
        (figures.count, 999.7, "1k"),
        (figures.count, 820_352, "820k"),
        (figures.count, 999_950, "1M"),
        (figures.count, 124_475_904, "124M"),
        (figures.count, 1_500_000_000, "1.5B"),
        (figures.count, math.nan, "not a number"),
        (figures.size, 0, "0 B"),
        (figures.size, 1023, "1023 B"),
        (figures.size, 1024, "1 KiB"),
        (figures.size, 1.5 * 2**30, "1.5 GiB"),
        (figures.size, 1023 * 2**20, "1023 MiB"),
        (figures.duration, 0.0421, "0.042 s"),
        (figures.duration, 9.96, "10 s"),
        (figures.duration, 59.6, "1 min 00 s"),
        (figures.duration, 134, "2 min 14 s"),
        (figures.duration, 3599.7, "1 h 00 min"),
        (figures.duration, 11_100, "3 h 05 min"),
        (figures.duration, 187_200, "2 d 4 h"),
        (figures.duration, math.nan, "not a number"),
        (figures.power_of_two, 65536.0, "65,536 (2^16)"),
        (figures.power_of_two, 1.0, "1"),
        (figures.power_of_two, 1000.0, "1,000"),
        (figures.power_of_two, 2.0**-20, "9.537e-07 (2^-20)"),
        (figures.moment, 0, "1970-01-01 00:00 UTC"),
        (figures.moment, math.nan, "an unknown time"),
    ],
)
def test_numbers_are_told(written, value, told):
    assert written(value) == told


def test_plural():
    assert [figures.plural(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
