import json
import re

import pytest

from halfstep.report.markup import Html, join, json_element, raw_element, tag, with_code

NASTY = '</script><b onclick="x">\'&'


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "a < b & c ", tag("em", "d")) == "<p>a &lt; b &amp; c <em>d</em></p>"
    assert tag("p", NASTY) == "<p>&lt;/script&gt;&lt;b onclick=&quot;x&quot;&gt;&#x27;&amp;</p>"
    assert join("<", None, Html("<br>"), between="&") == "&lt;&amp;<br>"


def test_attributes_are_escaped_and_named():
    assert tag("p", class_="a", data_line='"><b>', hidden=True, id=None, lang=False) == (
        '<p class="a" data-line="&quot;&gt;&lt;b&gt;" hidden></p>'
    )
    assert tag("meta", name="x") == '<meta name="x">'


def test_words_in_backquotes_are_code():
    assert with_code("0 is `a < b`, else `c`.") == "0 is <code>a &lt; b</code>, else <code>c</code>."
    assert with_code("`a` and 5` of it") == "<code>a</code> and 5` of it"  # one alone begins nothing


def test_data_cannot_end_its_element_and_reads_back():
    data = {"label": NASTY, "comment": "<!--", "y": [1, None, 0.5]}
    text = re.fullmatch(r'<script type="application/json" id="data">(.*)</script>', json_element("data", data))
    assert "<" not in text[1]
    assert json.loads(text[1]) == data


def test_data_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        json_element("data", [float("nan")])


def test_an_asset_that_would_close_its_own_element_is_found():
    assert raw_element("style", "p > b {}") == "<style>p > b {}</style>"
    with pytest.raises(AssertionError, match="closes its own"):
        raw_element("script", "x = '</SCRIPT>'")
