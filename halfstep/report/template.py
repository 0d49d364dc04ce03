"""Fills the templates. Jinja escapes all text; `{{ text | code }}` marks words in backquotes as code."""

import base64
import hashlib
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from halfstep.core.errors import printable
from halfstep.core.formats import Format
from halfstep.core.roles import Value, print_value
from halfstep.report import number_format


def fill(name: str, **values: Any) -> str:
    """Returns the template of that name, filled with values."""
    return environment().get_template(name).render(values)


def with_code(text: str) -> Markup:
    """Escapes text and marks its words in backquotes as code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # the last backquote has no partner: it is a character
        pieces[-2:] = ["`".join(pieces[-2:])]
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(piece) if place % 2 else piece for place, piece in enumerate(pieces))


def content_hash(content: str) -> str:
    """Returns how a Content-Security-Policy names an inline script or style that may run."""
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def tint(value: Value) -> str:
    """Returns the class that colors a value by the bits of its format, so that narrow ones stand out."""
    fmt = value if isinstance(value, Format) else getattr(value, "format", None)
    return f" bits-{fmt.bits}" if isinstance(fmt, Format) and fmt.bits in (8, 16) else ""


@cache
def environment() -> Environment:
    """Returns the templates of the reports with their filters."""
    made = Environment(
        loader=PackageLoader("halfstep.report"),
        autoescape=True,
        finalize=lambda value: printable(value, lines=True) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("count", "duration", "moment", "number", "occasions", "percent", "plural", "size")
    made.filters.update({name: getattr(number_format, name) for name in names})
    # The quotes around a digest are part of it.
    made.filters.update(code=with_code, csp_hash=lambda content: Markup(content_hash(content)))
    made.filters.update(print_value=print_value, tint=tint)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made
