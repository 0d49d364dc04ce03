"""`halfstep formats`: the table of number formats."""

from halfstep.cli.arguments import Json
from halfstep.cli.output import print_json, print_table
from halfstep.core.formats import NAMED, Format

PROPERTIES = (
    *("name", "bits", "exponent_bits", "mantissa_bits", "bias", "max", "smallest_normal", "smallest_subnormal"),
    *("epsilon", "decimal_digits", "has_inf", "has_nan", "native_overflow"),
)
HEAD = ("format", "bits", "layout", "largest", "normal", "smallest", "digits", "special", "overflow")


def formats(*names: str, json: Json = False) -> None:
    """Show number formats: bits, range, precision, special values, and what a number beyond the largest becomes.

    `normal` is the smallest number with full precision, `smallest` the smallest above zero.

    You can name any ExMy. Its suffix states its special values: `ieee` has infinities and NaN, `fn` only
    NaN, `f` neither, `fnuz` NaN in place of negative zero: e3m4ieee, e4m3fn, e2m1f, e5m2fnuz.

    Parameters
    ----------
    names
        The formats to show; by default, all named ones.
    """
    chosen = [Format.parse(name) for name in names] or list(NAMED.values())
    if json:
        print_json([{name: getattr(fmt, name) for name in PROPERTIES} for fmt in chosen])
        return
    print_table(HEAD, map(_row, chosen), right=HEAD[3:7])


def _row(fmt: Format) -> tuple[str, ...]:
    return (
        fmt.name,
        str(fmt.bits),
        f"e{fmt.exponent_bits}m{fmt.mantissa_bits}",
        f"{fmt.max:.6g}" if fmt.max < 1e6 else f"{fmt.max:.3g}",
        f"{fmt.smallest_normal:.3g}",
        f"{fmt.smallest_subnormal:.3g}",
        f"{fmt.decimal_digits:.1f}",
        ", ".join(["inf"] * fmt.has_inf + ["NaN"] * fmt.has_nan) or "none",
        {"inf": "inf", "nan": "NaN", "saturate": "largest"}[fmt.native_overflow],
    )
