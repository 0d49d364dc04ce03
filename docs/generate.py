"""Writes the reference pages that come out of the schema; a test keeps them current.

python docs/generate.py
"""

from pathlib import Path

from halfstep.config.run import RunConfig
from halfstep.config.schema import rows
from halfstep.core.formats import NAMED
from halfstep.core.policy import PRESETS
from halfstep.core.roles import ROLES, print_value

HERE = Path(__file__).parent


def table(columns: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    marked = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in marked)


def settings() -> str:
    """Every setting of a run."""
    lines = [[f"`{row.key}`", row.kind, f"`{row.shown}`", row.help] for row in rows(RunConfig)]
    return (
        "# Settings\n\nEvery setting of a run, as a recipe file or `--set` gives it. Generated from "
        "`halfstep/config/run.py`.\n\n" + table(["setting", "type", "default", "what it is"], lines) + "\n"
    )


def policies() -> str:
    """Roles and presets."""
    lines = [
        [f"`{role}`", ROLES[role].meaning, *(f"`{print_value(getattr(p, role))}`" for p in PRESETS.values())]
        for role in ROLES
    ]
    lines.append(["rules", "other values for some modules", *(_rules(p.rules) for p in PRESETS.values())])
    return (
        "# Roles and presets\n\nA policy gives one format to each role; a preset is a column of this table. "
        "Generated from `halfstep/core/roles.py` and `halfstep/core/policy.py`, which say how policies are "
        "written.\n\n" + table(["role", "what it is", *PRESETS], lines) + "\n"
    )


def formats() -> str:
    """The number formats that have a name of their own."""
    lines = [
        [
            f"`{fmt}`",
            f"{fmt.bits}",
            f"e{fmt.exponent_bits}m{fmt.mantissa_bits}{fmt.specials}",
            f"{fmt.max:.6g}",
            f"{fmt.smallest_normal:.3g}",
            f"{fmt.smallest_subnormal:.3g}",
            f"{fmt.epsilon:.3g}",
            fmt.native_overflow,
        ]
        for fmt in NAMED.values()
    ]
    columns = ["format", "bits", "layout", "largest", "smallest normal", "smallest", "epsilon", "overflow"]
    return (
        "# Number formats\n\nThe formats with a name of their own; `halfstep formats e3m4ieee` shows any "
        "other. Generated from `halfstep/core/formats.py`.\n\n" + table(columns, lines) + "\n"
    )


PAGES = {"settings.md": settings, "policies.md": policies, "formats.md": formats}


def _rules(rules: tuple[object, ...]) -> str:
    return " ".join(f"`{rule}`" for rule in rules)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
