"""Check every link of the built site: `python docs/_site/check_links.py build/site`; exit status 1 names each bad one.

Within the site, the file and the anchor must exist. Links to other hosts must be well formed; they are not followed.
What a page loads by itself, such as scripts and images, must be of the site, which is read without a network, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

_LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href"), ("source", "src")}
_MISSING = "404.html"
"""The page of an address that does not exist: it may be served from anywhere, so its links begin at the root."""


class Page(HTMLParser):
    """links: (tag, address) in their order; anchors: every id and name."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str, bool]] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag refers to, and by what it can be referred to."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value is not None:
                canonical = tag == "link" and ("rel", "canonical") in attrs
                self.links.append((tag, value, (tag, name) in _LOADED and not canonical))


def problems(site: Path) -> Iterator[str]:
    """What is wrong with each bad link, a line each."""
    for path in sorted(site.rglob("*.html")):
        if path.name == _MISSING:
            continue
        for tag, address, loaded in _page(path).links:
            if problem := _problem(site, path, address, loaded):
                yield f"{path.relative_to(site)}: <{tag}> {address!r} {problem}"


def _problem(site: Path, path: Path, address: str, loaded: bool) -> str:
    try:
        url = urlsplit(address)
    except ValueError as error:
        return f"is no address: {error}"
    if url.scheme == "data":
        return ""
    if url.scheme or url.netloc:
        return "is loaded from another host" if loaded else _against_external(url)
    target = (path.parent / unquote(url.path)).resolve() if url.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site.resolve()) or not target.is_file():
        return "leads to no file of the site"
    if url.fragment and target.suffix == ".html" and unquote(url.fragment) not in _page(target).anchors:
        return f"leads to no anchor of {target.relative_to(site.resolve())}"
    return ""


def _against_external(url: SplitResult) -> str:
    if url.scheme == "mailto":
        return "" if "@" in url.path else "is no address"
    well_formed = url.scheme in ("http", "https") and "." in (url.hostname or "") and " " not in url.geturl()
    return "" if well_formed else "is no address that a browser can follow"


@cache
def _page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def main(site: Path) -> int:
    """Print every problem; how the process should end."""
    if not (site / "index.html").is_file():
        print(f"{site} is no built site; run mkdocs build first")
        return 2
    found = list(problems(site.resolve()))
    print("\n".join(found) or f"every link of {site} leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
