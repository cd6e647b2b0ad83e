"""Docstrings as Markdown: griffe's parsers expect sections of arguments, and docstrings here are prose with columns.

A row of columns, `name   type   meaning`, becomes a list item; x[i] becomes code, since x[i][j] is a link in Markdown.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROWS = re.compile(r"(?:^[a-z]\w*(?:, [a-z]\w*)* {2,}\S.*\n(?:^ {4,}\S.*\n)*)+", re.MULTILINE)
_ROW = re.compile(r"^(?P<names>[a-z]\w*(?:, [a-z]\w*)*) {2,}", re.MULTILINE)
_CODE = re.compile(r"(`+[^`]*`+|^    .*$)", re.MULTILINE)
_SUBSCRIPT = re.compile(r"[\w.]+(?:\[(?:[^][]|\[[^][]*\])*\])+")
"""A name with subscripts, of one more inside at most."""


class ProseDocstrings(Extension):
    """Rewrites each docstring as it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """The docstring with its rows as lists, and subscripts as code."""
    text = _ROWS.sub(lambda rows: "\n" + _ROW.sub(r"- `\g<names>` ", re.sub(r"\n +", " ", rows[0])) + "\n", text + "\n")
    parts = _CODE.split(text)
    parts[::2] = [_SUBSCRIPT.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts).strip("\n")
