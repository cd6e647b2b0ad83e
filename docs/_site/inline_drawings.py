"""Drawings become part of the page, so that they take its colours, which a reader can switch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DRAWING = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?:\.\./)*(?P<path>drawings/[\w-]+\.svg)" ?/?>')


def on_page_content(html: str, *, config: Any, **_: Any) -> str:
    """The page with each of its drawings instead of a reference to it; the text stays as its label."""

    def drawing(image: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / image["path"]).read_text(encoding="utf-8")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{image["alt"]}" ', 1)

    return _DRAWING.sub(drawing, html)
