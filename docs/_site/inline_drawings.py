"""Inline drawings into pages, so they follow the colour scheme that the reader selects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DRAWING = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?:\.\./)*(?P<path>drawings/[\w-]+\.svg)" ?/?>')


def on_page_content(html: str, *, config: Any, **_: Any) -> str:
    """Replace each reference to a drawing by the SVG, labelled with the alt text."""

    def drawing(image: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / image["path"]).read_text(encoding="utf-8")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{image["alt"]}" ', 1)

    return _DRAWING.sub(drawing, html)
