"""HTML as nested calls, escaped unless it is already HTML.

    tag("p", "a < b ", tag("em", text), class_="note")      ->  <p class="note">a &lt; b <em>...</em></p>

A plain `str` is text and is escaped; only `Html` goes in as it is. Forgetting to escape is thus impossible by
omission: one must write `Html(...)` to put markup on the page. Two places cannot be escaped that way, script
and style, whose content HTML reads raw up to the closing tag: `raw_element` and `json_element` see to those.
"""

import base64
import hashlib
import json
from html import escape
from typing import Any

# Elements that have no content and no closing tag.
_VOID = frozenset({"meta", "br", "hr", "col"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Html:
    """An element. In names of attributes `_` stands for `-`, and a trailing one for nothing: `class_`."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        assert not children
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child, between: str = "") -> Html:
    """Children side by side; None is nothing."""
    return Html(escape(between).join(_child(child) for child in children if child is not None))


def with_code(text: str) -> Html:
    """Text whose words in backquotes are code, as help strings write them."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # the last one has no other: it is a character
        pieces[-2:] = ["`".join(pieces[-2:])]
    return join(*[tag("code", piece) if place % 2 else piece for place, piece in enumerate(pieces)])


def raw_element(name: str, content: str) -> Html:
    """A script or style element of our own; what would end it early cannot be in it."""
    assert f"</{name}" not in content.lower(), f"an asset closes its own <{name}>"
    return Html(f"<{name}>{content}</{name}>")


def json_element(identifier: str, data: Any) -> Html:
    """Data for the page's script. `<` is written as an escape, so no text in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{escape(identifier)}">{text}</script>')


def content_hash(content: str) -> str:
    """How a Content-Security-Policy names an inline script or style that may run."""
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _child(child: str) -> str:
    return child if isinstance(child, Html) else escape(child)


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(value)}"'
