import re
import tomllib
from pathlib import Path

import pytest

from halfstep.core.errors import (
    LONGEST,
    HalfstepError,
    PolicySyntaxError,
    how_to_install,
    nearest,
    printable,
    shortened,
)

ROOT = Path(__file__).parents[2]


def test_control_characters_are_shown_and_not_obeyed():
    assert printable("a\x1b[31m\x07\x9b\u202e\udcff\n") == r"a\x1b[31m\x07\x9b\u202e\udcff\n"
    assert printable("é 中 💥 `x`\n\t", lines=True) == "é 中 💥 `x`\n\t"
    error = HalfstepError("there is no `\x1b[2J`", hint="\r")
    assert (error.message, error.hint, str(error)) == (
        r"there is no `\x1b[2J`",
        r"\r",
        r"there is no `\x1b[2J` (hint: \r)",
    )


def test_the_code_is_the_name_of_the_family():
    assert (HalfstepError.code, PolicySyntaxError("").code) == ("halfstep", "policy-syntax")
    moved = PolicySyntaxError("`x`", hint="y").within("in rule 1")
    assert (moved.code, moved.message, moved.hint) == ("policy-syntax", "in rule 1: `x`", "y")


@pytest.mark.parametrize("quote", ["`{}`", '"{}"', "'{}'", "{}"])
@pytest.mark.parametrize("long", ["A" * 100_000, "a b " * 25_000])
def test_what_a_message_quotes_is_shortened(quote, long):
    message = HalfstepError(f"unknown format {quote.format(long)}; formats are e4m3").message
    assert len(message) <= LONGEST + 100
    assert "more characters) ..." in message
    assert message.endswith("formats are e4m3")
    assert HalfstepError(message).message == message


def test_what_is_short_stays_and_what_is_long_is_like_nothing():
    assert shortened("a" * 500) == "a" * 500
    assert nearest("e4m3" * 1000, ["e4m3"]) is None


def test_how_to_install_is_said_in_one_place_as_the_readme_does():
    """halfstep is on no index, where `pip install 'halfstep[jax]'` would look for it."""
    assert how_to_install("torch") == "in the checkout of halfstep, run: pip install '.[torch]'"
    assert "    pip install '.[torch]' " in (ROOT / "README.md").read_text(encoding="utf-8")
    index = re.compile(r"pip install[^\n]*(halfstep|'\.\[)")
    said = [path.name for path in (ROOT / "halfstep").rglob("*.py") if index.search(path.read_text("utf-8"))]
    assert said == ["errors.py"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {"torch", "jax", "mlx", "data", "tensorboard", "trackio", "wandb"} <= extras.keys()
