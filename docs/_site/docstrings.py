"""Turn docstrings into Markdown: griffe's parsers expect argument sections, but docstrings here are prose and columns.

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
"""A name with subscripts, which can nest once."""


class ProseDocstrings(Extension):
    """Rewrites each docstring when it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return the docstring with column rows as lists and subscripts as code."""
    text = _ROWS.sub(lambda rows: "\n" + _ROW.sub(r"- `\g<names>` ", re.sub(r"\n +", " ", rows[0])) + "\n", text + "\n")
    parts = _CODE.split(text)
    parts[::2] = [_SUBSCRIPT.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts).strip("\n")
