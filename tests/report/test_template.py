from importlib import resources

import pytest

from halfstep.report.template import environment, with_code

NASTY = '</script><b onclick="x">\'&'


def test_text_is_escaped_and_data_cannot_end_its_element():
    assert with_code("0 is `a < b`, else `c`.") == "0 is <code>a &lt; b</code>, else <code>c</code>."
    assert with_code("`a` and 5` of it") == "<code>a</code> and 5` of it"  # one alone begins nothing
    filled = environment().from_string('<p title="{{ text }}">{{ text }}</p>').render(text=NASTY)
    safe = "&lt;/script&gt;&lt;b onclick=&#34;x&#34;&gt;&#39;&amp;"
    assert filled == f'<p title="{safe}">{safe}</p>'
    template = environment().from_string("{{ data | tojson }}")
    assert template.render(data={"z": NASTY, "a": "<!--"}).startswith('{"z":"\\u003c/script\\u003e\\u003cb')
    with pytest.raises(ValueError, match="JSON compliant"):
        template.render(data=[float("nan")])


def test_no_asset_closes_its_own_element():
    for asset in (resources.files("halfstep.report") / "assets").iterdir():
        text = asset.read_text(encoding="utf-8").lower()
        assert "</script" not in text
        assert "</style" not in text
