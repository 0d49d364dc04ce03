"""A browser for the pages, if this machine has one."""

import pytest

from tests.report.page.chromium import PROGRAM, WIDE, Chromium


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("no chromium or google-chrome on this machine: the page's script is not tried")
    with Chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """A browser that has said nothing yet, without a network."""
    chromium.send("Page.navigate", url="about:blank")  # the page of another test may still ask for its server
    chromium.complaints.clear()
    chromium.requests.clear()
    chromium.look(WIDE, offline=True)
    return chromium
