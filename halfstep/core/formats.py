"""The table of number formats.

A format ExMy has one sign bit, x exponent bits and y mantissa bits. With bias b, the code (s, e, m) means

    e > 0   (-1)^s * 2^(e - b) * (1 + m / 2^y)        a normal number
    e = 0   (-1)^s * 2^(1 - b) * (m / 2^y)            a subnormal number, or zero

and the suffix of the name says what the largest codes mean:

    ieee    the top exponent is reserved: m = 0 is an infinity, every other m a NaN       b = 2^(x-1) - 1
    fn      no infinity; only the all-ones code is a NaN                                   b = 2^(x-1) - 1
    f       neither infinity nor NaN: every code is a finite number                        b = 2^(x-1) - 1
    fnuz    no infinity; the code of negative zero is the NaN, so zero has no sign         b = 2^(x-1)

Names follow ml_dtypes (`e4m3fn`, `e4m3b11fnuz` with bias 11), except that it writes `fn` for formats without a
NaN, which are `f` here. A bare ExMy is accepted only if a published standard (OCP FP8, OCP MX) gives it one
meaning; a guess would be a silent substitution: e4m3 ends at 448 as `fn` and at 240 as `ieee`.
"""

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, cast, get_args

from halfstep.core.errors import UnknownFormatError, did_you_mean

Specials = Literal["ieee", "fn", "f", "fnuz"]
Overflow = Literal["inf", "nan", "saturate", "raise"]


@dataclass(frozen=True)
class Format:
    """One number format; two formats with the same codes are equal and print the same."""

    exponent_bits: int
    mantissa_bits: int
    specials: Specials = "ieee"
    bias: int = -1  # of the exponent; -1 means the usual one of the family

    def __post_init__(self) -> None:
        if not (2 <= self.exponent_bits <= 8 and 1 <= self.mantissa_bits <= 23):
            raise UnknownFormatError(
                f"`e{self.exponent_bits}m{self.mantissa_bits}` is not supported: "
                "a format has 2 to 8 exponent bits and 1 to 23 mantissa bits",
                hint="fp32 is e8m23, the widest format here",
            )
        if self.bias == -1:
            object.__setattr__(self, "bias", _usual_bias(self.exponent_bits, self.specials))
        if self.min_exponent - self.mantissa_bits < -149 or self.max_exponent > 127:
            raise UnknownFormatError(
                f"`{self.name}` has values that fp32 lacks (exponents {self.min_exponent} to "
                f"{self.max_exponent}); every format must fit inside fp32",
                hint="use a bias nearer to the middle, or fewer exponent bits",
            )

    @cached_property
    def name(self) -> str:
        """The shortest name that reads back as this format."""
        usual = self.bias == _usual_bias(self.exponent_bits, self.specials)
        size = f"e{self.exponent_bits}m{self.mantissa_bits}"
        full = size + ("" if usual else f"b{self.bias}") + self.specials
        return _SHORT.get(full, full)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Returns the format of a name."""
        return parse(text)

    @property
    def bits(self) -> int:
        """The bits of a value: sign, exponent and mantissa (19 for tf32, which is stored in 32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def has_inf(self) -> bool:
        """Whether there is a code for infinity."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether there is a code for NaN."""
        return self.specials != "f"

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero has a sign."""
        return self.specials != "fnuz"

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share its quantum."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        top = (1 << self.exponent_bits) - 1 - self.bias
        return top - 1 if self.specials == "ieee" else top

    @cached_property
    def max(self) -> float:
        """The largest finite number."""
        steps = 2**self.mantissa_bits - 1
        if self.specials == "fn":
            steps -= 1  # the all-ones code is the NaN
        return math.ldexp(2**self.mantissa_bits + steps, self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The gap from 1 to the next number; rounding to nearest is off by half of it at most, relatively."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def decimal_digits(self) -> float:
        """Precision in decimal digits: log10 of the number of significands."""
        return (self.mantissa_bits + 1) * math.log10(2)

    @property
    def native_overflow(self) -> Overflow:
        """What arithmetic in the format makes of a number too large for it."""
        return "inf" if self.has_inf else "nan" if self.has_nan else "saturate"


def _usual_bias(exponent_bits: int, specials: Specials) -> int:
    return (1 << (exponent_bits - 1)) - (0 if specials == "fnuz" else 1)


# The names people use, and the full name of each. Order is the order of the table that is printed.
ALIASES: dict[str, str] = {
    "fp32": "e8m23ieee",
    "tf32": "e8m10ieee",
    "bf16": "e8m7ieee",
    "fp16": "e5m10ieee",
    "e5m2": "e5m2ieee",
    "e4m3": "e4m3fn",
    "e3m2": "e3m2f",
    "e2m3": "e2m3f",
    "e2m1": "e2m1f",
}
# What other libraries call them, so that a pasted name works. Parsed, never printed.
FOREIGN: dict[str, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
_SHORT = {full: short for short, full in ALIASES.items()}
# Names that people use for several formats.
_FAMILIES = {
    "fp8": "fp8 is two formats: `e4m3` forward, such as `compute=e4m3:measured`, and `e5m2` for gradients; "
    "the preset `fp8-mixed` has both",
    "float8": "it is two formats: `e4m3` forward and `e5m2` for gradients; the preset `fp8-mixed` has both",
}
_NAME = re.compile(r"e(\d{1,20})m(\d{1,20})(?:b(\d{1,20}))?(ieee|fnuz|fn|f)?")


@cache
def parse(text: str) -> Format:
    """Reads a format's name: `bf16`, `e4m3`, `e3m4ieee`, `e4m3b11fnuz`."""
    name = text.strip().lower()
    name = FOREIGN.get(name, name)
    match = _NAME.fullmatch(ALIASES.get(name, name))
    if match is None:
        raise UnknownFormatError(
            f"unknown number format `{text}`; named formats are {', '.join(ALIASES)}, "
            "and any ExMy that states its special values, such as e3m4ieee",
            hint=_FAMILIES.get(name)
            or did_you_mean(name, [*ALIASES, *FOREIGN], otherwise="`halfstep formats` lists them"),
        )
    exponent_bits, mantissa_bits, bias, specials = match.groups()
    if specials is None:
        variants = " or ".join(f"`{name}{suffix}`" for suffix in get_args(Specials))
        raise UnknownFormatError(
            f"`{text}` does not say whether it has infinities and NaN",
            hint=f"write {variants} (`halfstep formats --help` explains the suffixes)",
        )
    return Format(
        int(exponent_bits), int(mantissa_bits), cast(Specials, specials), -1 if bias is None else int(bias)
    )


FP32 = parse("fp32")
TF32 = parse("tf32")
BF16 = parse("bf16")
FP16 = parse("fp16")
E4M3 = parse("e4m3")
E5M2 = parse("e5m2")

NAMED: dict[str, Format] = {name: parse(name) for name in ALIASES}
