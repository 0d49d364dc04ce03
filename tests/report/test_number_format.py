import math

import pytest

from halfstep.report import number_format


def test_what_is_not_a_number_is_nan():
    assert all(math.isnan(number_format.number(value)) for value in (None, True, "nonsense", []))
    assert [number_format.number(n) for n in ("inf", 3, 0.5)] == [math.inf, 3.0, 0.5]


# fmt: off
WRITTEN = {
    number_format.plain: {
        1.39812: "1.398", 12345.6: "12,346", 65536.0: "65,536", 3e-5: "3e-05", 0.0: "0", -2.5: "-2.5",
        math.nan: "not a number", math.inf: "infinite", -math.inf: "minus infinite", 1e300: "1e+300",
    },
    number_format.count: {
        999: "999", 999.7: "1k", 820_352: "820k", 999_950: "1M", 124_475_904: "124M", 1_500_000_000: "1.5B",
        math.nan: "not a number",
    },
    number_format.size: {
        0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1.5 * 2**30: "1.5 GiB", 1023 * 2**20: "1023 MiB",
    },
    number_format.duration: {
        0.0421: "0.042 s", 9.96: "10 s", 59.6: "1 min 00 s", 134: "2 min 14 s", 3599.7: "1 h 00 min",
        11_100: "3 h 05 min", 187_200: "2 d 4 h", math.nan: "not a number",
    },
    number_format.power_of_two: {
        65536.0: "65,536 (2^16)", 1.0: "1", 1000.0: "1,000", 2.0**-20: "9.537e-07 (2^-20)",
    },
    number_format.moment: {0: "1970-01-01 00:00 UTC", math.nan: "an unknown time"},
}
# fmt: on


@pytest.mark.parametrize("written", WRITTEN, ids=lambda function: function.__name__)
def test_numbers_are_written(written):
    assert {value: written(value) for value in WRITTEN[written]} == WRITTEN[written]


def test_plural():
    assert [number_format.plural(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
