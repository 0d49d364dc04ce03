"""Errors that help: what was given, where, what is allowed, and as a hint what to do next.

Every mistake a user can make raises a `HalfstepError`. `assert` is for what cannot happen, so that `python -O`
changes nothing a user can see.
"""

import difflib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

# Characters that move a cursor, change colors, reverse the text or end a line, and halves of surrogate pairs: what
# a file or an argument brings is shown by their escapes.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*_CONTROLS, *range(0xD800, 0xE000))}
_LINES_KEPT = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
LONGEST, LONGEST_PART = 4000, 500  # characters of a message, and of a part of it in quotes
_LONG = f"{{{LONGEST_PART},}}"
_QUOTED = re.compile(rf"""`[^`]{_LONG}`|"[^"]{_LONG}"|'[^']{_LONG}'|\S{_LONG}""")


def printable(text: str, *, lines: bool = False) -> str:
    """Returns text that is safe to print: control characters are escaped, newlines and tabs unless `lines`."""
    return text.translate(_LINES_KEPT if lines else _ESCAPES)


def shortened(text: str, longest: int = LONGEST_PART) -> str:
    """Returns a text without its middle if it is long, and says how much of it is left out."""
    if len(text) <= longest:
        return text
    head, tail = longest // 2, longest // 4
    return f"{text[:head]}... ({len(text) - head - tail:,} more characters) ...{text[-tail:]}"


def as_message(text: str) -> str:
    """Returns a message as one printable line: what it quotes, and the whole of it, in reasonable length."""
    return shortened(_QUOTED.sub(lambda match: shortened(match[0]), printable(text)), LONGEST)


# The packages that stand between a line of the user's and ours.
OURS = ("halfstep", "torch", "jax", "mlx")


class HalfstepError(Exception):
    """Something the user gave cannot be used. `message` says what and where, `hint` what to do next."""

    def __init__(self, message: str, *, hint: str | None = None):
        self.message = as_message(message)
        self.hint = None if hint is None else as_message(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"

    def within(self, place: str) -> "HalfstepError":
        """Returns the same error with `place` in front of the message."""
        return type(self)(f"{place}: {self.message}", hint=self.hint)


class FormatError(HalfstepError):
    """A number format that does not exist or cannot do what was asked."""


class RoundingError(HalfstepError):
    """A cast that is impossible under the given rule."""


class PolicyError(HalfstepError):
    """A policy that is misspelled, contradicts itself, or does not fit the model."""


class ScalingError(HalfstepError):
    """A loss scale that cannot work."""


class ConfigError(HalfstepError):
    """A recipe, a configuration file or a `--set` that cannot be used."""


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`, each in backquotes."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """Returns the legal name that a typo was probably meant to be, or None if nothing is close."""
    if len(name) > LONGEST_PART:
        return None  # nobody typed it, and comparing takes the product of the lengths
    # 0.6 is difflib's own cutoff; it accepts one or two slips in a word of five letters or more.
    matches = difflib.get_close_matches(name, list(legal), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, legal: Iterable[str], otherwise: str | None = None) -> str | None:
    """Returns a hint for a name that is not legal."""
    match = nearest(name, legal)
    return f"did you mean `{match}`?" if match else otherwise


def warn_caller(message: str) -> None:
    """Warns at the line of the user's own code that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def how_to_install(extra: str, options: str = "") -> str:
    """Returns the hint for a package that an extra of halfstep brings: halfstep itself is on no index."""
    return f"in the checkout of halfstep, run: pip install {options}'.[{extra}]'"


def explain_missing(load: Callable[[str], Any], package: str, *frameworks: str) -> Callable[[str], Any]:
    """Wraps a backend's `__getattr__`: without its framework, the error names the extra to install."""

    def load_or_explain(name: str) -> Any:
        try:
            return load(name)
        except ImportError:
            for framework in frameworks:
                try:
                    import_module(framework)
                except ImportError as error:  # it is missing, or it is there without the library of a device
                    needed = framework.partition(".")[0]
                    raise HalfstepError(
                        f"`{package}.{name}` needs {needed}, which cannot be imported: {error}",
                        hint=how_to_install(package.rpartition(".")[2]),
                    ) from error
            raise

    return load_or_explain
