"""Checks the built site: every link and anchor leads somewhere, every page is in the navigation, nothing is loaded
from outside, and the site stays small.

python docs/check.py site
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

LARGEST = 15_000_000  # bytes of a site
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}


@dataclass
class Page(HTMLParser):
    """What a page has (`anchors`), points at (`links`), lists in its navigation, and loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Sets up the parser."""
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what an element has, points at and loads."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if "md-nav__link" in given.get("class", ""):
                self.listed.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "alternate", "next", "prev"):
            self.loads.append(given["href"])
        if given.get(LOADS.get(tag, "")):
            self.loads.append(given[LOADS[tag]])


def read(site: Path) -> dict[Path, Page]:
    """Returns every page of a site."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def complaints(site: Path, written: Path) -> Iterator[str]:
    """Yields what is wrong with a site that was built from the pages of a folder."""
    pages = read(site)
    home = pages[site / "index.html"]
    listed = {target(site / "index.html", link)[0] for link in home.listed}
    for page in sorted(written.rglob("*.md")):
        if site / page.relative_to(written).with_suffix(".html") not in listed:
            yield f"{page.relative_to(written)} is not in the navigation: add it to `nav` in mkdocs.yml"
    for path, page in pages.items():
        here = path.relative_to(site)
        if here.name == "404.html":  # its links are of a server's root
            continue
        yield from (f"{here} loads {url}, from outside" for url in page.loads if urlparse(url).netloc)
        for link in page.links:
            if urlparse(link).scheme:
                continue
            found, anchor = target(path, link)
            if not (found.is_file() and found.is_relative_to(site)):
                yield f"{here} links to {link}, which does not exist"
            elif anchor and found in pages and anchor not in pages[found].anchors:
                yield f"{here} links to {link}, which has no such anchor"
    for path in sorted(site.rglob("*.css")):
        for url in re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""", path.read_text("utf-8")):
            yield f"{path.relative_to(site)} loads {url}, from outside"
    if (size := sum(path.stat().st_size for path in site.rglob("*") if path.is_file())) > LARGEST:
        yield f"the site has {size:,} bytes; at most {LARGEST:,} are allowed"


def target(path: Path, link: str) -> tuple[Path, str]:
    """Returns the file and the anchor that a link of a page leads to."""
    name, anchor = urldefrag(link)
    found = (path.parent / unquote(name)).resolve() if name else path
    return found / "index.html" if found.is_dir() else found, unquote(anchor)


def main() -> int:
    """Prints what is wrong, and returns 1 if something is."""
    site = Path(sys.argv[1]).resolve()
    wrong = list(dict.fromkeys(complaints(site, Path(__file__).parent.resolve())))
    print("\n".join(wrong) or f"{len(list(site.rglob('*.html')))} pages, every link leads somewhere")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
