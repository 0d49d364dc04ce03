"""How numbers are written: as few digits as matter, units a reader knows, NaN as text."""

import math
from datetime import UTC, datetime
from typing import Any

# Significant digits of a number that stands alone.
DIGITS = 4


def number(value: Any) -> float:
    """Returns a number of an event; NaN, which charts show as a gap, for what is absent or not a number."""
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)  # "nan" and "inf" as text too, for writers of strict JSON
    except (TypeError, ValueError):
        return math.nan


def plain(value: float, digits: int = DIGITS) -> str:
    """`1.398`, `12,345`, `3e-05`, `not a number`."""
    if not math.isfinite(value):
        return _not_finite(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    # Beyond its digits, a number is rounded to a whole one; powers of ten start where zeros would mislead.
    return f"{value:,.0f}" if 10**digits <= abs(value) < 1e15 else f"{value:.{digits}g}"


def count(value: float, digits: int = 3) -> str:
    """`830k`, `124M`, `1.5B`."""
    if not math.isfinite(value):
        return _not_finite(value)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,950 is 1M, not 1,000k: the unit is chosen after rounding.
        if float(f"{abs(value):.{digits}g}") >= size:
            return f"{_format_digits(value / size, digits)}{letter}"
    return plain(value, digits)


def percent(share: float) -> str:
    """`41.3 %`."""
    return f"{plain(100 * share, 3)} %"


def size(value: float) -> str:
    """Bytes, in powers of 1024: `1.5 GiB`."""
    if not math.isfinite(value):
        return _not_finite(value)
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{_format_digits(value / 1024**power, 3)} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """`0.42 s`, `48 s`, `2 min 14 s`, `3 h 05 min`, `2 d 4 h`."""
    if not math.isfinite(seconds):
        return _not_finite(seconds)
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def moment(unix: float) -> str:
    """`2025-10-09 08:53 UTC`."""
    if not math.isfinite(unix):
        return "an unknown time"
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")


def occasions(amount: int, first: float) -> str:
    """When something happened, or how often and when first."""
    return moment(first) if amount == 1 else f"{amount:,} times, first {moment(first)}"


def plural(amount: int, word: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{amount:,} {word}" if amount == 1 else f"{amount:,} {word}s"


def power_of_two(value: float) -> str:
    """`65,536 (2^16)`: a loss scale is an exponent, and most people know the number."""
    if not (math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5):
        return plain(value)
    exponent = int(math.log2(value))
    return f"{plain(value)} (2^{exponent})" if abs(exponent) > 3 else plain(value)


def _format_digits(value: float, digits: int) -> str:
    """`124`, `1.5`, `1023`: significant digits, or a whole number if it has more; no trailing zeros."""
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def _not_finite(value: float) -> str:
    return "not a number" if math.isnan(value) else "infinite" if value > 0 else "minus infinite"
